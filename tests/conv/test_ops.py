"""Operations: every row means what torch's function means, and rows may come from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

import transconv
from tests.outside import BOUNDED, Bounded
from transconv import ir
from transconv.compute import ACTIVATIONS, OPS, Op, register, unregister
from transconv.conv import ConvProblem, Epilogue, Prop
from transconv.errors import ScheduleError
from transconv.torch_ops.conversion import fold
from transconv.torch_ops.fused import fused_functional
from transconv.verify import judgement
from transconv.verify.case import ProblemCase
from transconv.verify.fuzz import conv_problems

POINTS = (-3.5, -3.0, -2.5, -1.0, -0.25, 0.0, 0.125, 0.5, 1.5, 2.0, 3.0, 6.0, 7.5)
POSITIVE = ("log", "log2", "sqrt", "rsqrt")


def computed(e: ir.Expr, values: dict[ir.Var, np.ndarray]) -> np.ndarray:
    """The value of an expression in NumPy, at many points at once."""
    evaluator = ir.Evaluator(ir.Memory({}), {}, 1)
    evaluator.env.update(values)
    with np.errstate(all="ignore"):
        made = evaluator.compute(e)
    return np.broadcast_to(made, (next(iter(values.values())).shape))


def operands(op: Op) -> list[np.ndarray]:
    points = [x for x in POINTS if x > 0] if op.name in POSITIVE else list(POINTS)
    grid = np.meshgrid(*[points] * (op.arity if op.name != "where" else 2), indexing="ij")
    made = [g.ravel().astype(np.float64) for g in grid]
    if op.name == "div":
        made = [x[made[1] != 0] for x in made]
    return [made[0] > made[1], *made] if op.name == "where" else made


def variables(values: Sequence[np.ndarray]) -> list[ir.Var]:
    return [ir.Var(f"x{i}", ir.boolean if v.dtype == np.bool_ else ir.f64) for i, v in enumerate(values)]


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_the_expression_is_what_torch_computes(op: Op) -> None:
    given = operands(op)
    names = variables(given)
    got = computed(op(*names), dict(zip(names, given, strict=True)))
    want = op.function()(*map(torch.from_numpy, given)).numpy()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
    if op.exact and not op.name.endswith("e") and got.dtype != np.bool_:
        assert np.array_equal(got, want)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.derivative], ids=str)
def test_the_derivative_is_that_of_torch(op: Op) -> None:
    assert op.derivative is not None
    given = operands(op)
    names = variables(given)
    leaves = [torch.from_numpy(x).requires_grad_(x.dtype == np.float64) for x in given]
    wanted = [t for t in leaves if t.requires_grad]
    grads = iter(torch.autograd.grad(op.function()(*leaves).sum(), wanted))
    for leaf, partial in zip(leaves, op.derivative(*names), strict=True):
        assert (partial is None) == (not leaf.requires_grad)
        if partial is not None:
            got = computed(partial, dict(zip(names, given, strict=True)))
            np.testing.assert_allclose(got, next(grads).numpy(), rtol=1e-9, atol=1e-9)
            if op.arity == 1:
                assert np.abs(got).max() <= op.steepest or not op.activation


def test_far_from_zero() -> None:
    """What would overflow on the way has its limit, in f32 too."""
    x = ir.Var("x", ir.f32)
    far = np.array([-1e4, -100, -30, 30, 100, 1e4], np.float32)
    for name in (*ACTIVATIONS, "softplus", "elu"):
        want = OPS[name].function()(torch.from_numpy(far)).numpy()
        np.testing.assert_allclose(computed(OPS[name](x), {x: far}), want, rtol=1e-6, atol=1e-12)


def test_halves_are_rounded_to_even() -> None:
    x = ir.Var("x", ir.f32)
    given = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 8388609, np.inf, 0.49999997], np.float32)
    assert np.array_equal(computed(OPS["round"](x), {x: given}), np.rint(given))


@pytest.mark.parametrize(
    ("name", "reason"), [("relu", "already names"), ("bias", "cannot name"), ("a+b", "cannot name")]
)
def test_names_that_no_row_can_have(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        register(Op(name, 1, lambda x: x, "torch.abs"))


def test_the_number_of_operands() -> None:
    with pytest.raises(TypeError, match="max takes 2 values, not 1"):
        OPS["max"](ir.ONE)


# -- a row from outside ----------------------------------------------------------------------------


@pytest.fixture
def bounded() -> Iterator[Op]:
    register(BOUNDED)
    yield BOUNDED
    unregister(BOUNDED.name)


def test_a_row_from_outside_is_everywhere(bounded: Op) -> None:
    assert str(Epilogue.parse("bias+bounded")) == "bias+bounded"
    assert "bounded" in conv_problems.EXACT and "bounded" in fused_functional.ACTIVATIONS
    assert not judgement.approximates("bias+bounded")
    from transconv.verify.benchdnn_job import post_ops

    assert post_ops("clip:-2:2", 4) == ["clip:-2:2"]
    assert str(Epilogue.parse("clip:-2:2")) == "bounded"
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), Bounded()).eval()
    assert [m.activation for m in fold.fold(model).modules() if hasattr(m, "activation")] == ["bounded"]


@pytest.mark.parametrize("numpy", [True, False])
def test_a_row_from_outside_in_a_kernel(bounded: Op, numpy: bool) -> None:
    """By the NumPy interpreter, and by Triton's."""
    p = ConvProblem.parse("mb1ic3ih5oc4oh5kh3ph1 dt=f32 tag=axb")
    case = ProblemCase(p, Prop.FWD, "bias+bounded", where="cpu", numpy=numpy)
    compiled = case.plan("mb.oh.ow:16 oc:16 ic:16 | fma")
    assert "tl.minimum" in compiled.source
    found = case.judge(compiled, "exact", 1)
    assert found.right and found.telling and bounded.exact, found.reason


def test_gradients_of_a_row_from_outside(bounded: Op) -> None:
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 5, 5), (3, 2, 3, 3)))
    assert "bounded" in fused_functional.GRAD_FROM_RESULT

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return transconv.fused_conv2d(x, w, activation="bounded")

    torch.testing.assert_close(call(x, w), torch.conv2d(x, w).clamp(-2, 2))
    assert torch.autograd.gradcheck(call, (x, w), fast_mode=True)


def test_a_row_that_is_gone_is_nowhere() -> None:
    assert "bounded" not in OPS and "bounded" not in conv_problems.DRAWN
    with pytest.raises(ScheduleError, match="has 'bounded', expected one of"):
        Epilogue.parse("bounded")
    with pytest.raises(RuntimeError, match="activation 'bounded' is unknown"):
        transconv.fused_conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), activation="bounded")
