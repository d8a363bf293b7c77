"""What is computed of numbers alone, of truths, and of tensors without dims, beside torch: each call in a
graph of its own, as what is stored beside it hides how it is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
BIG = 2**24 + 1  # no f32


def full(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.full((3,), value, dtype=dtype)


# Of x = [1, 2, 3], whole numbers.
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: full(7) * BIG,
    "sum": lambda x: full(BIG) + x.shape[0] - 1,
    "of a size": lambda x: full(7) - x.shape[0] * 20000003,
    "negative": lambda x: -full(BIG).view(1, 3).T,
    "wraps": lambda x: (full(200, torch.int32) * 20000000).long(),
    "chosen": lambda x: torch.where(x > 1, BIG, 0),
    "joined": lambda x: torch.cat([full(BIG), full(BIG + 2)]),
    "padded": lambda x: F.pad(full(BIG), (1, 1)),
    "added up": lambda x: full(BIG).sum(0),
    "largest": lambda x: torch.maximum(full(BIG), full(3)),
    "a place": lambda x: x.gather(0, torch.zeros(1, dtype=torch.int64) + x.shape[0] - 1),
    "rounded": lambda x: full(0.1, torch.float16).float() * x,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
def test_of_numbers_alone(dynamic: bool) -> None:
    x = torch.tensor([1, 2, 3])
    for name, call in NUMBERS.items():
        torch._dynamo.reset()
        got, want = torch.compile(call, backend="transconv", dynamic=dynamic)(x), call(x)
        assert got.dtype is want.dtype, name
        assert torch.equal(got, want), name


MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add, scaled": lambda a, b: torch.add(a, b, alpha=-1),
}
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "not": torch.logical_not,
    "where": lambda v: torch.where(v, 1.0, 2.0),
    "sum": lambda v: v.sum(0),
    "float": lambda v: v.float(),
    "eq": lambda v: v == 1,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", MADE)
def test_arithmetic_of_truths_is_a_truth(made: str) -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    for read, reads in READ.items():
        torch._dynamo.reset()

        def call(a: Tensor, b: Tensor, reads: Callable[[Tensor], Tensor] = reads) -> Tensor:
            return reads(MADE[made](a, b))

        got, want = torch.compile(call, backend="transconv", dynamic=True)(a, b), call(a, b)
        assert torch.equal(got, want), read


NO_DIMS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: (x * 2).transpose(0, -1),
    "flip": lambda x: (x * 2).flip(0),
    "softmax": lambda x: torch.softmax(x * 2, 0),
    "amax": lambda x: (x * 2).amax(-1, keepdim=True),
    "repeat": lambda x: (x * 2).repeat(2, 2),
    "var": lambda x: (x * 2).var(0, correction=0),
}


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_dims() -> None:
    x = torch.tensor(1.5)
    for name, call in NO_DIMS.items():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="transconv")(x), call(x)), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "x", [torch.ones(0, 3, 5, dtype=torch.int64), torch.ones(2, 0, 5)], ids=["int64", "float32"]
)
def test_instance_norms_of_what_torch_decides(x: Tensor) -> None:
    want = F.instance_norm(x)
    got = torch.compile(lambda x: F.instance_norm(x), backend="transconv")(x)
    assert got.dtype is want.dtype and torch.equal(got, want)
