"""One thing is one row: each is added from outside the package by one call, and reaches its users.

What a row means to each part is tested with the rows (test_ops.py, test_words.py, ir/test_dtype.py,
test_target.py); here all of them are added together, counted, and meet in the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.outside import BOUNDED, F8, NOTE, NOTING
from transconv import compute, ir, passes, schedule, target
from transconv.__main__ import main
from transconv.conv import ConvProblem, Prop
from transconv.ir import Const, Expr, ExprMutator, Kernel, Mul, Shl
from transconv.passes import Context, Pass
from transconv.runtime import build_compute
from transconv.schedule import Schedule
from transconv.target import TARGETS, Target
from transconv.verify.case import ProblemCase
from transconv.verify.computation import ComputationCase as ComputeCase
from transconv.verify.computation import after_every_pass


class _Shifts(ExprMutator):
    def mutate_Mul(self, at: Mul) -> Expr:
        match at := self.generic(at):
            case Mul(x, Const(c)) if at.dtype.kind == "index" and c > 1 and c & (c - 1) == 0:
                return Shl(x, Const(c.bit_length() - 1, at.dtype))
        return at


def _shifts(kernel: Kernel, context: Context) -> Kernel:
    return _Shifts().mutate(kernel)  # type: ignore[no-any-return]


SHIFTS = Pass("shifts", "products with powers of two become shifts", _shifts)
CHIP = replace(TARGETS["sm_90"], name="sm_310", arch=310, sms=200)
CHIP_OF_8_BITS = replace(CHIP, name="sm_320", arch=320, mma_dtypes=CHIP.mma_dtypes | {F8})

# The calls that add a thing, and those that take it out again.
Calls = tuple[Callable[[], object], ...]
ADDED: dict[str, tuple[Calls, Calls]] = {
    "activation": ((lambda: compute.register(BOUNDED),), (lambda: compute.unregister(BOUNDED.name),)),
    "word": ((lambda: schedule.register_word(NOTE),), (lambda: schedule.unregister_word(NOTE.name),)),
    "pass of the word": ((lambda: passes.register(NOTING),), (lambda: passes.unregister(NOTING.name),)),
    "type": (
        (lambda: ir.DTYPES.add(F8), lambda: target.register(CHIP_OF_8_BITS)),
        (lambda: ir.DTYPES.remove(F8.name), lambda: target.unregister(CHIP_OF_8_BITS.name)),
    ),
    "chip": ((lambda: target.register(CHIP),), (lambda: target.unregister(CHIP.name),)),
    "pass": ((lambda: passes.register(SHIFTS),), (lambda: passes.unregister(SHIFTS.name),)),
}


@pytest.fixture
def rows() -> Iterator[None]:
    for add, _ in ADDED.values():
        for call in add:
            call()
    yield
    for _, remove in ADDED.values():
        for call in remove:
            call()


PRODUCT = """compute product
    tensor A {dtype} [m=24, k=33]
    tensor B {dtype} [k=33, n=16]
    axes   m=24 n=16 k=33
    read   a = A[m, k]
    read   b = B[k, n]
    store  C[m, n] = {after}(sum(a*b; k))"""
WORDS = "m:16 n:16 k:32 | mma | stages=2 note=2"


def test_one_call_each() -> None:
    """A type that a matrix unit multiplies is a row, and a word in the record of its chip."""
    assert {what: len(add) for what, (add, _) in ADDED.items()} == dict.fromkeys(ADDED, 1) | {"type": 2}


def test_an_activation_in_a_text_and_behind_a_convolution(rows: None) -> None:
    """Both times it has torch's value."""
    made = compute.parse(PRODUCT.format(dtype="f16", after="bounded"))
    case = ComputeCase(made)
    a, b = (torch.from_numpy(case.given[n]) for n in "AB")
    assert np.array_equal(case.answers["C"].value, torch.clamp(a @ b, -2, 2).numpy())
    plan = build_compute(made, CHIP, Schedule.parse("m:16 n:16 k:32 | mma"))
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []
    conv = ProblemCase(
        ConvProblem.parse("mb1ic3ih5oc4oh5kh3ph1"), Prop.FWD, "bounded", where="cpu", numpy=True
    )
    found = conv.judge(conv.plan("mb.oh.ow:16 oc:16 ic:16 | fma"), "exact", 1)
    assert found.right and found.telling, found.reason


def test_a_word_and_its_pass(rows: None) -> None:
    chosen = Schedule.parse(WORDS)
    assert chosen.word("note") == 2
    made = compute.parse(PRODUCT.format(dtype="f16", after="relu"))
    assert "# note 0 of mine (and 1 more like it)\n" in build_compute(made, CHIP, chosen).source
    without = build_compute(made, CHIP, chosen.with_words(note=0))
    assert "of mine" not in without.source


def test_a_type(rows: None) -> None:
    """In the text of a computation, in the matrix unit of the chip that has it, and rounded."""
    made = compute.parse(PRODUCT.format(dtype=F8.name, after="relu"))
    assert made.a.tensor.dtype is F8 and made.factors is not None
    plan = build_compute(made, CHIP_OF_8_BITS, Schedule.parse(WORDS))
    assert "tl.dot" in plan.source
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(made, plan) if j.problem] == []
    assert F8.name in str(made) and compute.parse(str(made)) == made


@pytest.mark.parametrize("name", [CHIP.name, "sm_312"])
def test_a_chip(rows: None, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It and its siblings have kernels of texts and of convolutions."""
    assert Target.parse(name).sms == 200
    assert (
        main(["show", "mb8ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc", "--target", name, "--stage", "emit"])
        == 0
    )
    assert "warpgroup_mma" in capsys.readouterr().out
    made = compute.parse(PRODUCT.format(dtype="bf16", after="relu"))
    assert f"# target {name}" in build_compute(made, Target.parse(name)).source


def test_a_pass(rows: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", "mb2ic16ih8oc16oh4kh3sh2ph1 tag=nhwc", "--target", CHIP.name, "--stage", "shifts"])
        == 0
    )
    told = capsys.readouterr().out
    assert "---- shifts: products with powers of two" in told and " << " in told


def test_what_is_taken_out_is_gone() -> None:
    assert BOUNDED.name not in compute.OPS and F8.name not in ir.DTYPES
    assert NOTE.name not in {w.name for w in schedule.words()}
    assert not {SHIFTS.name, NOTING.name} & {s.name for s in passes.stages()}
    assert not {CHIP.name, CHIP_OF_8_BITS.name} & {*TARGETS}
