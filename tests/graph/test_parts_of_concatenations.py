"""Parts of concatenations are stored where they stand in them, if nothing else needs them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.graph.meant import by_meaning, compare
from transconv.errors import Unsupported
from transconv.graph import GraphReport, backend, report
from transconv.graph.fusion import plan
from transconv.graph.graph_report import TorchRow
from transconv.graph.regions import region_calls

Tensor = torch.Tensor
X, W, V = torch.randn(2, 16, 6, 6), torch.randn(16, 16, 3, 3) / 12, torch.randn(8, 32, 1, 1) / 6


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, padding=w.shape[2] // 2))


def branches(x: Tensor) -> Tensor:
    """As in an inception."""
    return F.conv2d(torch.cat([conv(x, W), conv(x, W + 1)], 1), V)


def dense(x: Tensor) -> Tensor:
    """Each layer reads all results before it: one tensor."""
    found = [conv(x, W)]
    for i in range(3):
        found.append(conv(torch.cat(found, 1), W.repeat(1, i + 1, 1, 1)))
    return F.conv2d(torch.cat(found, 1), V.repeat(1, 2, 1, 1))


def skipped(x: Tensor) -> tuple[Tensor, Tensor]:
    """The input has no kernel: it is copied to its slice of a tensor that is handed out."""
    x = x.contiguous(memory_format=torch.channels_last)
    both = torch.cat([x, conv(x, W)], 1)
    return F.conv2d(both, V), both


def changed_later(x: Tensor) -> Tensor:
    """A map reads the part last, when the concatenation is still to be read."""
    part = conv(x, W)
    both = torch.cat([part, conv(x, W + 1)], 1)
    return F.conv2d(both, V).sum() + F.conv2d(torch.sigmoid(part) * part.mean((2, 3), True), W)


def along_a_batch(x: Tensor) -> Tensor:
    return conv(torch.cat([conv(x, W), conv(x.flip(2), W)], 0), W)


def twice(x: Tensor) -> Tensor:
    """One value stands in two places: the second one is a copy, or read through the view."""
    part = conv(x, W)
    return F.conv2d(torch.cat([part, part], 1), V)


def around(x: Tensor) -> Tensor:
    """One value stands on both sides of another kernel's."""
    part = conv(x, W)
    return F.conv2d(torch.cat([part, conv(x, W + 1), part], 1), V.repeat(1, 2, 1, 1)[:, :48])


def handed(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is handed out has torch's strides."""
    part = conv(x, W)
    return F.conv2d(torch.cat([part, conv(x, W + 1)], 1), V), part


def short(x: Tensor) -> Tensor:
    """Rows of 12 numbers of 4 bytes are shorter than what memory moves at once."""
    parts = [conv(x, W[:12]), conv(x, W[4:])]
    return F.conv2d(torch.cat(parts, 1), V[:, :24])


CASES: list[tuple[Callable[..., Any], int, int]] = [  # values that are placed, and kernels
    (branches, 2, 3),
    (dense, 4, 5),
    (skipped, 1, 3),
    (along_a_batch, 2, 3),
    (twice, 0, 2),
    (around, 0, 3),
    (handed, 0, 3),
    (short, 0, 3),
]


def made(f: Callable[..., Any], x: Tensor = X) -> GraphReport:
    """The report of a function whose results are right, at three calls."""
    run = torch.compile(f, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        for _ in range(3):
            compare(f, run, [x], 1e-5, gradients=False)
    (graph,) = report(run).graphs
    return graph


def placed(graph: GraphReport) -> int:
    return sum(edge.reason == plan.IN_PLACE for edge in graph.edges)


@pytest.mark.every(4)
@pytest.mark.parametrize(("f", "parts", "kernels"), CASES, ids=[f.__name__ for f, _, _ in CASES])
def test_which_parts_are_placed(f: Callable[..., Any], parts: int, kernels: int) -> None:
    graph = made(f)
    assert (placed(graph), len(graph.kernels)) == (parts, kernels), graph
    if parts and f is not skipped:  # every product reads a plain tensor
        assert not any("where(" in k.text for k in graph.kernels), [k.text for k in graph.kernels]


@pytest.mark.slow
def test_a_part_is_not_written_over() -> None:
    """Nothing needs the part any more, but the concatenation's memory is the same."""
    assert placed(made(changed_later)) == 2


def test_a_copy_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the copy computes is torch's then, and the concatenation."""
    transconv.config.fallback = "silent"
    run = torch.compile(skipped, backend=backend, options={"rest": "eager"})
    with by_meaning(), monkeypatch.context() as patch, torch.no_grad():
        meant = region_calls.launch

        def launch(asked: Any, *how: Any) -> Any:
            if isinstance(asked, str):  # the others are convolutions
                raise Unsupported("schedule:refused", "no copies")
            return meant(asked, *how)

        patch.setattr(region_calls, "launch", launch)
        for _ in range(2):
            compare(skipped, run, [X], 1e-5, gradients=False)
    (graph,) = report(run).graphs
    assert len(graph.kernels) == 2, graph
    others = [row.operations for row in graph.rows if isinstance(row, TorchRow)]
    assert others == ["clone.default", "cat.default"]


def test_memory_is_held_once() -> None:
    """The tensor of all parts, and a result; not the parts beside it."""
    image = 2 * 6 * 6 * 4
    assert made(branches).peak == (32 + 8) * image and made(dense).peak == (64 + 8) * image


def test_a_mistake_in_a_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "never")  # else it is torch's
    monkeypatch.setattr(plan, "_starts", lambda piece: [0] * len(piece.parts))
    with pytest.raises(AssertionError):
        made(branches)


@pytest.mark.slow
def test_sizes_that_are_names_are_left_alone() -> None:
    run = torch.compile(branches, backend=backend, options={"rest": "eager"}, dynamic=True)
    with by_meaning(), torch.no_grad():
        for n in (6, 8):
            compare(branches, run, [torch.randn(2, 16, n, n)], 1e-5, gradients=False)
    assert not any(placed(graph) for graph in report(run).graphs)


EMPTY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda e, x: torch.cat([e, x], -2) * 2,
    "between": lambda e, x: torch.cat([x, e, x + 1], 1).relu(),
    "behind": lambda e, x: torch.cat([x, e], -1).sum((-1, -2)),
    "two": lambda e, x: torch.cat([e, e, x], 0).exp(),
    "then a part": lambda e, x: (torch.cat([e, x], -2)[..., 1:, :] * 3).softmax(-1),
    "then a maximum": lambda e, x: torch.cat([e, x * 2], 1).amax(1),
    "alone": lambda e, x: torch.cat([e, e]).sum() + x.sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EMPTY)
def test_empty_parts_of_one_dim(name: str) -> None:
    """torch takes such a part in any concatenation; beside f64, with gradients, at shapes that change."""
    f = EMPTY[name]
    for dynamic in (None, True):
        torch._dynamo.reset()
        run = torch.compile(f, backend="transconv", dynamic=dynamic)
        for shape in ((2, 3, 4), (3, 5, 7)):
            x = torch.randn(shape, requires_grad=True)
            wide = x.detach().double().requires_grad_()
            y, want = run(torch.empty(0), x), f(torch.empty(0).double(), wide)
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
            (made,) = torch.autograd.grad(y.square().sum(), x)
            (theirs,) = torch.autograd.grad(want.square().sum(), wide)
            torch.testing.assert_close(made.double(), theirs, rtol=1e-4, atol=1e-4)
