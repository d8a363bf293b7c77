"""Bugs for the passes, the emitters and the computation, each as a developer could have made it.

A bug in a pass is a change to what the pass returns, for every kernel it is given. The test asserts
that every pass of the pipeline has one here, but those of kernels whose sizes are arguments, which
bisection does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from transconv.backend_triton.emitters import arithmetic, triton
from transconv.conv import relation as compute
from transconv.conv.conv_problem import Prop
from transconv.ir import (
    BYTES,
    TRUE,
    WAIT,
    Add,
    BoxLoad,
    Call,
    Cast,
    Const,
    Expr,
    For,
    FuncCall,
    Kernel,
    Let,
    Load,
    Lt,
    Mutator,
    Node,
    Reduce,
    Renamed,
    Spread,
    Stmt,
    View,
    ViewDim,
    all_of,
    conjuncts,
    find,
    i8,
    rewrite,
    substitute,
)
from transconv.passes import pipeline
from transconv.passes.lowering import naive
from transconv.passes.lowering.gridwise import STEP
from transconv.passes.pipeline import Context
from transconv.schedule.tiles import copy_kernels

Damage = Callable[[Kernel, Kernel], Kernel]  # of the kernels before and after a pass
PLAIN = "mb2ic16ih7oc16oh7kh3ph1 dt=f16 tag=axb"
DEPTHWISE = "g8mb2ic8ih7oc8oh7kh3ph1 dt=f16 tag=axb"
SLIDING = "mb.oh:4 ow:4 g:8 | fma | regs=ow.kw stages=1"
GATHER = "mb.oh.ow:32 oc:16 ic:16 | mma | stages=2 warps=4"


@dataclass(frozen=True)
class Bug:
    """Where it is, in words what it does, and a case that shows it."""

    stage: str
    what: str
    damage: Damage | None = None
    problem: str = PLAIN
    prop: Prop = Prop.FWD
    schedule: str = GATHER
    switches: dict[str, bool] = field(default_factory=dict)


# -- damage ----------------------------------------------------------------------------------------


class Statements(Mutator):
    """Changes the statements for which ``change`` gives another, None to drop one."""

    def __init__(self, change: Callable[[Stmt], Stmt | None]) -> None:
        self.change = change

    def mutate(self, at: Node) -> Node | None:
        if isinstance(at, Expr):
            return at
        made = super().mutate(at)
        return self.change(made) if isinstance(made, Stmt) else made  # type: ignore[no-any-return]


def changed(kernel: Kernel, old: Stmt | None, new: Stmt | None) -> Kernel:
    """The kernel with one statement replaced or, for None, left out."""
    if old is None:
        return kernel
    made = Statements(lambda s: new if s is old else s).mutate(kernel)
    assert isinstance(made, Kernel) and made is not kernel
    return made


def made_by_the_pass(before: Kernel, after: Kernel, kind: type[Any]) -> Any:
    """The last statement of a class that the pass made or changed."""
    old = set(find(before, kind))
    return next((s for s in reversed(find(after, kind)) if s not in old), None)


def off_by_one(before: Kernel, after: Kernel) -> Kernel:
    """A number that the pass gave a name is one too large."""
    old = set(find(before, Let))
    let = next(
        (
            s
            for s in find(after, Let)
            if s not in old and s.value.dtype.kind == "index" and not isinstance(s.value, Load)
        ),
        None,
    )
    return changed(after, let, let and Let(let.var, Add(let.value, Const(1))))


def part_is_late(before: Kernel, after: Kernel) -> Kernel:
    let = next((s for s in find(after, Let) if s.var is STEP and "part" in str(s.value)), None)
    return changed(after, let, let and Let(let.var, Add(let.value, Const(1))))


def word_is_turned(before: Kernel, after: Kernel) -> Kernel:
    """The bytes of words stand the wrong way round, where a kernel has words."""
    words = [c for c in find(after, Call) if c.name == BYTES[4]]
    return substitute(after, {c: Call(c.name, c.args[::-1]) for c in words})


def one_program_less(before: Kernel, after: Kernel) -> Kernel:
    loop = next(s for s in find(after, For) if s.kind == "grid")
    return changed(after, loop, replace(loop, stop=loop.stop - 1))


def neighbour_is_read(before: Kernel, after: Kernel) -> Kernel:
    """An address is one too far; its mask is as it was."""
    load = find(after, Load)[0]
    return substitute(after, {load: Load(load.tensor, Add(load.offset, Const(1)), load.mask)})


def box_is_shifted(before: Kernel, after: Kernel) -> Kernel:
    box = find(after, BoxLoad)[0]
    corner = (*box.corner[:-1], Add(box.corner[-1], Const(1)))
    return substitute(after, {box: replace(box, corner=corner)})


def last_copy_is_lost(before: Kernel, after: Kernel) -> Kernel:
    return changed(after, made_by_the_pass(before, after, FuncCall), None)


def condition_is_lost(before: Kernel, after: Kernel) -> Kernel:
    """The last condition of the first mask that has more than one."""
    load = next((x for x in find(after, Load) if len(conjuncts(x.mask)) > 1), None)
    if load is None:
        return after
    mask = all_of(conjuncts(load.mask)[:-1])
    return substitute(after, {load: Load(load.tensor, load.offset, mask)})


def let_is_lost(before: Kernel, after: Kernel) -> Kernel:
    let = next((s for s in find(after, Let) if s.value.dtype.kind == "index"), None)
    return changed(after, let, None)


def eight_bits(before: Kernel, after: Kernel) -> Kernel:
    """Addresses wrap around."""
    return substitute(after, {x: Load(x.tensor, Cast(x.offset, i8), x.mask) for x in find(after, Load)})


def condition_is_mistaken(before: Kernel, after: Kernel) -> Kernel:
    """A load whose mask the pass has touched loses it."""
    let = made_by_the_pass(before, after, Let)
    if let is None or not isinstance(let.value, Load):
        return after
    return changed(after, let, Let(let.var, Load(let.value.tensor, let.value.offset, TRUE)))


def neighbours_are_one(before: Kernel, after: Kernel) -> Kernel:
    """Two loads of a tensor that differ in their address are taken for the same."""
    lets = [s for s in find(after, Let) if isinstance(s.value, Load)]
    first, second = next(
        (a, b)
        for a in lets
        for b in lets
        if a is not b and a.value.tensor is b.value.tensor and a.value.dtype is b.value.dtype
    )
    kernel = changed(after, second, None)
    return substitute(kernel, {second.var: first.var})


def spread_of_zero(before: Kernel, after: Kernel) -> Kernel:
    """All lanes are given the first element."""
    spread = find(after, Spread)[0]
    return substitute(after, {spread: Spread(spread.x * 0, spread.lanes)})


def lane_is_not_added(before: Kernel, after: Kernel) -> Kernel:
    """The largest of the lanes' sums is taken instead of their sum."""
    total = find(after, Reduce)[0]
    return rewrite(after, lambda e: Reduce("max", e.x, e.lane) if e is total else e)


def nothing_done(before: Kernel, after: Kernel) -> Kernel:
    return before


def rows_are_columns(before: Kernel, after: Kernel) -> Kernel:
    return rewrite(
        after, lambda e: replace(e, new=e.new[::-1]) if isinstance(e, Renamed) and len(e.new) > 1 else e
    )


def wait_is_lost(before: Kernel, after: Kernel) -> Kernel:
    return changed(after, next((s for s in find(after, FuncCall) if s.func is WAIT), None), None)


PASSES = [
    Bug("gridwise", "the last program is not started", one_program_less),
    Bug("blockwise", "parts of a sum begin one step late", part_is_late, schedule=f"{GATHER} split_k=3"),
    Bug(
        "blockwise",
        "boxes are fetched one element further",
        box_is_shifted,
        schedule="mb:1 oh:4 ow:8 oc:16 ic:16 | a=box b=box swap=1",
        problem="mb2ic16ih8oc16oh8kh3ph1 dt=f16 tag=axb",
    ),
    Bug("lanewise", "lanes begin at 1", neighbour_is_read),
    Bug(
        "lanewise",
        "lanes that were kept are not added",
        lane_is_not_added,
        problem=DEPTHWISE,
        prop=Prop.BWD_W,
        schedule=f"kw:3 {SLIDING} late=1",
    ),
    Bug("unroll", "the last copy is not written", last_copy_is_lost, schedule=f"{GATHER} unroll=1"),
    Bug(
        "reuse",
        "neighbours are taken for one",
        neighbours_are_one,
        problem=DEPTHWISE,
        schedule=f"kw:3 {SLIDING}",
    ),
    Bug("simplify", "a condition that is needed is dropped", condition_is_lost),
    Bug("lets", "a name that is used is removed", let_is_lost),
    Bug(
        "quads",
        "the bytes of a word are turned",
        word_is_turned,
        problem="g16mb2ic16ih6iw20oc16oh6ow20kh7kw7ph3pw3 dt=s8:s8:s32 tag=nhwc",
        schedule="mb.oh:2 ow:10 kw:7 g:16 | fma | regs=ow.kw pack=b stages=1",
    ),
    Bug("hoist", "what is hoisted is off by one", off_by_one),
    Bug(
        "cse",
        "a condition is taken for one that always holds",
        condition_is_mistaken,
        problem="g4mb1ic4ih5oc4oh5kh3ph1",
        schedule="",
        switches={"reuse": False},
    ),
    Bug("narrow", "addresses wrap around at 8 bits", eight_bits),
    Bug(
        "narrow",
        "indices beyond 32 bits stay short",
        nothing_done,
        problem="mb70000ic1ih256oc1oh256kh1 dt=f16",
        schedule="mb.oh.ow:64 | fma",
    ),
    Bug(
        "widen",
        "all lanes look at the first element",
        spread_of_zero,
        problem=DEPTHWISE,
        prop=Prop.BWD_W,
        schedule=f"kh:2 kw:3 {SLIDING} late=1",
    ),
    Bug(
        "upright",
        "the rows of a square tile are taken for its columns",
        rows_are_columns,
        problem="mb2ic16ih7oc16oh7kh1 dt=f16",
        schedule="mb.oh.ow:16 oc:16 ic:16 | mma | swap=1 stages=2",
    ),
    Bug(
        "final",
        "a quotient is not shifted back all the way",
        off_by_one,
        problem="mb1ic2iw9oc2ow5kw3sw2pw1",
        prop=Prop.BWD_D,
        switches={"simplify": False},
        schedule="",
    ),
    Bug(
        "roles",
        "one wait is forgotten",
        wait_is_lost,
        problem="mb2ic32ih8oc24oh8kh3ph1 dt=f16 tag=axb",
        schedule="mb:1 oh:8 ow:8 oc:16 ic:16 | a=box b=box via=gluon | c=box stages=3",
    ),
]


@contextmanager
def planted_pass(bug: Bug) -> Iterator[None]:
    """The pipeline with a bug in one pass."""
    step = next(p for p in pipeline.PIPELINE if p.name == bug.stage)
    honest, damage = step.run, bug.damage
    assert damage is not None

    def run(kernel: Kernel, context: Context) -> Kernel:
        return damage(kernel, honest(kernel, context))

    object.__setattr__(step, "run", run)  # frozen, and shared by all that hold the pipeline
    try:
        yield
    finally:
        object.__setattr__(step, "run", honest)


# -- elsewhere -------------------------------------------------------------------------------------


def comparisons_include_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arithmetic.ir.INFIX, Lt, "<=")


def sums_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tl.dot`` without the accumulator."""
    honest = triton.TlEmitter.call_dot
    monkeypatch.setattr(
        triton.TlEmitter,
        "call_dot",
        lambda self, s: [line.replace(f", {s.args[0].name}", "") for line in honest(self, s)],
    )


def padding_has_the_wrong_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """i = o*S + k*D + P, and o = (i - P - k*D) / S."""
    for name in ("_solve_i", "_solve_o"):
        honest = getattr(compute, name)

        def solve(p: Any, *rest: int, honest: Any = honest) -> Any:
            told = {word: getattr(p, word) for word in ("spatial", "i", "o", "k", "stride", "dilation")}
            return honest(SimpleNamespace(**told, pad_lo=[-n for n in p.pad_lo]), *rest)

        monkeypatch.setattr(compute, name, solve)


def groups_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged groups read the filter beside its diagonal, too."""
    honest = copy_kernels.merged

    def without_masks(view: View) -> View:
        return View(
            view.tensor,
            tuple(ViewDim(d.coord) for d in view.dims) if view.tensor.name == "wei" else view.dims,
        )

    monkeypatch.setattr(
        copy_kernels,
        "merged",
        lambda made, merge: honest(made, merge).over(without_masks) if merge > 1 else made,
    )


def copies_are_read_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last dimension of copies alone: an error in all three would cancel."""
    honest = copy_kernels.over_copies

    def backwards(view: View) -> View:
        if view.tensor.copy_of not in ("wei", "dst"):
            return view
        last = ViewDim(view.tensor.shape[-1] - 1 - view.dims[-1].coord, view.dims[-1].mask)
        return View(view.tensor, (*view.dims[:-1], last))

    monkeypatch.setattr(copy_kernels, "over_copies", lambda *given: honest(*given).over(backwards))


def weights_are_one_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop nest reads the neighbour of the weight that the view names."""
    honest = naive.naive

    def spoiled(made: Any, name: str) -> Kernel:
        kernel = honest(made, name)
        return rewrite(
            kernel,
            lambda e: (
                Load(e.tensor, Add(e.offset, Const(1)), e.mask)
                if isinstance(e, Load) and e.tensor.name == "wei"
                else e
            ),
        )

    monkeypatch.setattr(naive, "naive", spoiled)


# One for each emitter. Gluon's text runs on GPUs of its kind alone: its bug belongs to tests/gpu.
EMITTERS = {"masks include the end": comparisons_include_the_end, "sums are not kept": sums_are_not_kept}
