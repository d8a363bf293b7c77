"""Convolutions of DTensors compared with one process: cases, how they are drawn, and one that runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Tensor = torch.Tensor
Places = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """``placed``: for each mesh dim the dim along which input, weight and bias are sharded, or None."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    placed: tuple[tuple[int | None, int | None, int | None], ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    channels: tuple[int, int] = (8, 8)
    batch: int = 2
    biased: bool = True
    channels_last: bool = False

    def arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }
        return found | ({"output_padding": self.output_padding} if self.transposed else {})

    def tensors(self) -> list[Tensor | None]:
        """Input, weight and bias of small integers, so that every order of summation gives one result."""
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).double()

        first, second = self.channels[::-1] if not self.transposed else self.channels
        x = drawn(self.batch, self.channels[0], *self.sizes)
        w = drawn(first, second // self.groups, *self.kernel)
        if self.channels_last and len(self.sizes) == 2:
            x = x.to(memory_format=torch.channels_last)
        return [x, w, drawn(self.channels[1]) if self.biased else None]


FILTERS = [
    (3, 1, 1, 1, 1),
    (3, 1, 0, 1, 1),
    (3, 2, 1, 1, 1),
    (5, 1, 2, 1, 1),
    (4, 2, 1, 1, 1),
    (2, 2, 0, 1, 1),
    (3, 1, 2, 2, 1),
    (3, 1, 1, 1, 4),
    (7, 2, 3, 1, 1),
    (1, 1, 0, 1, 1),
]


def probed() -> list[Case]:
    """The 120 cases for which torch's own rule has no right answer: one spatial axis is sharded."""
    return [
        Case(
            (16,) * n,
            (k,) * n,
            (s,) * n,
            (p,) * n,
            (d,) * n,
            ((2 + axis, None, None),),
            transposed,
            (0,) * n,
            g,
        )
        for n in (1, 2, 3)
        for transposed in (False, True)
        for k, s, p, d, g in FILTERS
        for axis in range(n)
    ]


def drawn(seed: int, dims: int) -> Case:
    """A case for a mesh of so many dims: any sizes, also fewer rows than ranks, and kernels wider than a
    rank's rows; placements of which some cannot be served as they are."""
    r = random.Random(seed)
    while True:
        n = r.choice((1, 1, 2, 2, 3))
        transposed = r.random() < 0.4
        groups = r.choice((1, 1, 1, 2, 4, 8))
        channels = (8, 8) if groups > 1 else (r.randint(1, 9), r.randint(1, 9))
        one = [_line(r, transposed, 9 if n == 3 else 20) for _ in range(n)]
        sizes, kernel, stride, padding, dilation, extra = (tuple(x) for x in zip(*one, strict=True))
        whole = (
            not transposed
            and set(stride) == {1}
            and all((k - 1) * d % 2 == 0 for k, d in zip(kernel, dilation, strict=True))
        )
        placed = tuple(r.choice(_placements(n, transposed)) for _ in range(dims))
        case = Case(
            sizes,
            kernel,
            stride,
            "same" if whole and r.random() < 0.5 else padding,
            dilation,
            placed,
            transposed,
            extra if transposed else (),
            groups,
            channels,
            r.randint(1, 4),
            r.random() < 0.7,
            r.random() < 0.3,
        )
        x, w, b = case.tensors()
        try:
            function(torch.nn.functional, case)(x, w, b, **case.arguments())
        except RuntimeError:
            continue  # torch has no such convolution
        return case


def _line(r: random.Random, transposed: bool, most: int) -> tuple[int, ...]:
    size, kernel = r.randint(1, most), r.choice((1, 2, 3, 3, 4, 5, 7))
    stride, dilation = r.choice((1, 1, 2, 3, 5)), r.choice((1, 1, 2, 3))
    extra = r.randrange(max(stride, dilation)) if transposed else 0
    return size, kernel, stride, r.randint(0, kernel * dilation), dilation, extra


def _placements(n: int, transposed: bool) -> list[tuple[int | None, int | None, int | None]]:
    """Mostly those that need no redistribution."""
    ic, oc = (0, 1) if transposed else (1, 0)
    spatial: list[tuple[int | None, int | None, int | None]] = [(2 + x, None, None) for x in range(n)]
    return [
        *spatial * 3,
        (0, None, None),
        (None, oc, 0),
        (1, ic, None),
        (1, oc, 0),
        (1, 0, 0),
        (2, oc, None),
        (0, 0, 0),
        (None, None, None),
        (None, 2, None),
    ]


def function(module: Any, case: Case) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(module, f"conv{'_transpose' * case.transposed}{len(case.sizes)}d")
    return found


def wrong(case: Case, mesh: Any, module: Any, dtype: torch.dtype = torch.float64) -> str:
    """What differs from one process, of the result and the three gradients; empty if nothing does. One
    process is torch on the CPU in f64; ``dtype`` is that of the sharded call, which holds all integers
    here and their sums."""
    given = case.tensors()
    whole = [
        None if t is None else t.clone(memory_format=torch.preserve_format).requires_grad_() for t in given
    ]
    y = function(torch.nn.functional, case)(*whole, **case.arguments())
    grad = torch.randint(-3, 4, y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    y.backward(grad)

    def placed(t: Tensor, places: Any) -> Any:
        return distribute_tensor(t.to(mesh.device_type, dtype), mesh, places)

    parts = [
        None
        if t is None
        else placed(
            t,
            [
                Replicate() if dims[at] is None or dims[at] >= t.dim() else Shard(dims[at])
                for dims in case.placed
            ],
        ).requires_grad_()
        for at, t in enumerate(given)
    ]
    got = function(module, case)(*parts, **case.arguments())

    def same(part: Any, want: Tensor) -> bool:
        return torch.equal(part.full_tensor().cpu().double(), want)

    found = [] if same(got, y) else [f"result, {got.placements}"]
    got.backward(placed(grad, [Replicate() if p.is_partial() else p for p in got.placements]))
    for name, part, want in zip(("input", "weight", "bias"), parts, whole, strict=True):
        if part is None or want is None:
            continue
        if part.grad is None:
            found.append(f"no gradient of the {name}")
        elif not same(part.grad, want.grad):
            found.append(f"gradient of the {name}, {part.grad.placements}")
    return ", ".join(found)
