"""Knobs: read at access, strict, and the only readers of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from transconv import knobs
from transconv.passes import PIPELINE

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
    assert len(files) == len(PIPELINE) + 1
    assert "for mb in 0..1 parallel:" in files[0].read_text()
    assert "after gridwise" in caplog.text and "(unchanged)" in caplog.text
    assert "tl.dot" in caplog.text
