"""Knobs: read at access, strict, and the only readers of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from transconv import knobs
from transconv.passes import PIPELINE, TOGETHER, running, stages
from transconv.schedule import Schedule

PACKAGE = Path(knobs.__file__).parent


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in knobs.KNOBS:
        monkeypatch.delenv(knob.name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert knobs.debug() == 0
    assert knobs.dump() is None
    assert knobs.cache() == Path("/somewhere/transconv")
    assert knobs.verify() is False
    assert knobs.schedule() == ""
    assert knobs.fallback() == "warn"
    assert knobs.passes() == ()
    assert knobs.interpret() is False
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert knobs.cache() == Path.home() / ".cache/transconv"


@pytest.mark.parametrize(("knob", "text", "value"), [
    (knobs.debug, "4", 4),
    (knobs.dump, "/tmp/not-there", Path("/tmp/not-there")),
    (knobs.cache, "~/kernels", Path.home() / "kernels"),
    (knobs.verify, " 1 ", True),
    (knobs.schedule, "oh:8 oc:128 | mma", "oh:8 oc:128 | mma"),
    (knobs.fallback, "error", "error"),
    (knobs.passes, "-cse,+hoist, -narrow", (("cse", False), ("hoist", True), ("narrow", False))),
    (knobs.interpret, "1", True),
    (knobs.verify, "", False),
])
def test_values_are_read_at_access(monkeypatch: pytest.MonkeyPatch, knob: knobs.Knob[object],
                                   text: str, value: object) -> None:
    monkeypatch.setenv(knob.name, text)
    assert knob() == value
    assert type(knob()) is type(value)


@pytest.mark.parametrize(("knob", "text"), [
    (knobs.debug, "5"), (knobs.debug, "yes"), (knobs.debug, "-1"), (knobs.verify, "true"),
    (knobs.fallback, "quiet"), (knobs.passes, "cse"), (knobs.passes, "-cse +hoist"),
    (knobs.passes, "-cse,"), (knobs.cache, __file__), (knobs.dump, __file__),
])
def test_an_illegal_value_lists_the_legal_ones(monkeypatch: pytest.MonkeyPatch,
                                               knob: knobs.Knob[object], text: str) -> None:
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(ValueError) as caught:
        knob()
    assert str(caught.value) == f"{knob.name}={text!r} is not legal; expected {knob.legal}"


def test_table_has_a_row_for_each_knob() -> None:
    rows = knobs.table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [knob.name for knob in knobs.KNOBS]
    assert all(row.count("|") == 5 for row in rows)


def test_nobody_else_reads_the_environment() -> None:
    readers = [path.name for path in PACKAGE.rglob("*.py")
               if "os.environ" in path.read_text() or "getenv" in path.read_text()]
    assert readers == ["knobs.py"]


def test_dump_and_debug_show_every_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                         caplog: pytest.LogCaptureFixture) -> None:
    from transconv.conv import compiler
    from transconv.conv.problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    monkeypatch.setenv("TRANSCONV_DUMP", str(tmp_path / "stages"))
    monkeypatch.setenv("TRANSCONV_DEBUG", "4")
    compiler.build(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1"), Prop.FWD, TARGETS["sm_90"])
    files = sorted((tmp_path / "stages").iterdir())
    names = [s.name for s in stages() if s is not TOGETHER]  # a launch for itself
    assert [f.name.split(".")[2] for f in files] == names
    told = {f.name.split(".")[2]: f.read_text() for f in files}
    assert "mb1ic16ih5oc16oh5kh3ph1 fwd on sm_90" in told["problem"] and " | " in told["schedule"]
    assert "compute fwd" in told["compute"] and told["compute"] == told["merging"] == told["packing"]
    assert "for mb in 0..1 parallel:" in told["naive"] and "tl.dot" in told["emit"]
    assert "after gridwise" in caplog.text and "(unchanged)" in caplog.text
    assert "tl.dot" in caplog.text


def test_dump_shows_phases_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transconv.conv import compiler
    from transconv.conv.problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    monkeypatch.setenv("TRANSCONV_DUMP", str(tmp_path))
    problem = ConvProblem.parse("mb16ic64ih32oc64oh16kh3sh2ph1 dt=f16 tag=axb")
    made = compiler.build(problem, Prop.BWD_D, TARGETS["sm_90"],
                          Schedule.parse("mb:2 qh:8 qw:8 ic:64 oc:64 | mma | a=box b=box via=gluon | "
                                         "programs=9 stages=3"))
    (step,) = made.steps
    left = {f.name.split(".")[2]: f.read_text() for f in tmp_path.glob(f"{step.kernel.name}.*")}
    assert set(left) == {"problem", "together", "emit"} and left["emit"] == f"{step.source}\n"
    assert "role fetches" in left["together"]


@pytest.mark.parametrize(("words", "name"), [
    ("+bogus", "bogus"), ("-bogus", "bogus"), ("-narrow", "narrow"), ("-cse,-tidy", "tidy")])
def test_a_word_that_switches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, words: str,
                                                 name: str) -> None:
    from transconv.conv import compiler
    from transconv.conv.problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    assert [p for p, runs in running({"cse": False}).items() if not runs] == ["cse"]
    monkeypatch.setenv("TRANSCONV_PASSES", words)
    expected = " ".join(p.name for p in PIPELINE if p.optional)
    with pytest.raises(ValueError, match="TRANSCONV_PASSES: there is no optional pass") as caught:
        compiler.build(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1"), Prop.FWD, TARGETS["sm_90"])
    assert str(caught.value).endswith(f" '{name}'; expected some of {expected}")
