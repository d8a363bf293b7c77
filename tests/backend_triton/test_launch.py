"""Compiled kernels are launched with the right addresses, on the current stream, by one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.starts import start_of
from transconv.backend_triton.launch import bound_start
from transconv.backend_triton.launch.bound_start import MAPS_KEPT, KernelStart
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.backend_triton.miscompiles import Miscompiled
from transconv.conv import CompiledDirection
from transconv.conv.compiler import plan
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import Layout, Tensor, f32
from transconv.runtime import torch_internals
from transconv.target.records import TARGETS

KERNEL = SimpleNamespace(function="function", packed_metadata="packed", name="f")


@dataclass
class Started:
    """Stands in for Triton's launch function and records its arguments."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    current = {0: 70}
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: current[device], raising=False
    )
    monkeypatch.setattr(
        torch_internals,
        "quickest",
        lambda: lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )
    return current


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(4) for _ in range(count)]


def test_addresses_in_the_kernels_order(stream: dict[int, int]) -> None:
    raw = Started()
    of = TritonKernel("", "f", None, 12, 4, 2)
    assert start_of(of, (0, 1, 2)) is None  # nothing was launched yet
    of.kept[0, True] = KernelStart(raw, KERNEL)
    assert start_of(of, (0, 1, 2), aligned=False) is None
    for order in (
        (0, 1, 2),
        (2, 1, 0),
        (0, 2, 1),
        (3, 0, 1, 2),
        (1, 0),
        (2, 4, 0, 3, 1),
        (2, 4, 0, 5, 3, 1),
    ):
        begin = start_of(of, order)
        assert begin is not None
        given = tensors(6)
        stream[0] += 1
        begin(*given)
        grid, _, _, used, function, *rest = raw.calls[-1]
        assert (grid, used, function) == (12, stream[0], "function")
        assert rest[-len(order) :] == [given[i].data_ptr() for i in order]
        assert rest[4] == "packed" and rest[5 : -len(order)] == [None] * 3


def compiled(text: str, prop: Prop, schedule: str | None = None) -> CompiledDirection:
    return plan(ConvProblem.parse(text), prop, TARGETS["sm_90"], schedule)


def keep(made: CompiledDirection) -> Started:
    raw = Started()
    for step in made.steps:
        step.triton.kept[0, True] = KernelStart(raw, KERNEL)
    return raw


def test_names_say_what_is_what() -> None:
    made = compiled("mb1ic16ih4oc16oh4kh1", Prop.BWD_D)
    raw = keep(made)
    begin = made.starter(0, True, ("wei", "dst", "src"))
    assert begin is not None
    wei, dst, src = given = tensors(3)
    begin(*given)
    assert len(raw.calls) == 1
    by_name = {"wei": wei, "dst": dst, "src": src}
    assert raw.calls[0][-3:] == tuple(by_name[p].data_ptr() for p in made.steps[0].params)
    assert made.starter(0, False, ("wei", "dst", "src")) is None
    assert made.starter(0, True, ("wei", "dst", "bia")) is None


@pytest.mark.parametrize(
    ("epilogue", "extra"),
    [("relu", ()), ("bias+relu", ("bia",)), ("res", ("res",)), ("bias+res+relu", ("bia", "res"))],
)
def test_what_an_epilogue_reads_is_named_too(
    stream: dict[int, int], epilogue: str, extra: tuple[str, ...]
) -> None:
    made = plan(ConvProblem.parse("mb1ic16ih4oc16oh4kh1"), Prop.FWD, TARGETS["sm_90"], epilogue=epilogue)
    raw = keep(made)
    names = ("src", "wei", *extra, "dst")
    begin = made.starter(0, True, names)
    assert begin is not None
    for _ in range(2):  # always on the stream that is the current one
        stream[0] += 1
        given = tensors(len(names))
        begin(*given)
        by_name = dict(zip(names, given, strict=True))
        params = made.steps[0].params
        assert raw.calls[-1][-len(params) :] == tuple(by_name[p].data_ptr() for p in params)
        assert raw.calls[-1][3] == stream[0]


@pytest.mark.parametrize(("reduce", "launches"), [("partials", 2), ("atomic", 1)])
def test_split_sums_get_their_workspace(reduce: str, launches: int) -> None:
    made = compiled(
        "mb4ic16ih16oc16oh16kh3ph1 dt=f32", Prop.BWD_W, f"ic:16 oc:16 oh.ow:32 split_k=4 reduce={reduce}"
    )
    raw = keep(made)
    begin = made.starter(0, True, ("src", "dst", "wei"))
    assert begin is not None
    given = tensors(3)
    given[2].fill_(7)
    begin(*given)
    assert len(raw.calls) == launches == len(made.steps)
    addresses = {t.data_ptr() for t in given}
    if reduce == "atomic":
        assert given[2].eq(0).all()  # cleared before it is added to
        assert set(raw.calls[0][-3:]) == addresses
    else:
        (space,) = set(raw.calls[0][-3:]) - addresses
        assert set(raw.calls[1][-2:]) == {space, given[2].data_ptr()}


def test_encoded_descriptors_are_kept_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("mb2ic64ih16oc64oh16kh3ph1 dt=bf16 tag=nhwc", Prop.FWD)
    of = made.steps[0].triton
    assert of.boxes
    raw, encoded = Started(), []
    monkeypatch.setattr(bound_start, "entry", lambda kernel, boxed: (raw, of.boxes))
    monkeypatch.setattr(
        bound_start,
        "encoding",
        lambda meta, box: (
            lambda address, lying: encoded.append((address, lying, meta, box)) or [f"map{len(encoded)}"]
        ),
    )

    start, (at, _) = of.starting(KERNEL), of.numbers()
    boxed = sum(b is not None for b in of.boxes)
    first, second = (tensors(len(of.boxes)) for _ in range(2))
    for given, new in ((first, boxed), (second, boxed), (second, 0), (first, 0)):
        before = len(encoded)
        start((), at, given, 1)
        assert len(encoded) == before + new
        for box, passed, tensor in zip(of.boxes, raw.calls[-1][-len(given) :], given, strict=True):
            assert passed == tensor.data_ptr() if box is None else passed.startswith("map")
    assert raw.calls[-3] == raw.calls[-2]
    of.kept[0, True] = start
    begin = start_of(of, tuple(range(len(first))[::-1]), count=len(first))
    assert begin is not None
    begin(*first[::-1])
    assert raw.calls[-1][4:] == raw.calls[-2][4:] and len(encoded) == 2 * boxed
    for number in range(1, 2 * MAPS_KEPT):
        start((), at, [SimpleNamespace(data_ptr=lambda: 16 * number)] * len(first), 1)  # noqa: B023
    assert len(encoded) > 2 * MAPS_KEPT


class Driver:
    """Records what it is asked to encode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import driver

        self.asked: list[tuple[Any, ...]] = []
        utils = SimpleNamespace(fill_tma_descriptor=lambda *given: self.asked.append(given) or "map")
        monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))


def test_descriptors_are_those_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked for what Triton's own launch asks it for."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    driver, tensor = Driver(monkeypatch), torch.zeros(8, 64)
    box = Tensor("X", ("n", "c"), (8, 64), Layout.dense(f32, (8, 64)))
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 8, "block_size": [8, 32], "fp4_padded": False}
    made = bound_start.encoding(meta, box)(tensor.data_ptr(), bound_start.lying(box))
    assert made == make_tensordesc_arg(bound_start.describe(tensor, box, (8, 32)), meta)
    ours, tritons = ([[*x] if isinstance(x, tuple) else x for x in given] for given in driver.asked)
    assert ours == tritons


class Compiling:
    """Does what Triton's JIT functions do, with a compiler whose output is fixed."""

    def __init__(self, asm: dict[str, str]) -> None:
        self.kernel = SimpleNamespace(asm=asm)
        self.calls: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        self.calls.append((args, grid, options))
        return self.kernel


@pytest.mark.parametrize("lost", [False, True])
def test_a_kernel_is_looked_at_before_it_starts(lost: bool) -> None:
    asm = {
        "ptx": ".version 8.7\nadd.s16x2 %r3, %r1, %r2;",
        "sass": f"VIADD.16x2 R6, R6, {'0x0' if lost else '0x32'};",
    }
    of = TritonKernel("", "kernel", None, 5, 4, 3)
    of.jit = made = Compiling(asm)
    given: list[Any] = [SimpleNamespace(device=torch.device("cuda", 0))]
    if lost:
        with pytest.raises(Miscompiled, match="kernel: ptxas lost the constant"):
            of._compiled(given, True)
    else:
        assert of._compiled(given, True) is made.kernel
    assert len(made.calls) == 1


@pytest.mark.parametrize("early", [False, True])
def test_compiling_ahead_makes_the_kernel_that_is_launched(early: bool) -> None:
    of = TritonKernel("", "kernel", None, 5, 4, 3, early=early)
    of.jit = made = Compiling({})
    given: list[Any] = [SimpleNamespace(device=torch.device("cuda", 0))]
    of.warm(given)
    of._compiled(given, True)
    ahead, compiled = made.calls
    assert ahead == compiled and ahead[-1].get("launch_pdl", False) is early
    idle = TritonKernel("", "kernel", None, 0, 4, 3)
    idle.jit = made = Compiling({})
    idle.warm(given)
    assert not made.calls


@pytest.mark.parametrize("explicit", [False, True])
def test_a_descriptor_says_what_is_rounded(monkeypatch: pytest.MonkeyPatch, explicit: bool) -> None:
    """Triton 3.6 encodes the type that the kernel has; that of rounded boxes is tf32's."""
    driver, seen = Driver(monkeypatch), {}
    record = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [8, 32]}
    for text in ("dt=f32", "dt=f32 math=ieee", "dt=bf16"):
        made = compiled(
            f"mb2ic64ih16oc64oh16kh3ph1 {text} tag=nhwc",
            Prop.FWD,
            "mb:2 oh:8 ow:8 oc:64 ic:32 | a=box b=box c=box"
            + " swap=1"
            + " via=gluon" * (explicit and "ieee" not in text),
        )
        tensors = {
            n: torch.empty(2**17, dtype=torch.bfloat16 if "bf16" in text else torch.float32)
            for n in ("src", "wei", "dst")
        }
        of = made.steps[0].triton
        for name, box in zip(made.steps[0].params, of.boxes, strict=True):
            assert box is not None
            described = of.describe(tensors[name], *box)
            bound_start.encoding(record, box[0])(tensors[name].data_ptr(), bound_start.lying(box[0]))
            kind = seen[text, name] = driver.asked[-1][3]
            # The spelling of newer releases, where the installed one accepts it.
            assert getattr(described, "round_f32_to_tf32", None) in (None, kind == 11)
    assert {key for key, kind in seen.items() if kind == 11} == {("dt=f32", "src"), ("dt=f32", "wei")}
    assert len(seen) == 9
