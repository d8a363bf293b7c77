"""Drawn calls in invariant mode: one sample alone against the same sample inside a batch, bit for bit.

    conv2d(x[17, 24, 9, 11], w[32, 24, 3, 3]) f16: y and dx of each of 17 samples alone, and of a part of
    them, have the bits that they have inside; dw is that of 17 samples and 3 of zeros

A trial draws a function, its numbers, its types and 2 to 64 samples. Results and gradients along samples
are compared at all positions. What sums over samples is compared with the same samples and some of zeros
behind them, which add nothing: it differs where the number of samples decides which terms are added to
which."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import transconv
import transconv.functional as F
from transconv.verify.invariance.drawn_batches import bits_off

Tensor = torch.Tensor
Run = Callable[..., Tensor]
MOST_ZEROS = 3  # samples of zeros behind the others


@dataclass(frozen=True, slots=True)
class BatchTrial:
    """A call of ``run`` on tensors that hold samples, and on others that all samples share. ``summed``:
    whether gradients of the others are compared, which are sums over samples."""

    text: str
    run: Run
    samples: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()
    trains: bool = False
    summed: bool = False

    @property
    def count(self) -> int:
        """How many samples."""
        return len(self.samples[0])

    def results(self, samples: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What has a part for each sample, and what is a sum over them."""
        if not self.trains:
            return [self.run(*samples, *self.shared)], []
        given = [t.detach().clone().requires_grad_() for t in samples]
        others = [t.detach().clone().requires_grad_(self.summed) for t in self.shared]
        y = self.run(*given, *others)
        wanted = [*given, *(t for t in others if t.requires_grad)]
        found = torch.autograd.grad(y, wanted, _slope(y, given[0]))
        return [y.detach(), *found[: len(given)]], list(found[len(given) :])

    def differing(self, rng: random.Random) -> Iterator[str]:
        """In words, whatever has other bits than in the whole batch."""
        whole, sums = self.results(self.samples)
        at = rng.randrange(self.count)
        parts = [(i, i + 1) for i in range(self.count)]
        parts.append((at, rng.randint(at + 1, self.count)))
        for begin, end in parts:
            # Every second one as a view of the batch, which begins anywhere.
            part, _ = self.results(
                [t[begin:end] if begin % 2 else t[begin:end].clone() for t in self.samples]
            )
            for name, one, inside in zip(self.names, part, whole, strict=False):
                if number := bits_off(one, inside[begin:end]):
                    said = f"sample {begin}" if end == begin + 1 else f"samples {begin} to {end - 1}"
                    yield f"{name} of {said} of {self.count}: {number} of {one.numel()} elements differ"
        if sums:
            more = rng.randint(1, MOST_ZEROS)
            zeros = [_with_zeros(t, more) for t in self.samples]
            for i, (one, other) in enumerate(zip(sums, self.results(zeros)[1], strict=True)):
                if number := bits_off(one, other):
                    said = f"sum {i} over {self.count} samples and {more} of zeros"
                    yield f"{said}: {number} of {one.numel()} elements differ"

    @property
    def names(self) -> list[str]:
        """Those of what has a part for each sample."""
        return ["the result", *(f"gradient {i}" for i in range(len(self.samples)))]


def _with_zeros(t: Tensor, more: int) -> Tensor:
    """Samples and some of zeros behind them, in the same order of memory: another one is another
    problem."""
    strides = t.stride()
    order = sorted(range(t.dim()), key=lambda d: -strides[d])
    made = torch.empty_permuted((len(t) + more, *t.shape[1:]), order, dtype=t.dtype, device=t.device)
    made[: len(t)] = t
    made[len(t) :] = 0
    return made


def _slope(y: Tensor, x: Tensor) -> Tensor:
    """A gradient of a result that follows from each sample's own values: zeros for a sample of zeros."""
    own = x.detach().reshape(len(x), -1)[:, :1].to(y.dtype)
    made = torch.arange(y[0].numel(), device=y.device, dtype=torch.float32).cos().to(y.dtype)
    return (own * made).reshape(y.shape)


DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float16, torch.bfloat16, torch.float32)}
SIZES = {"cpu": (3, 8), "cuda": (5, 40)}  # of sides
CHANNELS = {"cpu": (1, 12), "cuda": (1, 200)}
COUNTS = {"cpu": (2, 6), "cuda": (2, 64)}


class CallDrawing:
    """Draws trials for a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.rng = device, random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.dtype = torch.float32

    def trial(self) -> BatchTrial:
        """The next one."""
        self.dtype = self.rng.choice(DTYPES[self.device])
        kinds = (self.convolution, self.convolution, self.product, self.norm, self.reduction, self.pool)
        return self.rng.choice(kinds)()

    def number(self, of: tuple[int, int]) -> int:
        return self.rng.randint(*of)

    def channels(self, share: int = 1) -> int:
        least, most = CHANNELS[self.device]
        return share * self.rng.choice([self.number((least, most)), min(most, 1 << self.number((0, 7)))])

    def tensor(self, *shape: int, last: bool = False) -> Tensor:
        made = torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)
        if last and len(shape) > 3:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            return made.contiguous(memory_format=formats[len(shape)])
        return made

    def count(self) -> int:
        return self.number(COUNTS[self.device])

    def convolution(self) -> BatchTrial:
        """A convolution or a transposed one, and its gradients."""
        rng, rank = self.rng, self.rng.choice((1, 2, 2, 3))
        groups = rng.choice((1, 1, 1, 2))
        given, made = self.channels(groups), self.channels(groups)
        if rng.random() < 0.2:
            groups = made = given
        least, most = SIZES[self.device]
        sides = [self.number((least, most if rank < 3 else max(least, most // 3))) for _ in range(rank)]
        window = [rng.choice((1, 2, 3)) for _ in range(rank)]
        last, transposed = rng.random() < 0.5, rng.random() < 0.3
        numbers = {"stride": rng.choice((1, 1, 2)), "padding": rng.choice((0, 1)), "groups": groups}
        numbers["padding"] = min(numbers["padding"], min(window) - 1) if transposed else numbers["padding"]
        name = f"conv{'_transpose' if transposed else ''}{rank}d"
        of, to = (given, made // groups) if transposed else (made, given // groups)
        x, w = self.tensor(self.count(), given, *sides, last=last), self.tensor(of, to, *window, last=last)
        function = getattr(transconv, name)
        return BatchTrial(
            f"{name} {list(x.shape)} {list(w.shape)} {numbers} {self.dtype}{' channels last' * last}",
            lambda x, w: function(x, w, None, **numbers),
            (x,),
            (w,),
            trains=rng.random() < 0.5,
            summed=rng.random() < 0.5,
        )

    def product(self) -> BatchTrial:
        """A product of matrices: with shared weights, or one for each sample."""
        rows, inner, columns = (self.channels() for _ in range(3))
        trains = self.rng.random() < 0.5
        if self.rng.random() < 0.3:
            a, b = self.tensor(count := self.count(), rows, inner), self.tensor(count, inner, columns)
            text = f"bmm {list(a.shape)} {list(b.shape)} {self.dtype}"
            return BatchTrial(text, F.bmm, (a, b), trains=trains)
        shape = (self.count(), inner) if self.rng.random() < 0.5 else (self.count(), rows, inner)
        x, w = self.tensor(*shape), self.tensor(columns, inner)
        text = f"linear {list(x.shape)} {list(w.shape)} {self.dtype}"
        return BatchTrial(text, F.linear, (x,), (w,), trains, trains)

    def norm(self) -> BatchTrial:
        """A normalization, of rows or of channels, or a softmax."""
        name = self.rng.choice(("layer_norm", "rms_norm", "softmax", "log_softmax", "group_norm"))
        rows, inner, trains = self.number((1, 9)), self.channels(), self.rng.random() < 0.5
        if name == "group_norm":
            groups = self.rng.choice((1, 2))
            x = self.tensor(self.count(), self.channels(groups), self.number(SIZES[self.device]), rows)
            text = f"{name} {list(x.shape)} {groups} groups {self.dtype}"
            return BatchTrial(text, lambda x: F.group_norm(x, groups), (x,), trains=trains)
        x = (
            self.tensor(self.count(), rows, inner)
            if self.rng.random() < 0.5
            else self.tensor(self.count(), inner)
        )
        runs: dict[str, Run] = {
            "layer_norm": lambda x: F.layer_norm(x, (inner,)),
            "rms_norm": lambda x: F.rms_norm(x, (inner,)),
            "softmax": lambda x: F.softmax(x, -1),
            "log_softmax": lambda x: F.log_softmax(x, -1),
        }
        return BatchTrial(f"{name} {list(x.shape)} {self.dtype}", runs[name], (x,), trains=trains)

    def reduction(self) -> BatchTrial:
        """A reduction of each sample."""
        name = self.rng.choice(("sum", "mean", "amax", "var", "logsumexp"))
        function, dim = getattr(F, name), self.rng.choice((1, 2))
        x = self.tensor(self.count(), self.channels() + 1, self.number(SIZES[self.device]))
        text = f"{name} {list(x.shape)} dim {dim} {self.dtype}"
        return BatchTrial(text, lambda x: function(x, dim), (x,))

    def pool(self) -> BatchTrial:
        """A pool."""
        name = self.rng.choice(("max_pool2d", "avg_pool2d"))
        function = getattr(F, name)
        x = self.tensor(
            self.count(), self.channels(), *(self.number(SIZES[self.device]) for _ in range(2))
        )
        return BatchTrial(f"{name} {list(x.shape)} {self.dtype}", lambda x: function(x, 2), (x,))


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """A trial's text, what differs, and why it was refused; a refusal is no difference."""

    text: str
    differs: tuple[str, ...] = ()
    refused: str = ""


def run_trials(count: int, device: str, seed: int = 0) -> Iterator[TrialOutcome]:
    """Drawn trials, one after another, in invariant mode."""
    drawing = CallDrawing(device, seed)
    with transconv.config.changed(invariant=True):
        for _ in range(count):
            trial = drawing.trial()
            try:
                yield TrialOutcome(trial.text, tuple(trial.differing(drawing.rng)))
            except transconv.errors.Unsupported as error:
                yield TrialOutcome(trial.text, refused=str(error))
