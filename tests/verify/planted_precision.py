"""Planted bugs that round or truncate too early. Sums of whole numbers do not show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.verify.planted import DEPTHWISE, Bug, Statements
from transconv.conv.conv_problem import Prop
from transconv.ir import (
    BoxLoad,
    Cast,
    DType,
    Expr,
    FuncCall,
    Kernel,
    Load,
    Stmt,
    Store,
    Tensor,
    Update,
    Var,
    bf16,
    bound_vars,
    f16,
    f32,
    find,
    rewrite,
    seq,
    substitute,
    tf32,
)

MMA = "mb.oh.ow:32 oc:16 ic:16 | mma | stages=2 warps=4"
BOX = "mb:1 oh:4 ow:8 oc:16 ic:16 | mma | a=box b=box swap=1"
LONG = "mb2ic64ih7oc16oh7kh3ph1 {} tag=axb"


def _short(x: Expr, short: DType) -> Expr:
    return Cast(Cast(x, short), f32)


def sums_are_short(short: DType) -> Callable[[Kernel, Kernel], Kernel]:
    """The accumulator goes through a shorter type after each addition to it."""

    def damage(before: Kernel, after: Kernel) -> Kernel:
        def change(s: Stmt) -> Stmt:
            match s:
                case FuncCall(func, (Var() as acc, *_)) if func.multiplies:
                    return seq(s, Update(acc, _short(acc, short)))
                case Update(acc, value) if acc.type is f32:
                    return Update(acc, _short(value, short))
            return s

        made = Statements(change).mutate(after)
        assert isinstance(made, Kernel)
        return made

    return damage


def stored_sums(of: tuple[str, ...], short: DType) -> Callable[[Kernel, Kernel], Kernel]:
    """The sum is rounded to a shorter type before something is done to it, or where it is kept."""

    def damage(before: Kernel, after: Kernel) -> Kernel:
        def change(s: Stmt) -> Stmt:
            if isinstance(s, Store) and s.tensor.name in of:
                acc = next(v for v in find(s.value, Var) if v.name in ("acc", "s"))
                return Store(s.tensor, s.offset, substitute(s.value, {acc: _short(acc, short)}), s.mask)
            return s

        made = Statements(change).mutate(after)
        assert isinstance(made, Kernel)
        return made

    return damage


def operands_are_cut(before: Kernel, after: Kernel) -> Kernel:
    """Nothing is rounded to tf32: not in registers, not in a copy, not by the copy engine."""

    def plain(e: Expr) -> Expr:
        match e:
            case Cast(x, to) if to is tf32:
                return x
            case Var(name, to) if to is tf32:
                return Var(name, f32)
            case BoxLoad() | Load():
                return replace(e, tensor=whole(e.tensor))
        return e

    def whole(t: Tensor) -> Tensor:
        layout = replace(t.layout, dtype=f32) if t.dtype is tf32 else t.layout
        return replace(t, near=None, layout=layout)

    def stored(s: Stmt) -> Stmt:
        return replace(s, tensor=whole(s.tensor)) if isinstance(s, Store) else s

    names = {v: Var(v.name, f32) for v in bound_vars(after) if v.type is tf32}
    made = Statements(stored).mutate(substitute(rewrite(after, plain), names))
    assert isinstance(made, Kernel)
    return Kernel(made.name, tuple(map(whole, after.params)), made.body, made.notes)


@dataclass(frozen=True)
class Imprecise:
    """A bug in a kernel with an epilogue, and what is said of it."""

    bug: Bug
    said: str
    epilogue: str = ""


def _bug(
    what: str,
    damage: Callable[[Kernel, Kernel], Kernel],
    dtypes: str,
    schedule: str = MMA,
    stage: str = "lanewise",
    prop: Prop = Prop.FWD,
) -> Bug:
    return Bug(stage, what, damage, LONG.format(f"dt={dtypes}"), prop, schedule)


PRECISION = [
    Imprecise(
        _bug("sums of a wide result are kept in f16", sums_are_short(f16), "f16:f16:f32"),
        "elements are wrong",
    ),
    Imprecise(
        Bug(
            "lanewise",
            "sums of multiply-adds are kept in f16",
            sums_are_short(f16),
            DEPTHWISE,
            schedule="mb.oh:4 ow:4 g:8 | fma",
        ),
        "elements are wrong",
    ),
    Imprecise(
        _bug("the epilogue sees a rounded sum", stored_sums(("dst", "C"), f16), "f16"),
        "rounded once",
        "bias+res",
    ),
    Imprecise(
        _bug("parts of sums are kept in f16", stored_sums(("partials",), f16), "f16", f"{MMA} split_k=3"),
        "rounded once",
    ),
    Imprecise(
        _bug(
            "parts of sums are kept in bf16",
            stored_sums(("partials",), bf16),
            "bf16",
            "ic:16 oc:16 mb.oh.ow:16 | mma | stages=2 warps=4 split_k=4",
            prop=Prop.BWD_W,
        ),
        "elements are wrong",
    ),
    Imprecise(_bug("tf32 is cut in registers", operands_are_cut, "f32"), "2-norm"),
    Imprecise(_bug("tf32 is cut in copies", operands_are_cut, "f32", f"{MMA} pack=a.b"), "2-norm"),
    Imprecise(_bug("tf32 is cut by the copy engine", operands_are_cut, "f32", BOX, "blockwise"), "2-norm"),
]
