"""Stage 4. In: Algorithm. Out: Kernel: a scalar loop nest that is right, and nothing else.

    for every point of the B, M, N axes (parallel):
        acc = 0
        for every point of the K axes:
            a = load(...); b = load(...)
            acc = acc + a * b
        store(c, epilogue(acc))
"""

from __future__ import annotations

from transconv.algorithm import Algorithm
from transconv.ir import (
    TRUE,
    Alloc,
    Call,
    Cast,
    Const,
    Expr,
    For,
    Kernel,
    Let,
    Load,
    Seq,
    Stmt,
    Update,
    Var,
    View,
    f32,
    find,
    free_vars,
    seq,
    store,
    substitute,
)
from transconv.packing import is_copy, rounds


def naive(algorithm: Algorithm, name: str) -> Kernel:
    """The loop nest of an algorithm. A sum over no elements at all has no loops: it is 0."""
    summed = algorithm.axes_of("K")
    around = [x for x in algorithm.axes if x not in summed]
    taken = {x.name for x in algorithm.axes}

    if is_copy(algorithm):
        return Kernel(name, algorithm.tensors, _copy(algorithm, taken))
    acc = Var("acc", algorithm.acc)
    k_vars = {x.var for x in summed}
    c_lets, c = _name_coordinates(algorithm.c, taken)
    body: list[Stmt] = []
    factors: list[Expr] = []
    for letter, view in (("a", algorithm.a), ("b", algorithm.b)):
        if view is not None:
            lets, named = _name_coordinates(view, taken)
            body += [x for x in lets if x not in c_lets and x not in body]
            value = Var(letter, named.tensor.dtype)
            body.append(Let(value, Load(named.tensor, named.offset(), named.mask())))
            factors.append(Cast(value, algorithm.acc))
    product = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    outside = [x for x in body if isinstance(x, Let) and not isinstance(x.value, Load)
               and not free_vars(x.value) & k_vars]
    inside = [x for x in body if x not in outside]
    nest: Stmt = seq(*inside, Update(acc, acc + product))
    for x in reversed(summed):
        nest = For(x.var, x.size, nest)
    if any(x.size == 0 for x in summed):
        nest = Seq(())

    finish = _finish(algorithm, acc, c)
    whole: Stmt = seq(*c_lets, *outside, Alloc(acc, (), Const(0.0, algorithm.acc)), nest, *finish)
    for x in reversed(around):
        whole = For(x.var, x.size, whole, "parallel")
    return Kernel(name, algorithm.tensors, whole)


def _copy(algorithm: Algorithm, taken: set[str]) -> Stmt:
    """Every element is loaded and stored; no accumulator, so that its bits stay what they are. What
    would be cut to tf32 later is rounded to it on the way."""
    a_lets, a = _name_coordinates(algorithm.a, taken)
    c_lets, c = _name_coordinates(algorithm.c, taken)
    value = Var("a", a.tensor.dtype)
    lets = [*a_lets, *(x for x in c_lets if x not in a_lets),
            Let(value, Load(a.tensor, a.offset(), a.mask()))]
    if rounds(algorithm):
        lets.append(Let(Var("near", f32), Call("tf32", (value,))))
        value = Var("near", f32)
    whole: Stmt = seq(*lets, store(c.tensor, c.offset(), value, c.mask()))
    for x in reversed(algorithm.axes):
        whole = For(x.var, x.size, whole, "parallel")
    return whole


def _name_coordinates(view: View, taken: set[str]) -> tuple[list[Stmt], View]:
    """Give a computed coordinate the name of its dimension: ``let ih = oh*2 + kh - 1``."""
    lets: list[Stmt] = []
    for name, dim in zip(view.tensor.dims, view.dims, strict=True):
        if isinstance(dim.coord, (Var, Const)) or name in taken:
            continue
        lets.append(Let(Var(name), dim.coord))
        view = substitute(view, {dim.coord: Var(name)})
    return lets, view


def _finish(algorithm: Algorithm, acc: Var, c: View) -> list[Stmt]:
    """The epilogue's loads, then the store."""
    value = algorithm.epilogue.value(acc, c)
    lets: list[Stmt] = []
    for load in find(value, Load):
        lets.append(Let(Var(f"{load.tensor.name}_value", load.dtype), load))
    value = substitute(value, {x.value: x.var for x in lets if isinstance(x, Let)})
    mask = c.mask()
    return [*lets, store(c.tensor, c.offset(), Cast(value, c.tensor.dtype),
                         TRUE if mask is TRUE else mask)]
