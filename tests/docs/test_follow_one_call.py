"""docs/follow_one_call.md follows calls that are made: its links lead to functions that run in them, and
what it shows is printed anew. ``pytest tests/docs/test_follow_one_call.py --update-golden`` rewrites both.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs import one_call
from tests.docs.one_call import CALLS, LINK, PAGE, PRINTED, Function, Trace, meant, ran
from tests.shown import blocks, cut

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
MOST_LINES = 300


def made_anew(page: str) -> str:
    """The page with its links where the functions are, and with what is printed now."""
    page = LINK.sub(lambda m: f"[`{m[1]}`](../{meant(m[1]).file})", page)
    for block in blocks(page):
        if block.rule:
            head = block.heads[0]
            what = head.split()[-1]
            assert head == f"$ python -m {one_call.__name__} {what}\n"
            page = page.replace(
                block.whole, block.whole.replace(block.body, head + cut(PRINTED[what](), block.rule))
            )
    return page


@pytest.mark.slow
def test_the_page_is_as_the_calls_are(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text("utf-8")
    now = made_anew(page)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(now, "utf-8")
        return
    assert now == page, "the page is stale; --update-golden if that is meant"


def test_the_page_is_short_and_shows_all_there_is() -> None:
    page = PAGE.read_text("utf-8")
    assert len(page.splitlines()) <= MOST_LINES
    assert {b.heads[0].split()[-1] for b in blocks(page) if b.rule} == set(PRINTED)
    assert len(one_call.labels(page)) >= 30


def test_functions_are_told_in_the_order_of_the_calls() -> None:
    """Each is named where it first runs: those of the first call in order, then those of later ones."""
    order = list(dict.fromkeys(f for call in ("first", "second", "third") for f in ran(call)))
    told = [order.index(meant(label)) for label in one_call.labels(PAGE.read_text("utf-8"))]
    late = [
        label
        for label, at, before in zip(
            one_call.labels(PAGE.read_text("utf-8"))[1:], told[1:], told, strict=False
        )
        if at < before
    ]
    assert late == []


def test_each_call_runs_less_than_the_one_before() -> None:
    """A repeated call on a GPU runs four functions, three of them written for it."""
    counts = [len(ran(call)) for call in CALLS if call != "third"]
    assert counts == sorted(counts, reverse=True)
    assert [f.name for f in ran("gpu")] == ["conv2d", "call", "start", "run"]
    assert {f.file for f in ran("gpu")[1:]} == {one_call.TEXT}


def test_a_function_that_does_not_run_is_not_named() -> None:
    with pytest.raises(LookupError, match="no function that runs"):
        meant("conv_transpose3d")
    with pytest.raises(LookupError, match=r"routes?_cache.*plan_cache|plan_cache.*route_cache"):
        meant("find")


def test_a_trace_has_each_function_once_below_its_caller() -> None:
    trace = Trace(lambda f: f.name in ("cut", "where")).of(lambda: cut("a\nb", '"b"'))
    assert trace.ran == {}  # no function of the package
    assert Function("transconv/x/y.py", "A.b").answers_to("y.A.b")
    assert not re.match(LINK, "[`cut`](shown.py)")
