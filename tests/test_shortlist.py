"""What one process chose, the next reads; what cannot be right is ranked anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from transconv import compiler
from transconv.algorithm import algorithms
from transconv.config import Config
from transconv.database import choice, rows, shortlist, store
from transconv.database.rows import Row
from transconv.database.shortlist import DRAWER, Listed
from transconv.problem import ConvProblem, Prop
from transconv.target import TARGETS
from transconv.verdicts import triton_version

pytestmark = pytest.mark.usefixtures("nothing_known")
SM90 = TARGETS["sm_90"]
DENSE = ConvProblem.parse("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
TUNED = "mb:4 oh:4 ow:4 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4"


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithms that were ranked, not read."""
    found: list[str] = []
    real = choice.ranked

    def watched(algorithm, *rest):  # type: ignore[no-untyped-def]
        found.append(algorithm.name)
        return real(algorithm, *rest)

    monkeypatch.setattr(choice, "ranked", watched)
    return found


def listed(prop: Prop = Prop.FWD, count: int = 8, target: str = "sm_90") -> list[Listed]:
    algorithm = algorithms(DENSE, prop)[0]
    return shortlist.shortlist(count, algorithm, TARGETS[target], DENSE, prop)


def record() -> Path:
    (found,) = Path(os.environ["TRANSCONV_CACHE"], DRAWER.name).glob("*.json")
    return found


def test_a_plan_made_again_ranks_nothing(ranked: list[str]) -> None:
    once = compiler.plan(DENSE, Prop.FWD, SM90)
    assert ranked[0] == "fwd"
    ranked.clear()
    compiler._plans.clear()  # as a new process begins
    again = compiler.plan(DENSE, Prop.FWD, SM90)
    assert not ranked
    assert (again.config, again.why) == (once.config, once.why)
    assert [s.source for s in again.steps] == [s.source for s in once.steps]


def test_what_is_read_is_what_was_ranked(ranked: list[str]) -> None:
    made = listed()
    assert made == listed() and ranked == ["fwd"]
    assert made == [Listed(c.config, c.why, False)
                    for c in choice.ranked(algorithms(DENSE, Prop.FWD)[0], SM90, DENSE, Prop.FWD)[:8]]


def test_everything_that_has_a_say_is_in_the_key(ranked: list[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    listed()
    assert len(ranked) == 1
    listed(count=7)
    listed(target="sm_80")
    listed(Prop.BWD_D)
    assert len(ranked) == 4
    store.remember([Row(rows.problem_text(DENSE), "fwd", "", "sm_90x132", TUNED, 12.5, 16,
                        rows.LOWERING, triton_version())])
    found = listed()
    assert len(ranked) == 5 and found[0].config == Config.parse(TUNED) and found[0].tuned
    monkeypatch.setenv("TRANSCONV_TUNED", "0")
    assert not listed()[0].tuned  # and this was known already
    assert len(ranked) == 5
    monkeypatch.setattr(shortlist, "_files", lambda: [("cost.py", 1, 1)])
    listed()
    assert len(ranked) == 6


def test_a_given_config_is_not_kept(ranked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_CONFIG", TUNED)
    assert [k.config for k in listed()] == [Config.parse(TUNED)]
    monkeypatch.delenv("TRANSCONV_CONFIG")
    assert len(listed()) == 8 and len(ranked) == 2


@pytest.mark.parametrize("configs", [
    [], "none", [{"config": "mb:4"}], [{"config": 7, "why": "", "tuned": False}], [7],
    [{"config": "no config", "why": "", "tuned": False}],
    [{"config": "mb.oh.ow:128 oc:4096 ic:64 | mma | stages=3", "why": "", "tuned": True}],
    [{"config": f"{TUNED} stages=800".replace("stages=4 ", ""), "why": "", "tuned": True}],
    [{"config": "od:4 oc:64 ic:64 | mma", "why": "", "tuned": True}]])
def test_what_makes_no_sense_is_ranked_anew(ranked: list[str], configs: object) -> None:
    right = listed()
    key = record().stem
    DRAWER.put(key, {"configs": configs})
    assert listed() == right
    assert len(ranked) == 2
    content = json.loads(record().read_text())["content"]
    assert [c["config"] for c in content["configs"]] == [str(k.config) for k in right]
