"""Draws small graphs of operations that the table has, and makes a failing one smaller.

    python -m tests.graph.draw --n 500 --seed 1
    python -m tests.graph.draw --n 50 --shapes 4 --dynamic none,true    by torch.compile, at several shapes

A graph is a list of operations, each with the numbers of its operands: the inputs first, then results. It
may have several sets of inputs, of other sizes: an operation is drawn that all of them allow, and takes
the sizes that it needs from its operands.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import fx

Tensor = torch.Tensor
MOST = 600  # elements of a value


@dataclass(frozen=True)
class Step:
    """An operation of values; ``says``: it, as a text."""

    of: tuple[int, ...]
    does: Callable[..., Any]
    says: str


@dataclass(frozen=True)
class Drawn:
    """A function of tensors. ``leaves``: whether reductions leave with products, whatever it costs;
    ``others``: further sets of inputs, of other sizes; ``batched``: how many inputs, the first ones, have
    images along their first dim, which no operation joins."""

    inputs: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    leaves: bool = False
    others: tuple[tuple[Tensor, ...], ...] = ()
    batched: int = 0

    def __call__(self, *given: Any) -> Any:
        values = list(given)
        for step in self.steps:
            values.append(step.does(*[values[i] for i in step.of]))
        return tuple(values[i] for i in self.outputs)

    def traced(self) -> fx.GraphModule:
        """As a graph."""
        graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        given = [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(self.inputs))]
        graph.output(tuple(p.node for p in self(*given)))
        return fx.GraphModule(torch.nn.Module(), graph)

    def __str__(self) -> str:
        n = len(self.inputs)
        sets = [self.inputs, *self.others]
        lines = [
            f"x{i}: {', '.join(str(list(given[i].shape)) for given in sets)} "
            f"{str(x.dtype).removeprefix('torch.')}"
            for i, x in enumerate(self.inputs)
        ]
        lines += [
            f"x{n + i} = {s.says} of {' '.join(f'x{k}' for k in s.of)}" for i, s in enumerate(self.steps)
        ]
        return "\n".join([*lines, f"return {' '.join(f'x{i}' for i in self.outputs)}"])


class Draw:
    """A random graph. ``count``: of the sets of inputs that it has."""

    def __init__(self, seed: int, count: int = 1) -> None:
        self.chance = random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.count = count
        self.inputs: list[list[Tensor]] = []  # of each input, one for each set
        self.steps: list[Step] = []
        self.known: list[list[Tensor]] = []

    def drawn(self, gradients: bool = True, together: bool = True) -> Drawn:
        """``together``: whether an operation may join the images of a batch."""
        self.gradients, self.together = gradients, together
        shapes = self.shapes(self.chance.choice([2, 3, 4, 4]))
        self.input(*shapes)
        if self.chance.random() < 0.5:
            self.input(*shapes)
        self.images = {*range(1000, 1000 + len(self.inputs))}
        count, tries = self.chance.randint(3, 12), 0
        while len(self.steps) < count and tries < 100:
            tries += 1
            step = self.step(self.chance.choice(self.floats()))
            if step is not None:
                self.add(step)
        total = len(self.steps)
        first = len(self.inputs)

        # The inputs that operations asked for on the way were numbered from 1000 on.
        def place(i: int) -> int:
            return i - 1000 if i >= 1000 else i + first

        steps = tuple(replace(s, of=tuple(place(i) for i in s.of)) for s in self.steps)
        others = self.chance.sample(range(total), self.chance.randint(0, min(2, total - 1)))
        outputs = tuple(first + i for i in dict.fromkeys([*others, total - 1]))
        given, *more = zip(*self.inputs, strict=True)
        return Drawn(
            given,
            steps,
            outputs,
            self.chance.random() < 0.5,
            tuple(more),
            0 if together else sum(i >= 1000 for i in self.images),
        )

    def shapes(self, rank: int) -> list[list[int]]:
        """Of each set; most dims differ from set to set."""
        found = [
            [self.chance.choice([2, 3, 4]) for _ in range(2)]
            + [self.chance.choice([4, 5, 6]) for _ in range(rank - 2)]
        ]
        if not self.together:
            found[0][0] = self.chance.choice([4, 6])
        if self.count > 1:
            moves = [
                d == 0 or self.chance.random() < (0.3 if d == 1 and rank > 2 else 0.8) for d in range(rank)
            ]
            found += [
                [
                    self.chance.randint(2, 9) if moved else n
                    for n, moved in zip(found[0], moves, strict=True)
                ]
                for _ in range(self.count - 1)
            ]
        return found

    # -- values: results by their number, inputs from 1000 on -------------------------------------

    def input(self, *shapes: Sequence[int]) -> int:
        """An input of a shape for each set."""
        self.inputs.append(
            [
                torch.randn(shape, generator=self.random, dtype=torch.float64).requires_grad_(
                    self.gradients
                )
                for shape in shapes
            ]
        )
        return 1000 + len(self.inputs) - 1

    def asked(self, i: int, shape: Callable[[Tensor], Sequence[int]]) -> int:
        """An input of a shape that a value tells."""
        return self.input(*[shape(x) for x in self.values(i)])

    def index(self, i: int, d: int, count: int) -> int:
        self.inputs.append(
            [torch.randint(0, x.shape[d], (count,), generator=self.random) for x in self.values(i)]
        )
        return 1000 + len(self.inputs) - 1

    def values(self, i: int) -> list[Tensor]:
        """A value for each set of inputs."""
        return self.inputs[i - 1000] if i >= 1000 else self.known[i]

    def value(self, i: int) -> Tensor:
        """A value for the first set of inputs."""
        return self.values(i)[0]

    def least(self, i: int, d: int) -> int:
        """The smallest size of a dim."""
        return min(x.shape[d] for x in self.values(i))

    def floats(self) -> list[int]:
        found = [*range(1000, 1000 + len(self.inputs)), *range(len(self.known)), *range(len(self.known))]
        near = [i for i in found if self.value(i).is_floating_point() and self.value(i).dim()]
        return near[-5:] or near

    def add(self, step: Step) -> None:
        try:
            with torch.no_grad():
                made = [step.does(*given) for given in zip(*map(self.values, step.of), strict=True)]
        except (RuntimeError, IndexError, ValueError):
            return
        if all(
            0 < x.numel() <= MOST and bool(torch.isfinite(x).all()) and x.abs().max() < 1e4 for x in made
        ) and (self.together or self.is_apart(step, made[0])):
            self.images.add(len(self.steps))
            self.steps.append(step)
            self.known.append(made)

    def is_apart(self, step: Step, made: Tensor) -> bool:
        """Whether an operation gives the same of each half of a batch."""
        count = self.inputs[0][0].shape[0]
        try:
            with torch.no_grad():
                halves = [
                    step.does(
                        *[
                            self.value(i).chunk(2)[half] if i in self.images else self.value(i)
                            for i in step.of
                        ]
                    )
                    for half in (0, 1)
                ]
        except (RuntimeError, IndexError, ValueError):
            return False
        return (
            made.dim() > 0
            and made.shape[0] == count
            and all(h.dim() == made.dim() and 2 * h.shape[0] == count for h in halves)
            and bool(torch.allclose(torch.cat(halves).double(), made.double()))
        )

    def step(self, i: int) -> Step | None:
        kinds = [
            self.pointwise,
            self.pair,
            self.view,
            self.view,
            self.pad,
            self.joined,
            self.reduction,
            self.norm,
            self.window,
            self.product,
            self.product,
            self.gathered,
            self.counted,
        ]
        return self.chance.choice(kinds)(i)

    def one(self, i: int, says: str, does: Callable[..., Any]) -> Step:
        return Step((i,), does, says)

    def dim(self, i: int) -> int:
        return self.chance.randrange(self.value(i).dim())

    # -- kinds of operations ---------------------------------------------------------------------

    def pointwise(self, i: int) -> Step:
        c = round(self.chance.uniform(-2, 2), 2)
        return self.one(
            i,
            *self.chance.choice(
                [
                    ("relu", torch.relu),
                    ("silu", F.silu),
                    ("tanh", torch.tanh),
                    ("gelu", F.gelu),
                    ("sigmoid", torch.sigmoid),
                    ("abs", torch.abs),
                    ("neg", torch.neg),
                    ("hardswish", F.hardswish),
                    ("softplus", F.softplus),
                    ("elu", F.elu),
                    (f"add {c}", lambda x: x + c),
                    (f"mul {c}", lambda x: x * c),
                    (f"clamp at {c}", lambda x: x.clamp(min=c)),
                    (f"rsub {c}", lambda x: c - x),
                    ("square", lambda x: x**2),
                    ("sin", torch.sin),
                    ("leaky_relu", lambda x: F.leaky_relu(x, 0.2)),
                    ("clone", lambda x: x.clone()),
                    (f"where above {c}", lambda x: torch.where(x > c, x, x * 0.5)),
                    ("sqrt of square", lambda x: (x * x + 1).sqrt()),
                    ("reciprocal", lambda x: 1 / (x * x + 1)),
                ]
            ),
        )

    def pair(self, i: int) -> Step | None:
        others = [
            k
            for k in self.floats()
            if all(_fits(y.shape, x.shape) for x, y in zip(self.values(i), self.values(k), strict=True))
        ]
        k = self.chance.choice(others)
        says, does = self.chance.choice(
            [
                ("add", torch.add),
                ("sub", torch.sub),
                ("mul", torch.mul),
                ("maximum", torch.maximum),
                ("minimum", torch.minimum),
                ("add twice", lambda a, b: torch.add(a, b, alpha=2)),
                ("where less", lambda a, b: torch.where(a < b, a, b)),
            ]
        )
        return Step((i, k), does, says)

    def view(self, i: int) -> Step:
        d, rank = self.dim(i), self.value(i).dim()
        n = self.least(i, d)
        order = self.chance.sample(range(rank), rank)
        begin = self.chance.randrange(n)
        step = self.chance.choice([1, 1, 2])
        last = self.chance.randrange(max(1, rank - 1))
        shift = self.chance.randrange(n)
        choices = [
            (f"permute {order}", lambda x: x.permute(order)),
            (f"flip {d}", lambda x: x.flip(d)),
            (f"roll {shift} along {d}", lambda x: x.roll(shift, d)),
            (
                f"slice {begin}::{step} along {d}",
                lambda x: x[(slice(None),) * d + (slice(begin, None, step),)],
            ),
            (f"select {begin} along {d}", lambda x: x.select(d, begin)),
            (f"unsqueeze {d}, expand", lambda x: x.unsqueeze(d).expand(*[-1] * d, 2, *[-1] * (rank - d))),
            (f"flatten from {last}", lambda x: x.flatten(last)),
            ("contiguous", lambda x: x.contiguous()),
            ("reshape to a column", lambda x: x.reshape(-1, 1)),
        ]
        for by in (2, 3):
            if all(x.shape[d] % by == 0 and x.shape[d] > by for x in self.values(i)):
                choices.append(
                    (f"unflatten {d} by {by}", lambda x, by=by: x.unflatten(d, (by, x.shape[d] // by)))
                )
        half = (slice(None),) * d
        choices += [
            (f"first half along {d}", lambda x: x[(*half, slice(0, x.shape[d] // 2 + 1))]),
            (f"last {begin + 1} along {d}", lambda x: x[(*half, slice(-begin - 1, None))]),
            (f"split in two along {d}", lambda x: x.split((x.shape[d] + 1) // 2, d)[0]),
        ]
        if rank == 2:
            choices.append(("transpose", lambda x: x.t()))
        return self.one(i, *self.chance.choice(choices))

    def pad(self, i: int) -> Step:
        x = self.value(i)
        a, b, c = (self.chance.randrange(3) for _ in range(3))
        choices = [
            (f"pad {a} {b}", lambda x: F.pad(x, (a, b), value=float(c))),
            (f"crop and pad {a}", lambda x: F.pad(x, (a, -1))),
        ]
        if x.dim() == 4:
            choices += [
                (f"{mode} pad {a} {b} {c}", lambda x, mode=mode: F.pad(x, (a, b, c, 1), mode=mode))
                for mode in ("reflect", "replicate")
            ]
        return self.one(i, *self.chance.choice(choices))

    def joined(self, i: int) -> Step:
        d = self.dim(i)
        others = [
            k
            for k in self.floats()
            if all(
                y.dim() == x.dim()
                and all(n == m or e == d for e, (n, m) in enumerate(zip(y.shape, x.shape, strict=True)))
                for x, y in zip(self.values(i), self.values(k), strict=True)
            )
        ]
        return Step((i, self.chance.choice(others)), lambda a, b: torch.cat([a, b], d), f"cat along {d}")

    def reduction(self, i: int) -> Step:
        d, rank = self.dim(i), self.value(i).dim()
        dims = sorted(self.chance.sample(range(rank), self.chance.randint(1, rank)))
        keep = self.chance.random() < 0.5
        # Which of two values is greater is not compared where they differ in their last bits alone.
        places = [
            (f"argmax {d}", lambda x: x.argmax(d)),
            (f"argmin {d} of it twice", lambda x: (x * 2).argmin(d)),
            ("argmax of all", lambda x: x.argmax()),
            (f"maximum along {d}", lambda x: x.max(d)[0]),
            (f"place of the minimum along {d}", lambda x: x.min(d)[1]),
        ]
        less = self.chance.choice([0, 1, 2])
        return self.one(
            i,
            *self.chance.choice(
                [
                    *(places if i >= 1000 else []),
                    (f"sum {dims} {keep}", lambda x: x.sum(dims, keepdim=keep)),
                    (f"mean {dims} {keep}", lambda x: x.mean(dims, keepdim=keep)),
                    (f"amax {dims} {keep}", lambda x: x.amax(dims, keepdim=keep)),
                    (f"var {dims} {keep}", lambda x: x.var(dims, keepdim=keep, correction=0)),
                    (
                        f"std {dims} {keep} less {less}",
                        lambda x: x.std(dims, keepdim=keep, correction=less),
                    ),
                    (
                        f"normalized along {d}",
                        lambda x: (x - x.mean(d, keepdim=True)) / (x.std(d, keepdim=True) + 0.1),
                    ),
                    (
                        f"without the mean along {d}",
                        lambda x: x - torch.std_mean(x, d, keepdim=True, correction=0)[1],
                    ),
                    (f"softmax {d}", lambda x: x.softmax(d)),
                    (f"log_softmax {d}", lambda x: x.log_softmax(d)),
                    (f"logsumexp {d}", lambda x: x.logsumexp(d)),
                ]
            ),
        )

    def norm(self, i: int) -> Step | None:
        x = self.value(i)
        if x.dim() > 2 and self.least(i, 1) % 2 == 0 and self.chance.random() < 0.5:
            features = [self.asked(i, lambda x: (x.shape[1],)) for _ in range(2)]
            return Step((i, *features), lambda x, w, b: F.group_norm(x, 2, w, b), "group_norm")
        if x.dim() > 2 and self.chance.random() < 0.5:
            # torch's decomposition gives a permuted batch other strides than its kernel does.
            return Step(
                (i,), lambda x: F.batch_norm(x.contiguous(), None, None, training=True), "batch_norm"
            )
        last = [self.asked(i, lambda x: (x.shape[-1],)) for _ in range(2)]
        return Step((i, *last), lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), "layer_norm")

    def window(self, i: int) -> Step | None:
        x = self.value(i)
        if x.dim() != 4:
            return None
        return self.one(
            i,
            *self.chance.choice(
                [
                    ("upsample", lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")),
                    ("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
                    ("avg_pool", lambda x: F.avg_pool2d(x, 2)),
                    ("avg_pool 3", lambda x: F.avg_pool2d(x, 3, 1, 1)),
                    ("max_pool", lambda x: F.max_pool2d(x, 3, 2, 1)),
                    ("global average", lambda x: F.adaptive_avg_pool2d(x, 1)),
                ]
            ),
        )

    def product(self, i: int) -> Step | None:
        x = self.value(i)
        if x.dim() == 4 and self.chance.random() < 0.7:
            stride, k = self.chance.choice([1, 1, 2]), self.chance.choice([1, 3])
            if self.chance.random() < 0.2:
                return Step(
                    (i, self.asked(i, lambda x: (x.shape[1], 2, k, k))),
                    lambda x, w: F.conv_transpose2d(x, w, stride=stride, padding=k // 2),
                    f"conv_transpose {k} {stride}",
                )
            if self.chance.random() < 0.2:
                return Step(
                    (i, self.asked(i, lambda x: (x.shape[1], 1, k, k))),
                    lambda x, w: F.conv2d(x, w, stride=stride, padding=k // 2, groups=x.shape[1]),
                    f"depthwise {k} {stride}",
                )
            weight = self.asked(i, lambda x: (3, x.shape[1], k, k))
            return Step(
                (i, weight, self.asked(i, lambda x: (3,))),
                lambda x, w, b: F.conv2d(x, w, b, stride=stride, padding=k // 2),
                f"conv {k} {stride}",
            )
        if x.dim() == 3 and self.chance.random() < 0.5:
            return Step((i, self.asked(i, lambda x: (x.shape[0], x.shape[2], 3))), torch.bmm, "bmm")
        weight = self.asked(i, lambda x: (4, x.shape[-1]))
        return Step((i, weight, self.asked(i, lambda x: (4,))), F.linear, "linear")

    def gathered(self, i: int) -> Step:
        d = self.dim(i)
        return Step((i, self.index(i, d, 3)), lambda x, j: x.index_select(d, j), f"index_select {d}")

    def counted(self, i: int) -> Step:
        """What numbers of positions, and sizes, are made of."""
        d, rank = self.dim(i), self.value(i).dim()

        def places(x: Any) -> Any:
            return torch.arange(x.shape[d], dtype=x.dtype, device=x.device).view(-1, *[1] * (rank - d - 1))

        return self.one(
            i,
            *self.chance.choice(
                [
                    (f"add places along {d}", lambda x: x + places(x)),
                    (f"over the size of {d}", lambda x: x / x.shape[d]),
                    (f"times the size of {d}", lambda x: x * (x.shape[d] - 1)),
                    (f"sum along {d} over its size", lambda x: x.sum(d, keepdim=True) / x.shape[d]),
                    (f"ones beside {d}", lambda x: torch.cat([x, x.new_ones(x.shape)], d)),
                    (
                        f"half of the places along {d}",
                        lambda x: torch.where(places(x) < x.shape[d] // 2, x, -x),
                    ),
                ]
            ),
        )


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    try:
        return torch.broadcast_shapes(tuple(one), tuple(other)) is not None
    except RuntimeError:
        return False


# -- a failing graph, made smaller -----------------------------------------------------------------


def smaller(failing: Drawn, fails: Callable[[Drawn], bool]) -> Drawn:
    """A graph that fails, of which no part can be left out so that it still does."""
    while (found := next((d for d in _parts(failing) if fails(d)), None)) is not None:
        failing = found
    return failing


def _parts(whole: Drawn) -> list[Drawn]:
    """Graphs with an output or an operation less."""
    n = len(whole.inputs)
    found = [replace(whole, outputs=(i,)) for i in whole.outputs if len(whole.outputs) > 1]
    for at in reversed(range(len(whole.steps))):
        gone = n + at

        def moved(i: int, gone: int = gone, to: int = whole.steps[at].of[0]) -> int:
            i = to if i == gone else i
            return i - (i > gone)

        steps = [replace(s, of=tuple(map(moved, s.of))) for k, s in enumerate(whole.steps) if k != at]
        outputs = tuple(dict.fromkeys(o for o in map(moved, whole.outputs) if o >= n))
        if steps and outputs:
            found.append(replace(whole, steps=tuple(steps), outputs=outputs))
    return found


def why_wrong(drawn: Drawn, most: float = 1e-8) -> str:
    """What is wrong with a graph's results or gradients; empty if they are torch's, up to the roundings
    that they make larger."""
    from tests.graph.shaken import F64, movements

    why = _why_wrong(drawn, most)
    if "off by" not in why:
        return why
    return _why_wrong(drawn, most + 4 * max(movements(drawn, drawn.inputs, F64)))


def _why_wrong(drawn: Drawn, most: float) -> str:
    from tests.graph.meant import by_meaning, compare, traced
    from transconv.graph.regions import region_kernels
    from transconv.graph.regions.region_kernels import REFUSED, why_again

    try:
        with torch.no_grad():
            drawn(*drawn.inputs)
    except (RuntimeError, IndexError, ValueError):
        return ""  # no graph at all

    def at_any_price(kernel: Any, rates: Any) -> str:
        why = why_again(kernel, rates)
        return why if why == REFUSED or not drawn.leaves else ""

    try:
        with by_meaning(), patch.object(region_kernels, "why_again", at_any_price):
            compare(drawn, traced(drawn.traced(), drawn.inputs), drawn.inputs, most)
    except Exception as error:  # any error is a failure that the caller shows
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Try many graphs; show the first wrong one, shrunk. With a device, by its kernels, all of them."""
    import transconv

    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=int, default=1, help="sets of inputs, of other sizes")
    parser.add_argument("--dynamic", default="none,true", help="of torch.compile: none, true, false")
    parser.add_argument(
        "--meaning",
        action="store_true",
        help="of --shapes: texts are executed in NumPy, which is faster; else kernels run",
    )
    parser.add_argument("--device", default="", help="cuda: kernels run there; else texts are executed")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="of --device (default: one for each core)",
    )
    parser.add_argument("--time-budget", type=float, default=90.0)
    parser.add_argument("--out", default="", help="a CSV file that gets a row of the counts")
    args = parser.parse_args()
    if args.shapes > 1:
        from tests.graph.draw_at_shapes import at_shapes

        at_shapes(args)
        return
    if args.device:
        from tests.graph.draw_on_device import on_device

        on_device(args)
        return
    transconv.config.cpu, transconv.config.fallback = "interpret", "error"
    for seed in range(args.seed, args.seed + args.n):
        drawn = Draw(seed).drawn()
        if why_wrong(drawn):
            least = smaller(drawn, lambda d: bool(why_wrong(d)))
            raise SystemExit(f"seed {seed}\n{least}\n{why_wrong(least)}")
    print(f"{args.n} graphs, results and gradients as torch's")


if __name__ == "__main__":
    main()
