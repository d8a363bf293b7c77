"""Conversion of models, and aten's own operators under enable, disable and use."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests import programs
from transconv.torch_ops.conversion import aten_convolutions, aten_replacement

CPU = ("cpu",)
ROOT = Path(__file__).parents[2]


class Own(torch.nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight * 2, self.bias)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 4, 2, stride=2)),
        Own(4, 4, 1),
        torch.nn.LazyConv2d(2, 1),
    ).eval()


def test_convert_and_revert() -> None:
    net = model()
    x = torch.randn(2, 3, 6, 6)
    wanted = net(x)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    parameters = list(net.parameters())
    shown = repr(net)
    hooks: list[int] = []
    net[0].register_forward_hook(lambda *_: hooks.append(1))
    with pytest.warns(transconv.FallbackWarning, match="'4' to torch: its class Own has a forward"):
        report = transconv.convert_(net)
    assert report.converted == ("0", "3.0", "5")
    assert list(report.skipped) == ["4"] and "Own" in report.skipped["4"]
    assert "3 convolutions converted, 1 left" in str(report)
    assert torch.equal(net(x), wanted) and hooks == [1]
    assert transconv.stats().total == 3
    assert repr(net) == shown
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert transconv.convert_(net).converted == ()
    assert transconv.revert_(net).converted == ("0", "3.0", "5")
    assert type(net[0]) is torch.nn.Conv2d and torch.equal(net(x), wanted)
    assert transconv.stats().total == 3
    assert transconv.convert_(torch.nn.Sequential(torch.nn.LazyConv2d(4, 3))).converted == ("0",)


class Causal(torch.nn.Conv3d):
    """Pads the past alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(F.pad(x, (1, 1, 1, 1, 2, 0)))


class Scaled(torch.nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.weight * 2, self.bias)


class Turned(Scaled):
    def _conv_forward(self, x: torch.Tensor, w: torch.Tensor, b: Any) -> torch.Tensor:
        return super()._conv_forward(x.flip(-1), w, b)


class Named(torch.nn.Conv1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.Conv1d.forward(self, x) + 1


class Wider(torch.nn.ConvTranspose2d):
    def forward(self, x: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        return super().forward(x, [2 * n + 1 for n in x.shape[2:]])


class Renamed(torch.nn.Conv2d):
    pass


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: Causal(2, 3, 3), (1, 2, 4, 5, 5)),
        (lambda: Scaled(2, 3, 3), (1, 2, 5, 5)),
        (lambda: Turned(2, 3, 3), (1, 2, 5, 5)),
        (lambda: Named(2, 3, 3), (1, 2, 5)),
        (lambda: Wider(2, 3, 3, 2), (1, 2, 5, 5)),
        (lambda: Renamed(2, 3, 3), (1, 2, 5, 5)),
        (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(2, 3, 3)), (1, 2, 5, 5)),
        (lambda: torch.nn.utils.parametrizations.weight_norm(Scaled(2, 3, 3)), (1, 2, 5, 5)),
    ],
    ids=["super", "weight", "both", "named", "transposed", "empty", "parametrized", "both kinds"],
)
def test_subclasses_keep_their_forward(make: Any, shape: Any, recwarn: Any) -> None:
    module, x = make(), torch.randn(shape)
    kind, wanted, shown = type(module), module(x), repr(module)
    transconv.stats(reset=True)
    assert transconv.convert_(module).converted == ("",) and not len(recwarn)
    assert torch.equal(module(x), wanted) and transconv.stats().total == 1
    assert isinstance(module, kind.__bases__[0]) and repr(module) == shown
    assert transconv.convert_(module).converted == ()
    again = copy.deepcopy(module)
    assert torch.equal(again(x), wanted) and transconv.stats().total == 2
    if "Parametrized" not in kind.__name__:  # torch pickles none of these
        stored = pickle.loads(pickle.dumps(module))
        assert type(stored) is type(module) and torch.equal(stored(x), wanted)
    torch.testing.assert_close(torch.compile(again, backend="aot_eager")(x), wanted)
    assert transconv.revert_(module).converted == ("",)
    before = transconv.stats().total
    assert torch.equal(module(x), wanted) and transconv.stats().total == before
    assert type(module).__mro__[1:] == kind.__mro__[1:] and type(module).__name__ == kind.__name__
    assert transconv.revert_(module).converted == ()


def test_a_parametrization_can_still_be_removed() -> None:
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(2, 3, 3))
    transconv.convert_(module)
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert type(module) is transconv.nn.Conv2d


def test_what_cannot_be_converted_is_told_once(recwarn: Any) -> None:
    transposed = torch.nn.ConvTranspose2d(2, 2, 1)
    transposed.forward = transposed.forward
    for _ in range(2):
        report = transconv.convert_(torch.nn.Sequential(Own(2, 2, 1), transposed, Own(2, 2, 1)))
        assert sorted(report.skipped) == ["0", "1", "2"] and not report.converted
        assert "does not end in _conv_forward" in report.skipped["2"]
        assert "forward of its own" in report.skipped["1"]
    assert [w.category for w in recwarn] == [transconv.FallbackWarning] * 2


def test_convert_a_single_module_and_filter() -> None:
    conv = torch.nn.Conv1d(2, 2, 1)
    assert transconv.convert_(conv).converted == ("",)
    assert type(conv) is transconv.nn.Conv1d
    net = model()
    report = transconv.convert_(net, lambda module, name: module.in_channels == 3)
    assert report.converted == ("0",)
    assert report.skipped["3.0"] == "filter_fn said no"


@pytest.mark.slow
def test_converted_models_compile() -> None:
    net = model()
    x = torch.randn(2, 3, 6, 6)
    wanted = net(x)
    transconv.convert_(net)
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), wanted)


def problem() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(2, 4, 6, 6, requires_grad=True),
        torch.randn(4, 2, 3, 3, requires_grad=True),
        torch.randn(4, requires_grad=True),
    )


def run(x: Any, w: Any, b: Any) -> tuple[torch.Tensor, ...]:
    y = F.conv2d(x, w, b, padding=1, groups=2)
    return (y, *torch.autograd.grad(y.sin().sum(), (x, w, b)))


def test_enable_reaches_everything_and_disable_ends_it() -> None:
    given = problem()
    wanted = run(*given)
    transconv.enable(CPU)
    try:
        torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0)
        assert transconv.stats().fallback == {"device:cpu": 3}  # result, two gradients
        x, w, b = (t.detach() for t in given)
        torch.func.vmap(lambda x: F.conv2d(x, w, b, groups=2))(x)
        torch.func.jvp(lambda x: F.conv2d(x, w, b, groups=2), (x,), (x,))
        with torch.autocast("cpu"):
            assert F.conv2d(x, w, b, groups=2).dtype == torch.bfloat16
        y = torch.compile(lambda x: F.conv2d(x, w, b, groups=2), backend="aot_eager")(x)
        torch.testing.assert_close(y, F.conv2d(x, w, b, groups=2))
        double = [t.double().requires_grad_() for t in (x, w, b)]
        assert torch.autograd.gradgradcheck(lambda *t: F.conv2d(*t, groups=2), double, fast_mode=True)
        assert transconv.stats().total > 10
    finally:
        transconv.disable()
    before = transconv.stats().total
    torch.testing.assert_close(run(*given), wanted, rtol=0, atol=0)
    assert transconv.stats().total == before
    assert not aten_convolutions.replacement.devices


def test_enable_nests() -> None:
    with pytest.raises(RuntimeError, match="without a transconv.enable"):
        transconv.disable()
    transconv.enable(CPU)
    transconv.enable(CPU)
    transconv.disable()
    run(*problem())
    assert transconv.stats().total
    transconv.disable()
    with pytest.raises(ValueError, match="expected one of: cuda, cpu"):
        transconv.enable(("xpu",))
    assert not aten_replacement._entries.enabled


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.conv2d(torch.randn(1, 3, 4, 4), torch.randn(4, 2, 3, 3)),
        lambda: F.conv1d(torch.randn(1, 1, 4), torch.randn(1, 1, 3), padding=(1, 1)),
        lambda: F.conv2d(torch.randn(1, 2, 4, 4), torch.randn(4, 2, 3, 3), stride=0),
    ],
)
def test_errors_under_enable_are_torchs(call: Any) -> None:
    with pytest.raises(RuntimeError) as wanted:
        call()
    with transconv.use(CPU), pytest.raises(RuntimeError) as got:
        call()
    assert str(got.value) == str(wanted.value)


def test_complex_and_odd_dtypes_under_enable() -> None:
    x = torch.randn(1, 2, 5, 5, dtype=torch.complex64)
    w = torch.randn(3, 2, 3, 3, dtype=torch.complex64)
    wanted = F.conv2d(x, w)
    with transconv.use(CPU):
        torch.testing.assert_close(F.conv2d(x, w), wanted)
        assert F.conv2d(x.real.long(), w.real.long()).dtype == torch.int64


def test_use_is_for_one_thread() -> None:
    given = tuple(t.detach() for t in problem())
    inside, done = threading.Event(), threading.Event()
    counts: list[int] = []

    def other() -> None:
        inside.wait()
        F.conv2d(*given, groups=2)
        counts.append(transconv.stats().total)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with transconv.use(CPU):
        inside.set()
        done.wait()
        assert counts == [0]
        F.conv2d(*given, groups=2)
        assert transconv.stats().total == 1
        with transconv.use(CPU):
            F.conv2d(*given, groups=2)
        F.conv2d(*given, groups=2)
    thread.join()
    F.conv2d(*given, groups=2)
    assert transconv.stats().total == 3


THREADS = """
import threading, torch, transconv
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion import aten_convolutions

other = threading.Event()
thread = threading.Thread(target=other.wait, daemon=True)
thread.start()
with transconv.use(("cpu",)):
    kept = aten_convolutions.replacement.originals["cpu"]
assert aten_convolutions.replacement.originals["cpu"] is kept
x = torch.randn(1, 1, 4, 4)
torch.conv2d(x, x)
with transconv.use(("cpu",)):
    assert aten_convolutions.replacement.originals["cpu"] is kept
    torch.conv2d(x, x)
assert transconv.stats().total == 1
other.set()
thread.join()
with transconv.use(("cpu",)):
    pass
assert not aten_convolutions.replacement.originals
"""


def test_kernels_stay_while_another_thread_may_enter_them() -> None:
    """Removing a kernel that a thread is about to enter crashes the process, or fails inside torch."""
    programs.run(["-c", THREADS], cwd=ROOT, check=True)


def test_use_as_a_decorator() -> None:
    @transconv.use(CPU)
    def call() -> torch.Tensor:
        return F.conv2d(torch.randn(1, 1, 3, 3), torch.randn(1, 1, 3, 3))

    call()
    call()
    assert transconv.stats().total == 2


def test_checkpoint_recomputes_with_the_same_kernels() -> None:
    x, w, b = problem()
    with transconv.use(CPU):
        y = torch.utils.checkpoint.checkpoint(
            lambda x: F.conv2d(x, w, b, groups=2).sin(), x, use_reentrant=False
        )
        y.sum().backward()
    assert transconv.stats().total == 4  # result, the same again, two gradients


def test_a_backward_after_the_scope_is_torchs() -> None:
    x, w, b = problem()
    with transconv.use(CPU):
        y = F.conv2d(x, w, b, groups=2)
    wanted = torch.autograd.grad(F.conv2d(x, w, b, groups=2).sum(), (x, w, b))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w, b)), wanted)
    assert transconv.stats().total == 1


def test_our_functions_under_enable_do_not_recurse() -> None:
    x, w, b = problem()
    with transconv.use(CPU):
        torch.testing.assert_close(transconv.conv2d(x, w, b, groups=2), F.conv2d(x, w, b, groups=2))
        torch.func.vmap(lambda x: transconv.conv2d(x, w, b, groups=2))(x.detach()[None])
        assert "transform:functorch" not in transconv.stats().fallback  # aten is ours as well
        double = [t.detach().double().requires_grad_() for t in (x, w, b)]
        assert torch.autograd.gradcheck(
            lambda *t: transconv.conv2d(*t, padding="same", groups=2), double, fast_mode=True
        )


def test_one_device_may_be_a_word() -> None:
    transconv.enable("cpu")
    try:
        assert aten_convolutions.replacement.devices == {"cpu"}
    finally:
        transconv.disable()
    with transconv.use("cpu"):
        assert aten_convolutions.replacement.devices == {"cpu"}
    with pytest.raises(ValueError, match="on 'xpu'; expected one of: cuda, cpu"):
        transconv.enable("xpu")


def test_aten_keeps_a_bias_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels for GPUs add it, those of the CPU refuse it in their own words."""
    x, w, b = (t.detach() for t in problem())
    with pytest.raises(RuntimeError) as theirs:
        torch.convolution(x, w, b.double(), [1], [0], [1], False, [0], 2)
    with transconv.use("cpu"), pytest.raises(RuntimeError) as ours:
        torch.convolution(x, w, b.double(), [1], [0], [1], False, [0], 2)
    assert str(ours.value) == str(theirs.value)
