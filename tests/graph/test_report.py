"""The report of a compiled model: estimates of the cost room, the page, what is held in memory."""

from __future__ import annotations

import functools
import operator
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import transconv
from tests.graph import networks
from tests.graph.meant import by_meaning
from transconv.compute import Alone, parse
from transconv.cost import estimate
from transconv.graph import KernelRow, TorchRow, backend, graph_report, report
from transconv.graph.fusion.groups import FusionGroup
from transconv.graph.fusion.index_ir import Piece, Reduced
from transconv.graph.graph_report import GraphReport, Report, sides
from transconv.graph.lowerings.table import ROWS
from transconv.graph.regions.partition import title
from transconv.runtime import torch_internals
from transconv.runtime.timing import Timing
from transconv.selection import shortlist
from transconv.support import ScheduleError
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
    assert "torch / ours" not in found.html()
    page = found.html()
    assert all(f"<td>{r.name}</td>" in page for r in rows) and "a product reads an element of" in page
    # The normalised image, then it and the result.
    assert found.graphs[0].peak == 2 * 8 * 4 * 6 * 4 and "MB held" in str(found)


def test_estimates_of_another_chip() -> None:
    """Of the same kernels, without a GPU: of every chip, and in the first line of the text."""
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.SiLU()).eval()
    run = torch.compile(model, backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        run(torch.randn(2, 16, 9, 9))
    (first,) = report(run).graphs[0].kernels
    for name, chip in TARGETS.items():
        found = report(run, target=name)
        (row,) = found.graphs[0].kernels
        assert f"(estimated for {name})" in str(found)
        assert replace(row, estimate=first.estimate, measure=first.measure, on=first.on) == replace(
            first, limit=row.limit, limit_us=row.limit_us
        )
        if row.limit == "memory":
            assert row.limit_us == pytest.approx(row.bytes / chip.bandwidth_gbs / 1e3)
        assert row.us > row.limit_us or name == "interpreter"
    assert report(run, target=H100).graphs[0].kernels[0].us == first.us
    with pytest.raises(ScheduleError, match="target 'sm_20' is unknown"):
        report(run, target="sm_20")


def test_regions_of_torch_are_on_the_page() -> None:
    graph = GraphReport("forward", (TorchRow("inductor", "sort <x>", ("no row",)),), (), "all of it")
    page = Report((graph,)).html()
    assert "sort &lt;x&gt;: no row" in page and "<p>all of it</p>" in page


class Block(nn.Module):
    """Modules of torch, functions and operators: all have names in a report."""

    def __init__(self) -> None:
        super().__init__()
        self.d1 = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.d2 = nn.Sequential(*(transconv.off(nn.Conv2d(4, 4, 1)) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.d1(x))
        y += x
        y = self.d2(y)
        for _ in range(30):
            y = y.cumsum(1) * 0.5
        return y


def block(*, training: bool = False) -> Any:
    run = torch.compile(Block().train(training), backend=backend, options={"rest": "eager"})
    with by_meaning(), torch.set_grad_enabled(training):
        made = run(torch.randn(1, 4, 6, 6, requires_grad=training))
        if training:
            made.square().sum().backward()
    return run


@functools.cache
def inferred() -> GraphReport:
    (graph,) = report(block()).graphs
    return graph


@pytest.fixture
def inference() -> GraphReport:
    return inferred()


def test_kernels_have_the_names_of_the_model(inference: GraphReport) -> None:
    titles = [k.title for k in inference.kernels]
    assert titles[:2] == ["d1.0: GroupNorm + SiLU", "d1.2: Conv2d + gelu + add"] and "mul" in titles
    assert f"d1.0: GroupNorm + SiLU ({inference.kernels[0].name})" in str(inference)


def test_a_reason_is_told_once_a_graph(inference: GraphReport) -> None:
    text, page = str(inference), Report((inference,)).html()
    for said in ("30 x cumsum: a scan", "5 x Conv2d (d2.0, d2.1, d2.2, ...): transconv.off was called"):
        assert text.count(said) == 1
    assert text.count("a scan: each") == page.count("a scan: each") == 1
    assert "left to torch (eager):" in text and len(inference.left) == 35


@pytest.mark.slow
def test_gradients_are_those_of_the_models_operations() -> None:
    forward, backward = report(block(training=True)).graphs
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert {"d1.2: Conv2d gradient"} <= {k.title for k in backward.kernels}
    assert "5 x Conv2d gradient (d2.4, d2.3, d2.2, ...)" in str(backward)


@pytest.mark.parametrize(
    ("path", "by", "said"),
    [
        ("L['self']._modules['up'][2].norm", nn.GroupNorm, "up.2.norm: GroupNorm"),
        ("L['fn'].0.1", operator.iadd, "0.1: add"),
        ("L['model']", operator.invert, "invert"),
        ("L['s'].block", "transpose_", "block: transpose"),
        ("L['s']", torch.conv2d, "conv2d"),
    ],
)
def test_paths_of_modules(path: str, by: object, said: str) -> None:
    node = fx.Graph().call_function(torch.relu)
    node.meta = {
        "nn_module_stack": {"1": ("L['x'].outer", nn.Module), "2": (path, nn.Module)},
        "source_fn_stack": [("outer", nn.Module), ("inner_1", by)],
    }
    assert title([node, node]) == said


@pytest.mark.slow
def test_times_are_beside_the_limit_and_torch(
    inference: GraphReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the numbers are the test's, what torch computes is torch's."""
    ours = {kernel.name: 10.0 * (i + 1) for i, kernel in enumerate(inference.kernels[:2])}

    def timed(row: KernelRow) -> KernelRow:
        return replace(row, measure=lambda _: ours.get(row.name, 1.0))

    rows = tuple(timed(r) if isinstance(r, KernelRow) else r for r in inference.rows)
    asked: list[fx.GraphModule] = []
    monkeypatch.setattr(torch_internals, "inductor_compile", lambda gm, _: asked.append(gm) or gm.forward)

    class OneCall:
        def one(self, make: Any, footprint: int) -> Timing:
            made = make(0)()
            assert made and all(isinstance(t, torch.Tensor) for t in made) and footprint > 0
            return Timing(30.0, 30.0, 30.0, "test")

    (found,) = graph_report._measured((replace(inference, rows=rows),), OneCall())  # type: ignore[arg-type]
    norm, conv, *maps = found.kernels
    assert (norm.gain, conv.gain, maps[0].gain) == (3.0, 1.5, 30.0) and norm.torch_us == 30.0
    targets = [{str(n.target) for n in gm.graph.nodes if n.op == "call_function"} for gm in asked]
    assert {"aten.native_group_norm.default", "aten.silu.default"} <= targets[0]
    assert {"aten.convolution.default", "aten.gelu.default", "aten.add.Tensor"} <= targets[1]
    regions = [r for r in found.rows if isinstance(r, TorchRow)]
    assert all(r.measured_us == 30.0 for r in regions)
    assert found.step_us == sum(r.measured_us or 0.0 for r in found.rows)
    assert {k.limit for k in found.kernels} <= {"memory", "products", "arithmetic"}
    assert all(0.0 < k.limit_us < 10.0 for k in found.kernels)
    lines = [line for line in str(found).splitlines() if line.endswith(("eager)", ")")) and "%" in line]
    limits = [row.limit_us if isinstance(row, KernelRow) else 0.0 for row in found.rows]
    lost = [
        row
        for _, row in sorted(
            zip(limits, found.rows, strict=True), key=lambda x: x[0] - (x[1].measured_us or 0.0)
        )
    ]
    assert all(row.title in line for row, line in zip(lost, lines, strict=True))
    assert "torch / ours" in Report((found,)).html() and f"{10 / found.step_us:.1%}" in str(found)


@pytest.mark.slow
def test_kernels_with_parts_of_one_operation_are_compared_together() -> None:
    """Moments in one kernel, what is done with them in another one: torch has an operation."""
    graph = fx.Graph()
    norm, act, other = (graph.call_function(torch.relu) for _ in range(3))
    moments, mapped, silu, alone = (piece(i == 0) for i in range(4))
    made = [{moments: norm}, {mapped: norm, silu: act}, {alone: other}, {}]
    one, two, three, none = sides(made, lambda gm: gm.forward, torch.device("cpu"))
    assert one is two and one is not None and {*one.nodes} == {norm, act}
    assert three is not None and three.nodes == (other,) and none is None


def piece(anchored: bool) -> Piece:
    kind = (
        Reduced(shape=(1,), dtype=torch.float32, inputs=(), op="sum", dims=())
        if anchored
        else Piece(shape=(1,), dtype=torch.float32)
    )
    return kind


HERE = sys.modules[__name__]


class Broken(nn.Module):
    """Two graphs, between which torch's compiler stops. Its code names a module that names transconv."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp() if HERE.__name__ else x
        torch._dynamo.graph_break()
        return x * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("prepared", [False, True])
def test_modules_of_torch(prepared: bool) -> None:
    """Their code is common to all of them: each has its own kernels in its report."""
    kernels = []
    x = torch.randn(1, 2, 4, 4)
    for model in (
        nn.Conv2d(2, 2, 3),
        nn.Sequential(nn.Conv2d(2, 2, 3), nn.SiLU()),
        nn.Sequential(nn.Tanh(), Broken()),
    ):
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
    (graph,) = report(run, measure=True).graphs
    for row in graph.kernels:
        assert row.measured_us is not None and 0.5 < row.measured_us < 1e5
        assert row.torch_us is not None and 0.5 < row.torch_us < 1e5 and row.gain
    assert "torch/ours" in str(graph) and graph.step_us


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
