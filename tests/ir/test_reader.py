"""A kernel's text is read back as the same kernel, and what cannot be read is told in one line."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from tests.expressions import Draw
from tests.passes.test_explicit import CASES as EXPLICIT
from tests.passes.test_explicit import ROLE
from tests.stages import PHASES, small_schedules
from tests.strategies import BINARY, problems
from transconv import ir
from transconv.compute import Compute
from transconv.conv import Epilogue, compiler, computes
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.errors import KernelError
from transconv.ir.reader import parse_kernel
from transconv.passes import lower
from transconv.schedule import Schedule, why_not
from transconv.target import TARGETS

A, B = ir.Var("a"), ir.Var("b", ir.i64)
X, Y = ir.Var("x", ir.f16), ir.Var("y", ir.i32)
M, N = ir.Lane("m", 16, 1, "M"), ir.Lane("n", 8, 2)
TWIN = ir.Lane("m", 16, 0, "B")
T = ir.Tensor("t", ("h", "w"), (5, 8), ir.Layout.parse("5a8b", ir.f16))
ODD = ir.Tensor(
    "odd", ("h", "w"), (5, 8), ir.Layout.from_strides(ir.i32, (5, 8), (1, 64), 3), ir.tf32, "t", "", True
)
PARTS = ir.Tensor("parts", (), (), ir.Layout.dense(ir.f64, ()), parts_of="t")
RING = ir.SmemRing("ring", ir.f16, 3, (16, 8), 2, True)
LONE = ir.SmemRing("lone", ir.f16, 1, (16, 8))
GATE, TURN = ir.Barrier("gate", 3, 2), ir.Barrier("turn", 1)
WORDS = {"", "one note", "  indented, with # and |", "two\nlines", "\n", "|", "else:"}


def read_back(kernel: ir.Kernel) -> None:
    text = str(kernel)
    assert ir.Kernel.parse(text) is kernel, text


# ---- all nodes, drawn ----

NUMBERS = draw.one_of(
    draw.integers(-9, 2**40),
    draw.booleans(),
    draw.floats(width=32),
    draw.sampled_from([0, 0.0, -0.0, 1e-30, 1e22, float("inf"), float("-inf"), float("nan")]),
)
TYPES = draw.sampled_from(list(ir.DTYPES.values()))
LEAVES = draw.one_of(
    draw.builds(ir.Const, NUMBERS, TYPES),
    draw.builds(ir.as_expr, NUMBERS),
    draw.sampled_from([A, B, X, Y, M, N, TWIN, ir.Lane("m", 32, 1)]),
)
TENSORS = draw.sampled_from([T, ODD, PARTS])


def larger(e: draw.SearchStrategy[ir.Expr]) -> draw.SearchStrategy[ir.Expr]:
    lists = draw.lists(e, max_size=2).map(tuple)
    sizes = draw.lists(draw.integers(0, 64), max_size=2).map(tuple)
    return draw.one_of(
        draw.builds(lambda node, a, b: node(a, b), draw.sampled_from(BINARY), e, e),
        draw.builds(ir.Neg, e),
        draw.builds(ir.Not, e),
        draw.builds(ir.Select, e, e, e),
        draw.builds(ir.Cast, e, TYPES),
        draw.builds(ir.Load, TENSORS, e, e, NUMBERS),
        draw.builds(ir.Reduce, draw.sampled_from(list(ir.REDUCERS)), e, draw.sampled_from([M, TWIN])),
        draw.builds(ir.Spread, e, draw.lists(draw.sampled_from([M, N, TWIN]), max_size=2).map(tuple)),
        draw.builds(ir.BoxLoad, TENSORS, lists, lists, sizes),
        draw.builds(ir.SlotTile, draw.sampled_from([RING, LONE]), e, e, lists),
        draw.builds(
            ir.Call,
            draw.sampled_from(["fma", "max", "sum", "load", "f16", "select", "spread"]),
            draw.lists(e, min_size=1, max_size=3).map(tuple),
        ),
    )


EXPRS = draw.recursive(LEAVES, larger, max_leaves=4)
EXPR_LISTS = draw.lists(EXPRS, max_size=2).map(tuple)
PIECES = draw.builds(ir.SlotTile, draw.sampled_from([RING, LONE]), EXPRS, EXPRS, EXPR_LISTS)


def inner(s: draw.SearchStrategy[ir.Stmt]) -> draw.SearchStrategy[ir.Stmt]:
    kinds = draw.sampled_from(["serial", "grid", "unroll", "jam", "dealt"])
    counts, loops = draw.integers(0, 9), draw.sampled_from([ir.Var("i"), ir.Var("j", ir.i32)])
    roles = draw.builds(ir.Role, draw.sampled_from(["one", "two"]), counts, counts, s)
    return draw.one_of(
        draw.builds(ir.Seq, draw.lists(s, max_size=3).map(tuple)),
        draw.builds(ir.If, EXPRS, s, draw.none() | s),
        draw.builds(
            ir.For,
            loops,
            counts,
            s,
            kinds,
            counts,
            counts,
            EXPRS,
            draw.none() | EXPRS,
            draw.sampled_from(["", "M"]),
        ),
        draw.builds(ir.Roles, draw.lists(roles, max_size=2).map(tuple)),
        roles,
    )


LANES = draw.lists(draw.sampled_from([M, N, TWIN]), max_size=2).map(tuple)
SIMPLE = draw.one_of(
    draw.builds(ir.Let, draw.builds(ir.Var, draw.just("v"), TYPES), EXPRS, draw.sampled_from(["", "a"])),
    draw.builds(
        ir.Alloc,
        draw.builds(ir.Var, draw.just("w"), TYPES),
        LANES,
        EXPRS,
        draw.sampled_from(["register", "shared"]),
    ),
    draw.builds(ir.Update, draw.sampled_from([X, Y]), EXPRS),
    draw.builds(ir.Store, TENSORS, EXPRS, EXPRS, EXPRS),
    draw.builds(ir.BoxStore, TENSORS, EXPR_LISTS, EXPR_LISTS, draw.just((4, 2)), EXPRS),
    draw.builds(ir.Fetch, TENSORS, EXPR_LISTS, PIECES, draw.sampled_from([GATE, TURN]), EXPRS),
    draw.builds(ir.Put, PIECES, EXPRS),
    draw.builds(ir.Send, TENSORS, EXPR_LISTS, PIECES),
    draw.builds(ir.Comment, draw.sampled_from(sorted(WORDS))),
    draw.builds(lambda e: ir.FuncCall(ir.ASSUME, (e,)), EXPRS),
    draw.builds(lambda a, b: ir.FuncCall(ir.dot("tf32"), (X, a, b)), EXPRS, EXPRS),
    draw.builds(lambda a, b: ir.FuncCall(ir.WAIT, (GATE, a, b)), EXPRS, EXPRS),
    draw.builds(lambda a, b: ir.FuncCall(ir.ATOMIC_ADD, (T, a, b, ir.TRUE)), EXPRS, EXPRS),
    draw.just(ir.FuncCall(ir.FENCE, ())),
)
STATEMENTS = draw.recursive(SIMPLE, inner, max_leaves=4)
NAMES = [
    *(ir.Shared(x) for x in (RING, LONE, GATE, TURN)),
    ir.Let(A, ir.ZERO),
    ir.Let(B, ir.ZERO),
    ir.Alloc(X, (M,), ir.ZERO),
    ir.Alloc(Y),
]


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(STATEMENTS, draw.lists(draw.sampled_from(sorted(WORDS)), max_size=3).map(tuple))
def test_any_statement(s: ir.Stmt, notes: tuple[str, ...]) -> None:
    read_back(ir.Kernel("drawn", (T, ODD, PARTS), ir.Seq((*NAMES, s)), notes))
    read_back(ir.Kernel("alone", (), ir.Seq((ir.Comment("# t: 5a8b"),)), notes))


EACH = [
    ir.Const(-3, ir.index),
    ir.as_expr(0.5),
    A,
    M,
    *(node(A, B) for node in BINARY),
    ir.Neg(A),
    ir.Not(A),
    ir.Select(A, B, X),
    ir.Cast(A, ir.f16),
    ir.Load(T, A, B, 1.5),
    ir.Reduce("sum", A, M),
    ir.Spread(A, (M, N)),
    ir.BoxLoad(T, (A,), (), ()),
    ir.Call("exp", (A,)),
    ir.SlotTile(RING, A, B, ()),
    ir.SlotTile(RING, A, B, (Y,)),
]
AROUND = [(lambda e, node=node: node(e, X), lambda e, node=node: node(X, e)) for node in BINARY] + [
    (
        ir.Neg,
        ir.Not,
        lambda e: ir.Cast(e, ir.f16),
        lambda e: ir.Reduce("sum", e, M),
        lambda e: ir.Spread(e, (N,)),
        lambda e: ir.Call("fma", (e, X)),
    ),
    (lambda e: ir.Select(e, X, Y), lambda e: ir.Select(X, e, Y), lambda e: ir.Select(X, Y, e)),
    (
        lambda e: ir.Load(T, e, X),
        lambda e: ir.Load(T, X, e),
        lambda e: ir.BoxLoad(T, (e, X), (), ()),
        lambda e: ir.BoxLoad(T, (), (X, e), ()),
    ),
    (
        lambda e: ir.SlotTile(RING, e, X, ()),
        lambda e: ir.SlotTile(RING, X, e, ()),
        lambda e: ir.SlotTile(RING, X, e, (Y,)),
        lambda e: ir.SlotTile(RING, X, Y, (e,)),
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("around", AROUND)
def test_every_expression_inside_every_other(around: tuple[Callable[[ir.Expr], ir.Expr], ...]) -> None:
    made = (each(e) for each in around for e in EACH)
    lets = [ir.Let(ir.Var(f"v{i}", ir.f32), e) for i, e in enumerate(made)]
    read_back(ir.Kernel("nested", (T, ODD, PARTS), ir.Seq((*NAMES, *lets))))


# ---- what the passes make ----


@draw.composite
def legal(choose: draw.DrawFn, compute: Compute) -> Schedule:
    return small_schedules(compute, choose)


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(problems(), draw.sampled_from(list(Prop)), draw.data())
def test_small_problems_after_every_pass(p: ConvProblem, prop: Prop, data: draw.DataObject) -> None:
    for compute in computes(p, prop):
        schedule = data.draw(legal(compute))
        target = data.draw(
            draw.sampled_from([t for t in TARGETS.values() if why_not(schedule, compute, t) is None])
        )
        for _, kernel in lower(compute, schedule, target, "drawn", "tf32"):
            read_back(kernel)


@pytest.mark.every(11)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942", "pvc", "interpreter"])
@pytest.mark.parametrize(
    "text",
    [
        "mb2ic32ih9oc48oh9kh3ph1 dt=bf16 tag=nhwc",
        "mb2ic16ih9oc8oh5kh3sh2ph1",
        "g8mb2ic8ih6oc8oh6kh3ph1 dt=f16 tag=axb",
        "mb64ic16ih4oc64oh4kh1 dt=f64",
    ],
)
def test_chosen_schedules_after_every_pass(text: str, target: str) -> None:
    chip, problem, epilogue = TARGETS[target], ConvProblem.parse(text), Epilogue.parse("bias+relu")
    for compute, schedule in compiler.plan_steps(problem, Prop.FWD, chip, None, epilogue):
        for _, kernel in lower(compute, schedule, chip, "chosen"):
            read_back(kernel)


PHASES_OF_A_STRIDE = (
    "mb5ic16ih16oc32oh8kh3sh2ph1",
    Prop.BWD_D,
    f"mb:4 qh:2 qw:8 ic:16 oc:16 | {ROLE} c=box programs=3 consumers=2",
)


@pytest.mark.every(8)
@pytest.mark.parametrize(("text", "prop", "schedule"), [*EXPLICIT[::4], PHASES_OF_A_STRIDE])
def test_roles_and_one_launch_for_all(text: str, prop: Prop, schedule: str) -> None:
    problem = ConvProblem.parse(f"{text} dt=f16 tag=axb")
    plan = compiler.build(problem, prop, TARGETS["sm_90"], Schedule.parse(schedule))
    for step in plan.steps:
        read_back(step.kernel)
        for _, kernel in lower(step.compute, step.schedule, TARGETS["sm_90"], "roles"):
            read_back(kernel)


def test_a_computation_that_is_no_convolution() -> None:
    compute = Compute.parse("""compute pool
        axes   n=2 c=5 oh=5 ow=4 kh=3 kw=3
        read   a = x[n, c, oh*2 + kh - 1, ow*2 + kw - 1] else -inf
        store  y[n, c, oh, ow] = max(a; kh kw)""")
    for _, kernel in lower(compute, Schedule.parse("oh.ow:16 c:4 | fma"), TARGETS["sm_90"], "pool"):
        read_back(kernel)


# ---- what cannot be read ----

GOOD = """\
# a note
kernel scale(t: f16):
    # t: 5a8b [h=5 w=8]
    lanes m[0:16 axis=1 M]
    barrier gate[3]
    for i in 0..8 grid:
        let x = load(t, (i * 8) + m[0:16], mask=i < 5)
        if i < 3:
            store(t, i + m[0:16], x + 1)
        else:
            fence()
"""


def test_a_text_by_hand() -> None:
    kernel = ir.Kernel.parse(GOOD)
    ir.verify(kernel)
    assert f"{kernel}\n" == GOOD and kernel.notes == ("a note",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kernel scale", "kernal scale", "line 2: found 'kernal scale(t: f16):', expected 'kernel name("),
        ("(t: f16)", "(t: f61)", "line 2: found 'f61', expected a type (index"),
        ("(t: f16):", "(t: f16)", "line 2: found the end of the line, expected ':'"),
        (
            "# t: 5a8b [h=5 w=8]",
            "# u: 5a8b [h=5 w=8]",
            "line 3: found '# u: 5a8b [h=5 w=8]', expected '# t",
        ),
        ("[h=5 w=8]", "[h=5 w]", "line 3: found [h=5 w], expected sizes such as [n=8 c=64]"),
        ("w=8]", "w=8], sorted", "line 3: found 'sorted', expected copy of, parts of, planes or number"),
        ("5a8b", "5a8q", "line 3: layout '5a8q' has an unknown dim 'q'"),
        ("axis=1 M]", "axis=1 M] 3", "line 4: found '3', expected an expression"),
        ("barrier gate[3]", "barrier gate 3", "line 5: found '3', expected '['"),
        ("0..8", "0...8", "line 6: found '.', expected a whole number"),
        ("for i", "for 3", "line 6: found '3', expected a name"),
        (
            "let x",
            "lat x",
            "line 7: found 'lat', expected a statement or one of the functions dot dot_scaled atomic_add",
        ),
        ("let x = ", "let x = 2 ", "line 7: found 'load', expected the end of the line"),
        ("(i * 8) + m[0:16]", "i * 8 + m[0:16]", "line 7: found '+', expected ')'"),
        ("m[0:16], ", "m[0:32], ", "line 7: found 'm[0:32]', expected a lane of the header (m[0:16])"),
        ("load(t", "load(u", "line 7: found 'u', expected a tensor of the kernel (t)"),
        ("mask=i < 5)", "mask=i < 5", "line 7: found the end of the line, expected ')'"),
        ("x + 1", "z + 1", "line 9: found 'z', expected a variable that is bound here (i x)"),
        ("x + 1", "ring[0]", "line 9: found 'ring', expected shared memory that is reserved here ("),
        ("if i < 3:", "assume(i < 3)", "line 9: found a deeper line, expected one as deep as that before"),
        (
            "        else:",
            "            else:",
            "line 10: found 'else', expected it behind the block of an",
        ),
        ("            fence()", "             fence()", "line 11: found 13 spaces before 'fence()', exp"),
        ("fence()", "wait(free, 0, 0)", "line 11: found 'free', expected a barrier that is reserved here"),
        ("fence()", "fence(0)", "line 11: found '0', expected ')'"),
        ("fence()", "y = 3", "line 11: found 'y', expected a variable that is bound here (i x)"),
        ("fence()\n", "fence()\nfence()\n", "line 12: found 'fence()', expected the end"),
    ],
)
def test_one_line_says_what_was_found(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(KernelError, match="^" + re.escape(said)) as caught:
        ir.Kernel.parse(GOOD.replace(old, new))
    assert "\n" not in str(caught.value)


def test_nothing_is_no_kernel() -> None:
    with pytest.raises(KernelError, match="^line 1: found nothing, expected 'kernel name"):
        ir.Kernel.parse("")


def test_drawn_expressions_read_back() -> None:
    """Of every operation with a sign, inside each other."""
    tensor = ir.Tensor("t", ("n",), (8,), ir.Layout.dense(ir.f64, (8,)))
    names = [ir.Var(n, ir.index if n in "abc" else ir.f64) for n in "abcxyz"]
    for seed in range(150):
        kind = ("whole", "float", "truth")[seed % 3]
        e = Draw(seed, names).of(kind, 1 + seed % 5)
        lets = [
            ir.Let(v, ir.Const(1, v.dtype) if v.dtype.is_integer else ir.Const(1.5, v.dtype))
            for v in names
        ]
        made = ir.Kernel("k", (tensor,), ir.seq(*lets, ir.Let(ir.Var("e", e.dtype), e)))
        assert parse_kernel(str(made)) == made
