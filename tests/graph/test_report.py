"""The report of a compiled model: estimates of the cost room, the page, what is held in memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import transconv
from tests.graph import networks
from tests.graph.meant import by_meaning
from transconv.compute import Alone, parse
from transconv.cost import estimate
from transconv.graph import TorchRow, backend, report
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.graph_report import GraphReport, Report
from transconv.graph.lowerings.table import ROWS
from transconv.selection import shortlist
from transconv.target import TARGETS

H100 = TARGETS["sm_90"]


def test_estimates_and_pages() -> None:
    run = torch.compile(networks.Normalized().eval(), backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        run(torch.randn(1, 8, 4, 6))
    found = report(run, measure=True)
    rows, first = found.graphs[0].kernels, parse(found.graphs[0].kernels[0].text)
    (listed,) = shortlist(1, first, H100, Alone(first))
    assert rows[0].us == pytest.approx(estimate(listed.schedule, first, H100))
    assert all(r.measured_us is None for r in rows), "nothing is measured on a CPU"
    page = found.html()
    assert all(f"<td>{r.name}</td>" in page for r in rows) and "a product reads an element of" in page
    # The normalised image, then it and the result.
    assert found.graphs[0].peak == 2 * 8 * 4 * 6 * 4 and "MB held" in str(found)


def test_regions_of_torch_are_on_the_page() -> None:
    graph = GraphReport("forward", (TorchRow("inductor", "sort <x>", ("no row",)),), (), "all of it")
    page = Report((graph,)).html()
    assert "sort &lt;x&gt;: no row" in page and "<p>all of it</p>" in page


class Broken(nn.Module):
    """Two graphs, between which torch's compiler stops. Its code names a module that names transconv."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp() if sys.modules else x
        torch._dynamo.graph_break()
        return x * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("prepared", [True, False])
def test_modules_of_torch(prepared: bool) -> None:
    """Their code is common to all of them: each has its own kernels in its report."""
    kernels = []
    x = torch.randn(1, 2, 4, 4)
    for model in (nn.Conv2d(2, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 3), nn.SiLU()),
                  nn.Sequential(nn.Tanh(), Broken())):
        run = torch.compile(model.eval().requires_grad_(False), backend=backend, options={"rest": "eager"})
        with by_meaning(), torch.no_grad():
            transconv.prepare(run, x, progress=False) if prepared else run(x)
        kernels.append([k.name for g in report(run).graphs for k in g.kernels])
    assert kernels == [["convolution_bias"], ["convolution_bias_silu"], ["exp_map", "mul_map"]]
    never = torch.compile(nn.Conv2d(2, 3, 1), backend=backend), torch.compile(nn.Conv2d(2, 3, 1))
    assert all("no graph yet" in str(report(run)) for run in never), "others' graphs are not theirs"


@pytest.mark.gpu
def test_kernels_are_timed_on_the_device() -> None:
    run = torch.compile(networks.Normalized().eval().cuda().bfloat16(), backend=backend)
    with torch.no_grad():
        run(torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16))
    for row in report(run, measure=True).graphs[0].kernels:
        assert row.measured_us is not None and 0.5 < row.measured_us < 1e5


def test_nothing_is_measured_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.compile(lambda x: x * 2 + 1, backend=backend, options={"rest": "eager"})
    with by_meaning():
        run(torch.randn(3, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert all(r.measured_us is None for r in report(run).graphs[0].kernels)


def test_rows_are_of_all_libraries_whose_operations_graphs_have() -> None:
    assert {getattr(op, "namespace", "") for op in ROWS} >= {"aten", "prims", "transconv"}


def test_names_of_kernels_are_words() -> None:
    """Of operations with several words, too."""
    pieces = [SimpleNamespace(label=label) for label in ("zero point", "copy", "add", "add", "mul")]
    group = object.__new__(FusionGroup)
    group.evaluated, group.product, group.reduced = pieces, None, {"k"}  # type: ignore[assignment]
    assert group.name == "zero_point_add_mul"
    group.evaluated = pieces[2:3]  # type: ignore[assignment]
    assert group.name == "add_rows"
