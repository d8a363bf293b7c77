"""The table of what the simplifier leaves of kernels, and kernels of it counted again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench import index_operations
from bench.index_operations import KEY, NAME, summary
from transconv.ir import FALSE, Const, Expr, Var, all_of, eq
from transconv.passes.scalar import simplification
from transconv.simplify import Facts, Range, Verdict

with (Path(__file__).parents[2] / "bench" / "results" / NAME).open(encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))
AFTER = {tuple(r[c] for c in KEY[:-1]): r for r in ROWS if r["side"] == "after"}
BEFORE = {tuple(r[c] for c in KEY[:-1]): r for r in ROWS if r["side"] == "before"}
LOST = [(key, AFTER[key]) for key, r in BEFORE.items() if int(r["masks"]) > int(AFTER[key]["masks"])]


def test_what_is_left() -> None:
    """Of the conditions that every point shows to be needless, all are gone, and no
    kernel has more masks, divisions or operations."""
    assert len({key[0] for key, _ in LOST}) >= 100
    removable = {
        side: sum(int(r["removable"]) for r in ROWS if r["side"] == side) for side in ("before", "after")
    }
    assert removable["before"] > 200 and removable["after"] == 0
    assert [line.split()[-1] for line in summary(ROWS)][2:] == ["0", "0", "0"]


@pytest.mark.every(3)
@pytest.mark.parametrize("number", [0, 20, 50])
def test_kernels_are_counted_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the table; without the second tier more masks are left, or as many where rules decide."""
    text, row = LOST[number]
    found = index_operations._counted(*text)
    assert found is not None
    assert found["masks"] == int(row["masks"])

    def rules_alone(condition: object, facts: Facts) -> Verdict | None:
        return Verdict(bool(condition.value), "simplify") if isinstance(condition, Const) else None

    monkeypatch.setattr(simplification, "decide", rules_alone)
    bypassed = index_operations._counted(*text)
    assert bypassed is not None and bypassed["masks"] >= found["masks"]


@pytest.mark.slow
def test_what_is_dropped_is_needless_at_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = 0
    meant = simplification._Simplify.independent

    def checked(self: simplification._Simplify, parts: list[Expr], tensor: str) -> list[Expr]:
        nonlocal dropped
        kept = meant(self, parts, tensor)
        if kept == [FALSE]:
            assert index_operations.needless(self.whole(all_of(parts)), [], self.facts) is not False
        rest = [self.whole(part) for part in kept if part is not FALSE]
        for part in parts if kept != [FALSE] else []:
            if part not in kept:
                dropped += 1
                whole, known = self.whole(part), [*rest, *self.facts.true]
                assert index_operations._always(whole, known, self.facts) is not False, str(part)
        return kept

    monkeypatch.setattr(simplification._Simplify, "independent", checked)
    for text, _ in LOST[::8]:
        index_operations._counted(*text)
    assert dropped > 20


def test_needless_conditions_are_seen() -> None:
    x, y = Var("x"), Var("y")
    facts = Facts(ranges={x: Range(0, 7), y: Range(0, 1)})
    assert index_operations.needless(x < 4, [eq(x // 4, y), y + x < 5], facts)
    assert index_operations.needless(x < 8, [], facts)
    assert not index_operations.needless(x < 4, [eq(x // 4, y)], facts)
    assert index_operations.needless(Var("far") < 4, [], facts) is None
