"""Results that are views, alone and one of another, each behind a computed value: they have torch's
strides and begin where torch's do, those that share memory in torch share it, and what is written to one
is seen through the others. Some dims are 1 at some shapes, by which an example of sizes misleads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, near
from transconv.graph import backend, report

Tensor = torch.Tensor
View = Callable[[Tensor], Tensor]

VALUES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "by a number": lambda x, c: x * c,
    "pool": lambda x, c: F.avg_pool1d(x, 2),
    "pool of a half": lambda x, c: F.avg_pool1d(x[:, : (x.shape[1] + 1) // 2] + c, 2),
    "depthwise": lambda x, c: F.conv1d(x, x.new_full((x.shape[1], 1, 1), c), stride=2, groups=x.shape[1]),
    "transposed": lambda x, c: x.transpose(0, 2).sin(),
    "concatenation": lambda x, c: torch.cat([x, x + c], 2),
    "product": lambda x, c: F.linear(x.transpose(1, 2), x.new_full((x.shape[1] // 2, x.shape[1]), c)),
    "input": lambda x, c: x,
}
VIEWS: dict[str, View] = {
    "split in two": lambda x: x.split((x.shape[1] + 1) // 2, 1)[0],
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]),
    "chunk": lambda x: x.chunk(2, 0)[1],
    "permute": lambda x: x.permute(*range(1, x.dim()), 0),
    "split": lambda x: x.split(2, 0)[0],
    "select": lambda x: x.select(0, 1),
    "step": lambda x: x[:, ::2],
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "tensor_split": lambda x: x.tensor_split(2, 0)[1],
    "movedim": lambda x: x.movedim(0, -1),
    "unbind": lambda x: x.unbind(0)[1],
    "narrow": lambda x: x.narrow(0, 1, x.shape[0] - 1),
    "broadcast_to": lambda x: x[:1].broadcast_to(3, *x.shape[1:]),
    "flatten": lambda x: x.flatten(1),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "mT": lambda x: x.mT,
    "from the end": lambda x: x[-2:],
    "view": lambda x: x.view(-1, x.shape[-1]),
    "squeeze": lambda x: x[:1].squeeze(0),
    "as_strided": lambda x: x.as_strided((2,), (1,), 1),
    "as real": lambda x: torch.view_as_real(torch.complex(x, x)),
    "detach": lambda x: x.detach(),
    "half": lambda x: x[..., : x.shape[-1] // 2 + 1],
}
LAID: dict[str, View] = {
    "dense": lambda x: x,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
}
SHAPES = (2, 3, 2), (4, 4, 6), (3, 2, 3)
ROUNDED = 1e-12
NUMBER = 0.37


def _chains(value: str, listed: Sequence[str], apart: int) -> Iterator[tuple[str, tuple[View, ...]]]:
    """Views of a value, and of each the one that stands so many places behind it, that all shapes have."""
    for i, name in enumerate(listed):
        for chain in ((name,), (name, listed[(i + apart) % len(listed)])):
            if all(_exists(value, [VIEWS[n] for n in chain], shape) for shape in SHAPES):
                yield " of ".join((*reversed(chain), value)), tuple(VIEWS[n] for n in chain)


def _exists(value: str, chain: Sequence[View], shape: Sequence[int]) -> bool:
    try:
        return _viewed(VALUES[value](torch.ones(shape), NUMBER), chain).numel() > 0
    except (RuntimeError, IndexError):
        return False


def _viewed(x: Tensor, chain: Sequence[View]) -> Tensor:
    for view in chain:
        x = view(x)
    return x


def _places(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """How tensors lie, and of each the first one whose memory it has."""
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    return [
        (
            t.shape,
            [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1],
            t.storage_offset(),
            memory.index(at),
        )
        for t, at in zip(tensors, memory, strict=True)
    ]


def _compare(names: Sequence[str], want: Sequence[Tensor], got: Sequence[Tensor], when: str) -> None:
    for name, a, b in zip(names, want, got, strict=True):
        near(b, a, ROUNDED, f"{name}, {when}")


def _written(a: Tensor, b: Tensor) -> bool:
    """Whether a tensor can be written to, as its elements have places of their own; then both are."""
    try:
        a.add_(1)
    except RuntimeError:
        return False
    b.add_(1)
    return True


def _check(
    values: Sequence[str], views: Sequence[str], apart: int, dynamic: bool | None, laid: str = "dense"
) -> None:
    chains = [(v, *named) for v in values for named in _chains(v, views, apart)]
    names = ["the input", *values, *(name for _, name, _ in chains)]

    def function(x: Tensor, c: float) -> tuple[Tensor, ...]:
        made = {v: VALUES[v](x, c) for v in values}
        return (*made.values(), *(_viewed(made[v], chain) for v, _, chain in chains))

    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, dynamic=dynamic, options={"rest": "eager"})
    with by_meaning():
        for shape in SHAPES:
            given = torch.randn(shape, dtype=torch.float64)
            one, other = LAID[laid](given.clone()), LAID[laid](given.clone())
            want, got = (one, *function(one, NUMBER)), (other, *run(other, NUMBER))
            for name, a, b in zip(names, _places(want), _places(got), strict=True):
                assert a == b, f"{name}, at {shape}"
            _compare(names, want, got, f"at {shape}")
            for name, a, b in zip(names, want, got, strict=True):
                if _written(a, b):
                    _compare(names, want, got, f"at {shape} when {name} is written to")
    # Of views of an input nothing is computed.
    assert any(g.kernels for g in report(run).graphs) == (tuple(values) != ("input",))


QUICK = [*VIEWS][:3]  # the others are for `make check-all`


@pytest.mark.every(3)
@pytest.mark.parametrize("dynamic", [True, None, False])
def test_views_that_are_results(dynamic: bool | None) -> None:
    _check(("by a number",), QUICK, 1, dynamic)


def test_views_of_an_input_take_no_kernel() -> None:
    _check(("input",), QUICK, 1, False)


def test_views_of_equal_values_are_apart() -> None:
    def function(x: Tensor, c: float) -> tuple[Tensor, Tensor]:
        return (x * c)[:, 1:], (x * c)[:, 1:]

    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, dynamic=True, options={"rest": "eager"})
    with by_meaning():
        one, other = run(torch.ones(3, 4), NUMBER)
    one.zero_()
    assert other.all()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None, False])
@pytest.mark.parametrize("apart", [1, 5])
@pytest.mark.parametrize("value", VALUES)
def test_views_of_each_value(value: str, apart: int, dynamic: bool | None) -> None:
    _check((value,), [*VIEWS], apart, dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("laid", LAID)
def test_views_of_inputs_that_lie_otherwise(laid: str, dynamic: bool) -> None:
    _check(("by a number",), [v for v in VIEWS if v not in ("view", "as_strided")], 7, dynamic, laid)
