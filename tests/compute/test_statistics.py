"""Reductions of a product's result that leave with its store: what they mean, which tiles can leave them,
and that parts of them become the answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from transconv.compute import Alone, examine, execute, kernels, parse, why_not_lowered
from transconv.cost.copies import leaving_us
from transconv.errors import Unsupported
from transconv.runtime import build_compute
from transconv.runtime.standalone.reference_check import lines_of
from transconv.runtime.steps import plan_steps
from transconv.schedule import Schedule, finishes, why_not
from transconv.target import TARGETS
from transconv.torch_ops.calls.lower_call import target_of
from transconv.verify.computation import ComputationCase, after_every_pass

SM90 = TARGETS["sm_90"]
CONV = """compute conv
    tensor X f16 [n=2, c=8, h=7, w=7] {order}
    tensor W f16 [o=12, c=8, kh=3, kw=3]
    tensor Y f16 [n=2, o=12, h=5, w=5] {order}
    axes   n=2 h=5 w=5 o=12 | kh=3 kw=3 c=8
    read   x = X[n, c, h + kh, w + kw]
    read   k = W[o, c, kh, kw]
    let    s = sum(x*k; kh kw c)
    let    y = f16(s)
    store  Y[n, o, h, w] = y
"""
NCHW, NHWC = CONV.format(order=""), CONV.format(order="acdb")
MOMENTS = "    store  M[n, o//4] sum= y\n    store  D[n, o//4] squares= y\n    store  T[o] max= s\n"
ROWS = "    store  L[n, h, w] min= y\n    store  A[0] sum= s\n"
LETS = """    let    t = sum(y; n h w)
    let    mean = t / 50
    let    d = y - mean
    let    v = sum(d*d; n h w)
    store  M[o] = t
    store  V[o] = v / 50
"""


def test_they_mean_what_numpy_says() -> None:
    made = parse(NHWC + MOMENTS)
    assert parse(str(made)) == made and kernels(made) == (made,)
    case = ComputationCase(made)
    y = execute(made, case.given)["Y"].value.reshape(2, 3, 4, 5, 5)
    np.testing.assert_array_equal(case.answers["M"].value, y.sum((2, 3, 4)))
    squares = ((y - y.mean((2, 3, 4), keepdims=True)) ** 2).sum((2, 3, 4))
    np.testing.assert_allclose(case.answers["D"].value, squares, rtol=1e-12)
    np.testing.assert_array_equal(case.answers["T"].value, y.max((0, 3, 4)).reshape(12))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (NHWC + MOMENTS, "h.w:32 o:16 c:16 | mma"),
        (NCHW + MOMENTS, "h:2 w:8 o:16 c:16 | mma swap=1"),
        (NCHW + ROWS, "h.w:32 o:16 c:8 | fma programs=2"),
    ],
)
def test_parts_become_the_answer(text: str, schedule: str) -> None:
    """Tiles that end within the result add nothing from beyond its end."""
    plan = build_compute(parse(text), TARGETS["interpreter"], Schedule.parse(schedule))
    for data in ("exact", "float"):
        assert not ComputationCase(parse(text), data).launched(plan, "cpu").problem


def test_every_pass_keeps_them() -> None:
    made = parse(NHWC + MOMENTS)
    plan = build_compute(made, SM90, Schedule.parse("n:1 h.w:16 o:16 c:16 | mma warps=4 stages=2"))
    assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []
    assert [t.name for t in plan.workspaces.values()] == ["M_parts", "D_parts", "T_parts"]


ROLES = """compute point
    tensor X f16 [n=2, c=16, h=12, w=8] acdb
    tensor W f16 [o=64, c=16]
    tensor Y f16 [n=2, o=64, h=12, w=8] acdb
    axes   n=2 h=12 w=8 o=64 | c=16
    read   x = X[n, c, h, w]
    read   k = W[o, c]
    let    s = sum(x*k; c)
    let    y = f16(s)
    store  Y[n, o, h, w] = y
    store  M[n, o//4] sum= y
    store  D[n, o//4] squares= y
    store  T[o] max= s
"""
BOXES = "h:8 w:8 o:64 c:16 | mma | a=box b=box | stages=2 warps=4 via=gluon"


@pytest.mark.every(4)
@pytest.mark.parametrize("words", ["", "swap=1 programs=3", "c=box programs=2 consumers=2"])
def test_warps_that_multiply_leave_them(words: str) -> None:
    """A kernel of roles, whose tiles end within the result: no value from beyond its end counts."""
    made, schedule = parse(ROLES), Schedule.parse(f"{BOXES} {words}")
    plan = build_compute(made, SM90, schedule)
    assert [j.problem for _, j in after_every_pass(made, plan) if j.problem] == []
    mask, over = ("[None, :]", 1) if "swap" in words else ("[:, None]", 0)
    for consumer in ("evens", "odds") if "consumers" in words else ("consumer",):
        role = plan.source.partition(f"def {consumer}(")[2].partition("@gluon")[0]
        assert f'gl.reduce(gl.where((h < 12){mask}, s, float("-inf")), {over}, max_of)' in role


def test_lanes_that_meet_cost() -> None:
    """In the columns of the matrix unit fewer lanes hold parts than in its rows."""
    made = parse(ROLES)
    across, down = (leaving_us(Schedule.parse(f"{BOXES} swap={swap}"), made, SM90) for swap in (1, 0))
    assert 0 < across < down


@pytest.mark.gpu
@pytest.mark.parametrize("words", ["", "swap=1 programs=3", "c=box programs=2 consumers=2"])
def test_on_the_device(words: str) -> None:
    made = parse(ROLES)
    plan = build_compute(made, target_of(torch.device("cuda")), Schedule.parse(f"{BOXES} {words}"))
    for data in ("exact", "float"):
        assert not ComputationCase(made, data).launched(plan, "cuda").problem


def test_reductions_behind_a_product_leave_with_it() -> None:
    """A mean and a variance are its statistics, so that the result is not read again."""
    product, last = kernels(parse(NHWC + LETS))
    assert [(w.op, w.view.tensor.name) for w in product.statistics] == [
        ("sum", "M"),
        ("squares", "v_kept"),
    ]
    assert {r.view.tensor.name for r in last.reads} == {"v_kept"}
    plan = build_compute(parse(NHWC + LETS), TARGETS["interpreter"])
    assert not ComputationCase(parse(NHWC + LETS), "float").launched(plan, "cpu").problem


def test_a_result_that_is_needed_with_them_is_read_again() -> None:
    again = NHWC + LETS + "    store  Z[n, o, h, w] = d*v\n"
    assert not any(k.statistics for k in kernels(parse(again)))


@pytest.mark.parametrize("own", ["L[n, h, w] min= y", "M[n, o//4] sum= y"])
def test_a_kernel_with_statistics_of_its_text_leaves_no_others(own: str) -> None:
    made = parse(f"{NCHW}    store  {own}\n    let    t = max(y; n h w)\n    store  T[o] = t\n")
    product, last = kernels(made)
    assert len(product.statistics) == 1 and [w.view.tensor.name for w in last.writes] == ["T"]
    plan = build_compute(made, TARGETS["interpreter"])
    assert not ComputationCase(made, "exact").launched(plan, "cpu").problem


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("M[o//5] sum= y", "M sum= divides o=12 by 5; expected a divisor"),
        ("M[o + 1] sum= y", "M sum= has a coordinate that is neither an axis"),
        ("M[o] squares= y", "M squares= needs the sum of the same value"),
        ("M[o] sum= h*1.0", "M sum= is the same along n; expected a value of the product's result"),
        ("M[o] sum= f16(s)", "M sum= is kept in f16; expected f32"),
        ("M[o] where o < 3 max= s", "M max= has a condition"),
    ],
)
def test_a_store_that_cannot_reduce_says_why(store: str, said: str) -> None:
    text = NHWC + f"    store  {store}\n"
    assert said in (why_not_lowered(parse(text)) or "")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("n.h.w:16 o:16 c:16 | mma", "M sum= keeps n, and block n.h.w:16 crosses its positions"),
        ("n:2 h:8 o:16 c:16 | mma", "M sum= keeps n, and block n:2 crosses"),
        ("h.w:16 o:16 c:16 | mma split_k=3", "a program has a part of the sum; expected split_k=1"),
        ("h.w:16 o:4 c:8 | fma regs=o", "regs=o writes positions out"),
    ],
)
def test_tiles_that_cannot_leave_them_say_why(schedule: str, said: str) -> None:
    assert said in (why_not(Schedule.parse(schedule), parse(NHWC + MOMENTS), SM90) or "")


def test_a_tile_within_a_kept_position_is_reduced() -> None:
    """A block over images and rows keeps the image, where no tile crosses from one to the next."""
    text = NHWC.replace("5", "4").replace("7", "6") + "    store  M[n] sum= y\n"
    (last,) = finishes(parse(text), Schedule.parse("n.h.w:16 o:16 c:16 | mma"))
    assert [(x.name, x.size) for x in last.axes] == [("n", 2), ("n_h_w_part", 1), ("o_part", 1)]


@pytest.mark.every(2)
@pytest.mark.parametrize("text", [NHWC + MOMENTS, NCHW + ROWS], ids=["moments", "rows"])
def test_the_first_results_are_checked(text: str) -> None:
    """Statistics are compared with what is stored; one that is wrong is named."""
    made = parse(text)
    case = ComputationCase(made, "float")
    tensors = {
        t.name: torch.from_numpy(
            case.given.get(
                t.name, case.answers[t.name].value if t.name in case.answers else np.zeros(t.shape)
            )
        )
        for t in made.tensors
    }
    tensors |= {n: t.half() for n, t in tensors.items() if n in "XWY"}
    found = examine(made, tensors)
    assert not found.reason and found.checked > sum(w.view.tensor.shape[0] for w in made.statistics)
    for write in made.statistics:
        name = write.view.tensor.name
        spoiled = tensors | {name: tensors[name] * 2 + 30}
        assert f"of {name} are wrong" in examine(made, spoiled).reason


STEM = """compute stem
    tensor X bf16 [n=2, c=1, d=128, h=128, w=128]
    tensor W bf16 [o=32, c=1, kd=3, kh=3, kw=3]
    tensor Y bf16 [n=2, o=32, d=128, h=128, w=128]
    tensor M f32 [n=2, o=32]
    axes   n=2 d=128 h=128 w=128 o=32 | kd=3 kh=3 kw=3 c=1
    read   x = X[n, c, d + kd - 1, h + kh - 1, w + kw - 1]
    read   k = W[o, c, kd, kh, kw]
    let    s = sum(x*k; kd kh kw c)
    store  Y[n, o, d, h, w] = s
    store  M[n, o] sum= s
"""


def test_the_kernel_that_combines_parts_may_leave_parts_again() -> None:
    """A kernel behind it adds these: otherwise nothing stores the statistic."""
    steps = plan_steps(Alone(parse(STEM)), SM90)
    assert [s.split_k > 1 for _, s in steps] == [False, True, False], "this size has parts of parts"
    assert [r.view.tensor.name for c, _ in steps[1:] for r in c.reads] == ["M_parts", "partials"]
    assert steps[2][0].c.tensor.name == "M"


@pytest.mark.parametrize("value", ["t", "t*t"])
def test_a_statistic_that_nothing_stores_is_found(value: str) -> None:
    """Under another name of what is stored, and as a function of it, which is not computed again."""
    named = NHWC.replace("    store ", "    let    t = f32(s)\n    store ")
    made = parse(named + f"    store  M[n, o] sum= {value}\n")
    tensors = ComputationCase(made, "float").tensors("cpu")
    build_compute(made, TARGETS["interpreter"]).run(tensors)
    assert not examine(made, tensors).reason
    tensors["M"].fill_(float("nan"))
    assert "of M are" in examine(made, tensors).reason


def test_a_file_that_checks_some_points_has_none() -> None:
    with pytest.raises(Unsupported, match="M is a statistic of all of the result"):
        lines_of(parse(NHWC + MOMENTS))


def test_a_statistic_of_all_points() -> None:
    """One place, of a tensor without dims."""
    case = ComputationCase(
        parse("""compute whole
        tensor X f32 [8, 4]
        tensor W f32 [16, 4]
        axes   m=8 n=16 | k=4
        read   x = X[m, k]
        read   w = W[n, k]
        let    y = sum(x*w; k)
        store  Y[m, n] = y
        store  S[] sum= y
        store  D[] squares= y
    """)
    )
    y = case.answers["Y"].value
    np.testing.assert_allclose(case.answers["S"].value, y.sum(), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(case.answers["D"].value, ((y - y.mean()) ** 2).sum(), rtol=1e-6)
