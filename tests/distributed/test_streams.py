"""Models piece by piece: the pieces are those of torch's whole result, and of the stream's own whole the
bits; what looks ahead or goes over time is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transconv
from tests.torch_ops.conftest import fresh, untimed_guards
from transconv.compute import AxisSpan
from transconv.distributed.streams.step_replay import Run, StepGraphs
from transconv.distributed.streams.stream import ROWS, StreamedModel
from transconv.distributed.streams.time_axis import TimeRelation
from transconv.errors import TensorError, Unsupported

__all__ = ["fresh", "untimed_guards"]

Tensor = torch.Tensor


class Causal(nn.Module):
    """A convolution that is padded on the left, 1D or 3D."""

    def __init__(
        self, i: int, o: int, k: int, d: int = 1, s: int = 1, mode: str = "constant", ndims: int = 1
    ) -> None:
        super().__init__()
        kind: Any = {1: nn.Conv1d, 3: nn.Conv3d}[ndims]
        rest = (1,) * (ndims - 1)
        self.conv = kind(i, o, (k, *(3,) * (ndims - 1)), (s, *rest), (0, *rest), (d, *rest))
        self.left, self.mode = (k - 1) * d - (s - 1), mode

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (*(0, 0) * (x.dim() - 3), self.left, 0), mode=self.mode))


class Trimmed(nn.Module):
    """A convolution padded on both sides, of which the end is cut off."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(c, c, k, padding=k - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -(self.conv.kernel_size[0] - 1)]


class Up(nn.Module):
    """A transposed convolution without its tail."""

    def __init__(self, i: int, o: int, k: int, s: int) -> None:
        super().__init__()
        self.conv, self.tail = nn.ConvTranspose1d(i, o, k, s), k - s

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y[..., : y.shape[-1] - self.tail]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Says(nn.Module):
    """A function as a module."""

    def __init__(self, says: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.says = says

    def forward(self, x: Tensor) -> Tensor:
        return self.says(x)


class Recurrent(nn.Module):
    def __init__(self, c: int, both: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(c, c, 2, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x.permute(2, 0, 1))[0][..., : x.shape[1]]
        return y.permute(1, 2, 0) + x


def frames(f: Callable[[Tensor], Tensor]) -> Says:
    """A function of each frame of a video by itself, time in the batch."""

    def says(x: Tensor) -> Tensor:
        n, c, t, h, w = x.shape
        y = f(x.permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w))
        return y.reshape(n, t, *y.shape[1:]).permute(0, 2, 1, 3, 4)

    return Says(says)


def first_repeated(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2)


def doubled(x: Tensor) -> Tensor:
    """Half of the channels become every second frame."""
    n, c, t, h, w = x.shape
    y = x.reshape(n, 2, c // 2, t, h, w)
    return torch.stack((y[:, 0], y[:, 1]), 3).reshape(n, c // 2, t * 2, h, w)


def encoder(mode: str = "constant") -> nn.Sequential:
    return nn.Sequential(
        Causal(2, 4, 7, mode=mode),
        nn.ELU(),
        Residual(nn.Sequential(Causal(4, 4, 3, 2, mode=mode), nn.SiLU(inplace=True), nn.Conv1d(4, 4, 1))),
        Causal(4, 6, 4, s=2, mode=mode),
        Says(lambda x: F.layer_norm(x.transpose(1, 2), (6,)).transpose(1, 2)),
        Trimmed(6, 3),
        Causal(6, 8, 6, s=3, mode=mode),
        Says(lambda x: F.normalize(x, dim=1) * math.sqrt(8)),
    )


def decoder() -> nn.Sequential:
    return nn.Sequential(
        Causal(8, 6, 7),
        Up(6, 6, 4, 2),
        nn.GELU(),
        nn.Upsample(scale_factor=3, mode="nearest"),
        Residual(nn.Sequential(Causal(6, 6, 3, 4), Says(lambda x: x + torch.sin(x) ** 2))),
        Up(6, 4, 3, 3),
        nn.Conv1d(4, 1, 1),
    )


def video() -> nn.Sequential:
    return nn.Sequential(
        Causal(3, 4, 3, ndims=3),
        Says(first_repeated),
        nn.Conv3d(4, 4, 3, padding=(0, 1, 1)),
        frames(nn.GroupNorm(2, 4)),
        nn.SiLU(),
        Says(doubled),
        frames(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact")),
        Causal(2, 3, 3, s=2, ndims=3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (encoder, (2, 2, 36)),
    "replicated": (lambda: encoder("replicate"), (1, 2, 36)),
    "reflected": (lambda: encoder("reflect"), (1, 2, 36)),
    "decoder": (decoder, (2, 8, 7)),
    "codec": (lambda: nn.Sequential(encoder(), decoder()), (1, 2, 30)),
    "recurrent": (lambda: nn.Sequential(Causal(3, 3, 2), Recurrent(3)), (2, 3, 11)),
    "video": (video, (2, 3, 6, 5, 4)),
    "pointwise": (lambda: nn.BatchNorm1d(3).eval(), (2, 3, 5)),
    "steps": (lambda: nn.Sequential(Causal(2, 2, 3), Says(lambda x: x[..., ::2])), (1, 2, 12)),
}


def pieces(length: int, seed: int) -> list[int]:
    """Lengths that add up: all 1, then drawn ones."""
    if not seed:
        return [1] * length
    draw = torch.Generator().manual_seed(seed)
    found: list[int] = []
    while sum(found) < length:
        found.append(min(int(torch.randint(1, 9, (1,), generator=draw)), length - sum(found)))
    return found


def streamed(s: StreamedModel, x: Tensor, lengths: list[int]) -> Tensor:
    made = [s(part) for part in x.split(lengths, 2)]
    rest = s.flush() if s.latency else None
    s.reset()
    return torch.cat(made if rest is None else [*made, rest], 2)


@pytest.mark.parametrize("name", MODELS)
def test_pieces_are_torchs_whole(name: str) -> None:
    made, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = made().eval(), torch.randn(shape)
    with torch.no_grad():
        want = model(x)
    s = transconv.streaming(model)
    for lengths in ([shape[2]], pieces(shape[2], 0), pieces(shape[2], 1), pieces(shape[2], 2)):
        torch.testing.assert_close(streamed(s, x, lengths), want, rtol=1e-5, atol=1e-5)
    assert s.latency == 0


@pytest.fixture
def rows_alike(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter with products of matrices that add each row's terms alike, as matrix units do:
    NumPy's depend on where a row lies."""
    from triton.runtime import interpreter

    def product(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        made = d.data.copy()
        for k in range(a.data.shape[-1]):
            made = made + a.data[..., :, k, None] * b.data[..., None, k, :]
        return interpreter.TensorHandle(made, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
    transconv.config.cpu, transconv.config.fallback = "interpret", "error"


BITS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "strided": (lambda: nn.Sequential(Causal(2, 4, 5), nn.ReLU(), Causal(4, 3, 4, s=2)), (2, 2, 14), 0),
    "dilated": (lambda: Residual(nn.Sequential(Causal(4, 4, 3, 2), nn.LeakyReLU())), (1, 4, 13), 0),
    "transposed": (lambda: Up(3, 4, 5, 2), (1, 3, 9), 0),
    "depthwise": (lambda: nn.Sequential(nn.ZeroPad1d((2, 0)), nn.Conv1d(4, 4, 3, groups=4)), (1, 4, 9), 0),
    "late": (lambda: nn.Conv1d(2, 4, 5, padding=2), (1, 2, 11), 2),
    "video": (lambda: Causal(2, 3, 3, ndims=3), (1, 2, 5, 4, 3), 0),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", BITS)
def test_pieces_have_the_bits_of_the_whole(name: str, rows_alike: None) -> None:
    made, shape, latency = BITS[name]
    torch.manual_seed(0)
    model, x = made().eval(), torch.randn(shape)
    s = transconv.streaming(model, latency=latency)
    whole = streamed(s, x, [shape[2]])
    with torch.no_grad():
        torch.testing.assert_close(whole, model(x), rtol=1e-5, atol=1e-5)
    for seed in (0, 1):
        assert torch.equal(streamed(s, x, pieces(shape[2], seed)), whole)
    found = transconv.stats(reset=True)
    assert set(found.native) == {"stream"}


def test_state_is_as_long_as_the_windows_reach() -> None:
    s = transconv.streaming(nn.Sequential(Causal(2, 3, 7), Causal(3, 4, 3, 4), Up(4, 2, 6, 2)))
    for length in (1, 5, 20):
        s(torch.randn(1, 2, length))
    assert [shape[-1] for shape in s.state.values()] == [6, 8, 3]


def test_a_late_result_is_the_whole() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.ReLU(), nn.Conv1d(3, 3, 4, 2, padding=1))
    x = torch.randn(1, 2, 20)
    s = transconv.streaming(model, latency=5)
    with torch.no_grad():
        want = model(x)
    for seed in (0, 1):
        torch.testing.assert_close(streamed(s, x, pieces(20, seed)), want)
    s(x)
    assert 0 < s.latency <= 5 and s.hop == 2
    with pytest.raises(Unsupported, match=rf"'0' looks ahead.*latency={s.latency}\)"):
        transconv.streaming(model, latency=s.latency - 1)(x)


def attention(x: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y).transpose(1, 2)


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "ahead": (
        nn.Conv1d(2, 2, 3, padding=1),
        r"convolution looks ahead.*pad on the left alone.*latency=1\)",
    ),
    "tail": (nn.ConvTranspose1d(2, 2, 4, 2), "convolution looks ahead"),
    "norm": (nn.GroupNorm(1, 2), "native_group_norm cannot be streamed: the norm goes over time"),
    "training": (nn.BatchNorm1d(2), r"writes to its tensor 'num_batches_tracked'.*call model.eval\(\)"),
    "mean": (
        Says(lambda x: x - x.mean(-1, keepdim=True)),
        "mean cannot be streamed: its sum goes over time",
    ),
    "attention": (Says(attention), "cannot be streamed: .*attention"),
    "positions": (
        Says(lambda x: x + torch.arange(x.shape[-1])),
        "add cannot be streamed: it reads a constant",
    ),
    "sum so far": (Says(lambda x: x.cumsum(-1)), "cumsum cannot be streamed: there is no rule for it"),
    "last rows": (Says(lambda x: x - x[..., -1:]), "slice cannot be streamed: it takes the last rows"),
    "backwards": (Says(lambda x: x.flip(-1)), "flip cannot be streamed"),
    "both ways": (Recurrent(2, both=True), "lstm of 'lstm' cannot be streamed: it also runs from the end"),
    "values": (Says(lambda x: x if x.sum() > 0 else -x), "reads values of the stream"),
    "loop": (
        Says(lambda x: torch.cat([p * 2 for p in x.split(1024, -1)], -1)),
        "split cannot be streamed: it cuts the stream in pieces|other operations for other lengths",
    ),
    "two results": (Says(lambda x: (x, x)), "the model returns 2 tensors; expected one"),  # type: ignore[arg-type,return-value]
    "end padded": (nn.ReplicationPad1d((0, 1)), "it repeats the last 1 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message):
        transconv.streaming(model)(torch.randn(1, 2, 5))


def test_wrong_calls() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got function"):
        transconv.streaming(F.relu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="latency: expected a number of rows from 0 on, got -1"):
        transconv.streaming(nn.ReLU(), latency=-1)
    s = transconv.streaming(Causal(2, 2, 3))
    with pytest.raises(TensorError, match="time in dim 2, got"):
        s(torch.randn(2, 2))
    s(torch.randn(1, 2, 3))
    with pytest.raises(TensorError, match=r"inputs of shape \[1, 2, -1\].*got \[2, 2, 3\].*reset\(\)"):
        s(torch.randn(2, 2, 3))
    s.reset()
    assert s(torch.randn(2, 2, 3)).shape == (2, 2, 3)


def test_weights_that_change_between_streams_are_taken() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 1))
    s, x = transconv.streaming(model), torch.randn(1, 2, 4)
    s(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    s.reset()
    torch.testing.assert_close(s(x), model(x).detach())


@pytest.mark.parametrize("viewed", [False, True])
def test_callers_may_write_to_inputs_and_results(viewed: bool) -> None:
    view = Says(lambda x: torch.cat([x, F.pad(x, (2, 0))[..., :-2]], 1).transpose(0, 1))
    model = nn.Sequential(Causal(2, 3, 4), *[view] * viewed)
    x, buffer, found = torch.randn(1, 2, 9), torch.empty(1, 2, 1), []
    s = transconv.streaming(model)
    for row in x.split(1, 2):
        y = s(buffer.copy_(row))
        found.append(y.clone())
        y.zero_()
    torch.testing.assert_close(torch.cat(found, 2), model(x).detach())


def test_no_rows_yet() -> None:
    s = transconv.streaming(Causal(2, 3, 4, s=4))
    assert [s(torch.randn(1, 2, 1)).shape[2] for _ in range(9)] == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert s(torch.randn(1, 2, 0)).shape == (1, 3, 0)


@pytest.mark.parametrize(("k", "stride", "pad"), [(4, 2, 0), (16, 8, 4), (3, 3, 0), (7, 2, 2), (1, 1, 0)])
def test_relations_are_those_of_counting(k: int, stride: int, pad: int) -> None:
    """What each row reads, found by trying all rows and taps."""
    assert ROWS > 40
    of_window = TimeRelation.of_window(k, stride, 1, pad)
    transposed = TimeRelation.of_transposed_window(k, stride, 1, pad)
    for row in range(30):
        taps = [row * stride - pad + tap for tap in range(k)]
        assert of_window.needs(AxisSpan(row, row + 1)) == (min(taps), max(taps) + 1)
        read = [i for i in range(-30, 60) for tap in range(k) if i * stride + tap - pad == row]
        found = transposed.needs(AxisSpan(row, row + 1))
        assert found.stop == max(read) + 1 and found.start <= min(read)
        ready = [n for n in range(60) if transposed.ready(n) > row]
        assert min(ready) == max([found.stop, *(transposed.needs(AxisSpan(0, row + 1)).stop,)])


class Replayed(TorchDispatchMode):
    """What records a step where there is no GPU. A replay runs the recorded operations on the tensors that
    they had, and writes their results to where the first run left them, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, run: Run, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
        self.operations = operations = []
        with self:
            made = run()
        assert operations

        def replay() -> None:
            self.replays += 1
            for function, args, kwargs, results in operations:
                for own, t in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(own, Tensor) and own.data_ptr() != t.data_ptr():
                        own.copy_(t)

        return made, replay

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, tree_leaves(made)))
        return made


def recording(s: StreamedModel, x: Tensor) -> Replayed:
    """A stream's steps are recorded from here on."""
    s(x[:, :, :1])
    s.reset()
    assert s._plan is not None
    recorder = Replayed()
    s._plan.graphs = StepGraphs(recorder)
    return recorder


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_have_the_bits_of_others(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    x = torch.randn(*shape[:2], 48, *shape[3:])
    plain, s = transconv.streaming(model), transconv.streaming(model)
    recorder = recording(s, x)
    for lengths in ([1] * 48, [2] * 24, [4] * 12, [3, 5] * 6, [1, 2, 1, 4] * 6):
        for stream in (plain, s):
            stream.reset()
        wanted, found = [], []
        for at, part in enumerate(x.split(lengths, 2)):
            want, got = plain(part), s(part)
            assert torch.equal(got, want), (lengths, at)
            if at % 2:
                got.zero_()  # a result is the caller's
            else:
                wanted.append(want)
                found.append(got)
            if at == 7:
                plain = copy.deepcopy(plain)
        assert torch.equal(torch.cat(found, 2), torch.cat(wanted, 2)), lengths
        assert (s._plan and s._plan.state_now.numbers) == (plain._plan and plain._plan.state_now.numbers)
    assert recorder.replays > 30


class FirstRow(nn.Module):
    """Rows less the first one, which is another in each stream, and by a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x - x[:, :, :1])


@pytest.mark.parametrize("name", [*MODELS, "first row"])
def test_recorded_steps_of_other_streams(name: str) -> None:
    """Each of other numbers, so that nothing of a stream stays behind in the graphs."""
    make, shape = MODELS.get(name, (FirstRow, (2, 3)))
    model = make().eval()
    plain, s = transconv.streaming(model), transconv.streaming(model)
    recorder = recording(s, torch.randn(*shape[:2], 48, *shape[3:]))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(*shape[:2], 48, *shape[3:])
        for lengths in ([4] * 12, [1, 2, 1, 4] * 6):
            plain.reset()
            s.reset()
            for part in x.split(lengths, 2):
                assert torch.equal(s(part), plain(part)), (seed, lengths)
    assert recorder.replays > 30


def test_a_step_that_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, x = encoder().eval(), torch.randn(1, 2, 64)
    plain, s = transconv.streaming(model), transconv.streaming(model)
    recording(s, x)

    def fails(run: Run, device: torch.device) -> tuple[list[Tensor], Callable[[], object]]:
        run()
        raise RuntimeError("an operation waits")

    assert s._plan is not None
    s._plan.graphs = StepGraphs(fails)
    for part in x.split(8, 2):
        assert torch.equal(s(part), plain(part))
    assert s._plan.graphs.why_not == "RuntimeError: an operation waits"
    assert len(caplog.records) == 1 and "without a CUDA graph" in caplog.text
