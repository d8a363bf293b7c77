"""docs/walkthrough.md shows what the project prints: every block is made anew and compared.
``pytest tests/docs/test_walkthrough.py --update-golden`` rewrites them; their diff is read as code."""

from __future__ import annotations

import re

import pytest

from tests.shown import ROOT, Block, anew, blocks, cut

PAGE = ROOT / "docs" / "walkthrough.md"
BLOCKS = blocks(PAGE.read_text())
SHOWN = [b for b in BLOCKS if b.rule]
MOST_LINES = 400


@pytest.mark.every(2)
@pytest.mark.parametrize("block", SHOWN, ids=lambda b: b.heads[0].strip()[:70])
def test_what_is_shown(block: Block, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    now = anew(block, page)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page.replace(block.whole, now))
        return
    assert now == block.whole, "the page is stale; --update-golden if that is meant"


def test_nothing_is_copied_by_hand() -> None:
    """What is not shown is to be typed: variables of the page, or programs of it."""
    for block in BLOCKS:
        assert block.rule or block.kind == "sh" or block.body.startswith("# "), block.body
    assert all(b.body[0] in "#$" for b in SHOWN) and len(SHOWN) >= 16


def test_the_page_is_short_and_its_files_exist() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    paths = re.findall(r"`((?:transconv|tests|bench|docs)/[\w./]+)`", text)
    assert paths and [p for p in paths if not (ROOT / p).exists()] == []


DIFF = "@@ -1 +1 @@\n kernel\n-    for m:\n+    let m\n+    store\n--- x"


@pytest.mark.parametrize(
    ("text", "rule", "left"),
    [
        ("a\nb\nc", "whole", "a\nb\nc\n"),
        ("a\nb\nc", "lines 2-3", "b\nc\n"),
        ("    a\n    b\n        c\n    d", '"a"; "c" to "d"', "a\n    ...\n    c\nd\n"),
        ("a\nb\na\nc", '"b"; "a" to "c"', "b\na\nc\n"),
        (DIFF, "changed", "-    for m:\n+    let m\n+    store\n"),
        (DIFF, 'changed; "store"', "+    store\n"),
    ],
)
def test_rules(text: str, rule: str, left: str) -> None:
    assert cut(text, rule) == left


@pytest.mark.parametrize("rule", ['"not there"', '"b" to "a"', "line 3", ""])
def test_a_rule_that_finds_nothing(rule: str) -> None:
    with pytest.raises(ValueError, match="no line|no rule"):
        cut("a\nb", rule)
