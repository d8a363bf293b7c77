"""``transconv.optimize`` and ``transconv.off``: what is chosen and said; a copy behaves as its model."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn

import transconv
from tests import programs
from tests.graph.meant import by_meaning
from tests.house.source import ROOT
from transconv.graph import TorchRow, backend, optimization, report


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()).eval()


X = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)


def kernels(model: nn.Module) -> list[str]:
    return [k.name for g in report(model).graphs for k in g.kernels]


def test_a_copy_computes_by_kernels_and_behaves_as_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    want = model(X)
    with by_meaning():
        fast = transconv.optimize(model, X)
        made = fast(X)
    torch.testing.assert_close(made, want, rtol=1e-3, atol=1e-3)
    assert transconv.stats().native["graph"] == 2 and len(kernels(fast)) == 1 and not made.requires_grad
    first, expected, left = capsys.readouterr().out.splitlines()
    assert "Sequential for inference: a compiled graph, weights copied once" in first
    assert "in 1 kernel for 7 operations; 0 regions of torch" in expected and "no module" in left
    assert str(report(fast)).startswith(first)
    assert type(fast) is type(model) and [*fast.state_dict()] == [*model.state_dict()]
    assert all(p.requires_grad for p in model.parameters()), "the model itself is not frozen"
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(again(X), want)
        with pytest.raises(TypeError, match="expected what torch.compile or transconv"):
            report(again)
    fast.train()
    assert fast[1].training and not model[1].training


def test_writes_to_the_models_weights_are_seen() -> None:
    model = network()
    with by_meaning():
        fast = transconv.optimize(model, X, verbose=False)
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        torch.testing.assert_close(fast(X), model(X), rtol=1e-3, atol=1e-3)
    assert transconv.stats().fallback == {}


def test_training_has_the_models_gradients() -> None:
    model = network().train()
    with by_meaning():
        fast = transconv.optimize(model, verbose=False)
        fast(X).square().sum().backward()
    made = {n: p.grad for n, p in model.named_parameters()}  # they are the same parameters
    assert {g.phase for g in report(fast).graphs if g.kernels} == {"forward", "backward"}
    model.zero_grad()
    model(X).square().sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(made[n], p.grad, rtol=2e-3, atol=2e-3)


def test_the_fastest_whose_results_are_right_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimization, "OTHER", "eager")
    seconds = {"eager": 3e-3, "torch.compile": 2e-3, "transconv": 1e-3}
    monkeypatch.setattr(optimization.ModelTrial, "seconds", lambda self, name: seconds[name])
    with by_meaning():
        fast = transconv.optimize(network(), X, measure=True)
        found = report(fast).optimization
        assert found.kept == "transconv" and len(kernels(fast)) == 1
        assert [s.ms for s in found.sides] == [3.0, 2.0, 1.0]
        said = capsys.readouterr().out
        assert "kept transconv" in said and "3.00 times as fast as eager" in said
        # One that is fast and wrong is not kept, nor one that cannot be compiled.
        monkeypatch.setattr(optimization, "OTHER", "no such backend")
        for limit in ("FURTHEST", "AS_NUDGED"):
            monkeypatch.setattr(optimization, limit, 0.0)
        kept = report(transconv.optimize(network(), X, measure=True, verbose=False)).optimization
        assert kept.kept == "eager" and "InvalidBackend" in str(kept)
    assert found.lines[1].startswith("  measured: 1 ms a call")


@pytest.mark.slow
def test_random_models_are_compared_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimization, "OTHER", "eager")
    monkeypatch.setattr(optimization.ModelTrial, "seconds", lambda self, name: 1.0 + (name != "transconv"))
    with by_meaning():
        fast = transconv.optimize(
            nn.Sequential(*network(), nn.Dropout()).train(), X, measure=True, rest="eager"
        )
    assert report(fast).optimization.kept == "transconv"


@pytest.mark.slow
def test_gradients_that_hang_on_rounding_are_compared_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a bias before a batch norm is rounding alone, and no reason to keep eager; one that
    is another function's is."""
    monkeypatch.setattr(optimization, "OTHER", "eager")
    monkeypatch.setattr(optimization.ModelTrial, "seconds", lambda self, name: 1.0 + (name != "transconv"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()).train()
    with by_meaning():
        found = report(transconv.optimize(model, X, measure=True, rest="eager")).optimization
        assert found.kept == "transconv" and max(s.difference for s in found.sides) < 1e-3
        real = optimization.ModelTrial.step

        def step(self, call, given=None):
            results, gradients = real(self, call, given)
            ours = getattr(call, "compiled", None) is self.calls["transconv"]
            return results, [2 * t for t in gradients] if ours else gradients

        monkeypatch.setattr(optimization.ModelTrial, "step", step)
        again = report(transconv.optimize(model, X, measure=True, rest="eager")).optimization
        assert again.kept != "transconv"


def test_without_a_gpu_it_stays_eager_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    transconv.config.cpu = "fallback"
    model = network()
    fast = transconv.optimize(model)
    said = capsys.readouterr().out
    assert "stays eager: there is no GPU here" in said and "left to torch: all of it" in said
    torch.testing.assert_close(fast(X), model(X))
    assert report(fast).graphs == () and transconv.stats().total == 0


@pytest.mark.slow
def test_modules_that_are_left_out() -> None:
    """Their operations are torch's, forward and backward, in one graph with the others'."""
    model = network()
    with by_meaning():
        fast = transconv.optimize(
            model,
            X,
            filter_fn=lambda m, _: not isinstance(m, nn.Conv2d),
            rest="eager",
            training=True,
            verbose=False,
        )
        graphs = report(fast).graphs
        torch.testing.assert_close(fast(X), model.train()(X), rtol=1e-3, atol=1e-3)
    assert [g.phase for g in graphs] == ["forward", "backward"]
    for graph in graphs:
        rows = [r for r in graph.rows if isinstance(r, TorchRow)]
        assert any("transconv.off was called with its module" in why for r in rows for why in r.reasons)
        assert graph.kernels and not any("convolution" in k.name for k in graph.kernels)


def test_off() -> None:
    model = network()
    assert transconv.off(model[0]) is model[0]
    assert transconv.convert_(model).skipped == {"0": "transconv.off was called with its module"}
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again[0].forward.module is again[0]
    with by_meaning(), torch.no_grad():
        torch.testing.assert_close(run(X), model(X))
    assert not any("convolution" in k.name for g in report(run).graphs for k in g.kernels)
    transconv.off(model, undo=True)
    assert transconv.convert_(model).converted == ("0",)
    transconv.off(model)
    assert type(model[0]) is nn.Conv2d
    model[2].forward = torch.sigmoid
    with pytest.raises(ValueError, match="'2' has a forward of its own"):
        transconv.off(transconv.off(model, undo=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: transconv.optimize(3), "expected a torch.nn.Module, got int"),
        (lambda: transconv.optimize(network(), measure=True), "measure=True needs an example"),
        (lambda: transconv.optimize(torch.jit.trace(network(), X)), "ScriptModule"),
        (lambda: transconv.optimize(nn.Sequential(nn.LazyLinear(3))), "that was called once"),
        (lambda: transconv.optimize(nn.Linear(2, 2, device="meta")), "model.to_empty"),
        (lambda: transconv.optimize(network(), X.to("meta"), measure=True), "meta device"),
        (lambda: transconv.optimize(network(), X, rest="inductr"), "did you mean inductor"),
        (lambda: transconv.optimize(network(), X, tune="60"), "tune='60'; expected seconds"),
        (lambda: transconv.optimize(network(), X, cudagraphs="no"), "expected None, False or True"),
        (lambda: transconv.optimize(network(), X, filter_fn="conv"), "a function.module, name"),
        (
            lambda: transconv.optimize(nn.Softmax(threading.Lock())),
            "cannot pickle .* compiles the model itself",
        ),
        (lambda: transconv.off("conv1"), "transconv.off: expected a torch.nn.Module"),
    ],
)
def test_wrong_calls(call: object, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        call()  # type: ignore[operator]


KNOWN = """
import importlib.metadata as m, sys
of = m.MetadataPathFinder.find_distributions
m.MetadataPathFinder.find_distributions = classmethod(lambda cls, *a: (  # as if it were not installed
    d for d in of(*a) if d.metadata["Name"] != "transconv" or "dynamo" in str(d._path)))
{first}
before = [*sys.modules]
import transconv
assert not {{"transconv.graph", "sympy", *({early} or ["torch._dynamo"])}} & {{*sys.modules}} - {{*before}}
import torch
assert "transconv" in torch.compiler.list_backends()
f = torch.compile(lambda x: x + 1, backend="transconv", options={{"rest": "eager"}})
assert f(torch.zeros(2)).tolist() == [1, 1]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", id="before torch's compiler"),
        pytest.param(
            "import torch; torch.compiler.list_backends()", id="behind it", marks=pytest.mark.slow
        ),
    ],
)
def test_the_backend_is_known_by_name(first: str) -> None:
    """Without an installed package, and without an import of torch's compiler."""
    done = programs.run(["-c", KNOWN.format(first=first, early=["none"] if first else [])], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_graph_that_cannot_be_recorded_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {"transconv": 2.0, "transconv, CUDA graphs": 1.0}
    with by_meaning():
        trial = optimization.trial_of(network().eval(), X, False)
        assert trial.prepare()
        monkeypatch.setattr(optimization.ModelTrial, "gaps", lambda self: 0)
        monkeypatch.setattr(optimization.ModelTrial, "seconds", lambda self, name: seconds[name])
        monkeypatch.setattr(optimization.ModelTrial, "run", lambda self, name: [])
        assert trial.recorded_is_faster()
        seconds["transconv"] = 0.5
        assert not trial.recorded_is_faster()

        def run(self: object, name: str) -> None:
            raise torch.OutOfMemoryError("no memory for a pool")

        monkeypatch.setattr(optimization.ModelTrial, "run", run)
        assert not trial.recorded_is_faster()
    assert "runs without CUDA graphs: OutOfMemoryError: no memory for a pool" in caplog.text


class Masked(nn.Linear):
    """Its results have infinities, and it writes to what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.add_(1.0)).masked_fill(torch.eye(4) > 0, float("-inf"))


def test_infinities_and_writes_are_compared_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results with infinities are no reason to keep what is wrong elsewhere, and an example that a model
    writes to is the same for every side, and afterwards."""
    transconv.config.cpu = "fallback"
    wrong = {"by": 0.0}

    def other(gm: torch.fx.GraphModule, given: object) -> object:
        return lambda *given: [t + wrong["by"] for t in gm(*given)]

    monkeypatch.setattr(optimization, "OTHER", other)
    monkeypatch.setattr(optimization.ModelTrial, "seconds", lambda self, name: 1.0 + (name == "eager"))
    x = torch.randn(4, 4)
    before = x.clone()
    for wrong["by"], kept in ((0.0, "torch.compile"), (1.0, "eager")):
        torch.compiler.reset()
        fast = transconv.optimize(Masked(4, 4).eval(), x, measure=True, verbose=False)
        assert report(fast).optimization.kept == kept and torch.equal(x, before)


def test_differences_are_of_all_numbers() -> None:
    inf, nan = float("inf"), float("nan")
    for made, apart in (([1, 2], 0), ([inf, 2], inf), ([nan, 2], inf), ([1 + 3j, 2], 3 / 5**0.5)):
        got = torch.tensor(made)
        want = torch.tensor([1, 2]).to(got.dtype)
        assert optimization._apart([got], [want]) == pytest.approx(apart)
    ends = torch.tensor([nan, -inf, 4.0])
    assert optimization._apart([ends + 1], [ends]) == 0.25


@pytest.mark.slow
def test_odd_models_and_examples() -> None:
    """A weight that a hook computes is none of the model's parameters; example in a mapping."""
    old: Any = nn.utils.weight_norm
    with pytest.warns(FutureWarning):
        model = nn.Sequential(old(nn.Conv1d(4, 4, 3)), nn.SiLU())
    x = torch.randn(1, 4, 8)
    with by_meaning():
        fast = transconv.optimize(model.eval(), UserDict(input=x), verbose=False)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
        model[0].weight_g.data.mul_(2.0)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
        for given, word in ((X, True), (X.numpy(), None)):  # on a CPU, asked for or not
            made = transconv.optimize(network(), given, cudagraphs=word, verbose=False)
            assert "CUDA graphs" not in str(report(made).optimization)
    assert "0: Conv1d" in str(report(fast)) and "__self__" not in str(report(fast))
