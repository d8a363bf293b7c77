"""``python -m bench sizes``: drawn sizes are legal and repeatable, rows are written and resumed, a wrong
result is named, and the tables say it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from bench import (
    auto_sizes,
    call_phases,
    environment,
    epochs,
    reference,
    size_layers,
    size_measures,
    size_models,
)
from bench.__main__ import main, understood
from bench.size_calls import Subject, same, switched
from bench.size_layers import Size
from bench.size_reference import exact_sums
from bench.size_table import lines_of, models_table, sizes_table
from bench.sizes import Run
from transconv.calls import size_policy
from transconv.conv import Epilogue, LayerRegistry, Prop
from transconv.errors import ProblemError, Unsupported
from transconv.support import knobs
from transconv.target import Target
from transconv.torch_ops.calls import select_impl
from transconv.tuning.table import CsvTable, Row, read

LAYERS = size_layers.chosen(quick=False)
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


def test_drawn_sizes_are_those_of_the_layer() -> None:
    kinds = {(x.kind, x.shape.ndims, x.transposed) for x in LAYERS}
    assert len(LAYERS) == 12 and {k for k, _, _ in kinds} == {"dense", "first", "depthwise", "grouped"}
    assert {n for _, n, _ in kinds} == {1, 2, 3} and {t for *_, t in kinds} == {False, True}
    for layer in LAYERS:
        sizes = size_layers.drawn(layer, 5, 1)
        assert sizes == size_layers.drawn(layer, 5, 1) != size_layers.drawn(layer, 5, 2)
        assert len({*sizes}) == 5 and [Size.parse(str(s)) for s in sizes] == sizes
        for size in sizes:
            p = size_layers.problem_at(layer, size, "bf16")
            assert 1 <= p.mb <= 16 and min(p.o) >= 1 and p.shapes["wei"] == layer.shape.shapes["wei"]
            assert 2 * (prod(p.shapes["src"]) + prod(p.shapes["dst"])) <= size_layers.MOST_BYTES
    with pytest.raises(ValueError, match="no layer of --layout=nhwc has this in its name"):
        size_layers.chosen(False, "nothing")
    first = size_layers.chosen(False, layout="nchw")
    assert first == [x for x in LAYERS if x.shape.ndims > 1], "1D layers are in no list twice"


@pytest.mark.parametrize("layout", size_layers.LAYOUTS)
def test_all_tensors_lie_in_the_layout(layout: str) -> None:
    """Those of both sides, as the problem of the kernels says."""
    for layer in size_layers.chosen(False, layout=layout):
        sides = tuple(n * s for n, s in zip(SMALL[layer.shape.ndims], layer.shape.stride, strict=True))
        p = size_layers.problem_at(layer, Size(2, sides), "f32", layout)
        form = reference.memory_format(p.ndims, layout) or torch.contiguous_format
        for name, tensor in Subject(layer, "fwd", layout).operands(p, 0).items():
            told = torch.empty_strided(tensor.shape, p.specs[name].layout.strides() or ())
            assert tensor.is_contiguous(memory_format=form) and told.is_contiguous(memory_format=form)


@pytest.mark.every(4)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: x.name)
def test_drawn_sizes_are_met_by_a_registry(layer: size_layers.Layer) -> None:
    """Its requirements follow from the layer: the sizes of dst are those that the kernels compute."""
    for size in size_layers.drawn(layer, 4, 1):
        p = size_layers.problem_at(layer, size, "bf16")
        try:
            made = LayerRegistry(p, Prop.FWD, Target.parse("sm_90"), Epilogue(), True, False)
        except ProblemError as error:
            pytest.fail(str(error))
        free = [q for q in made.questions if not any("%" in name for name in q.workload.open)]
        assert free
        for question in free:
            (compute,) = question.workload.computations
            at = dict(zip(compute.named.names, (p.mb, *p.i), strict=True))
            multiples = any("%" in name for name in question.workload.open)  # of a stride: not all sizes
            assert multiples or not compute.named.why_not(at), size


@pytest.mark.slow
@interpreted
def test_a_quick_run_writes_rows_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "sizes",
        "--quick",
        "--out",
        str(tmp_path),
        "--only",
        "quick_dense,quick_line",
        "--props",
        "fwd",
        "--count",
        "2",
        "--share",
        "1",
        "--timed",
        "1",
        "--budget-ms",
        "1",
    ]
    plain, words = words, [*words, "--layout", "nchw"]
    assert main(words) == 0
    found = read(tmp_path / "cpu_size_rows.csv")
    assert {(r["layer"], r["layout"]) for r in found} == {("quick_dense", "nchw")}
    told = [(r["wrong"], r["compiled"], r["elsewhere"], r["kernels"]) for r in found]
    assert told == [("", "0", "0", "7")] * 2 and all(float(r["first_us"]) for r in found)
    assert [bool(r["exact_us"]) for r in found] == [True, False]
    said = capsys.readouterr().out
    assert "measured quick_dense fwd: 2 of 2 sizes" in said
    assert "| quick_dense | fwd | 2 | 2 of 2 | 7 | 0 | 0 |" in said
    assert main(words) == 0 and read(tmp_path / "cpu_size_rows.csv") == found
    left = [dict(Run(understood(w)[1], environment.versions()).todo()) for w in (words, plain)]
    assert left[0] == {} and [*left[1]] == [("quick_dense", "fwd"), ("quick_line", "fwd")]
    for name, size, order in (("quick_dense", "mb1i4x5", "nhwc"), ("quick_line", "mb1i4", "nchw")):
        (row,) = size_measures.measure(name, "fwd", True, [size], [], [], 0)["rows"]
        assert (row["layout"], row["wrong"], row["elsewhere"]) == (order, "", 0)
    with pytest.raises(SystemExit):
        understood(["sizes", "--count", "0"])
    assert main(["sizes", "--quick", "--only", "models", "--layout", "nchw"]) == 2
    if not torch.cuda.is_available():
        assert main(["sizes", "--out", str(tmp_path)]) == 2


def test_a_wrong_result_is_named() -> None:
    subject = Subject(size_measures._layer("quick_dense", True), "fwd")
    p = size_layers.problem_at(subject.layer, Size(1, (4, 5)), "f32")
    right = exact_sums(p, subject.prop, subject.operands(p, 1))
    wrong = right.clone()
    wrong[0, 1, 2, 3] += 1
    assert same(right, right) == "" and same(right.bfloat16(), right) == ""
    assert same(wrong, right) == "1 of 160 elements differ from the exact sums"
    assert "its shape is" in same(wrong[:, :1], right)


SMALL = {1: (23,), 2: (9, 8), 3: (5, 4, 6)}


@pytest.mark.every(4)
@pytest.mark.parametrize("direction", ["fwd", "bwd_d", "bwd_w"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: x.name)
def test_sums_of_taps_are_torchs(layer: size_layers.Layer, direction: str) -> None:
    """Of all layers, each of which has at most a small image here."""
    sides = (
        tuple(n * s for n, s in zip(SMALL[layer.shape.ndims], layer.shape.stride, strict=True))
        if layer.transposed
        else SMALL[layer.shape.ndims]
    )
    p = size_layers.problem_at(layer, Size(2, sides), "f32")
    subject = Subject(layer, direction)
    given = subject.operands(p, 3)
    found = exact_sums(p, subject.prop, given)
    wide = subject.call("torch", p, {name: t.double() for name, t in given.items()})()
    assert torch.equal(found.double(), wide.round()) and float(found.abs().max()) > 0


def test_sums_that_f32_does_not_hold_are_refused() -> None:
    p = size_layers.problem_at(size_measures._layer("quick_dense", True), Size(1, (4, 5)), "f32")
    given = {n: torch.full(p.shapes[n], 2.0**12) for n in ("src", "wei")}
    with pytest.raises(ValueError, match="a sum is larger than"):
        exact_sums(p, Prop.FWD, given)


def test_each_plan_is_compiled_once_and_by_no_gpu() -> None:
    """The questions of a pair are those of its registry, then the sizes' own, as JSON objects."""
    found = size_measures.questions("rn50_l2_3x3_128_s2", "fwd", False, ["mb2i21x30"])
    jobs = [json.loads(json.dumps(q.job)) for q in found]
    assert len(jobs) == 7 and len({str(j) for j in jobs}) == 7
    assert "mb2i" not in jobs[0]["problem"] and "?" not in jobs[-1]["problem"]
    code = "import sys, bench.size_compiles; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@interpreted
@pytest.mark.slow
def test_sixteen_sizes_and_one_graph() -> None:
    found = size_models.ocr("prepared", True, 1)
    assert found["compiled"] == 0 and found["native"] == 1.0 and found["far"] < 1e-5
    found |= {"device": "cpu"}
    graph, apart = (size_models.dynamic(side, True, 1) for side in (size_models.ONE_GRAPH, "prepared"))
    assert (graph["graphs"], apart["graphs"]) == (1, 2), "torch alone has one for a batch of 1, too"
    assert graph["compiled"] == 0 and graph["far"] < 1e-5
    assert apart["worst_ms"] > 3 * graph["worst_ms"], "a size's first call makes the second"
    assert all(row["later_worst_ms"] < apart["worst_ms"] for row in (graph, apart)), "not again"
    table = models_table([{k: str(v) for k, v in row.items()} for row in (found, graph)])
    calls, others = table.split("\n\n")
    assert calls.count("\n") == others.count("\n") == 3
    assert "| dynamic | prepared, 1 as any size | 3 | 1 |" in calls


def test_the_table_counts_first_uses_apart() -> None:
    row = {
        "layer": "a",
        "direction": "fwd",
        "wrong": "",
        "kernels": "3",
        "compiled": "0",
        "elsewhere": "0",
    }
    rows = [
        {**row, "first_use": "1", "first_us": "9000", "later_us": "5", "us": "10", "exact_us": "8"},
        {**row, "first_use": "0", "first_us": "70", "later_us": "7", "us": "20", "exact_us": "20"},
        {**row, "first_use": "0", "first_us": "80", "later_us": "6", "wrong": "1 of 2"},
    ]
    last = {**row, "size": "mb2i9", "layout": "nchw"}  # whose layout is no choice
    rows = [{**last, **r} for r in rows]
    sizes, calls = (t.splitlines()[-1] for t in sizes_table(lines_of(rows)).split("\n\n"))
    assert sizes == "| a | fwd | 3 | 2 of 3 | 3 | 0 | 0 |"
    assert calls == "| a | fwd | 75 | 80 | 6 | 0.89, 0.80 (2) |"
    own = [{**r, "size": "mb2i9x8", "layout": layout} for r in rows for layout in ("nhwc", "nchw")]
    both, _, between, *apart = sizes_table(lines_of([*rows, *own])).split("\n\n")
    assert "--layout nchw" in between and "\n\n".join(apart) == sizes_table(lines_of(rows))
    assert both.splitlines()[-1].startswith("| a | fwd | 6 | 4 of 6 |")


@pytest.mark.every(3)
@interpreted
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("whisper_l3_conv1", "nhwc"),
        ("x3d_m_dw3_54", "nhwc"),
        ("dcgan_up_512_256", "nhwc"),
        ("dcgan_up_512_256", "nchw"),
        ("rn50_l1_1x1_64_256", "nchw"),
        ("mbv2_dw3_384", "nchw"),
    ],
)
def test_calls_ask_for_the_plans_that_are_timed(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry of a measurement has the questions of the calls' own."""
    asked: list[LayerRegistry] = []
    size_policy.forget()

    def choose(self: LayerRegistry, *given: object) -> None:
        asked.append(self)
        raise Unsupported("sizes:refused", "only looked at")

    monkeypatch.setattr(LayerRegistry, "choose", choose)
    monkeypatch.setattr(select_impl._SelectedCall, "question", choose)
    monkeypatch.setattr(size_measures, "_registries", {})
    subject = Subject(size_measures._layer(name, False), "fwd", layout)
    sides = tuple(4 * s for s in subject.layer.shape.stride)
    p = size_layers.problem_at(subject.layer, Size(1, sides), "f32", layout)
    reference.settings(tf32=False)
    with switched(sizes="any", fallback="silent"), torch.no_grad():
        found = size_measures._registry(name, "fwd", False, layout)
        subject.call("ours", p, subject.operands(p, 0))()  # computed by torch
    assert asked[0].questions == found.questions


def test_calls_with_default_settings_have_rows() -> None:
    """The first passes and the last one whole; of those between, slow calls."""
    x = torch.ones(2, requires_grad=True)
    steps = [(name, lambda: (x * 2).sum()) for name in ("a", "b")]
    rows = list[Row]()
    rows += auto_sizes._passes(steps, 0.2, None, rows.append)
    assert [(r["pass"], r["size"]) for r in rows[:6]] == [(n, s) for n in (1, 2, 3) for s in "ab"]
    assert [r["size"] for r in rows[-2:]] == ["a", "b"] and rows[-1]["pass"] == rows[-2]["pass"] > 4
    assert all({*r} < {*auto_sizes.COLUMNS} for r in rows)
    for row, slow_ms, at_s in zip(rows, (7.0, 9.0), (1.0, 31.0), strict=False):
        row.update(
            forward_ms=slow_ms, backward_ms=1.0, at_s=at_s, kernels=3, waiting=1, us=3.0, own_us=2.0
        )
    told = auto_sizes.describe(rows[:2])
    assert told == (
        "slowest of ten first calls 9.0 ms, of others 0.0 ms; after 30 s 75.0% by kernels; "
        "time over that of own kernels at most 1.500"
    )
    told = auto_sizes.describe([rows[0] | {"size": auto_sizes.MODEL, "forward_ms": 5e3}, *rows[:2]])
    assert told.startswith("first call 5000.0 ms, slowest of others 9.0 ms; after 30 s 75.0% by kernels")
    late: dict[str, object] = {"pass": 7, "backward_ms": 25.0, "phases": "check=12 gc=2"}
    own = {"pass": auto_sizes.OWN, "size": "a", "us": 3.0, "own_us": 1.0}
    assert auto_sizes.describe([*rows[:1], own]).endswith("at most 3.000")
    lines = [*auto_sizes.slow([*rows[:2], rows[0] | late, own])]
    assert len(lines) == 1 and "25.00 ms" in lines[0] and lines[0].endswith("check=12 gc=2")


def test_rows_are_written_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A side that was stopped has its rows in the file, and is measured again; the others' rows stay."""
    path, about = tmp_path / "rows.csv", {"case": "layer", "side": "torch heuristics", "device": "cpu"}
    before = {**about, "side": "auto", "size": "4x9", "us": 1.0}
    CsvTable(path, auto_sizes.COLUMNS, auto_sizes.KEY).add(before)

    def stopped(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(auto_sizes, "_us", stopped)
        auto_sizes.measure(str(path), about, True, 0.0, time.time() + 60)
    assert len(read(path)) == 1 + 3 * auto_sizes.WHOLE_PASSES
    assert not auto_sizes._is_finished(path, about) and len(read(path)) == 1
    made = auto_sizes.measure(str(path), about, True, 0.0, time.time() + 60)
    assert auto_sizes._is_finished(path, about) and len(read(path)) == 1 + len(made["rows"]) == 13


def test_sides_share_the_seconds_that_are_left() -> None:
    """Whatever each takes of its share, all are within the limit, and the last has a part of it."""
    for taken in itertools.product((0.1, 0.5, 1.0), repeat=3):
        left = 200.0
        for following, part in zip((2, 1, 0), taken, strict=True):
            share = auto_sizes.share(left, following)
            assert left * (following > 0) * 0.5 < share <= left and share >= 200 / 12 - 1e-9
            left -= part * share
        assert left >= 0


def test_a_side_that_was_not_begun_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, said = understood(["auto-sizes", "--only", "graph", "--limit", "0.001", "--out", str(tmp_path)])
    assert auto_sizes.main(said) == 1
    assert capfd.readouterr().out.count("no time was left to start it") == 3


def test_a_side_without_time_has_one_pass_and_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = list[int]()

    def us(forward: Any, count: int) -> float:
        times.append(count)
        return 1.0

    monkeypatch.setattr(auto_sizes, "_us", us)
    path, about = tmp_path / "rows.csv", {"case": "layer", "side": "torch heuristics", "device": "cpu"}
    made = auto_sizes.measure(str(path), about, True, 40.0, time.time())["rows"]
    assert [(r["pass"], r["us"]) for r in made] == [(1, 1.0)] * len(made) and len(made) == 3
    assert times == [1, 1, 1] and auto_sizes._is_finished(path, about)
    slow = [("a", lambda: torch.ones(1, requires_grad=True) * float(time.sleep(0.2) is None))]
    began = time.time()
    auto_sizes._passes(slow, 40.0, None, lambda row: None, began + 1.5, 3)
    assert 0.6 < time.time() - began < 1.2  # a fourth pass and three calls more would end after it


def test_sizes_with_the_most_kernels_of_their_own_come_first() -> None:
    answered = {"a": "fwd_any_size=3 bwd_w_any_size=1 fwd=9", "b": "fwd=2 bwd_w_any_size=3", "c": "fwd=1"}
    steps = [(size, lambda: torch.ones(1)) for size in answered]
    last = [{"size": size, "answered": words} for size, words in answered.items()]
    assert [size for size, _ in auto_sizes._most_own(steps, last)] == ["c", "b", "a"]


def test_a_step_has_the_time_of_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread runs in another one is not the step's, and kernels are added up by what they do."""

    def one(stream: int, name: str, us: float, on: DeviceType = DeviceType.CUDA) -> Any:
        of = {"device_type": on, "is_user_annotation": False, "duration_ns": 1e3 * us}
        of |= {"device_resource_id": stream, "name": name}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in of.items()})

    kernels = [one(7, "conv_fwd_mb1_0a", 4e3), one(7, "fwd_mb1_0b", 6e3), one(7, "pack_src_1", 2e3)]
    beside = [one(7, "relu", 2e3), one(13, "check", 9e3), one(0, "aten", 9e9, DeviceType.CPU)]
    recorded = SimpleNamespace(events=lambda: kernels + beside)
    found = SimpleNamespace(profiler=SimpleNamespace(kineto_results=recorded))
    monkeypatch.setattr(epochs, "profile", lambda **_: contextlib.nullcontext(found))
    assert epochs.busy_ms(lambda at: at, 2) == 7.0
    parts = auto_sizes._parts(lambda: torch.ones(1, requires_grad=True) * 1)
    assert parts == {"fwd": 1e4, "bwd_d": 0.0, "bwd_w": 0.0, "pack": 2e3, "others": 2e3}


@pytest.mark.usefixtures("own_garbage")
def test_a_call_tells_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the time of those within it taken out; what a thread did beside the call has its own."""
    from transconv.runtime import compiler, plan_cache, rehearsal_thread

    monkeypatch.setattr(rehearsal_thread, "START_S", 0.0)
    monkeypatch.setattr(plan_cache, "read", lambda: (time.sleep(0.02), compiler.build()))
    monkeypatch.setattr(compiler, "build", lambda: time.sleep(0.03))
    thread, done = rehearsal_thread.RehearsalThread(), threading.Event()
    with call_phases.watched() as phases:
        plan_cache.read()
        found = phases.take()
        assert set(found) - {"gc"} == {"read", "generate"}
        assert 20 <= found["read"] < 30 <= found["generate"]
        thread.add(torch.device("cpu"), lambda: plan_cache.read(), done.set)
        assert done.wait(60.0)
        gc.collect()
        found = phases.take()
        assert set(found) == {"beside:read", "beside:generate", "gc"} and phases.take() == {}
    thread.close()
    plan_cache.read()
    assert not phases.take(), "nobody watches"
    assert call_phases.said({"read": 2.5, "gc": 1.0}) == "read=2.5 gc=1"
