"""A mistake of a row, a size or a place is seen in a graph's first results: torch's answer is taken, the
caller is told, and the report has the operation."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import transconv
from tests.graph.meant import by_meaning
from transconv.calls import stats
from transconv.functional.calls import compiled_launch
from transconv.graph import backend, report
from transconv.graph.fusion.index_ir import ConstantValue
from transconv.graph.lowerings.table import ROWS, NodeCall, mapped
from transconv.graph.regions import region_calls
from transconv.graph.verification import agreement, eager_check, fx_reference
from transconv.runtime import FirstSizes

Tensor = torch.Tensor
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """The warnings; each launch is computed in NumPy, from its text."""
    transconv.config.fallback = "warn"
    stats.forget_warnings()
    with warnings.catch_warnings(record=True) as found, by_meaning():
        warnings.simplefilter("always")
        yield found


def planted(monkeypatch: pytest.MonkeyPatch, target: Any, how: Callable[[Any, NodeCall], Any]) -> None:
    """Have the row of an operation be another one, made of the right one."""
    right = ROWS[target]
    monkeypatch.setitem(ROWS, target, lambda call: how(right, call))


def swapped(right: Any, call: NodeCall) -> Any:
    return right(replace(call, args=(call.args[1], call.args[0], *call.args[2:])))


def dropped(right: Any, call: NodeCall) -> Any:
    return call.args[0]


def of_last(right: Any, call: NodeCall) -> Any:
    """A reduction over the last dim, not the one that was asked for."""
    return right(replace(call, args=(call.args[0], [1], *call.args[2:])))


def compiled(f: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(f, backend=backend, options={"rest": "eager"}, **options)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside ``by_meaning``, launches are Triton's interpreter's all the same."""
    with patch.object(region_calls, "launch", compiled_launch.launch):
        yield


def wrong(run: Any) -> str:
    return "\n".join(r for g in report(run).graphs for r in g.remarks)


def only(told: list[warnings.WarningMessage]) -> warnings.WarningMessage:
    (found,) = (w for w in told if issubclass(w.category, stats.FallbackWarning))
    return found


MISTAKES = {
    "sub": (aten.sub.Tensor, swapped, lambda x: (x * 2 - x.exp()).sin()),
    "relu": (aten.relu.default, dropped, lambda x: x.relu() + 1),
    "sum.dim_IntList": (aten.sum.dim_IntList, of_last, lambda x: (x * x).sum(0)),
    "cos": (aten.cos.default, dropped, lambda x: torch.cat([x.cos(), x], 1) * 2),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_a_row(
    name: str, monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    target, how, f = MISTAKES[name]
    planted(monkeypatch, target, how)
    run, x = compiled(f), torch.randn(5, 5)
    torch.testing.assert_close(run(x), f(x))
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    found = only(told)
    assert (found.filename, found.lineno) == (__file__, line)
    assert name in str(found.message) and f"{__file__}:" in str(found.message)
    assert name in wrong(run) and "instead of" in wrong(run)
    assert transconv.stats().fallback["wrong"] == transconv.stats().compared["wrong"] == 1
    torch.testing.assert_close(run(x), f(x))
    assert len([w for w in told if issubclass(w.category, stats.FallbackWarning)]) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize("at", ["the end", "the middle"])
def test_a_mistake_of_inductor(
    at: str, monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    """What it compiles of a part that kernels leave is judged as they are, once."""
    calls: list[int] = []

    def compile_(gm: Any, given: Any) -> Any:
        def run(*given: Any) -> Any:
            calls.append(1)
            return [t.flip(0) for t in gm(*given)]

        return run

    monkeypatch.setattr(torch._inductor, "compile", compile_)

    def f(x: Tensor) -> Tensor:
        made = torch.cumsum(x * 2, 0)
        return made if at == "the end" else made.sin() + 1

    run, x = torch.compile(f, backend=backend), torch.randn(5, 5)
    torch.testing.assert_close(run(x), f(x))
    assert "Inductor" in str(only(told).message) and "cumsum" in str(only(told).message)
    assert "cumsum" in wrong(run) and transconv.stats().compared["wrong"] == 1
    torch.testing.assert_close(run(x), f(x))
    assert len(calls) == 1


@pytest.mark.slow
def test_what_inductor_makes_is_compared_once(
    monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, given: gm)
    monkeypatch.setattr(
        torch,
        "compile",
        lambda gm, dynamic=None, real=torch.compile, **more: (
            gm if isinstance(gm, torch.fx.GraphModule) else real(gm, dynamic=dynamic, **more)
        ),
    )
    run = torch.compile(lambda x: torch.cumsum(x, 0), backend=backend, dynamic=True)
    for n in (3, 4, 5, 9):
        torch.testing.assert_close(run(torch.ones(n, 2)), torch.cumsum(torch.ones(n, 2), 0))
    assert transconv.stats().compared == {"right": 1} and not told


def test_a_mistake_without_a_disk(
    monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    """The case of a wrong result cannot be written; wrong it is all the same."""

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(eager_check, "replace_data", full)
    planted(monkeypatch, aten.relu.default, dropped)
    run, x = compiled(lambda x: x.relu() + 1), torch.tensor([-1.0, 1.0])
    assert torch.equal(run(x), x.relu() + 1) and "report-wrong" not in str(only(told).message)


def test_a_mistake_of_a_gradient(
    monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    """The forward graph is ours still."""
    planted(
        monkeypatch,
        aten.mul.Tensor,
        lambda right, call: (
            right(call)
            if not isinstance(call.args[1], ConstantValue)
            else right(replace(call, args=(call.args[0], 3)))
        ),
    )
    run, x = compiled(lambda x: x.sin()), torch.randn(3, 5, requires_grad=True)
    y = torch.randn(3, 5, requires_grad=True)
    planted(monkeypatch, aten.cos.default, dropped)
    y = run(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, x.cos())
    assert "cos" in str(only(told).message)
    forward, backward = report(run).graphs
    assert forward.kernels and not forward.remarks and backward.remarks


@pytest.mark.every(2)
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_mistake_of_a_later_size(
    dynamic: bool | None, monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    """Right for the first sizes: an example's number is in the text."""

    def clamped(right: Any, call: NodeCall) -> Any:
        made = right(call)
        return ROWS[aten.clamp.default](replace(call, args=(made, None, 6), name="clamp"))

    planted(monkeypatch, aten.argmax.default, clamped)
    f = lambda x: (x * 2).argmax(1)  # noqa: E731
    run = compiled(f, dynamic=dynamic)
    for shape in ((4, 6), (9, 7), (3, 17), (2, 40)):
        x = torch.randn(shape)
        x[:, -1] = 9
        assert torch.equal(run(x), f(x))
    assert "argmax" in str(only(told).message)
    assert transconv.stats().native["graph"] >= 2


def test_what_others_see_stays_as_torch_leaves_it(told: list[warnings.WarningMessage]) -> None:
    """Buffers, random numbers, inputs that are written to, and results that share memory."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), torch.nn.ReLU())
    run, x = compiled(model), torch.randn(4, 5)
    torch.manual_seed(3)
    run(x)
    after, mean = torch.get_rng_state(), model[0].running_mean.clone()
    torch.manual_seed(3)
    run(x)  # nothing is compared
    assert torch.equal(after, torch.get_rng_state())
    torch.testing.assert_close(mean, 0.1 * x.mean(0))
    assert int(model[0].num_batches_tracked) == 2

    def writes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.add_(x)
        z = x.relu() * 2
        return z, z.t()

    run, y = compiled(writes), torch.ones(4, 5)
    one, other = run(x, y)
    torch.testing.assert_close(y, 1 + x)
    assert other.data_ptr() == one.data_ptr() and torch.equal(one, x.relu() * 2)
    assert not wrong(run) and not [w for w in told if issubclass(w.category, stats.FallbackWarning)]
    assert transconv.stats().compared["right"] >= 4 and "wrong" not in transconv.stats().compared


ODD: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "nan": (lambda x: (x.log() + 1, x.log().argmax(1)), torch.tensor([[-1.0, 2.0], [3.0, 0.0]])),
    "infinite": (lambda x: (x / 0).exp(), torch.tensor([[-1.0, 2.0], [3.0, 1.0]])),
    "ties": (lambda x: (x * 2).max(1), torch.ones(3, 7)),
    "cancelling": (lambda x: (x - x.mean()).sum() * 1, torch.randn(40, 33)),
    "bits": (lambda x: (x > 0.5) & (x * 3 < 2), torch.rand(9, 9)),
    "rounded": (lambda x: (x * 10).round().to(torch.int32), torch.arange(90.0).view(9, 10) / 20),
    "complex": (lambda x: torch.complex(x * 2, x + 1) * 2, torch.randn(3, 4)),
    "bfloat16": (lambda x: ((x + 1) * 3).softmax(1) @ x.t(), torch.randn(9, 9).bfloat16()),
    "tail": (
        lambda x: F.layer_norm(F.gelu(x), (5,)),  # where torch's gelu has one digit
        torch.tensor([[-4.2214, -7.986, -10.1626, -8.5491, -8.7286]], dtype=torch.float64),
    ),
    "pooled": (lambda x: F.max_pool2d(x.relu()[None], 2, return_indices=True), torch.randn(2, 6, 6)),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", ODD)
def test_no_false_alarm(name: str, told: list[warnings.WarningMessage]) -> None:
    f, x = ODD[name]
    transconv.config.fallback = "error"
    run = compiled(f)
    with interpreted():
        run(x)
    assert transconv.stats().native["graph"] and transconv.stats().compared["right"] and not wrong(run)


@pytest.mark.slow
def test_sizes_that_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    real = eager_check.difference

    def noted(values: Any, name: str, got: Tensor, tf32: bool) -> str:
        asked.append(tuple(got.shape))
        return real(values, name, got, tf32)

    monkeypatch.setattr(eager_check, "difference", noted)
    run = compiled(lambda x: x.exp() * 2, dynamic=True)
    sizes = [3, 5, 6, 7, 9, 10, 11, 100, 12, 3, 999, *range(2000, 2100)]
    for n in sizes:
        run(torch.zeros(n))
    seen = [shape[0] for shape in dict.fromkeys(asked)]
    assert seen[:5] == sizes[:5] and 11 not in seen and {100, 12, 999} <= {*seen}
    assert len(seen) == FirstSizes.MOST and (3,) not in asked[2:]
    assert report(run).graphs[0].compared == len(seen)


def test_switched_off(monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "never")
    planted(monkeypatch, aten.relu.default, dropped)
    run, x = compiled(lambda x: x.relu() + 1), torch.tensor([-1.0, 1.0])
    assert torch.equal(run(x), x + 1)
    assert not transconv.stats().compared and not report(run).graphs[0].compared


def test_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_check, "room", lambda device: 100)
    monkeypatch.setattr(eager_check, "FEW", 0)
    run = compiled(lambda x: x.relu() + 1)
    run(torch.randn(40))
    assert transconv.stats().compared == {"left out": 1} and "no memory" in str(report(run))


def test_a_warm_call_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it pass through what compares."""
    run, x = compiled(lambda x: x.relu() + 1), torch.randn(4, 5)
    run(x)
    before = transconv.stats().compared
    monkeypatch.setattr(eager_check.Checks, "due", None)
    monkeypatch.setattr(eager_check, "WatchedCall", None)
    run(x)
    assert before["right"] == 1 and transconv.stats().compared == before


def test_a_mistake_of_a_wire(monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]) -> None:
    """What is handed out is compared, too: two results change places behind the kernels."""
    from transconv.graph.regions.graph_parts import Parts

    real = Parts.compared
    monkeypatch.setattr(Parts, "compared", lambda *given: real(*given)[::-1])
    f = lambda x: (x.sin(), x.cos())  # noqa: E731
    run, x = compiled(f), torch.randn(4, 5)
    for _ in range(2):
        torch.testing.assert_close(run(x), f(x))
    assert wrong(run) and report(run).graphs[0].whole and "a graph" in str(only(told).message)


def test_what_rounding_may_change() -> None:
    """Four times torch's own error, measured, and no more."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(64, 64).bfloat16()
    gm = make_fx(lambda x: ((x + 1).exp() - 1,))(x)
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["val"] = torch.empty(64, 64, dtype=torch.bfloat16)
    reference = eager_check.Reference(gm)
    name = reference.results[0]
    assert name is not None
    exact = (x.double() + 1).exp() - 1
    place = divmod(int(exact.argmax()), 64)

    def said(got: Tensor) -> str:
        return agreement.difference(reference.values([x]), name, got, False)

    assert not said(exact.bfloat16()) and not said(gm(x)[0])
    assert not said((exact * (1 + 2.0**-8)).bfloat16())
    for factor in (1.5, float("nan"), float("inf")):
        bad = exact.clone()
        bad[place] *= factor
        assert f"1 of 4096 elements differ, the first at {list(place)}" in said(bad.bfloat16())
    assert "torch's is" in said(exact.float()) and "torch's is" in said(exact[:3].bfloat16())


class Counted(TorchDispatchMode):
    """How many operations of torch run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1e25, 2e25], [1.5e25, 2e25], False),
        ([1e25, 2e25], [1e25, 2e25], True),
        ([float("inf"), 1.0], [float("inf"), 1.0], True),
        ([float("inf"), 1.0], [-float("inf"), 1.0], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [1.0, 1.0], False),
        ([1.0, 1e-6], [1.0, 2e-6], True),
        ([1.0, 1e-3], [1.0, 2e-3], False),
        ([0.0, 0.0], [0.0, -0.0], True),
        ([], [], True),
    ],
)
def test_what_is_near(one: list[float], other: list[float], same: bool) -> None:
    """Squares of large numbers overflow, and infinite errors would be allowed then."""
    for dtype, eps in ((torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7)):
        if dtype is torch.float32 or same or abs(one[1] - other[1]) > 0.1 or one[0] != other[0]:
            a, b = torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype)
            assert agreement.near(a, b, eps) is agreement.near(b, a, eps) is same


def test_a_comparison_takes_few_operations() -> None:
    """The first call of a graph has one for each kernel."""
    x, y = torch.randn(1000), torch.randn(1000)
    y.copy_(x).add_(1e-7)
    with Counted() as counted:
        assert agreement.near(x, y, 2.0**-23)
    assert counted.count <= 12


def test_no_more_runs_in_f64_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once where torch rounds at each operation: torch's own error allows it, in one run."""
    wide: list[bool] = []
    real = fx_reference.Values.evaluated

    def evaluated(self: Any, *said: Any, **how: Any) -> Any:
        wide.append(bool(how.get("wide")))
        return real(self, *said, **how)

    monkeypatch.setattr(fx_reference.Values, "evaluated", evaluated)

    def f(x: Tensor) -> Tensor:
        return ((x * 1.7 + 0.3).exp() / 3 - x * 5.1) * 0.7 + 11 * x

    run, x = compiled(f), torch.randn(64, 64).bfloat16()
    run(x)
    assert transconv.stats().compared == {"right": 1} and wide == [False, True]


def test_roundings_of_several_operations_are_near() -> None:
    """A sum of two large values that nearly cancel keeps the roundings of both, and of what made them."""
    drawn = torch.Generator().manual_seed(0)
    eps = torch.finfo(torch.bfloat16).eps
    parts = torch.randn(6, 1 << 16, generator=drawn).bfloat16()
    torchs = parts[0]
    for part in parts[1:]:
        torchs = torchs + part
    ours = parts.float().sum(0).bfloat16()
    assert not agreement.near(ours, torchs, eps)
    assert agreement.near(ours, torchs, eps, 6)
    ours[7] += 8 * eps * torchs.float().square().mean().sqrt()
    assert not agreement.near(ours, torchs, eps, 100)


def _normed(g: Tensor, weight: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """The gradient of a layer norm of one element, which is 0."""
    y = g * weight
    inner = scale / 1.0 * (y * 1 - y.sum(0, keepdim=True) - x * (y * x).sum(0, keepdim=True))
    return inner + -inner / 1


NOISE: dict[str, tuple[Callable[..., Tensor], list[list[float]], list[float]]] = {
    # results, other than torch's, of a fused multiply-add and of a mean that is off by one unit
    "fused products": (
        _normed,
        [[-0.4578705206209625], [0.6944940618820685], [0.0], [316.2277660168379]],
        [4.4e-32],
    ),
    "a deviation of noise": (
        lambda x, std: torch.where(std == 0, 0.0, 1 / (std * 2)) * (x - (x + x + x) / 3),
        [[0.5] * 3, [1.36e-16, 1.36e-16, 0.8]],
        [0.40816, -0.40816, 0.0],
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NOISE)
def test_noise_of_a_gpu_is_no_alarm(name: str) -> None:
    """A GPU adds products that are not rounded, and sums in another order than torch: a difference of
    equal values is noise then, which a division makes large."""
    f, operands, made = NOISE[name]
    given = [torch.tensor(x, dtype=torch.double) for x in operands]
    graph = make_fx(lambda *x: (f(*x),), tracing_mode="fake")(*given)
    result = next(n for n in graph.graph.nodes if n.op == "output").args[0][0].name

    def difference(got: list[float]) -> str:
        values = fx_reference.Reference(graph).values(given)
        return agreement.difference(values, result, torch.tensor(got, dtype=torch.double), False)

    assert not difference(made)
    assert "differ" in difference([x * 1000 + 1e-20 for x in made]), "that is more than noise"


@pytest.mark.every(2)
@pytest.mark.parametrize("least", [False, True])
def test_places_within_windows(least: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pool whose gradient is asked for. Windows of equal elements may choose any; a place of another
    element is wrong."""
    if least:

        def first(right: Any, call: NodeCall) -> Any:
            top, place = right(call)
            return top, mapped("i8(min({}, 0))".format, place, dtype=torch.int8)

        planted(monkeypatch, agreement.WITHIN, first)
    x = torch.arange(96.0).view(1, 2, 6, 8).clamp(max=70).requires_grad_()
    run = compiled(lambda x: F.max_pool2d(x * 2, 3, 2, 1))
    with interpreted():
        run(x).square().sum().backward()
    assert bool(wrong(run)) == least


@pytest.mark.every(3)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_windows_of_nothing_but_the_padding_value(dims: int, share: float) -> None:
    """Where all elements of a window are -inf, torch chooses the first one of the image."""
    pool = F.max_pool2d if dims == 2 else F.max_pool3d
    torch.manual_seed(0)
    drawn = torch.randn(1, 2, *(6, 7, 5)[:dims])
    each = [drawn.masked_fill(torch.rand(drawn.shape) < share, -torch.inf).requires_grad_()]
    each.append(each[0].detach().clone().requires_grad_())
    run = compiled(lambda x: pool(x * 1.0, 3, 2, 1))
    with interpreted():
        made = run(each[0])
        given = torch.randn_like(made)
        made.backward(given)
    pool(each[1] * 1.0, 3, 2, 1).backward(given)
    assert not wrong(run)
    torch.testing.assert_close(each[0].grad, each[1].grad)


@pytest.mark.parametrize("shape", [(64, 2), (2, 64), (3, 8, 5)])
def test_variances_in_f64_are_of_two_passes(shape: tuple[int, ...]) -> None:
    """torch's own, of one pass, lose the digits of a mean that is far from zero: they are no reference."""
    torch.manual_seed(0)
    x = 11.5 + 0.01 * torch.randn(*shape, dtype=torch.float64)
    for dims, less, keep in itertools.product((None, [0], [-1]), (None, 0, 1.5), (False, True)):
        given = {"correction": less, "keepdim": keep}
        found, mean = fx_reference.EXACT[torch.ops.aten.var_mean](x, dims, **given)
        torchs, means = torch.ops.aten.var_mean.correction(x, dims, **given)
        torch.testing.assert_close((found, mean), (torchs, means), rtol=1e-8, atol=0)
        wide, axes = x.numpy().astype(np.longdouble), None if dims is None else tuple(dims)
        exact = wide.var(axes, ddof=1 if less is None else less, keepdims=keep)  # type: ignore[arg-type]
        assert np.allclose(found.numpy(), exact.astype(np.float64), rtol=1e-14, atol=0)
        assert torch.equal(fx_reference.EXACT[torch.ops.aten.var](x, dims, **given), found)
    one = torch.ones(3, 1, dtype=torch.float64)
    assert (
        fx_reference.EXACT[torch.ops.aten.var](one, [1]).isnan().all()
        and torch.var(one, [1]).isnan().all()
    )
