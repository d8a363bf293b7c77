"""Folded models compute what the model computes, also with weights that are used twice, writes in
place, hooks, and additions of numbers."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.utils import prune

import transconv
from transconv.torch_ops.conversion import traced_graphs

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    """Two convolutions, a norm, and a forward that is given."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.other = torch.nn.Conv2d(4, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        for tensor in (self.norm.running_mean, self.norm.weight, self.norm.bias):
            torch.nn.init.uniform_(tensor)
        self.relu = torch.nn.ReLU(inplace=True)
        self.run = run
        self.requires_grad_(False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def fused(model: torch.nn.Module) -> int:
    return sum(type(m).__name__ == "FusedConv2d" for m in model.modules())


def compare(model: torch.nn.Module) -> int:
    """How many fused calls the folded model has; it gives the same."""
    x = torch.randn(2, 4, 5, 5)
    wanted = model(x.clone())
    folded = transconv.fold(model)
    torch.testing.assert_close(folded(x.clone()), wanted, rtol=1e-4, atol=1e-4)
    return fused(folded)


def in_turn(*values: Any) -> Any:
    """The last of values that are computed from left to right."""
    return values[-1]


@pytest.mark.parametrize(
    ("run", "count"),
    [
        # the weight is used beside the convolution, so no norm goes into it
        (lambda s, x: F.conv_transpose2d(s.norm(s.conv(x)), s.conv.weight, padding=1), 0),
        (lambda s, x: torch.relu(s.conv(x)) + s.conv.weight.sum(), 1),
        # what is read is written to before the chain ends: it ends there
        (lambda s, x: in_turn(shortcut := s.conv(x), s.relu(x), shortcut + s.other(x)), 1),
        (lambda s, x: in_turn(y := s.norm(s.conv(x)), x.add_(1), torch.relu(y)), 1),
        (lambda s, x: in_turn(y := s.conv(x), F.relu(x, True), torch.relu(y)), 0),
        (lambda s, x: in_turn(y := s.conv(x), torch.neg(x, out=x), torch.relu(y)), 0),
        (lambda s, x: in_turn(r := x * 2, y := s.conv(x) + r, r.mul_(3), torch.relu(y)), 1),
        # these writes reach neither the input nor what is added
        (lambda s, x: in_turn(y := s.conv(x), z := s.relu(s.other(x)), torch.relu(y + z)), 2),
        (lambda s, x: in_turn(r := x * 1, r.mul_(3), torch.relu(s.conv(x) + r)), 1),
        # sizes are added too
        (lambda s, x: torch.relu(s.conv(x) + x.size(0)), 1),
    ],
    ids=["tied", "read", "shortcut", "method", "by place", "out", "added", "apart", "before", "size"],
)
def test_the_same_is_computed(run: Forward, count: int) -> None:
    assert compare(Net(run)) == count


def test_the_norm_keeps_its_eps() -> None:
    model = Net(lambda s, x: s.norm(s.conv(x)))
    model.norm.eps = 0.5
    torch.nn.init.uniform_(model.norm.running_var, 0.1, 1)
    assert compare(model) == 1


@pytest.mark.parametrize(("name", "count"), [("conv", 0), ("norm", 0), ("relu", 1)])
def test_hooks_are_called_where_they_are(name: str, count: int) -> None:
    model = Net(lambda s, x: s.relu(s.norm(s.conv(x))))
    getattr(model, name).register_forward_hook(lambda module, given, made: made * 2 - 1)
    assert compare(model) == count


@pytest.mark.parametrize(("name", "count"), [("conv", 0), ("norm", 0), ("relu", 1)])
@pytest.mark.parametrize("method", ["forward", "_conv_forward", "_call_impl"])
def test_a_forward_of_the_instance_is_called_where_it_is(name: str, count: int, method: str) -> None:
    model = Net(lambda s, x: s.relu(s.norm(s.conv(x))))
    module = getattr(model, name)
    plain = getattr(module, method, None)
    if plain is None:
        pytest.skip("the module has no such method")
    setattr(module, method, lambda *given: plain(*given) * 2 - 1)
    assert compare(model) == count


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        torch.nn.utils.parametrizations.weight_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
    ids=["weight", "spectral", "parametrized", "pruned"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_are_computed(wrap: Callable[[torch.nn.Module], Any]) -> None:
    model = Net(lambda s, x: s.relu(s.norm(s.conv(x))))
    wrap(model.conv)
    with torch.no_grad():
        compare(model)


def test_a_folded_model_can_be_traced_again() -> None:
    model = Net(lambda s, x: torch.relu(s.norm(s.conv(x)) + s.other(x)))
    x = torch.randn(2, 4, 5, 5)
    folded = transconv.fold(model)
    for again in (fx.symbolic_trace(folded), transconv.fold(folded)):
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-4)


def test_types_under_autocast() -> None:
    """An addition of float32 to a half is float32, folded or not."""
    model = Net(lambda s, x: torch.relu(s.norm(s.conv(x)) + x))
    x = torch.randn(2, 4, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, made = model(x), transconv.fold(model)(x)
    assert made.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(made, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x: F.gelu(s.norm(s.conv(x))),
        lambda s, x: F.gelu(s.conv(x), approximate="tanh"),
        lambda s, x: F.gelu(s.conv(x) + x, approximate="none"),
    ],
    ids=["plain", "tanh", "added"],
)
def test_gelu_as_a_function(run: Forward) -> None:
    model = Net(run)
    assert compare(model) == 1
    assert not [n for n in transconv.fold(model).graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(("ndims", "groups", "biased"), [(1, 1, True), (2, 2, False), (3, 4, True)])
@pytest.mark.parametrize("converted", [False, True])
def test_norms_of_transposed_layers(ndims: int, groups: int, biased: bool, converted: bool) -> None:
    torch.manual_seed(0)
    conv = getattr(torch.nn, f"ConvTranspose{ndims}d")(4, 8, 3, 2, 1, groups=groups, bias=biased)
    norm = getattr(torch.nn, f"BatchNorm{ndims}d")(8, eps=0.1)
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        torch.nn.init.uniform_(tensor, 0.05, 1)
    model = torch.nn.Sequential(conv, norm, torch.nn.ReLU()).eval().requires_grad_(False)
    if converted:
        transconv.convert_(model)
    x, before = torch.randn(2, 4, *[5] * ndims), conv.weight.clone()
    folded = transconv.fold(model)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    kinds = [type(m) for m in folded.modules()][1:]
    assert kinds == [getattr(transconv.nn, f"ConvTranspose{ndims}d"), torch.nn.ReLU]
    assert torch.equal(conv.weight, before)


def drawn(seed: int) -> Forward:
    """A forward of twelve steps, in place and not, over what was computed lately."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        draw, values = random.Random(seed), [x * 1]
        steps: list[Callable[[Any, Any], Any]] = [
            lambda a, _: s.conv(a),
            lambda a, _: s.other(a),
            lambda a, _: s.norm(s.other(a)),
            lambda a, _: s.norm(a),
            lambda a, _: s.relu(a),
            lambda a, b: a + b,
            lambda a, b: a.add_(b),
            lambda a, _: F.relu(a, True),
            lambda a, _: a[:, :, :],
            lambda a, _: torch.tanh(a),
            lambda a, _: a.mul_(0.5),
        ]
        for _ in range(12):
            values.append(draw.choice(steps)(draw.choice(values[-3:]), draw.choice(values[-3:])))
        return torch.stack(values[-3:]).sum(0)

    return run


def test_drawn_models() -> None:
    assert sum(compare(Net(drawn(seed))) for seed in range(60)) > 8


@pytest.mark.parametrize("kernel", [(1, 2, 1, 2), []], ids=["of four dims", "of none"])
def test_a_kernel_of_another_rank_is_torchs_error_when_the_model_runs(kernel: Any) -> None:
    conv = torch.nn.Conv2d(4, 4, kernel, bias=False)
    folded = transconv.fold(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(4)).eval())
    with pytest.raises(RuntimeError, match="stride|dimensions"):
        folded(torch.randn(2, 4, 5, 5))


def test_a_folded_model_of_no_tensor_is_torchs_error() -> None:
    chain = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.SiLU()).requires_grad_(False).eval()
    with pytest.raises(TypeError, match="invalid combination"):
        transconv.fold(chain)(None)


# -- writes -----------------------------------------------------------------------------------------


class Writes(torch.nn.Module):
    """A convolution whose result is written in a way."""

    def __init__(self, does: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.does = torch.nn.Conv2d(4, 4, 3, padding=1), does
        self.norm, self.last, self.kept = torch.nn.BatchNorm2d(4), None, list[torch.Tensor]()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, x)


def _aliased(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x
    y += m.conv(x)
    return torch.relu(y) + x


def _view(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x[:, :2]
    y *= 2
    return m.conv(x).relu() + x


def _of_result(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = z = m.norm(m.conv(x))
    z -= x
    return y.relu()


def _into_residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    r = x * 1
    y = m.conv(x)
    y += r
    r += 1
    return y.relu() + r


def _method(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    x.mul_(0.5)
    return y.relu() + x


def _size(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[0]
    n += 1
    return m.conv(x).relu() * n


@pytest.mark.parametrize("does", [_aliased, _view, _of_result, _into_residual, _method, _size])
def test_writes_are_kept(does: Any) -> None:
    model = Writes(does).eval()
    x = torch.randn(2, 4, 5, 5)
    folded = transconv.fold(model)
    assert any(type(m).__module__.startswith("transconv") for m in folded.modules()) or does is not _size
    given = [x.clone() for _ in range(3)]
    loaded = pickle.loads(pickle.dumps(folded))  # which traces the text of the graph again
    with torch.no_grad():
        want = model(given[0])
        for run, own in zip((folded, loaded), given[1:], strict=True):
            torch.testing.assert_close(run(own), want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own, given[0])


def _attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    y.data = x
    return y


def _remembered(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.last = m.conv(x)
    return m.last.relu()


def _appended(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept.append(m.conv(x))
    return m.kept[-1].relu()


def _counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.conv(x).relu() * m.count


def _noise(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.conv(x).relu() + torch.randn(4, 1, 1)


def _cast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.conv(x).relu()


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (_attribute, "attribute data"),
        (_remembered, "its last"),
        (_appended, "its kept"),
        (_counted, "its count"),
        (_noise, "random"),
        (_cast, "autocast"),
    ],
)
def test_what_a_graph_would_lose_is_refused(does: Any, why: str) -> None:
    model = Writes(does).eval()
    with pytest.raises(RuntimeError, match=why):
        transconv.fold(model)


def test_hooks_of_the_model_itself_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU()).eval()
    model.register_forward_hook(lambda m, given, made: made + 1)
    with pytest.raises(RuntimeError, match="hooks"):
        transconv.fold(model)


def test_new_memory_is_written_through_views_alone() -> None:
    """``relu_`` of a norm's result changes what is made of that result, and nothing else."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.relu = torch.nn.BatchNorm2d(4), torch.nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.norm(x)
            b = a.view(-1).view(1, -1)
            other = x + 1
            self.relu(a)
            return b + other.view(1, -1)

    traced = fx.symbolic_trace(Two().eval())
    at = {n.name: n for n in traced.graph.nodes}
    views = [n for n in traced.graph.nodes if n.op == "call_method"]
    last = traced.graph.output_node()
    assert not traced_graphs.stays(traced, views[1], views[1], last, [])
    assert not traced_graphs.stays(traced, at["norm"], views[1], last, [])
    assert traced_graphs.stays(traced, at["add"], at["add"], last, [])
