"""The pass ``narrow`` on drawn kernels: no index of 32 bits runs over, none means another number than
before, and those that just fit stay as they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from transconv import ir
from transconv.ir import Const, Expr, For, If, Lane, Let, Load, Seq, Stmt, Store, Var, index, index64, walk
from transconv.passes.scalar.index_width import narrow

OUT = ir.Tensor("out", ("x",), (64,), ir.Layout.dense(ir.f32, (64,)))
TABLE = ir.Tensor("table", ("x",), (64,), ir.Layout.dense(ir.f32, (64,)))
M = Lane("m", 32, 1)
ONE = Const(1.0, ir.f32)


def drawn(rng: random.Random) -> ir.Kernel:
    """Loops of any length; an index with a name, one of a load, and one of a store, with masks."""
    loops = [Var(n) for n in "ijk"]
    sizes = [rng.choice([1, 2, 7, 100, 46341, 2**20, 2**31 - 1]) for _ in loops]
    t, x = Var("t"), Var("x", ir.f32)

    def index_of(names: list[Expr], depth: int) -> Expr:
        if depth == 0 or rng.random() < 0.1:
            return rng.choice([*names, M, ir.as_expr(rng.choice([0, 1, 3, 4096]))])
        a, b = index_of(names, depth - 1), index_of(names, depth - 1)
        n = rng.choice([2, 5, 64, 2**15, 2**16, 2**31 - 1])
        made: Expr = rng.choice(
            [
                a + b,
                a - b,
                a * n,
                a * b,
                a // n,
                a % n,
                ir.minimum(a, b),
                ir.maximum(a, b),
                ir.Select(a < b, a, b + n),
            ]
        )
        return made

    def mask(names: list[Expr]) -> Expr:
        return rng.choice([ir.TRUE, index_of(names, 2) < n, (index_of(names, 1) < n) & (loops[0] < 5)])

    n = rng.choice([64, 2**31, 2**33])
    names: list[Expr] = [*loops]
    body = ir.seq(
        Let(t, index_of(names, rng.choice([1, 2, 3]))),
        Let(x, Load(TABLE, index_of([*names, t], 2) + M, mask([*names, t]))),
        Store(OUT, index_of([*names, t, t], 2) + M, x, mask([*names, t])),
    )
    for var, size in zip(loops, sizes, strict=True):
        body = For(var, size, body, kind="grid" if var is loops[-1] else "serial")
    return ir.Kernel("drawn", (TABLE, OUT), body)


def flat(at: Stmt) -> Iterator[Stmt]:
    """Statements in their order, loops before what is in them."""
    yield at
    if isinstance(at, Seq):
        for s in at.stmts:
            yield from flat(s)
    elif isinstance(at, (For, If)):
        yield from flat(at.body if isinstance(at, For) else at.then)  # type: ignore[attr-defined]


def indices(kernel: ir.Kernel, at: dict[str, int], place: int) -> Iterator[tuple[str, Expr, int]]:
    """Every index and mask, as it is at the turns ``at`` of the loops and at a place of the lanes."""
    known = dict(at)

    def value(e: Expr) -> int:
        return int(ir.value_at(ir.substitute(e, {M: Const(place)}), known))

    for s in flat(kernel.body):
        if (isinstance(s, Let) and isinstance(s.value, Load)) or isinstance(s, Store):
            access: Any = s.value if isinstance(s, Let) else s
            yield "offset", access.offset, value(access.offset)
            yield "mask", access.mask, value(access.mask)
        elif isinstance(s, Let):
            yield "let", s.value, value(s.value)
            known[s.var.name] = value(s.value)
    for s in flat(kernel.body):  # parts, with what is known by then
        for e in walk(s):
            if isinstance(e, Expr) and e.dtype is index and not isinstance(s, (For, Seq)):
                yield "part", e, value(e)


@pytest.mark.every(15)
@pytest.mark.parametrize("seed", range(90))
def test_no_index_of_32_bits_runs_over_and_all_mean_the_same(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3):
        kernel = drawn(rng)
        made = narrow(kernel)
        ir.verify(made)
        sizes = {s.var.name: s.stop for s in flat(kernel.body) if isinstance(s, For)}
        for _ in range(16):
            at = {name: rng.choice([0, n - 1, rng.randrange(n)]) for name, n in sizes.items()}
            place = rng.choice([0, 31])
            before = [v for kind, _, v in indices(kernel, at, place) if kind != "part"]
            after = [*indices(made, at, place)]
            assert [v for kind, _, v in after if kind != "part"] == before
            for kind, e, v in after:
                assert kind != "part" or -(2**31) <= v < 2**31, f"{e} is {v} at {at}:\n{made}"


@pytest.mark.parametrize(
    ("offset", "size", "wide"),
    [
        (Var("i") * 65536 + 65535, 32768, False),
        (Var("i") * 65536 + 65536, 32768, True),
        (Var("i"), 2**31 - 1, False),
        (Var("i") * -65536, 32769, False),
        (Var("i") * -65536 - 1, 32769, True),
        (Var("i") - 2**31, 2**31 - 1, True),
        (Var("i") * 65536 - Var("i") * 65535, 32768, False),
        (Var("i") * 65536 - Var("i") * 65535, 32769, True),
        (Var("i") * 65536 // 65536, 32769, True),
        (M + Var("i") * 32, 2**26, False),
        (M + Var("i") * 32 + 1, 2**26, True),
    ],
    ids=str,
)
def test_what_just_fits_stays(offset: Expr, size: int, wide: bool) -> None:
    body = For(Var("i"), size, Store(OUT, offset, ONE, ir.TRUE), kind="grid")
    made = narrow(ir.Kernel("edge", (OUT,), body))
    assert any(isinstance(e, Expr) and e.dtype is index64 for e in walk(made.body)) == wide, str(made)
    store = next(s for s in flat(made.body) if isinstance(s, Store))
    if not wide:
        assert store.offset is offset


def test_the_largest_parts_that_fit_are_computed_in_32_bits() -> None:
    n, h, w = Var("n"), Var("h"), Var("w")
    offset = n * 2**32 + (h * 8192 + w)
    body: Stmt = Store(OUT, offset, ONE, ir.TRUE)
    for var, size in ((n, 4), (h, 100), (w, 8192)):
        body = For(var, size, body, kind="grid" if var is w else "serial")
    made = narrow(ir.Kernel("parts", (OUT,), body))
    casts = {str(e.x) for e in walk(made.body) if isinstance(e, ir.Cast) and e.type is index64}
    assert casts == {"n", str(h * 8192 + w)}


def test_of_the_corner_of_a_box_what_is_wide_alone_is_cast() -> None:
    box = ir.Tensor("box", ("a", "b"), (4096, 64), ir.Layout.dense(ir.f32, (4096, 64)))
    i, j, t, x = Var("i"), Var("j"), Var("t"), Var("x", ir.f32)
    body = ir.seq(Let(t, i * 2**20), Let(x, ir.BoxLoad(box, (t // 2**40, j), (ir.ZERO, M), (1, 32))))
    kernel = ir.Kernel("boxes", (box, OUT), For(i, 2**30, For(j, 2, body)))
    (load,) = (e for e in walk(narrow(kernel)) if isinstance(e, ir.BoxLoad))
    wide, near = load.corner
    assert isinstance(wide, ir.Cast) and wide.x.dtype is index64 and near is j
