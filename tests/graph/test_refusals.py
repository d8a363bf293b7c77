"""One kernel that is refused takes its own operations to torch alone; memory of a graph is freed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

import transconv
from tests.graph.meant import Meant, by_meaning, compare, traced
from transconv.compute import Compute
from transconv.errors import Unsupported
from transconv.graph import KernelRow, TorchRow, backend, report
from transconv.graph.fusion.groups import Price
from transconv.graph.regions.graph_parts import Parts, Setting, rows_of
from transconv.graph.symbols import Symbols
from transconv.schedule import Word
from transconv.schedule.schedule import register_word, unregister_word
from transconv.target import TARGETS

Tensor = torch.Tensor


@pytest.fixture
def banned() -> Iterator[None]:
    """No schedule is legal for what takes a logarithm."""

    def why_not(_: Any, compute: Compute, __: Any) -> str | None:
        return "logarithms are banned" if "log(" in str(compute) else None

    register_word(Word("banned", 0, "Planted.", (0, 1), why_not=why_not))
    yield
    unregister_word("banned")


def several(x: Tensor) -> Tensor:
    """Three kernels: columns, rows behind them, columns again."""
    y = x.softmax(0)
    z = y.sum(1, keepdim=True).log()
    return (y * z).softmax(0)


def kinds(run: Any) -> list[str]:
    return [type(r).__name__ for r in report(run).graphs[0].rows]


def test_only_the_operations_of_a_refused_kernel_are_torchs(banned: None) -> None:
    transconv.config.fallback = "warn"
    run = torch.compile(several, backend=backend, options={"rest": "eager"})
    with pytest.warns(transconv.FallbackWarning, match="the kernel sum_log of a graph"):
        compare(several, run, [torch.randn(3, 4)], 1e-5)
    assert kinds(run) == ["KernelRow", "TorchRow", "KernelRow"]
    row = report(run).graphs[0].rows[1]
    assert isinstance(row, TorchRow) and row.operations == "sum.dim_IntList, log.default"
    assert "the kernel sum_log is refused: no schedule is legal" in row.reasons[0]
    before = transconv.stats()
    compare(several, run, [torch.randn(3, 4)], 1e-5)
    assert transconv.stats().fallback == before.fallback, "the second call has no kernel to refuse"
    assert transconv.stats().native["graph"] == before.native["graph"] + 2


def test_each_refusal_under_the_policy_error(banned: None) -> None:
    x = torch.randn(3, 4)
    run = traced(lambda x: (several(x),), [x])
    for _ in range(2):
        with pytest.raises(Unsupported, match="no schedule is legal"):
            run(x)


def test_a_kernel_whose_first_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found when kernels before it have run: what they have read is still there."""
    start = Meant.start

    def wrong(self: Meant, tensors: Sequence[Tensor]) -> None:
        if any("log(" in group_text for group_text in self.texts):
            raise Unsupported("miscompiled", "planted")
        start(self, tensors)

    monkeypatch.setattr(Meant, "start", wrong)
    transconv.config.fallback = "silent"
    run = torch.compile(several, backend=backend, options={"rest": "eager"})
    with by_meaning():
        compare(several, run, [torch.randn(3, 4)], 1e-5)
    assert kinds(run) == ["KernelRow", "TorchRow", "KernelRow"]


def gradient(used: bool) -> fx.GraphModule:
    """Of a weight alone; the part that is the input's gradient is handed out, or nobody's."""
    made = fx.Graph()
    grad, x, w = (made.placeholder(n) for n in ("grad", "x", "w"))
    args = (grad, x, w, [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    both = made.call_function(torch.ops.aten.convolution_backward.default, args)
    parts = [made.call_function(operator.getitem, (both, i)) for i in (0, 1)]
    image, weight = torch.empty(1, 2, 4, 4), torch.empty(2, 2, 1, 1)
    vals = {grad: image, x: image, w: weight, both: (None, weight, None), parts[0]: None, parts[1]: weight}
    for node, val in vals.items():
        node.meta["val"] = val
    made.output((parts[1], parts[0]) if used else (parts[1],))
    return fx.GraphModule({}, made)


@pytest.mark.parametrize("used", [False, True])
def test_a_part_of_a_result_that_is_not_computed(used: bool) -> None:
    gm, x, w = gradient(used), torch.randn(1, 2, 4, 4), torch.zeros(2, 2, 1, 1)
    setting = Setting(
        torch.device("cpu"),
        TARGETS["interpreter"],
        Price(TARGETS["sm_90"]),
        "eager",
        Symbols(gm.graph),
        lambda: None,
    )
    parts = Parts(gm, setting)
    with by_meaning():
        found = parts({}, [x, x, w], {})
    assert [type(r) for r in rows_of(parts)] == [KernelRow]
    want = torch.einsum("bohw,bihw->oi", x, x)
    assert torch.allclose(found[0].view(2, 2), want, atol=1e-4) and found[1:] == [None] * used


def test_what_nothing_needs_is_freed_behind_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tensors of 12 rows, between regions and in them, at most two are there when a kernel runs:
    what it reads and what it stores."""
    big, there, most = 12 * 5 * 4, list[StorageWeakRef](), list[int]()
    start = Meant.start

    def noted(tensors: Sequence[Tensor]) -> None:
        known = {r.cdata for r in there if not r.expired()}
        there.extend(
            StorageWeakRef(s)
            for t in tensors
            if (s := t.untyped_storage()).nbytes() == big and s._cdata not in known
        )

    def counting(self: Meant, tensors: Sequence[Tensor]) -> None:
        noted(tensors)
        most.append(sum(not r.expired() for r in there))
        start(self, tensors)

    monkeypatch.setattr(Meant, "start", counting)

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.cumsum(x, 0)  # torch's
            x = (x.softmax(0) + 1).softmax(1).softmax(0)  # three kernels
        return x.sum()

    gm = fx.symbolic_trace(lambda x: (f(x),))
    run = backend(gm, [torch.randn(12, 5)], options={"rest": "eager"})
    with by_meaning(), torch.no_grad():
        for _ in range(2):
            most.clear()
            x = torch.randn(12, 5)
            (want,) = gm(x)
            (got,) = run(x)
            assert torch.allclose(got, want, rtol=1e-4)
    # The caller holds x, which is read before the first kernel runs.
    assert len(most) == 10 and max(most) == 2, most


# -- bugs of ours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["row", "text", "plan", "launch"])
def test_a_program_does_not_stop_for_a_bug(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted where errors of ours could reach a user: torch computes what the kernel would have."""
    from transconv.graph.fusion import group_text
    from transconv.graph.lowerings import table
    from transconv.graph.regions import region_calls
    from transconv.runtime import Launch

    def planted(*_: Any, **__: Any) -> Any:
        raise KeyError("S7")

    if where == "row":
        monkeypatch.setitem(table.ROWS, torch.ops.aten.sin.default, planted)
    else:
        owner, name = {
            "text": (group_text.Writer, "written"),
            "plan": (region_calls, "launch"),
            "launch": (Launch, "start_prepacked"),
        }[where]
        monkeypatch.setattr(owner, name, planted)
    x = torch.randn(3, 5)
    run: Any = torch.compile(lambda x: x.sin().sum(1), backend=backend, options={"rest": "eager"})
    with pytest.raises(Exception, match="S7"):
        run(x)
    transconv.config.fallback = "silent"
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.sin().sum(1), backend=backend, options={"rest": "eager"})
    for _ in range(2):
        torch.testing.assert_close(run(x), x.sin().sum(1))
    assert "KeyError" in str(report(run))
