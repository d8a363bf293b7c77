"""Targets: the records, their names, and what torch's properties of a device become."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from transconv.conv import ConvProblem, Prop, compiler, computes
from transconv.cost import estimate
from transconv.errors import ScheduleError, Unsupported
from transconv.ir.dtype import DType, bf16, f16, f32, f64, i8, i32
from transconv.selection.proposals import heuristics
from transconv.target import records as target
from transconv.target.records import TARGETS, Target


@pytest.mark.parametrize("record", TARGETS.values(), ids=str)
def test_records_are_whole(record: Target) -> None:
    assert Target.parse(record.name) is record
    assert TARGETS[str(record)] is record
    assert record.backend in {"cuda", "hip", "xpu", "interpreter"}
    assert record.warp_size in {16, 32, 64}
    assert min(record.sms, record.shared_bytes, record.regs, record.l2_bytes) > 0
    assert min(record.bandwidth_gbs, record.tflops, record.ridge) > 0
    assert {f16, bf16} <= record.mma_dtypes
    assert "ieee" in record.precisions
    assert record.upcast16 == (record.name == "interpreter")


def test_numbers_that_kernels_depend_on() -> None:
    shared = {name: TARGETS[name].shared_bytes for name in TARGETS}
    assert shared["sm_90"] == shared["sm_100"] == 232448
    assert shared["sm_80"] == 166912
    assert shared["sm_86"] == shared["sm_89"] == shared["sm_120"] == 101376
    assert shared["gfx942"] == shared["gfx1100"] == 65536
    boxes = {t.name for t in TARGETS.values() if "box" in t.features}
    assert boxes == {"sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "interpreter"}
    assert [t.name for t in TARGETS.values() if "wgmma" in t.features] == ["sm_90"]
    assert f64 in TARGETS["sm_90"].mma_dtypes and f64 not in TARGETS["sm_86"].mma_dtypes


def test_only_one_amd_chip_takes_tf32() -> None:
    amd = [t for t in TARGETS.values() if t.backend == "hip"]
    assert [t.name for t in amd if t.precisions != ("ieee",)] == ["gfx942"]
    assert "tf32" in TARGETS["gfx942"].precisions


@pytest.mark.parametrize(
    ("name", "like", "arch"),
    [
        ("sm_87", "sm_86", 87),
        ("sm_101", "sm_100", 101),
        ("sm_122", "sm_121", 122),
        ("gfx1101", "gfx1100", "gfx1101"),
        ("gfx1150", "gfx1151", "gfx1150"),
        ("gfx1200", "gfx1201", "gfx1200"),
        ("gfx941", "gfx90a", "gfx941"),
    ],
)
def test_siblings_of_known_chips(name: str, like: str, arch: int | str) -> None:
    found = Target.parse(name)
    assert (found.name, found.arch) == (name, arch)
    assert (found.shared_bytes, found.sms) == (TARGETS[like].shared_bytes, TARGETS[like].sms)
    assert found.features == TARGETS[like].features


@pytest.mark.parametrize("name", ["sm_90a", "gfx906", "gfx1030", "h100", "", "sm_", "what"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Target.parse(name)
    said = f"target '{name}' is unknown; expected one of {' '.join(TARGETS)}"
    assert str(caught.value) in (said, *(f"{said}; did you mean {near}?" for near in TARGETS))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("H100", "did you mean sm_90?"),
        ("sm90", "did you mean sm_90?"),
        ("mi300x", "did you mean gfx942?"),
        ("sm_75", "Triton compiles for chips from sm_80 on, so torch computes there"),
        ("V100", "Triton compiles for chips from sm_80 on, so torch computes there"),
    ],
)
def test_names_of_cards(name: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        Target.parse(name)


def test_properties_of_a_device_replace_the_counts() -> None:
    h200 = SimpleNamespace(
        name="H200",
        major=9,
        minor=0,
        multi_processor_count=66,
        L2_cache_size=60 << 20,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
    )
    found = target.from_properties(h200)
    assert (found.name, found.sms, found.l2_bytes) == ("sm_90", 66, 60 << 20)
    assert found.bandwidth_gbs == pytest.approx(4917, rel=0.001)
    assert found.tflops == pytest.approx(TARGETS["sm_90"].tflops / 2)
    assert found.shared_bytes == TARGETS["sm_90"].shared_bytes
    assert found.l2_gbs == TARGETS["sm_90"].l2_gbs  # the rates are an H200's
    h200.name = "NVIDIA H100 80GB HBM3"
    assert target.from_properties(h200) == replace(found, l2_gbs=76.0)


def test_properties_that_are_not_told_keep_the_record() -> None:
    amd = SimpleNamespace(name="MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    assert target.from_properties(amd, is_hip=True) == TARGETS["gfx942"]


def test_a_gpu_without_a_record_is_unsupported_with_a_reason() -> None:
    old = SimpleNamespace(name="T4", major=7, minor=5, multi_processor_count=40)
    with pytest.raises(Unsupported, match=re.escape("no record for T4; expected")) as caught:
        target.from_properties(old)
    assert caught.value.reason == "target:sm_75"


@pytest.mark.parametrize(
    ("held", "taken"),
    [("3.6.0", False), ("3.7.0", False), ("3.7.1", True), ("3.9.0+git1", True), ("", True)],
)
def test_a_chip_asks_for_a_release_of_triton(
    held: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled for it by any release; they run on one that has what is mended."""
    release = tuple(int(n) for n in re.findall(r"\d+", held)[:3])
    monkeypatch.setattr("transconv.target.records.triton_release", lambda: release)
    for minor, name in ((0, "sm_100"), (3, "sm_103")):
        b200 = SimpleNamespace(name="B200", major=10, minor=minor, multi_processor_count=148)
        if taken:
            assert target.from_properties(b200).name == name
            continue
        with pytest.raises(
            Unsupported, match=r"Triton 3\.[67]\.0 may read .* expected Triton 3\.7\.1"
        ) as caught:
            target.from_properties(b200)
        assert caught.value.reason == f"target:{name}"
    mi455x = SimpleNamespace(name="MI455X", gcnArchName="gfx1250", multi_processor_count=256)
    if taken:
        assert target.from_properties(mi455x, is_hip=True).name == "gfx1250"
    else:
        with pytest.raises(Unsupported, match="multiply without the matrix unit, in registers that spill"):
            target.from_properties(mi455x, is_hip=True)
    assert Target.parse("sm_100").since == (3, 7, 1) and not TARGETS["sm_90"].since


def test_detect_without_a_gpu_or_when_told_to_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert target.detect(torch.device("cpu")) is TARGETS["interpreter"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert target.detect() is TARGETS["interpreter"]
    fake = SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: fake)
    monkeypatch.setattr(torch.version, "hip", None)
    target._of_gpu.cache_clear()
    try:
        assert target.detect(torch.device("cuda", 3)) == target.detect(3) == TARGETS["sm_80"]
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert target.detect(3) is TARGETS["interpreter"]
    finally:
        target._of_gpu.cache_clear()


def test_features_can_be_switched_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_FEATURES", "-early,-wgmma")
    h100 = Target.parse("sm_90")
    assert h100.features == TARGETS["sm_90"].features - {"early", "wgmma"}
    monkeypatch.setenv("TRANSCONV_FEATURES", "+early")
    assert "early" not in TARGETS["sm_100"].features  # nobody has run it there
    assert "early" in Target.parse("sm_100").features
    for older in ("sm_80", "gfx942"):
        with pytest.raises(ScheduleError, match=f"TRANSCONV_FEATURES: {older} has no feature 'early'"):
            Target.parse(older)
    monkeypatch.setenv("TRANSCONV_FEATURES", "+wgmma")
    assert Target.parse("sm_90") is TARGETS["sm_90"]
    with pytest.raises(ScheduleError, match="TRANSCONV_FEATURES: sm_100 has no feature 'wgmma'; what a"):
        Target.parse("sm_100")
    monkeypatch.setenv("TRANSCONV_FEATURES", "+warp_speed")
    with pytest.raises(
        ScheduleError,
        match="TRANSCONV_FEATURES: there is no feature 'warp_speed'; "
        "expected some of mma async_copy box wgmma",
    ):
        Target.parse("sm_90")


@pytest.mark.parametrize(
    ("chip", "types", "wanted"),
    [
        ("sm_90", (f16, f16, f32), ("wgmma", 64, 8, 16, True)),
        ("sm_90", (f32, f32, f32), ("wgmma", 64, 8, 8, True)),
        ("sm_90", (f64, f64, f64), ("mma.sync", 8, 8, 4, False)),
        ("sm_100", (bf16, bf16, f32), ("tcgen05", 64, 8, 16, True)),
        ("sm_80", (i8, i8, i32), ("mma.sync", 16, 8, 32, False)),
        ("gfx942", (f32, f32, f32), ("mfma", 16, 16, 4, False)),
        ("gfx1100", (f16, f16, f32), ("wmma", 16, 16, 16, False)),
        ("pvc", (f16, f16, f32), ("dpas", 8, 16, 16, False)),
        ("gfx1100", (f32, f32, f32), None),
        ("sm_86", (f64, f64, f64), None),
        ("sm_90", (f16, f32, f32), None),
        ("sm_90", (f16, f16, i32), None),
    ],
)
def test_what_multiplies(chip: str, types: tuple[DType, DType, DType], wanted: object) -> None:
    found = TARGETS[chip].mma(*types)
    assert (found and (found.name, found.m, found.n, found.k, found.asynchronous)) == wanted
    if found and found.name in ("wgmma", "tcgen05"):
        assert found.b_from == {"shared"} and "shared" in found.a_from


def test_features_that_are_switched_off_multiply_nothing() -> None:
    older = replace(TARGETS["sm_90"], features=TARGETS["sm_90"].features - {"wgmma"})
    assert older.mma(f16, f16, f32).name == "mma.sync"  # type: ignore[union-attr]
    assert replace(older, features=frozenset()).mma(f16, f16, f32) is None


# -- a chip from outside ---------------------------------------------------------------------------


@pytest.fixture
def larger() -> Iterator[Target]:
    """As sm_90, with another number, more multiprocessors and twice the clock."""
    known = TARGETS["sm_90"]
    rates = replace(known.rates, triton=replace(known.rates.triton, launch_us=50.0))
    yield target.register(replace(known, name="sm_210", arch=210, sms=200, rates=rates))
    target.unregister("sm_210")


def test_a_chip_from_outside(larger: Target) -> None:
    """One record: kernels are emitted for it, and estimated with its rates."""
    assert Target.parse("sm_210") is larger
    assert Target.parse("sm_213").sms == 200
    p = ConvProblem.parse("mb8ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc")
    assert "warpgroup_mma" in compiler.build(p, Prop.FWD, larger).source
    (compute,) = computes(p, Prop.FWD)
    schedule = next(c for c in heuristics.candidates(compute, larger) if c.via == "tl")
    plain = replace(larger, rates=TARGETS["sm_90"].rates)
    assert estimate(schedule, compute, larger) > estimate(schedule, compute, plain) + 40


def test_records_that_cannot_be(larger: Target) -> None:
    with pytest.raises(ValueError, match="a record of sm_210 already"):
        target.register(larger)
    with pytest.raises(ScheduleError, match="no feature 'teleport'"):
        target.register(replace(larger, name="sm_220", features=frozenset({"teleport"})))


def test_a_chip_that_is_gone_is_unknown() -> None:
    with pytest.raises(ScheduleError, match="target 'sm_210' is unknown"):
        Target.parse("sm_210")
