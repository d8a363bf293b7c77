"""The estimate of maps and reductions beside the schedules that were timed on an H200."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import short_rows
from bench.environment import ROOT
from bench.map_cases import MapCase, cases
from transconv.compute import kernels, parse
from transconv.cost import estimate
from transconv.schedule import Schedule, why_not
from transconv.selection import candidates, spread
from transconv.selection.proposals import heuristics
from transconv.selection.proposals.maps import even
from transconv.target import TARGETS
from transconv.verify.data import torch_dtype

H200 = replace(TARGETS["sm_90"], bandwidth_gbs=4800.0, l2_bytes=60 << 20)
PARTS = ROOT / "bench" / "results" / "h200_part_trials.csv"
TRIALS = ROOT / "bench" / "results" / "h200_map_trials.csv"


def timed() -> dict[str, dict[Schedule, float]]:
    """Microseconds of schedules, by the computation that they are of."""
    found: dict[str, dict[Schedule, float]] = defaultdict(dict)
    with TRIALS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["case"]][Schedule.parse(row["schedule"])] = float(row["us"])
    return found


@pytest.mark.slow
def test_what_is_chosen_is_nearly_the_fastest() -> None:
    """In the geometric mean within 5% of the best that was timed, and never twice as slow."""
    logs = {}
    known = timed()
    for case in cases():
        made = [*kernels(parse(case.text))]
        made += [part for text in case.texts for k in kernels(parse(text)) for part in spread(k, H200)]
        for name, compute in ((case.name, made[0]), *((f"{case.name}: {k.name}", k) for k in made)):
            if len(of := known.get(name, {})) > 1:
                us = {s: estimate(s, compute, H200) for s in of}
                first = even(sorted(us, key=lambda s: us[s]), us, compute, H200)[0]
                logs[name] = math.log(of[first] / min(of.values()))
    assert len(logs) > 70
    assert math.exp(sum(logs.values()) / len(logs)) < 1.05, logs
    assert logs["average pool resnet"] < math.log(1.02)  # no exchange of lanes at each step
    assert max(logs.values()) < math.log(2), logs


@pytest.mark.slow
def test_estimates_of_the_table_are_near_what_was_timed() -> None:
    """Of all cases, with what is chosen now: 11% in quadratic mean, and not too high or too low in all."""
    with (ROOT / "bench" / "results" / "h200_maps.csv").open(encoding="utf-8") as file:
        took = {row["case"]: float(row["us"]) for row in csv.DictReader(file)}
    off = []
    for case in cases():
        parts_of = [part for text in case.texts for k in kernels(parse(text)) for part in spread(k, H200)]
        us = sum(estimate(heuristics.default(k, H200), k, H200) for k in parts_of)
        off.append(math.log(us / took[case.name]))
    assert len(off) == 49
    assert abs(sum(off) / len(off)) < math.log(1.04), off
    assert math.sqrt(sum(x * x for x in off) / len(off)) < math.log(1.11), off


@pytest.mark.slow
def test_what_is_chosen_for_parts_is_nearly_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of kernels over parts of rows, of sizes that were forced. CROSS is fitted to them."""
    found: dict[tuple[str, str, str], dict[Schedule, float]] = defaultdict(dict)
    with PARTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            of = found[row["case"], row["part"], row["kernel"]]
            of[Schedule.parse(row["schedule"])] = float(row["us"])
    whole = {c.name: kernels(parse(c.text))[0] for c in cases()}
    logs = {}
    for (name, size, kernel), of in found.items():
        if len(of) < 2:
            continue
        monkeypatch.setattr(candidates, "ALONG", int(size))
        monkeypatch.setattr(candidates, "ACROSS", (int(size), int(size)))
        compute = next(k for k in candidates._in_parts(whole[name], H200) or () if k.name == kernel)
        us = {s: estimate(s, compute, H200) for s in of}
        first = even(sorted(us, key=lambda s: us[s]), us, compute, H200)[0]
        logs[name, size] = math.log(of[first] / min(of.values()))
    assert len(logs) == 18
    assert math.exp(sum(logs.values()) / len(logs)) < 1.08, logs
    assert max(logs.values()) < math.log(1.5), logs


@pytest.mark.every(4)
@pytest.mark.parametrize("case", [*cases(), *short_rows.cases(lengths=(49,))], ids=lambda c: c.name)
def test_cases_are_texts_and_calls_of_torch(case: MapCase) -> None:
    """Texts that can be read, and a call that takes their tensors and returns the result's size."""
    made = [parse(text) for text in case.texts]
    assert all(str(parse(str(c))) == str(c) and kernels(c) for c in made)
    result = made[0].writes[0].view.tensor
    with FakeTensorMode():
        tensors = {}
        for t in (t for c in made for t in c.tensors):
            strides = [b.stride for b in sorted(t.layout.blocks, key=lambda b: b.dim)]
            tensors[t.name] = torch.empty_strided(t.shape, strides, dtype=torch_dtype(t.dtype))
        for laid in (tensors, case.other(tensors) if case.other else tensors):
            theirs = case.instead(laid)
            every = theirs if isinstance(theirs, tuple) else (theirs,)
            assert every[0].numel() == math.prod(result.shape)  # type: ignore[attr-defined]
            if "backward" in case.name:  # what is not returned, torch.compile would leave out
                assert len(every) == sum(len({w.view.tensor for w in c.writes}) for c in made)


def test_forms_of_short_rows_are_legal_and_differ() -> None:
    """Among them what is chosen, what was before, steps that are written out and those that are not."""
    for case in short_rows.cases(lengths=(49,)):
        made = kernels(parse(case.text))[0]
        found = [*short_rows.forms(made, H200)]
        assert [side for side, _ in found][:2] == ["before", "chosen"], case.name
        assert all(why_not(s, made, H200) is None for _, s in found)
        own = [s for side, s in found if side != "before"]
        assert len({*own}) == len(own) and {s.unroll for s in own} == {0, 1}
