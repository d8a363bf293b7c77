"""The levels of a kernel: a well-formed kernel of each level passes, and each rule has kernels that
break it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transconv import ir
from transconv.conv import ConvProblem, Prop, compiler
from transconv.ir import LEVELS, f32, verify
from transconv.ir.rules.verifier import RULES
from transconv.passes import levels, lower, passes, stages
from transconv.target import TARGETS

P, H, C, STEP, S = (ir.Var(n) for n in ("pid", "h", "c", "step", "slot"))
ACC, SUMS, A, B = (ir.Var(n, f32) for n in ("acc", "sums", "a", "b"))
ZERO = ir.Const(0.0, f32)
M, N, KK = ir.Lane("m", 16, 1, "M"), ir.Lane("n", 4, 3, "N"), ir.Lane("k", 8, 2, "K")
T = ir.Tensor("t", ("d",), (64,), ir.Layout.dense(f32, (64,)))
RING, FULL = ir.SmemRing("ring", f32, 2, (16,)), ir.Barrier("full", 2)
PIECE = ir.SlotTile(RING, ir.ZERO, ir.ZERO, (M,))
FETCH = ir.Fetch(T, (ir.ZERO,), PIECE, FULL, ir.ZERO)
BOX = ir.BoxLoad(T, (ir.ZERO,), (ir.ZERO,), (16,))
WAIT = ir.FuncCall(ir.WAIT, (FULL, ir.ZERO, ir.ZERO))


def load(at: ir.Expr = ir.ZERO) -> ir.Load:
    return ir.Load(T, at, ir.TRUE)


def kernel(*body: ir.Stmt) -> ir.Kernel:
    return ir.Kernel("k", (T,), ir.seq(*body))


def grid(*body: ir.Stmt) -> ir.Kernel:
    return kernel(ir.For(P, 4, ir.seq(*body), "grid"))


def tile(var: ir.Var, *body: ir.Stmt, stop: int = 16, side: str = "M") -> ir.For:
    return ir.For(var, stop, ir.seq(*body), "tile", side=side)


def axis(var: ir.Var, *body: ir.Stmt, stop: int = 4) -> ir.For:
    return ir.For(var, stop, ir.seq(*body), "parallel")


def programs(*body: ir.Stmt, names: tuple[str, ...] = ("one", "two"), warps: int = 4) -> ir.Kernel:
    """An explicit kernel whose first role has this body."""
    first, *others = (
        ir.Role(n, warps, 0, ir.seq(*body) if n is names[0] else ir.Comment("x")) for n in names
    )
    return grid(ir.Shared(RING), ir.Shared(FULL), ir.Roles((first, *others)))


TERMS = ir.For(C, 8, ir.seq(ir.Let(A, load(C)), ir.Update(ACC, ACC + A)))
SUM = (ir.Alloc(ACC, (), ZERO), TERMS, ir.store(T, H, ACC))
UNNAMED = ir.FuncCall(ir.dot("ieee"), (ACC, ir.Spread(A * 2.0, (M, KK)), B))
DOT = ir.FuncCall(ir.dot("ieee"), (ACC, ir.Spread(A, (M, KK)), ir.Spread(B, (KK, N))))
TILES = (ir.Let(A, load(M * 8 + KK)), ir.Let(B, load(KK * 4 + N)), ir.Alloc(ACC, (M, N), ZERO))
START = ir.FuncCall(
    ir.DOT_ASYNC, (ACC, replace(PIECE, within=(M * 8 + KK,)), replace(PIECE, within=(KK * 4 + N,)))
)
DEALT = ir.For(S, 8, ir.seq(WAIT, FETCH), "dealt", start=P, programs=4)

SOUND = {
    "nest": [
        kernel(axis(H, *SUM)),
        kernel(axis(H, *SUM[:2], ir.For(C, 8, ir.Let(B, load(C))), SUM[2])),
        kernel(ir.Let(A, load()), ir.store(T, 0, A)),
        kernel(axis(H, axis(S, ir.Let(A, load(S)), ir.store(T, S, A)))),
    ],
    "tiles": [
        grid(tile(H, *SUM)),
        grid(tile(H, ir.Let(A, BOX)), tile(H, ir.Let(A, load(H)))),
        grid(ir.FuncCall(ir.ASSUME, (P < 4,)), ir.FuncCall(ir.ATOMIC_ADD, (T, ir.ZERO, ZERO, ir.TRUE))),
    ],
    "lanes": [grid(*TILES, DOT), grid(ir.For(STEP, 4, ir.Let(A, BOX), "unroll"))],
    "explicit": [grid(*TILES, DOT), programs(DEALT, ir.Alloc(ACC, (M, N), ZERO), START)],
}

DEALT_IN_A_LOOP = grid(ir.For(C, 2, ir.For(H, 4, ir.Comment("x"), "dealt", programs=2)))
BREACHES: dict[str, dict[str, list[ir.Kernel]]] = {
    "nest": {
        "load-only-in-let": [
            kernel(ir.store(T, 0, load(ir.ONE))),
            kernel(ir.Let(A, load() + 1.0)),
            kernel(ir.Alloc(ACC, (), ZERO), ir.Update(ACC, ACC + load())),
            kernel(ir.Let(A, load(ir.Cast(load(), ir.index)))),
            kernel(ir.Let(A, ir.select(load() < 1.0, 0.0, 1.0))),
            kernel(ir.Let(A, ir.select(ir.TRUE, load(), load() + 1.0))),
        ],
        "values-are-scalars": [
            kernel(ir.Let(A, load(M))),
            kernel(ir.Alloc(ACC, (M,), ZERO)),
            kernel(ir.Let(A, ZERO), ir.Let(B, ir.Spread(A, ()))),
        ],
        "loops-are-axes": [
            kernel(axis(H, ir.For(C, 4, ir.Comment("x")), ir.For(C, 5, ir.Comment("x")))),
            kernel(ir.For(H, 4, ir.Comment("x"), "grid")),
            kernel(ir.For(H, 4, ir.Comment("x"), stages=2)),
            kernel(ir.For(H, 4, ir.Comment("x"), start=ir.ONE)),
        ],
        "parallel-loops-are-outside": [
            kernel(ir.For(C, 4, axis(H, ir.Comment("x")))),
            kernel(axis(H, ir.Let(A, ZERO), axis(C, ir.Comment("x")))),
        ],
        "sums-begin-before-loops": [
            kernel(ir.For(C, 4, ir.Alloc(ACC, (), ZERO))),
            kernel(ir.Alloc(ACC, (), ZERO), ir.Update(ACC, ACC + 1.0), ir.Update(ACC, ACC + 1.0)),
        ],
        "sums-only-grow": [
            kernel(ir.Alloc(ACC, (), ZERO), ir.Update(ACC, ACC - 1.0)),
            kernel(ir.Alloc(ACC, (), ZERO), ir.Update(ACC, ir.Add(ZERO, ACC))),
        ],
        "nothing-is-called": [
            kernel(ir.FuncCall(ir.ASSUME, (ir.TRUE,))),
            kernel(ir.If(ir.TRUE, ir.Comment("x"))),
        ],
        "elements-are-read-one-by-one": [
            kernel(ir.Let(A, BOX)),
            kernel(ir.BoxStore(T, (ir.ZERO,), (ir.ZERO,), (16,), ZERO)),
        ],
        "nothing-is-explicit": [kernel(ir.Shared(RING)), kernel(ir.Shared(FULL))],
    },
    "tiles": {
        "kernel-is-a-grid": [
            kernel(tile(H, ir.Comment("x"))),
            kernel(ir.Let(C, ir.ZERO), ir.For(P, 4, ir.Comment("x"), "grid")),
        ],
        "axes-are-tiled": [grid(axis(H, ir.Comment("x")))],
        "tiles-become-lanes": [
            grid(ir.For(H, 16, ir.Comment("x"), "tile")),
            grid(tile(H, ir.Comment("x"), stop=12)),
            grid(tile(H, ir.Comment("x"), stop=1)),
            grid(tile(H, ir.Comment("x")), tile(H, ir.Comment("x"), stop=8)),
            grid(tile(H, ir.Comment("x")), tile(H, ir.Comment("x"), side="N")),
        ],
        "values-are-scalars": [grid(ir.Let(A, load(M)))],
        "sums-only-grow": [grid(ir.Alloc(ACC, (), ZERO), ir.Update(ACC, ZERO))],
        "nothing-is-explicit": [grid(ir.Shared(RING))],
        "tiles-are-dealt-in-the-grid": [DEALT_IN_A_LOOP],
        "load-only-in-let": [grid(ir.store(T, 0, load(ir.ONE)))],
    },
    "lanes": {
        "tiles-are-lanes": [grid(tile(H, ir.Comment("x")))],
        "a-name-is-one-lane": [
            grid(ir.Let(A, load(M)), ir.Let(B, load(replace(M, extent=8)))),
            grid(ir.Alloc(ACC, (M,), ZERO), ir.Let(B, load(replace(M, kind="N")))),
        ],
        "shapes-are-ordered": [
            grid(ir.Alloc(ACC, (N, M), ZERO)),
            grid(ir.Alloc(ACC, (M, M), ZERO)),
            grid(ir.Let(A, ZERO), ir.Let(B, ir.Spread(A, (N, M)))),
        ],
        "products-are-of-names": [grid(*TILES, UNNAMED)],
        "nothing-is-explicit": [grid(ir.Shared(RING), ir.Let(A, PIECE)), grid(ir.FuncCall(ir.FENCE, ()))],
        "tiles-are-dealt-in-the-grid": [DEALT_IN_A_LOOP],
        "kernel-is-a-grid": [kernel(*TILES)],
        "axes-are-tiled": [grid(axis(H, ir.Comment("x")))],
        "load-only-in-let": [grid(ir.Let(A, load(M) + 1.0))],
    },
    "explicit": {
        "roles-share-a-program": [
            grid(ir.For(H, 2, ir.Shared(RING))),
            programs(names=("one", "one")),
            programs(warps=0),
            grid(ir.Let(A, ZERO), ir.Roles((ir.Role("one", 4, 0, ir.Comment("x")),))),
            grid(ir.Roles((ir.Role("one", 4, 0, ir.Comment("x")),)), ir.Let(A, ZERO)),
        ],
        "only-roles-wait": [
            grid(ir.Shared(FULL), WAIT),
            grid(ir.Shared(RING), ir.Put(PIECE, ZERO)),
            DEALT_IN_A_LOOP,
        ],
        "roles-say-all": [
            programs(ir.Let(A, BOX)),
            programs(*TILES, DOT),
            programs(ir.BoxStore(T, (ir.ZERO,), (ir.ZERO,), (16,), ZERO)),
        ],
        "pieces-are-multiplied": [programs(*TILES, ir.FuncCall(ir.DOT_ASYNC, DOT.args))],
        "tiles-are-lanes": [grid(tile(H, ir.Comment("x")))],
        "a-name-is-one-lane": [programs(ir.Let(A, load(M)), ir.Let(B, load(replace(M, extent=8))))],
        "shapes-are-ordered": [programs(ir.Alloc(ACC, (N, M), ZERO))],
        "products-are-of-names": [grid(*TILES, UNNAMED)],
        "kernel-is-a-grid": [kernel(ir.Comment("x"))],
        "axes-are-tiled": [grid(axis(H, ir.Comment("x")))],
        "load-only-in-let": [grid(ir.store(T, 0, load(ir.ONE)))],
    },
}
ALL = [
    (level, rule, broken)
    for level, rules in BREACHES.items()
    for rule, kernels in rules.items()
    for broken in kernels
]


@pytest.mark.parametrize("level", SOUND)
def test_a_sound_kernel_passes(level: str) -> None:
    for made in SOUND[level]:
        verify(made, level)


@pytest.mark.parametrize(("level", "rule", "broken"), ALL, ids=[f"{at}: {rule}" for at, rule, _ in ALL])
def test_breaking_one_rule(level: str, rule: str, broken: ir.Kernel) -> None:
    verify(broken)  # of no level is it well-formed
    with pytest.raises(ir.VerifyError) as e:
        verify(broken, level, "somebody")
    assert e.value.rules == {rule}, e.value
    assert f"broken rules of the IR at the level {level} after somebody\n  {rule}: `" in str(e.value)


def test_every_rule_of_a_level_is_broken_above() -> None:
    for level, rules in LEVELS.items():
        names = {rule.__name__.replace("_", "-") for rule in rules}
        assert names == set(BREACHES.get(level, {})), level
        assert not set(rules) & set(RULES) and all(rule.__doc__ for rule in rules)


def test_every_stage_has_a_level() -> None:
    """Levels come in their order, and no pass that gives another one can be switched off."""
    found = [s.level for s in stages() if s.level]
    assert found == list(LEVELS)
    assert set(levels()) == {s.name for s in stages()}
    assert not [p.name for p in passes() if p.level and p.optional]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("mb1ic32ih8oc32oh4kh3sh2ph1 dt=f32", "sm_80"),
        ("g16mb2ic16ih7oc16oh7kh3ph1 dt=bf16 tag=axb", "sm_100"),
        ("mb2ic64ih16oc64oh16kh3ph1 dt=f16 tag=axb", "sm_90"),
    ],
)
def test_kernels_keep_the_rules_of_their_levels(
    text: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRANSCONV_VERIFY", raising=False)  # removing one pass is enough
    where = levels()
    off = {p.name: False for p in passes() if p.optional}
    for prop in Prop:
        for compute, schedule in compiler.plan_steps(
            ConvProblem.parse(text), prop, TARGETS[target], None, compiler.Epilogue()
        ):
            for switches in ({}, off):
                for stage, made in lower(compute, schedule, TARGETS[target], "conv", switches=switches):
                    verify(made, where[stage], stage)
