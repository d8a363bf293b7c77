"""Kernels compiled offline for several chips, in a child process: what they take, and failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from transconv.backend_triton import offline_child, offline_compilation
from transconv.backend_triton.offline_compilation import (
    CompileFailure,
    CompileJob,
    Resources,
    compile_offline,
)
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.target.records import TARGETS
from transconv.verify.matrix import jobs_of

ROOT = Path(__file__).parents[2]
BF16 = ConvProblem.parse("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "gfx942": "v_mfma"}
COPY = {"sm_80": {"LDGSTS"}, "sm_90": {"LDGSTS", "UTMALDG"}, "gfx942": {"global_load"}}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, Prop], list[Resources | CompileFailure]]:
    """What the tests of this file that run ask for, all at once."""
    asked = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and item.name.startswith("test_resources")
    ]
    jobs = {(c["target"], c["prop"]): jobs_of(BF16, c["prop"], TARGETS[c["target"]]) for c in asked}
    answers = iter(compile_offline([j for own in jobs.values() for j in own]))
    return {pair: [next(answers) for _ in own] for pair, own in jobs.items()}


@pytest.mark.every(8)
@pytest.mark.parametrize("prop", list(Prop))
@pytest.mark.parametrize("target", list(MATRIX))
def test_resources(
    compiled: dict[tuple[str, Prop], list[Resources | CompileFailure]], target: str, prop: Prop
) -> None:
    """Each chip with one direction; `make check-all` has all directions."""
    # Stride phases are four kernels, or one launch; a weight gradient's parts are added by another one.
    assert (
        len(compiled[target, prop])
        >= {Prop.FWD: 1, Prop.BWD_D: 1 if target == "sm_90" else 4, Prop.BWD_W: 1}[prop]
    )
    for found in compiled[target, prop]:
        assert isinstance(found, Resources), f"{found}\n{getattr(found, 'log', '')}"
        assert 0 < found.registers <= 255 if target.startswith("sm") else 512
        assert found.spill_bytes == 0, str(found)
        assert found.shared_bytes <= TARGETS[target].shared_bytes
        assert not found.serialised, str(found)
        assert found.seconds > 0
        if "_sum_" not in found.function:
            assert found.words.get(MATRIX[target]), str(found)
            assert COPY[target] & set(found.words), str(found)


def test_a_log_warns_once_and_not_of_one_register_too_many() -> None:
    many = "ptxas warning : Too many maxnreg specified for entry conv, will be ignored"
    spilt = "ptxas warning : Registers are spilled to local memory in function 'conv'"
    assert offline_child.warnings(f"ptxas info : 0 bytes gmem\n{many}\n{spilt}\n  {spilt}\n") == (spilt,)


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x, y):
    at = tl.arange(0, 128)
    tl.store(y + at, tl.load(x + at) * 2)
"""


def job(source: str = KERNEL, **other: object) -> CompileJob:
    made = CompileJob(source, "double", (("f32", ()), ("f32", ())), "sm_80", "cuda", 80, 32)
    return replace(made, **other)  # type: ignore[arg-type]


@pytest.mark.slow
def test_failures_do_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    """An error in the text, a process that dies, a compiler that hangs, an unknown compiler."""
    good = job(keep=("ptx",))
    broken = job(KERNEL.replace("tl.load", "tl.lode"))
    deadly = job(KERNEL.replace("import triton\n", "import os\nimport triton\nos.abort()\n", 1))
    endless = job("import time\ntime.sleep(99)\n" + KERNEL)
    intel = job(target="pvc", backend="xpu", arch="pvc")
    first, error, dead, late, foreign, last = compile_offline(
        [good, broken, deadly, endless, intel, good], timeout_s=5
    )
    assert isinstance(first, Resources) and ".version" in first.texts["ptx"]
    assert isinstance(last, Resources) and last.words == first.words
    assert isinstance(error, CompileFailure) and "lode" in error.reason
    assert isinstance(dead, CompileFailure) and "died (signal 6)" in dead.reason
    assert isinstance(late, CompileFailure) and "no answer within 5 s" in late.reason
    assert isinstance(foreign, CompileFailure) and "not compilable offline" in foreign.reason
    assert capfd.readouterr() == ("", "")


def test_what_the_assembler_refuses_is_kept() -> None:
    """ptxas prints the whole module; the user gets one sentence, the log has the rest."""
    too_much = KERNEL.replace("tl.arange(0, 128)", "tl.arange(0, 1 << 21)")
    (found,) = compile_offline([job(too_much)])
    assert isinstance(found, CompileFailure)
    assert "\n" not in found.reason and len(found.reason) < 400
    assert found.log


def test_nothing_to_do() -> None:
    assert compile_offline([]) == []


def test_children_find_this_package() -> None:
    """Whatever folder the program is in, and whatever else is installed."""
    assert Path(offline_compilation.ROOT) == ROOT
