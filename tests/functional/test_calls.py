"""Calls of transconv.functional: errors, fallback, gradients of gradients, graphs and transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from transconv import functional as ours
from transconv.errors import Unsupported
from transconv.functional.calls import torch_operators
from transconv.functional.calls.dispatch import call


def counts() -> tuple[dict[str, int], dict[str, int]]:
    found = transconv.stats(reset=True)
    return found.native, found.fallback


def test_a_call_is_a_kernel_and_so_is_its_gradient() -> None:
    x = torch.randn(3, 7, requires_grad=True)
    ours.softmax(x, 1).sum().backward()
    with torch.no_grad():
        ours.softmax(x, 1)
    assert counts() == ({"softmax": 2, "softmax_gradient": 1}, {})


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda x: ours.softmax(x, 5), IndexError, r"softmax\(\[3, 4\] float32\): Dimension out of range"),
        (lambda x: ours.sum(x, (0, -4)), IndexError, r"sum\(\[3, 4\] float32\): Dimension out of range"),
        (lambda x: ours.sum(x, 1.5), TypeError, "must be"),
        (lambda x: ours.layer_norm(x, (5,)), RuntimeError, r"layer_norm\(\[3, 4\] float32, None, None\)"),
        (lambda x: ours.group_norm(x, 3), RuntimeError, "divisible by num_groups"),
        (lambda x: ours.matmul(x, x), RuntimeError, r"matmul\(\[3, 4\] float32, \[3, 4\] float32\): "),
        (lambda x: ours.bmm(x, x), RuntimeError, "3"),
        (lambda x: ours.linear(x, x[:, :2]), RuntimeError, "linear"),
        (lambda x: ours.linear(x, x, activation="no"), RuntimeError, "activation 'no' is unknown"),
        (lambda x: ours.batch_norm(x[:1], None, None, training=True), ValueError, "more than 1 value"),
        (lambda x: ours.max_pool2d(x[None], 2, padding=2), RuntimeError, "pad should be at most half"),
        (lambda x: ours.softmax([1.0], 0), (TypeError, AttributeError), ""),
        (lambda x: ours.sum(x, {1}), TypeError, "must be"),
        (lambda x: ours.any(x, slice(1)), TypeError, "invalid combination"),
        (lambda x: ours.prod(None, 1), TypeError, "prod"),
        (lambda x: ours.softmax(None, 1), AttributeError, "softmax"),
        (lambda x: ours.any(x, keepdim=(1,)), TypeError, "invalid combination"),
        (lambda x: ours.std(x, 1, 1), TypeError, "unbiased must be bool, not int"),
        (lambda x: ours.avg_pool2d(x[None], 2, stride=0), RuntimeError, "stride should not be zero"),
        (lambda x: ours.adaptive_avg_pool2d(x[None], (2,)), RuntimeError, "output_size must be 2"),
        (lambda x: ours.linear(x, [[1.0]]), TypeError, "must be Tensor, not list"),
        (lambda x: ours.argmax(x, 2), IndexError, r"argmax\(\[3, 4\] float32\): Dimension out of range"),
        (lambda x: ours.max(x, -3), IndexError, "Dimension out of range"),
        (lambda x: ours.flip(x, (2,)), IndexError, "Dimension out of range"),
        (
            lambda x: ours.cat((x, x[:2]), 1),
            RuntimeError,
            r"cat\(\[3, 4\] float32, \[2, 4\] float32\): Sizes",
        ),
        (lambda x: ours.pad(x[None], (4, 0), "reflect"), RuntimeError, "less than the corresponding"),
        (
            lambda x: ours.index_select(x, 0, x[0]),
            (IndexError, RuntimeError),
            r"index_select\(.*\[4\] float",
        ),
        (lambda x: ours.gather(x, 0, x), RuntimeError, r"gather\(\[3, 4\] float32, .*int64"),
        (lambda x: ours.embedding(x, x), RuntimeError, "Expected tensor for argument #1 'indices'"),
        (lambda x: ours.gather(x, 0, torch.tensor([[0, 5]])), RuntimeError, "index 5 is out of bounds"),
        (lambda x: ours.index_select(x, 0, torch.tensor([3])), IndexError, "index out of range in self"),
        (lambda x: ours.embedding(torch.tensor([-1]), x), IndexError, "index out of range in self"),
        (lambda x: ours.pixel_shuffle(x[None], 2), RuntimeError, "pixel_shuffle"),
    ],
    ids=range(33),
)
@pytest.mark.parametrize("cpu", ["interpret", "fallback"])
def test_errors_are_torchs_and_name_the_operands(wrong: Any, error: Any, said: str, cpu: str) -> None:
    transconv.config.cpu = cpu
    with pytest.raises(error, match=said):
        wrong(torch.randn(3, 4))


def test_the_policy_says_what_a_fallback_means() -> None:
    transconv.config.cpu = "fallback"
    x = torch.randn(3, 4)
    assert torch.equal(ours.softmax(x, 1), F.softmax(x, 1))
    assert counts() == ({}, {"device:cpu": 1})
    transconv.config.fallback = "warn"
    with pytest.warns(transconv.FallbackWarning, match=r"hands softmax to torch \(device:cpu\)"):
        ours.softmax(x, 1)
    transconv.config.fallback = "error"
    with pytest.raises(Unsupported, match="torch would have to compute this softmax"):
        ours.softmax(x, 1)
    transconv.config.cpu = "interpret"
    with pytest.raises(Unsupported, match="int64"):
        ours.sum(torch.arange(3))


def test_results_lie_as_torchs_do() -> None:
    x = torch.randn(2, 6, 3, 4).contiguous(memory_format=torch.channels_last)
    w = torch.randn(6)
    for f, g in (
        (lambda t: ours.layer_norm(t, (4,)), lambda t: F.layer_norm(t, (4,))),
        (lambda t: ours.max_pool2d(t, 2), lambda t: F.max_pool2d(t, 2)),
        (lambda t: ours.sum(t, 1), lambda t: t.sum(1)),
        (
            lambda t: ours.batch_norm(t, None, None, w, w, True),
            lambda t: F.batch_norm(t, None, None, w, w, True),
        ),
    ):
        torch.testing.assert_close(f(x), g(x), check_stride=True)
    assert not counts()[1]


def test_running_statistics_move_in_place() -> None:
    x = torch.randn(5, 3, 4)
    mine, theirs = ([torch.zeros(3), torch.ones(3)] for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(
            ours.batch_norm(x, *mine, training=True, momentum=0.3),
            F.batch_norm(x, *theirs, training=True, momentum=0.3),
        )
    torch.testing.assert_close(mine, theirs)


D = {"dtype": torch.float64, "requires_grad": True}
GRADS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "softmax": (lambda x: ours.softmax(x, 0), [torch.randn(3, 2, **D)]),
    "log_softmax": (lambda x: ours.log_softmax(x, 1), [torch.randn(2, 3, **D)]),
    "layer_norm": (
        lambda x, w, b: ours.layer_norm(x, (3,), w, b),
        [torch.randn(s, **D) for s in ((2, 3), 3, 3)],
    ),
    "group_norm": (lambda x, w: ours.group_norm(x, 2, w), [torch.randn(s, **D) for s in ((2, 4, 2), 4)]),
    "batch_norm": (
        lambda x, w: ours.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, None, True),
        [torch.randn(s, **D) for s in ((3, 2, 2), 2)],
    ),
    "mean": (lambda x: ours.mean(x, 0), [torch.randn(3, 2, **D)]),
    "prod": (lambda x: ours.prod(x, 1), [torch.tensor([[1.0, 0, 2], [3, 4, 5]], **D)]),
    "var": (lambda x: ours.var(x, 1), [torch.randn(2, 4, **D)]),
    "max_pool2d": (lambda x: ours.max_pool2d(x, 2), [torch.randn(1, 2, 4, 4, **D)]),
    "avg_pool2d": (lambda x: ours.avg_pool2d(x, 2, 1, 1), [torch.randn(1, 1, 3, 3, **D)]),
    "linear": (
        lambda x, w, b: ours.linear(x, w, b, "tanh"),
        [torch.randn(s, **D) for s in ((2, 3), (2, 3), 2)],
    ),
    "pad": (lambda x: ours.pad(x, (2, 1), "reflect"), [torch.randn(2, 4, **D)]),
    "max": (lambda x: ours.max(x, 1)[0], [torch.tensor([[1.0, 3, 2], [0, 2, 1]], **D)]),
    "cat": (lambda x, y: ours.cat((x, y), 1), [torch.randn(2, n, **D) for n in (2, 3)]),
    "gather": (
        lambda x: ours.gather(x, 1, torch.tensor([[0, 0, 2], [1, 2, 2]])),
        [torch.randn(2, 3, **D)],
    ),
    "fold": (lambda x: ours.fold(x, (4, 3), 2, 1, 1, 2), [torch.randn(1, 4, 6, **D)]),
    "interpolate": (lambda x: ours.interpolate(x, scale_factor=2), [torch.randn(1, 2, 3, **D)]),
    "cross_entropy": (
        lambda x: ours.cross_entropy(x, torch.tensor([1, 0, -100])),
        [torch.randn(3, 2, **D)],
    ),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("name", GRADS)
def test_gradients_and_gradients_of_them(name: str) -> None:
    f, tensors = GRADS[name]
    assert torch.autograd.gradcheck(f, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, tensors, fast_mode=True)
    assert not counts()[1]


def test_gradients_that_add_are_torchs_where_the_same_bits_are_asked_for() -> None:
    """No other gradient falls back, also where determinism is switched on or off after the forward
    call."""
    x, at = torch.randn(5, 3), torch.tensor([[0, 2, 2], [4, 2, 0]])
    for taken in (
        lambda f, x: f.index_select(x, 0, at[0]),
        lambda f, x: f.gather(x, 0, at),
        lambda f, x: f.embedding(at, x, 2),
    ):
        (want,) = torch.autograd.grad(
            taken(Theirs, leaf := x.clone().requires_grad_()).square().sum(), leaf
        )
        for before, behind in ((True, True), (False, True), (True, False)):
            leaf = x.clone().requires_grad_()
            try:
                torch.use_deterministic_algorithms(before)
                made = taken(ours, leaf).square().sum()
                torch.use_deterministic_algorithms(behind)
                made.backward()
            finally:
                torch.use_deterministic_algorithms(False)
            assert torch.equal(leaf.grad, want)
    took, handed = counts()
    assert took == {"index_select": 3, "gather": 3, "embedding": 3} and handed == {"deterministic:add": 9}


class Theirs:
    index_select, gather, embedding = torch.index_select, torch.gather, F.embedding


def test_gradients_that_are_solved_are_ours_where_the_same_bits_are_asked_for() -> None:
    x = torch.randn(1, 5, 3, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        ours.pad(x, (1, 1), "reflect").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts() == ({"pad": 1, "pad_gradient": 1}, {})


def test_what_moves_takes_any_type() -> None:
    with torch.no_grad():
        for moved in (torch.arange(6).view(2, 3), torch.rand(2, 3) > 0.5):
            assert torch.equal(ours.flip(moved, (0, 1)), moved.flip(0, 1))
            assert torch.equal(ours.pad(moved, (1, 2)), F.pad(moved, (1, 2)))
            assert torch.equal(ours.cat((moved, moved)), torch.cat((moved, moved)))
    assert not counts()[1]


def test_a_fold_is_torchs() -> None:
    x = torch.randn(2, 12, 9, requires_grad=True)
    got, want = (f.fold(x, (5, 6), (2, 2), 1, (1, 0), (2, 2)) for f in (ours, F))
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, g) for y in (got, want)))


def test_a_traced_and_an_exported_call_hold_the_operator() -> None:
    """With optional operands left out, and with gradients."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return ours.layer_norm(x, (4,), None, b) * ours.softmax(x, -1)

    x, b = torch.randn(3, 4), torch.randn(4)
    want = F.layer_norm(x, (4,), None, b) * F.softmax(x, -1)
    traced, exported = torch.jit.trace(Model(), (x, b)), torch.export.export(Model(), (x, b)).module()
    assert str(traced.graph).count("transconv::function") == 2
    counts()
    for graph in (traced, exported):
        torch.testing.assert_close(graph(x, b), want)
    assert counts() == ({"layer_norm": 2, "softmax": 2}, {})
    leaf = b.clone().requires_grad_()
    traced(x, leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, F.softmax(x, -1).sum(0))
    with pytest.raises(RuntimeError, match="as many tensors, got 'softmax 11"):
        torch_operators.function("softmax 11 (1, None, None, )", [x])


def test_what_torch_must_see_is_torchs() -> None:
    x = torch.randn(3, 4)
    want = F.softmax(x, 1)
    torch.testing.assert_close(torch.vmap(lambda t: ours.softmax(t, 0))(x), want)
    torch.testing.assert_close(torch.func.jvp(lambda t: ours.softmax(t, 1), (x,), (x,))[0], want)
    assert set(counts()[1]) == {"transform:functorch"}
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours.linear(x, x), F.linear(x, x))
    assert counts()[1] == {"autocast": 1}

    class Own(torch.Tensor):
        pass

    assert type(ours.softmax(x.as_subclass(Own), 1)) is Own
    assert counts()[1] == {"subclass:Own": 1}


def test_views_that_mean_more_than_their_memory_and_misaligned_ones() -> None:
    z = torch.randn(3, 5, dtype=torch.complex64).conj().imag
    torch.testing.assert_close(ours.softmax(z, 1), F.softmax(z, 1))
    x = torch.randn(13)[1:].view(3, 4)
    torch.testing.assert_close(ours.softmax(x, 1), F.softmax(x, 1))
    torch.testing.assert_close(ours.sum(x.T.expand(2, 4, 3), (0, 2)), x.T.expand(2, 4, 3).sum((0, 2)))


def test_gradients_that_lie_otherwise() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    g = torch.randn(4, 3).T
    got, want = (torch.autograd.grad(f(x, 1), x, g)[0] for f in (ours.log_softmax, F.log_softmax))
    torch.testing.assert_close(got, want)
    ours.softmax(x, 1).sum().backward()  # an expanded one


def test_the_first_result_of_a_kind_of_call_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    state = torch.random.get_rng_state()
    x = torch.ones(5, 70, requires_grad=True)
    ours.softmax(x, 1).sum().backward()
    x = torch.ones(5, 70, dtype=torch.bfloat16, requires_grad=True)
    for f in (ours.logsumexp, ours.mean):
        f(x, 1).sum().backward()
    ours.layer_norm(x, (70,), x[0], x[1])
    assert not counts()[1] and torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(0)  # a gradient drawn alike would be what is normalized, of which nothing is left
    z = torch.randn(64, 96, requires_grad=True)
    ours.batch_norm(z, None, None, x.new_ones(96).float(), x.new_ones(96).float(), True)
    assert not counts()[1]
    wrong = replace(torch_operators.FUNCTIONS["sum"], torch=lambda x, *_: x.sum(1) * 2)
    x = torch.randn(3, 4)
    torch.testing.assert_close(call(wrong, (x,), (1, False, None)), x.sum(1) * 2)
    assert counts()[1] == {"miscompiled": 1}


# -- graphs ----------------------------------------------------------------------------------------


def _model(f: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = f.layer_norm(x, (6,), w)
    return f.softmax(y, -1) * f.linear(y, w[None].expand(6, 6))


@pytest.mark.every(2)
@pytest.mark.parametrize("cpu", ["interpret", "fallback"])
def test_compiled_graphs_are_whole(cpu: str) -> None:
    transconv.config.cpu = cpu
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    compiled = torch.compile(lambda x, w: _model(ours, x, w), fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w), _model(F, x, w)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(y.sum(), (x, w)) for y in (got, want)]
    torch.testing.assert_close(*grads)
    native = counts()[0]
    assert ("softmax_gradient" in native) is (cpu == "interpret")


def test_compiled_running_statistics() -> None:
    x, mine, theirs = torch.randn(5, 3), [torch.zeros(3), torch.ones(3)], [torch.zeros(3), torch.ones(3)]
    compiled = torch.compile(
        lambda x, p, q: ours.batch_norm(x, p, q, training=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(x, *mine), F.batch_norm(x, *theirs, training=True))
    torch.testing.assert_close(mine, theirs)


def test_the_operators_keep_torchs_rules() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    torch.library.opcheck(torch_operators.function, ("softmax 1 (1, None, None,)", [x]))
    text = "compute twice\n axes n=3\n read x = X[n]\n store Y[n] = x + x"
    torch.library.opcheck(torch_operators.compute, (text, [torch.randn(3)]))
    with pytest.raises(RuntimeError, match="expected a call such as"):
        torch_operators.function("nothing (1,)", [x])


def test_numbers_are_spelled_and_read() -> None:
    f = torch_operators.FUNCTIONS["softmax"]
    numbers = (1, None, torch.bfloat16, (2, -3), True, 0.5, float("inf"), "gelu", "")
    x = torch.ones(1)
    assert torch_operators.read(torch_operators.spelled(f, (x, None), numbers), [x]) == (
        f,
        [x, None],
        numbers,
    )


def test_a_kept_dim_of_all_and_cpu_autocast_are_torchs() -> None:
    x = torch.randn(2, 3) > 0
    assert ours.any(x, None, True).shape == ours.all(x, keepdim=True).shape == (1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.softmax(torch.randn(2, 3).bfloat16(), 1).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ours.layer_norm(x[:, :1], (1,)),
        lambda x: ours.layer_norm(x[:, :2], (2,)),
        lambda x: ours.softmax(x * 40, 1),
        lambda x: ours.embedding(torch.tensor([1, 1, 0]), x),
        lambda x: ours.gather(x, 1, torch.tensor([[0, 0, 1]]).expand(3, 3)),
    ],
    ids=range(5),
)
def test_first_results_that_are_hard_to_judge(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients close to zero, and elements to which several points add."""
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    x = torch.randn(3, 4).requires_grad_()
    y = call(x)
    torch.autograd.grad(y, x, torch.randn_like(y))
    assert not transconv.stats().fallback


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_under_transforms(name: str, compiled: bool) -> None:
    """vmap, grad of each, and compiled code: results and moved statistics are torch's."""

    def made(home: Any, grad: bool) -> list[torch.Tensor]:
        function = getattr(home, name)
        x = torch.linspace(-1, 2, 3 * 4 * 5 * 6).view(3, 4, 5, 6).sin()
        mean, variance, w = torch.zeros(3, 5), torch.ones(3, 5), torch.linspace(1, 2, 5)

        def one(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            return function(x, mean, variance, w, None, True, 0.3)

        def slope(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda t: one(t, *given).pow(3).sum())(x)

        def whole(*given: torch.Tensor) -> torch.Tensor:
            return torch.vmap(slope if grad else one)(*given)

        torch._dynamo.reset()
        call = torch.compile(whole, backend="eager", fullgraph=True) if compiled else whole
        return [call(x, mean, variance), mean, variance]

    for grad in (False, True):
        torch.testing.assert_close(made(ours, grad), made(F, grad))


@pytest.mark.every(2)
@pytest.mark.parametrize("own", [True, False])
def test_compiled_code_moves_running_statistics(own: bool) -> None:
    x = torch.linspace(-1, 2, 60).view(3, 4, 5).sin()
    for name in ("batch_norm", "instance_norm"):
        found = []
        for home in (ours, F):
            mean, variance = torch.zeros(4), torch.ones(4)
            torch._dynamo.reset()
            function = getattr(home, name)
            call = torch.compile(
                lambda *given, function=function: function(*given, None, None, own),
                backend="aot_eager",
                fullgraph=True,
            )
            found.append([call(x, mean, variance), mean, variance])
        torch.testing.assert_close(found[0], found[1])
        assert bool(found[0][1].any()) == own


def test_running_statistics_of_inference_mode_move_outside_of_it() -> None:
    x = torch.randn(2, 4, 3, 4)
    with torch.inference_mode():
        held = torch.zeros(4), torch.ones(4)
    transconv.functional.batch_norm(x, *held, training=True)
    want = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, *want, training=True)
    for moved, theirs in zip(held, want, strict=True):
        torch.testing.assert_close(moved, theirs)
