"""Knobs: read at access, strict, and the only readers of the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transconv.passes import PIPELINE, TOGETHER, running, stages
from transconv.schedule import Schedule
from transconv.support import knobs

PACKAGE = Path(knobs.__file__).parents[1]


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


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        (knobs.debug, "4", 4),
        (knobs.dump, "/tmp/not-there", Path("/tmp/not-there")),
        (knobs.cache, "~/kernels", Path.home() / "kernels"),
        (knobs.verify, " 1 ", True),
        (knobs.schedule, "oh:8 oc:128 | mma", "oh:8 oc:128 | mma"),
        (knobs.fallback, "error", "error"),
        (knobs.passes, "-cse,+hoist, -narrow", (("cse", False), ("hoist", True), ("narrow", False))),
        (knobs.interpret, "1", True),
        (knobs.verify, "", False),
    ],
)
def test_values_are_read_at_access(
    monkeypatch: pytest.MonkeyPatch, knob: knobs.Knob[object], text: str, value: object
) -> None:
    monkeypatch.setenv(knob.name, text)
    assert knob() == value
    assert type(knob()) is type(value)


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (knobs.debug, "5"),
        (knobs.debug, "yes"),
        (knobs.debug, "-1"),
        (knobs.verify, "true"),
        (knobs.fallback, "quiet"),
        (knobs.passes, "cse"),
        (knobs.passes, "-cse +hoist"),
        (knobs.passes, "-cse,"),
        (knobs.cache, __file__),
        (knobs.dump, __file__),
    ],
)
def test_an_illegal_value_lists_the_legal_ones(
    monkeypatch: pytest.MonkeyPatch, knob: knobs.Knob[object], text: str
) -> None:
    monkeypatch.setenv(knob.name, text)
    with pytest.raises(ValueError) as caught:
        knob.checked()
    assert str(caught.value) == f"{knob.name}={text!r} is not legal; expected {knob.legal}"


@pytest.mark.parametrize(
    ("knob", "text"),
    [
        (knobs.debug, "x"),
        (knobs.trust, "maybe"),
        (knobs.fallback, "quiet"),
        (knobs.dump, __file__),
        (knobs.cache, "~nobody-of-this-name/x"),
        (knobs.tuned, "no/file"),
        (knobs.tuned, "x" * 5000),
        (knobs.dump, "x" * 5000),
    ],
)
def test_a_program_goes_on_with_the_default_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, knob: knobs.Knob[object], text: str
) -> None:
    knobs.forget()
    usual = knob()
    monkeypatch.setenv(knob.name, text)
    assert knob() == knob() == usual
    (told,) = caplog.records
    assert told.getMessage() == (
        f"{knob.name}={text!r} is not legal; expected {knob.legal}; it counts as not set"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("TRANSCONV_DEBUG", "9", "TRANSCONV_DEBUG='9' is not legal; expected 0, 1, 2, 3 or 4"),
        ("TRANSCONV_FEATURES", "-warp_speed", "TRANSCONV_FEATURES: there is no feature 'warp_speed'"),
        ("TRANSCONV_FEATURES", "nonsense", "TRANSCONV_FEATURES='nonsense' is not legal"),
        ("TRANSCONV_SCHEDULE", "nonsense", "TRANSCONV_SCHEDULE: "),
        ("TRANSCONV_CONFIG", "nonsense", "TRANSCONV_CONFIG: "),
        ("TRANSCONV_TRUST", "x", "TRANSCONV_TRUST='x' is not legal"),
    ],
)
@pytest.mark.parametrize("verb", ["show", "run", "check", "tune", "words"])
def test_a_command_refuses_what_cannot_be_read_before_it_prints_anything(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    name: str,
    text: str,
    message: str,
) -> None:
    from transconv.__main__ import main

    monkeypatch.setenv(name, text)
    assert main([verb, *["mb1ic8ih6oc8oh6kh3ph1"] * (verb != "words")]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1 and not told.out


def test_a_program_goes_on_without_words_that_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for each variable, and kernels as if they were not set."""
    from types import SimpleNamespace

    from transconv.conv import ConvProblem, ConvWorkload, Prop
    from transconv.selection import choice
    from transconv.target import TARGETS
    from transconv.target.records import from_properties

    knobs.forget()
    workload = ConvWorkload(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1"), Prop.FWD)
    usual = choice.default(workload.computations[0], TARGETS["sm_90"], workload)
    h100 = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132)
    record = from_properties(h100)
    monkeypatch.setenv("TRANSCONV_SCHEDULE", "nonsense")
    monkeypatch.setenv("TRANSCONV_FEATURES", "-warp_speed")
    for _ in range(2):
        assert choice.default(workload.computations[0], TARGETS["sm_90"], workload) == usual
        assert from_properties(h100) == record
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "TRANSCONV_SCHEDULE",
        "TRANSCONV_FEATURES",
    ]


def test_table_has_a_row_for_each_knob() -> None:
    rows = knobs.table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [knob.name for knob in knobs.KNOBS]
    assert all(row.count("|") == 5 for row in rows)


def test_the_page_of_settings_is_whole() -> None:
    """Every variable as it is here, every switch, every logger."""
    from transconv.calls.settings import WORDS

    page = (PACKAGE.parent / "docs" / "settings.md").read_text("utf-8")
    assert knobs.table() in page
    loggers = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'getLogger\("(transconv\.\w+)"\)', path.read_text("utf-8"))
    }
    assert [x for x in (*WORDS, *loggers) if f"| `{x}` | " not in page] == []


def test_nobody_else_reads_the_environment() -> None:
    readers = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == ["knobs.py"]


def test_dump_and_debug_show_every_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transconv.conv import compiler
    from transconv.conv.conv_problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    monkeypatch.setenv("TRANSCONV_DUMP", str(tmp_path / "stages"))
    monkeypatch.setenv("TRANSCONV_DEBUG", "4")
    compiler.build(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1"), Prop.FWD, TARGETS["sm_90"])
    files = sorted((tmp_path / "stages").iterdir())
    names = [s.name for s in stages() if s is not TOGETHER]  # a launch of its own
    assert [f.name.split(".")[2] for f in files] == names
    told = {f.name.split(".")[2]: f.read_text() for f in files}
    assert "mb1ic16ih5oc16oh5kh3ph1 fwd on sm_90" in told["problem"] and " | " in told["schedule"]
    assert "compute fwd" in told["compute"] and told["compute"] == told["merging"] == told["packing"]
    assert "for mb in 0..1 parallel:" in told["naive"] and "tl.dot" in told["emit"]
    assert "after gridwise" in caplog.text and "(unchanged)" in caplog.text
    assert "tl.dot" in caplog.text


def test_dumps_follow_no_link_and_go_on_where_the_disk_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transconv.support import files, leave_text

    (tmp_path / "mine").write_text("kept")
    (tmp_path / "stage.txt").symlink_to(tmp_path / "mine")
    leave_text(tmp_path, "stage.txt", "new")
    assert (tmp_path / "mine").read_text() == "kept" and (tmp_path / "stage.txt").read_text() == "new"
    files.forget()
    leave_text(tmp_path / "mine" / "below", "stage.txt", "new")
    assert "cannot be written to" in caplog.text


def test_dump_shows_phases_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transconv.conv import compiler
    from transconv.conv.conv_problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    monkeypatch.setenv("TRANSCONV_DUMP", str(tmp_path))
    problem = ConvProblem.parse("mb16ic64ih32oc64oh16kh3sh2ph1 dt=f16 tag=axb")
    made = compiler.build(
        problem,
        Prop.BWD_D,
        TARGETS["sm_90"],
        Schedule.parse("mb:2 qh:8 qw:8 ic:64 oc:64 | mma | a=box b=box via=gluon | programs=9 stages=3"),
    )
    (step,) = made.steps
    left = {f.name.split(".")[2]: f.read_text() for f in tmp_path.glob(f"{step.kernel.name}.*")}
    assert set(left) == {"problem", "together", "emit"} and left["emit"] == f"{step.source}\n"
    assert "role producer" in left["together"]


@pytest.mark.parametrize(
    ("words", "name"),
    [("+bogus", "bogus"), ("-bogus", "bogus"), ("-narrow", "narrow"), ("-cse,-tidy", "tidy")],
)
def test_a_word_that_switches_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, words: str, name: str
) -> None:
    from transconv.conv import compiler
    from transconv.conv.conv_problem import ConvProblem, Prop
    from transconv.target.records import TARGETS

    assert [p for p, runs in running({"cse": False}).items() if not runs] == ["cse"]
    monkeypatch.setenv("TRANSCONV_PASSES", words)
    expected = " ".join(p.name for p in PIPELINE if p.optional)
    with pytest.raises(ValueError, match="TRANSCONV_PASSES: there is no optional pass") as caught:
        compiler.build(ConvProblem.parse("mb1ic16ih5oc16oh5kh3ph1"), Prop.FWD, TARGETS["sm_90"])
    assert str(caught.value).endswith(f" '{name}'; expected some of {expected}")


def test_a_variable_that_nothing_reads_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    knobs.forget()
    for name in ("TRANSCONV_TUNE", "TRANSCONV_XYZZY", "TRANSCONV_CONFIG", "TRANSCONV_COMMIT"):
        monkeypatch.setenv(name, "0")
    knobs.name_unknown()
    knobs.name_unknown()
    first, second = caplog.messages
    assert first == (
        "TRANSCONV_TUNE=0: there is no such variable; did you mean TRANSCONV_TUNED? it counts as not set"
    )
    assert second.startswith("TRANSCONV_XYZZY=0: there is no such variable; known are TRANSCONV_DEBUG ")
    knobs.forget()
