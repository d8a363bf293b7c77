"""Predictions, their formulas by hand-made rows, files of others merged, and the board from the files."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path

import pytest

from bench import board, layers, predictions
from bench.predictions import CARDS, VALIDATION, correction, errors, factors, misses, predicted, regrets
from tests.cli.test_measurement import shared
from transconv.compute import Alone
from transconv.conv import DIRECTIONS, ConvProblem, ConvWorkload, Prop
from transconv.cost import estimate
from transconv.runtime import estimated, plan_steps
from transconv.target import TARGETS
from transconv.tuning.table import Row, read
from transconv.verify.case import ProblemCase
from transconv.verify.network_blocks import BLOCKS


def row(card: str, us: float, estimate: float, family: str = "boxes", **more: str) -> Row:
    return {
        "card": card,
        "source": "layers",
        "name": f"{us}",
        "family": family,
        "us": str(us),
        "estimate_us": str(estimate),
    } | more


EIGHT = [row("H200", 2.0 * n, n) for n in range(1, 9)]


def test_factors_are_medians_of_families_with_enough_rows() -> None:
    few = [row("H200", 30, 10, "fma"), row("H200", 50, 10, "fma")]
    found = factors([*EIGHT, *few, row("H200", 90, 10, "graph")])
    assert found == pytest.approx({"boxes": 2.0, "": 2.0})  # graphs are no kernels
    # Of a problem with many schedules the median counts, once.
    log_ = [row("H200", us, 1, "gathers", source="trials", name="one") for us in (3, 4, 5)]
    each = [row("H200", 8, 1, "gathers", name=f"p{n}") for n in range(7)]
    assert factors([*log_, *each])["gathers"] == pytest.approx(8.0)
    assert errors([row("H100", 3, 1), row("H100", 3, 1, "fma")], {"boxes": 2.0, "": 6.0}) == (
        pytest.approx([log(1.5), log(0.5)])
    )


def test_a_card_is_predicted_from_the_others_alone() -> None:
    other = [row("H100", 3.0 * n, n) for n in range(1, 9)]
    graphs = [
        row(c, 100, 100, "graph", source="zoo", name=f"m{n}") for c in ("H200", "H100") for n in range(8)
    ]
    rows = [*EIGHT, *other, *graphs]
    assert correction(rows, "H200").of("boxes") == pytest.approx(3.0)
    assert correction(rows, "H100").of("boxes") == pytest.approx(2.0)
    assert correction(rows).of("boxes") == pytest.approx(exp((log(2) + log(3)) / 2))
    # H200's times are 2/3 of what H100's factors say, H100's 3/2 of what H200's say.
    low, high = correction(rows).ends("layer", False)
    assert (low, high) == pytest.approx((2 / 3, 3 / 2))
    assert correction(rows).ends("layer", True) == pytest.approx((4 / 9, 9 / 4))
    found = predictions.validated(rows, "H200", "layer")
    assert found[0] == pytest.approx((2.0, 3.0, 2.0, 4.5))
    told = misses(found)
    assert (told.count, told.typical, told.bias) == pytest.approx((8, 1.5, 2 / 3))
    assert told.near == 0 and told.agreement == pytest.approx(1.0)


def test_regret_is_of_what_is_put_first() -> None:
    by = [row("H100", 1.0 * n, n) for n in range(1, 9)] + [
        row("H100", 4.0 * n, n, "fma", name=f"f{n}") for n in range(1, 9)
    ]
    tried = {"source": "trials", "name": "one"}
    own = [row("H200", 10, 9, **tried), row("H200", 8, 7, "fma", **tried)]
    assert regrets([*by, *own], "H200") == pytest.approx([10 / 8])  # 7 * 4 is more than 9
    assert regrets([*by, own[0]], "H200") == []


def test_a_prediction_is_the_estimate_of_the_choice_times_its_factor() -> None:
    """The sum of parts is in the main kernel's estimate, not counted again."""
    problem = ConvProblem.parse("mb4ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc")
    workload, chip = ConvWorkload(problem, Prop.BWD_W), TARGETS["sm_80"]
    by = correction(read(VALIDATION))
    (main, schedule), *_ = plan_steps(workload, chip)
    made = predicted({"kind": "layer"}, [workload], chip, by)
    us = estimate(schedule, main, chip)
    assert made["schedule"] == str(schedule) and made["estimate_us"] == pytest.approx(us)
    assert made["us"] == pytest.approx(us * by.of(made["family"]))
    low, high = by.ends("layer", True)
    assert (made["low"], made["high"]) == pytest.approx((made["us"] * low, made["us"] * high))
    assert low < by.ends("layer", False)[0] < 1 < by.ends("layer", False)[1] < high
    refused = predicted(
        {"kind": "layer"},
        [ConvWorkload(ConvProblem.parse("ic8ih8oc8oh8kh1 dt=f64"), Prop.FWD)],
        TARGETS["dg2"],
        by,
    )
    assert "us" not in refused and "f64" in refused["reason"]


def test_a_block_is_planned_without_being_run() -> None:
    (layer_norm, first, second) = (
        Alone(predictions.parse(t)) for t in predictions.texts(BLOCKS["two_layers"])
    )
    assert "8192" in first.text and "relu" not in second.text
    assert all(estimated(w, TARGETS["gfx942"]) > 0 for w in (layer_norm, first, second))


def test_files_have_every_layer_and_graph_of_every_card() -> None:
    """Each has a time inside of its interval, or the reason why there is none."""
    asked = {(x.name, d) for x in layers.read("layers") for d in DIRECTIONS} | {(b, "") for b in BLOCKS}
    by = correction(read(VALIDATION))
    for card in CARDS:
        rows = read(predictions.file_of(card))
        assert {(r["name"], r["direction"]) for r in rows} == asked and len(rows) == len(asked)
        for r in rows:
            if not r["us"]:
                assert r["reason"]
                continue
            assert 0 < float(r["low"]) < float(r["us"]) < float(r["high"]) and not r["reason"]
            if card not in predictions.MEASURED:
                factor = by.of("graph" if r["kind"] == "graph" else r["family"])
                assert float(r["us"]) == pytest.approx(factor * float(r["estimate_us"]), rel=0.5)
    assert sum(predictions.file_of(c).stat().st_size for c in CARDS) < 720_000


SLOW = [pytest.param(p, marks=pytest.mark.slow) for p in (Prop.BWD_D, Prop.BWD_W)]


@pytest.mark.every(3)
@pytest.mark.parametrize("prop", [Prop.FWD, *SLOW])
@pytest.mark.parametrize("target", sorted({t.name for t in CARDS.values()}))
def test_kernels_of_every_card_are_exact_when_they_are_interpreted(target: str, prop: Prop) -> None:
    """The mark ``interpreted`` of the board."""
    problem = ConvProblem.parse("mb2ic16ih6oc32oh6kh3ph1 dt=f16 tag=nhwc")
    case = ProblemCase(problem, prop, where="cpu", target=TARGETS[target], numpy=True)
    assert case.judge(case.plan(), "exact").right


# -- files of others -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA_A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA_L40S", "L40S"),
        ("NVIDIA_A40", "A40"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Tesla T4", ""),
    ],
)
def test_the_card_of_a_device(device: str, card: str) -> None:
    assert board.card_of(device) == card


def test_files_of_one_card_are_merged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(board, "SHARED", tmp_path / "shared")
    told = board.predictions_of("A100")
    name, block = layers.read("layers")[0].name, "two_layers"
    expected = float(told[name, "fwd"]["us"])
    for n, factor in enumerate((1.0, 3.0, 2.0)):
        given = tmp_path / f"{n}.json"
        shared("NVIDIA_A100-SXM4-80GB", name, factor * expected, block).write(given)
        monkeypatch.setattr(board, "alone", lambda us: us)
        kept = board.keep(given)
        assert (
            kept.parent == tmp_path / "shared"
            and kept.name.startswith("a100_")
            and board.keep(given) == kept
        )
    found = board.by_card(board.SHARED.glob("*.json"))
    assert board.times_of(found["A100"]) == pytest.approx({(name, "fwd"): 2 * expected, (block, ""): 7.0})
    (line,) = [x for x in board.times_board(found).splitlines() if x.startswith("| A100 ")]
    assert line.split(" | ")[2] == "2.00 of 1" and line.split(" | ")[4] == "-"
    (chip,) = [x for x in board.chips_board(found).splitlines() if x.startswith("| A100 ")]
    assert chip.endswith("| - | 3 files |")
    assert board.shared_board(found).count("| NVIDIA A100-SXM4-80GB | others | torch 2.11.0") == 3
    other = tmp_path / "other.json"
    shared("Tesla T4", name, 1.0, block).write(other)
    with pytest.raises(ValueError, match="no predictions for Tesla T4; expected one of A100"):
        board.keep(other)
    other.write_text(json.dumps({"layers": []}))
    with pytest.raises(ValueError, match="expected a file of transconv doctor --share"):
        board.keep(other)


def test_wrong_results_are_not_times() -> None:
    one = shared("NVIDIA_A100", "x", 5.0, "y")
    one.layers[0]["verdict"] = "wrong"
    assert board.times_of([one]) == {("y", ""): 7.0}
    one.graphs[0]["kernels_us"] = 5.0  # one by one, as they are predicted
    assert board.times_of([one]) == {("y", ""): 5.0}
