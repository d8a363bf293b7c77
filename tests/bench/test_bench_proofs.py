"""Drawn kernels of all kinds are proved, planted strays are found, and the table of many says so."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from random import Random

import pytest

from bench import proofs
from transconv.ir import Kernel
from transconv.passes.footprints import Footprint
from transconv.support import AddressError

with (Path(__file__).parents[2] / "bench" / "results" / proofs.NAME).open(encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))


def total(column: str) -> int:
    return sum(int(r[column] or 0) for r in ROWS)


def test_the_table() -> None:
    """Nearly all are proved for all sizes; most strays are found, and none is missed."""
    assert {r["kind"] for r in ROWS} == set(proofs.KINDS)
    assert total("nothing") == total("missed") == 0
    assert total("accesses") == sum(total(rule) for rule in (*proofs.RULES, "examples"))
    proved = sum(r["status"] == "proved" for r in ROWS)
    assert proved > 0.98 * len(ROWS)
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert f"Of {len(ROWS)} drawn trials (bench/results/proofs.csv) {proved} are proved" in page
    assert f"Of {total('strays')} strays {total('found')} leave their tensor" in page
    assert total("strays") == sum(total(v) for v in proofs.VERDICTS) < 2 * total("found")


@pytest.mark.parametrize("kind", proofs.KINDS)
def test_strays_of_each_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drawn kernels some strays are found; where the proof is blind, they are missed."""
    _, kernels = proofs.KINDS[kind](1, 4)
    assert proofs.proved(kernels)["status"] == "proved"

    def planted() -> dict[str, int]:
        return proofs.strays(kernels, Random(3))

    found = planted()
    assert found["strays"] == proofs.STRAYS and found["found"] >= 1 and "missed" not in found
    monkeypatch.setattr(Footprint, "proof", ("ranges", None))
    assert planted()["missed"] == found["found"]


def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are there are not made again; a kernel without a proof has its line and the reason, and a
    schedule that is refused for its addresses is no proof."""
    kernels, drawn = proofs.KINDS["computation"](1, 1)[1], []

    def computation(seed: int, number: int) -> tuple[str, list[Kernel]]:
        drawn.append(number)
        if number == 2:
            raise AddressError("the offset n is in 1..256; expected one in the memory of X, of 0..255")
        return f"line {number}", kernels

    monkeypatch.setitem(proofs.KINDS, "computation", computation)
    asked = Namespace(out=tmp_path, n=1, seed=1, kinds="computation", time_budget=600.0)
    assert proofs.main(asked) == 0
    asked.n = 3
    monkeypatch.setattr(Footprint, "proof", ("", None))
    monkeypatch.setattr(Footprint, "why_not", "it strays")
    assert proofs.main(asked) == 1 and drawn == [0, 1, 2]
    with (tmp_path / proofs.NAME).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["status"] for r in rows] == ["proved", "unproved", "unproved"]
    assert [r["line"] for r in rows] == ["", "line 1", ""]
    assert rows[1]["reason"] == "it strays" and "memory of X" in rows[2]["reason"]
