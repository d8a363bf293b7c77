"""What is stored for other kernels: as few bytes as can be; small values share kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.graph.meant import by_meaning, compare, results
from transconv.graph import KernelRow, backend, report

Tensor = torch.Tensor


def kernels(f: Callable[..., Any], inputs: Sequence[Tensor], most: float = 1e-5) -> list[KernelRow]:
    """The kernels of a function whose results are right."""
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        compare(f, run, inputs, most, gradients=False)
    return [k for graph in report(run).graphs for k in graph.kernels]


def stored(row: KernelRow) -> list[str]:
    """The types and sizes of what a kernel stores."""
    lines = [text.split() for text in row.text.splitlines()]
    return [" ".join(words[2:]) for words in lines if words[:1] == ["tensor"] and words[1].startswith("Y")]


def test_a_product_of_stored_values_is_evaluated_by_the_sum_that_needs_it() -> None:
    """The gradient of a batch norm behind that of a convolution: both sums and the result are
    one kernel."""

    def f(g: Tensor, w: Tensor, y: Tensor, x: Tensor) -> Tensor:
        made = torch.where(y > 0, F.conv_transpose2d(g, w, stride=2, output_padding=1), 0)
        dims = [0, 2, 3]
        total, dot = made.sum(dims, keepdim=True), (made * x).sum(dims, keepdim=True)
        return made - total * 0.1 - x * dot * 0.2

    image = torch.randn(2, 8, 6, 6)
    found = kernels(f, [torch.randn(2, 8, 3, 3), torch.randn(8, 8, 1, 1), image, torch.randn(2, 8, 6, 6)])
    product, sums = found
    assert "mul" not in product.operations and sums.operations.count("sum") == 2
    assert [*dict.fromkeys(stored(product))] == ["f32 [2, 8, 6, 6] strides(288,1,48,8)"]


def test_copies_of_a_sum_are_not_stored() -> None:
    def f(x: Tensor) -> Tensor:
        down = x.sum(0, keepdim=True).expand(6, 40)
        return (x.exp() - down) / (x - down).softmax(1)

    found = kernels(f, [torch.randn(6, 40)], 1e-4)
    assert not any("6, 40" in text for k in found[:-1] for text in stored(k)), [k.text for k in found]


def test_small_values_share_a_kernel() -> None:
    def f(*given: Tensor) -> list[Tensor]:
        return [x + i for i, x in enumerate(given)]

    inputs = [torch.randn(5) for _ in range(20)] + [torch.randn(7)]
    assert sorted(len(stored(k)) for k in kernels(f, inputs)) == [1, 4, 16]
    large = [torch.empty(1 << 13, 1 << 10)] * 2
    run = torch.compile(lambda x, y: (x + 1, y + 1), backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        results(run(*(t[:2] for t in large)))
    assert [len(stored(k)) for k in report(run).graphs[0].kernels] == [2]


def test_what_is_handed_out_is_read_by_a_product() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(x)
        return F.conv2d(y, w), y

    first, second = kernels(f, [torch.randn(1, 8, 5, 5), torch.randn(4, 8, 1, 1)], 1e-3)
    assert "gelu" in first.operations and second.operations == ("convolution",)


def test_gradients_of_pools_visit_windows() -> None:
    """A window of 3 that moves by 2 reaches an element from at most 2 places along each dim."""
    x = torch.randn(1, 2, 7, 7, requires_grad=True)
    run = torch.compile(
        lambda x: F.max_pool2d(x, 3, 2, 1).square(), backend=backend, options={"rest": "eager"}
    )
    with by_meaning():
        run(x).sum().backward()
    text = report(run).graphs[1].kernels[-1].text
    assert "i3=2 i4=2" in text and "% 2 ==" not in text, text


def test_what_is_expanded_to_its_own_shape_is_stored_once() -> None:
    """As attention of torch's reference hands its weights to a product, and to the backward graph."""

    def f(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = x.softmax(-1)
        return torch.bmm(weights.expand(weights.shape).reshape(6, 5, 7), v), weights

    run = torch.compile(f, backend=backend, options={"rest": "eager"}, dynamic=False)
    given = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(6, 7, 4, dtype=torch.float64)
    with by_meaning() as texts:
        compare(f, run, given, 1e-12)
    assert [text.count("store") for text in dict.fromkeys(texts)] == [1, 1]
