"""Drawn models piece by piece: the numbers of rows and the values are torch's for the whole, or the model
is refused; what becomes of a stream that is copied, saved, or fails."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import transconv
from tests.distributed.test_streams import Causal, Residual, Says
from transconv.errors import TensorError, Unsupported

Tensor = torch.Tensor


def layer(c: int, draw: random.Random) -> nn.Module:
    """A layer of c channels. Slices, paddings and groups of rows may be longer than a stream."""
    k, s, d, n = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 4)
    low, high, p = draw.randint(-2, 5), draw.randint(-2, 3), draw.randint(0, 4)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Conv1d(c, c, k, s, p, d, draw.choice([1, c])),
        lambda: nn.ConvTranspose1d(c, c, k, s, min(p, k - 1), 0, draw.choice([1, c]), True, d),
        lambda: nn.ConstantPad1d((low, high), 1.5),
        lambda: nn.ReplicationPad1d((p, 0)),
        lambda: nn.ReflectionPad1d((p, 0)),
        lambda: nn.Upsample(scale_factor=s),
        lambda: nn.PReLU(c),
        lambda: Residual(Causal(c, c, k, d)),
        lambda: Says(lambda x: x[..., n::s]),
        lambda: Says(lambda x: x[..., :-n]),
        lambda: Says(lambda x: F.pad(x, (n, -n))),
        lambda: Says(lambda x: x[..., n:] * x[..., :-n]),
        lambda: Says(lambda x: torch.cat([x[..., :n], x], -1)),
        lambda: Says(lambda x: x * x[..., n : n + 1]),
        lambda: Says(lambda x: torch.stack([x, -x], -1).flatten(-2)),
        lambda: Says(lambda x: x.unflatten(-1, (-1, s)).sum(-1)),
    ]
    return draw.choice(kinds)()


@pytest.mark.parametrize("seed", range(6))
def test_drawn_models_are_torchs_or_refused(seed: int) -> None:
    compared = 0
    for trial in range(25):
        draw = random.Random(100 * seed + trial)
        torch.manual_seed(trial)
        c, rows = draw.randint(1, 3), draw.choice([draw.randint(1, 9), draw.randint(10, 50)])
        model = nn.Sequential(*(layer(c, draw) for _ in range(draw.randint(1, 4))))
        x = torch.randn(draw.randint(1, 2), c, rows)
        lengths: list[int] = []
        while sum(lengths) < rows:
            lengths.append(min(draw.choice([0, 1, 1, 2, 3, 7, rows]), rows - sum(lengths)))
        s = transconv.streaming(model, latency=200)
        try:
            with torch.no_grad():
                want = model(x)
        except (RuntimeError, IndexError):  # torch takes no stream of this length
            continue
        try:
            made = [*(s(part) for part in x.split(lengths, 2)), s.flush()]
        except Unsupported:
            continue
        except TensorError as error:
            assert "reads the first" in str(error), model
            continue
        found = torch.cat([y for y in made if y is not None], 2)
        assert found.shape == want.shape, model
        assert torch.allclose(found, want, rtol=1e-4, atol=1e-4), model
        compared += 1
    assert compared > 5


GROUPS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "pairs": (lambda x: x.unflatten(-1, (-1, 2)).sum(-1), 12, 2),
    "threes": (lambda x: x.unflatten(-1, (-1, 3)).amax(-1), 12, 3),
    "pairs behind a first row": (lambda x: x[..., 1:].unflatten(-1, (-1, 2)).sum(-1), 13, 2),
}


@pytest.mark.parametrize("name", GROUPS)
def test_rows_that_go_in_groups(name: str) -> None:
    says, rows, group = GROUPS[name]
    x = torch.randn(1, 2, rows)
    s = transconv.streaming(Says(says), latency=9)
    made = [*(s(part) for part in x.split(5, 2)), s.flush()]
    torch.testing.assert_close(torch.cat([y for y in made if y is not None], 2), says(x))
    assert s.hop == group


LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "pieces of 5000 rows": lambda x: torch.cat(
        [x[..., i : i + 5000] - x[..., i : i + 1] for i in range(0, x.shape[-1], 5000)], -1
    ),
    "an end at row 5000": lambda x: x[..., :5000] * 2,
    "an end where rows are whole threes": lambda x: (
        x[..., : x.shape[-1] // 3 * 3].mean(-1, keepdim=True) * x
    ),
    "a row in the middle": lambda x: x - x[..., x.shape[-1] // 2].unsqueeze(-1),
    "the second half": lambda x: x[..., x.shape[-1] // 2 :] * 2,
    "a norm of a length": lambda x: F.layer_norm(x, (9,)),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_models_of_certain_lengths_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="other operations for|wherever the|fails for inputs|evenly"):
        transconv.streaming(Says(LENGTHS[name]))(torch.randn(1, 2, 9))


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.cell = Causal(2, 3, 4, 2), kind(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cell(self.first(x).permute(2, 0, 1))[0].permute(1, 2, 0)
        return y / (1 + x[..., :1].abs().mean())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("saved", [False, True])
def test_copies_go_on_with_weights_of_their_own(kind: type[nn.RNNBase], saved: bool) -> None:
    x, model = torch.randn(2, 2, 17), Cell(kind).eval()
    with torch.no_grad():
        want = model(x)
    s = transconv.streaming(model)
    made = [s(x[..., :4]), s(x[..., 4:9])]
    other = pickle.loads(pickle.dumps(s)) if saved else copy.deepcopy(s)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(torch.cat([*made, other(x[..., 9:])], 2), want, rtol=1e-5, atol=1e-5)


def test_a_piece_that_failed_is_not_forgotten() -> None:
    model = Causal(2, 3, 4)
    s, x = transconv.streaming(model), torch.randn(1, 2, 9)
    s(x[..., :4])
    model.double()
    with pytest.raises(RuntimeError):
        s(x[..., 4:])
    model.float()
    with pytest.raises(TensorError, match=r"a piece of this stream failed, rows.*reset\(\)"):
        s(x[..., 4:])
    s.reset()
    torch.testing.assert_close(s(x), model(x).detach())


def test_a_stream_that_ends_too_soon() -> None:
    s = transconv.streaming(Says(lambda x: x - x[..., 2:3]))
    assert s(torch.randn(1, 2, 2)).shape == (1, 2, 0)
    with pytest.raises(TensorError, match="slice reads the first 3 rows; the stream had 2"):
        s.flush()
    assert s(torch.randn(1, 2, 3)).shape == (1, 2, 3)


@pytest.mark.parametrize("first", [False, True])
def test_autocast_and_inference_mode(first: bool) -> None:
    model, x = nn.Sequential(nn.ZeroPad1d((3, 0)), nn.Conv1d(2, 3, 4), nn.ReLU()), torch.randn(1, 2, 9)
    s = transconv.streaming(model)
    for cast in (first, not first):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            torch.testing.assert_close(torch.cat([s(x[..., :4]), s(x[..., 4:])], 2), model(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            with pytest.raises(TensorError, match=r"autocast torch.bfloat16.*reset\(\)"):
                s(x)
        s.reset()


def test_parts_and_numbers_that_change_between_streams_are_taken() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.shift, self.scale = nn.ReLU(), torch.ones(2, 1), 2.0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x) * self.scale + self.shift
            return y

    model, x = Model(), torch.randn(1, 2, 5)
    s = transconv.streaming(model)
    for name, value in {"scale": 3.0, "shift": torch.zeros(2, 1), "inner": nn.Sigmoid()}.items():
        s(x)
        setattr(model, name, value)
        s.reset()
        torch.testing.assert_close(s(x), model(x))
        s.reset()


def test_random_numbers_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"draws random numbers; call model.eval\(\) first"):
        transconv.streaming(nn.Dropout())(torch.randn(1, 2, 5))
