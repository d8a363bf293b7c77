"""The words of a schedule: one table that the text form, the rules, the fuzzer and the documentation
read; values out of range are refused in one line; a word from outside the package takes part."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.outside import NOTE, NOTING
from transconv import passes
from transconv.__main__ import main
from transconv.backend_triton import emit
from transconv.compute import Compute
from transconv.conv import ConvProblem, ConvWorkload, Prop, computes
from transconv.cost import estimate
from transconv.errors import ScheduleError
from transconv.passes import lower
from transconv.runtime import check_records, header, kernel_name
from transconv.runtime.steps import digest_of
from transconv.schedule import Block, Schedule, Word, register_word, unregister_word, why_not, words
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify.fuzz import legal_schedules

PAGE = Path(__file__).parents[2] / "docs" / "guide_schedules.md"
BEGIN, END = "<!-- table:words -->\n", "\n<!-- end:words -->"
SM90 = Target.parse("sm_90")
PROBLEM = ConvProblem.parse("mb2ic32ih8oc32oh8kh3ph1 dt=f16 tag=nhwc")
FWD: Compute = computes(PROBLEM, Prop.FWD)[0]
PLAIN = Schedule.parse("mb.oh.ow:32 oc:32 ic:16 | mma | stages=2 warps=4")


# -- the table ------------------------------------------------------------------------------------


def words_table() -> str:
    """All words as a Markdown table."""
    rows = [
        "| word | values | default | says |",
        "|---|---|---|---|",
        "| `n.h.w:128` | axes and an extent | | A block: fused axes, and how many of their "
        "positions make one tile; axes of a sum make its steps. |",
    ]
    for word in words():
        values = (
            " ".join(f"`{v}`" for v in word.values if v != "")
            if isinstance(word.values, tuple)
            else word.expected
        )
        name = word.name if word.name == "unit" else f"{word.name}="
        default = f"`{word.default}`" if word.default != "" else ""
        rows.append(f"| `{name}` | {values} | {default} | {word.says} |")
    return "\n".join(rows)


def test_the_table_of_the_guide(request: pytest.FixtureRequest) -> None:
    """``pytest tests/schedule/test_words.py --update-golden`` rewrites it."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    shown, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + BEGIN + words_table() + END + after)
    else:
        assert shown == words_table(), "the table is stale; --update-golden if that is meant"


def test_every_word_has_a_row_that_is_whole() -> None:
    for word in words():
        assert word.refuses(word.default) is None and PLAIN.word(word.name) is not None
        assert word.says.endswith(".") and word.says.count("\n") == 0, word.name
        assert {*word.together} <= {w.name for w in words()}
        drawn = word.draw if isinstance(word.draw, tuple) else ()
        assert all(word.refuses(v) is None for v in drawn), word.name


def test_every_value_reads_back() -> None:
    assert str(PLAIN) == ("mb.oh.ow:32 oc:32 ic:16 | mma | a=gather b=gather | stages=2 warps=4")
    for word in words():
        for value in (
            word.values[:50]
            if isinstance(word.values, (tuple, range))
            else [x for x in ("", "a", "a.b") if x in word.values]
        ):
            schedule = PLAIN.with_words(**{word.name: value})
            assert Schedule.parse(str(schedule)) == schedule, str(schedule)
            assert schedule.word(word.name) == getattr(schedule, word.name) == value


def test_a_renamed_word_is_read_under_its_former_name() -> None:
    """Texts, tables and databases of the release before; keys on disk are made with the former name."""
    text = "oc:64 | mma | a=box b=box | programs=2 {}=2 stages=2 warps=4 via=gluon"
    schedule = Schedule.parse(text.format("teams"))
    assert str(schedule) == text.format("consumers") and schedule.consumers == 2
    assert schedule.key == text.format("teams") and PLAIN.key == str(PLAIN)
    with pytest.raises(ScheduleError, match="'consumers' is said twice"):
        Schedule.parse("teams=2 consumers=2")


def test_a_kernel_of_a_renamed_word_keeps_its_key_and_its_name() -> None:
    """What a release before has verified and compiled is found again."""
    workload = ConvWorkload(PROBLEM, Prop.FWD)
    schedule = Schedule.parse(
        "oh:8 ow:8 oc:16 ic:16 | a=box b=box | programs=2 consumers=2 stages=2 via=gluon"
    )
    name = kernel_name(workload, FWD, schedule, SM90)
    source = "\n".join(header(workload, FWD, schedule, SM90))
    assert name == "conv_fwd_ic32ih8oc32oh8kh3ph1_024341ed"
    assert (
        digest_of(source, schedule, SM90)
        == check_records.digest(source.replace("consumers=2", "teams=2"), "sm_90 4 2")
        != check_records.digest(source, "sm_90 4 2")
    )


@pytest.mark.parametrize("given", [["words"], ["words", "split_k", "via"]])
def test_the_page_of_words(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 0
    told = capsys.readouterr().out
    assert all(w.says in told for w in words() if w.name in given or given == ["words"])
    assert main(["words", "speed"]) == 2
    assert "there is no word 'speed'; expected some of unit" in capsys.readouterr().err


# -- values out of range --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("group_m=0", "group_m=0, expected a whole number from 1"),
        ("swap=5", "swap=5, expected 0 or 1"),
        ("unroll=2", "unroll=2, expected 0 or 1"),
        ("late=7", "late=7: the lanes of a sum are added late (1) or at every step (0)"),
        ("consumers=0", "consumers=0: tiles are worked at by one consumer, or by two in turns"),
        ("warps=3", "warps=3: the number of warps is a power of two up to 32"),
        ("warps=64", "warps=64: the number of warps is a power of two up to 32"),
        ("stages=0", "stages=0, expected a whole number from 1"),
        ("split_k=0", "split_k=0: at least one program works on a sum"),
        ("programs=-1", "programs=-1, expected a whole number from 0"),
        ("merge=-2", "merge=-2: at least one group is seen as one"),
        ("via=cuda", "via=cuda, expected tl or gluon"),
        ("keep=c", "keep=c, expected a or b"),
        ("order=kh,kw", "order=kh,kw, expected axes joined by dots, such as kh.kw.c"),
        ("stages=²", "stages=²': found '²' (0xb2), expected letters"),
        ("oc:0", "'oc:0' is neither a block"),
    ],
)
def test_values_out_of_range(said: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a kernel is made, also with stride phases and on the interpreter."""
    text = f"ic:16 oc:16 | mma | stages=2 {said}" if "stages" not in said else f"ic:16 | {said}"
    for problem, prop in (("mb1ic32ih8oc32oh8kh3ph1", "fwd"), ("mb1ic32ih8oc32oh4kh3sh2ph1", "bwd_d")):
        for target in ("sm_90", "interpreter"):
            assert main(["show", problem, "--prop", prop, "--target", target, "--schedule", text]) == 2
            told = capsys.readouterr().err
            assert reason in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "schedule",
    [
        replace(PLAIN, order="ic\nimport os"),
        replace(PLAIN, regs="oc\r"),
        replace(PLAIN, via="tl\n"),
        replace(PLAIN, pack="z"),
        replace(PLAIN, stages="2\nimport os"),  # type: ignore[arg-type]
        replace(PLAIN, swap=True),
        replace(PLAIN, unit="mma\n"),
        replace(PLAIN, blocks=(*PLAIN.blocks, Block(("kw\nimport os",), 1))),
        replace(PLAIN, blocks=(*PLAIN.blocks, Block(("kw",), "1\nimport os"))),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_schedules_made_by_hand(schedule: Schedule) -> None:
    """What does not read back is refused in one line, and no line of a header becomes two."""
    reason = why_not(schedule, FWD, SM90)
    assert reason and len(reason.splitlines()) == 1
    with pytest.raises(ScheduleError):
        lower(FWD, schedule, SM90, "conv")
    kernel = lower(FWD, PLAIN, SM90, "conv")[-1][1]
    source = emit(kernel, header(ConvWorkload(PROBLEM, Prop.FWD), FWD, schedule, SM90))
    assert not [line for line in source.splitlines() if line.startswith("import os")]


def test_a_word_that_is_misspelled_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no word 'spilt_k'"):
        PLAIN.spilt_k  # noqa: B018  # type: ignore[attr-defined]
    with pytest.raises(ScheduleError, match="there is no word 'spilt_k'"):
        PLAIN.word("spilt_k")
    with pytest.raises(ScheduleError, match="there is no word 'spilt_k'"):
        PLAIN.with_words(spilt_k=2)


# -- a word from outside --------------------------------------------------------------------------


@pytest.fixture
def note() -> Iterator[None]:
    register_word(NOTE)
    passes.register(NOTING, before="final")
    yield
    unregister_word("note")
    passes.unregister("noting")


def test_a_word_from_outside_takes_part(note: None) -> None:
    text = "mb.oh.ow:32 oc:32 ic:16 | mma | a=gather b=gather | stages=2 warps=4 note=2"
    schedule = Schedule.parse(text)
    assert str(schedule) == text and Schedule.parse(str(schedule)) == schedule != PLAIN
    assert schedule.word("note") == schedule.note == 2  # type: ignore[attr-defined]
    assert schedule.with_words(note=0) == PLAIN and hash(schedule.with_words(note=0)) == hash(PLAIN)
    assert replace(schedule, stages=3).word("note") == 2

    assert why_not(schedule, FWD, SM90) is None
    assert why_not(Schedule.parse(f"{text[:-1]}3"), FWD, SM90) == "note=3: at most one note a stage (2)"
    assert why_not(schedule.with_words(note=9), FWD, SM90) == "note=9, expected a whole number from 0 to 3"
    with pytest.raises(ScheduleError, match="note=x, expected a whole number"):
        Schedule.parse("note=x")

    kernel = lower(FWD, schedule, SM90, "conv")[-1][1]
    assert "# note 0 of mine (and 1 more like it)\n" in emit(kernel)
    assert "note" not in emit(lower(FWD, PLAIN, SM90, "conv")[-1][1])
    with pytest.raises(ScheduleError, match="at most one note a stage"):
        lower(FWD, schedule.with_words(note=3), SM90, "conv")


def test_a_word_from_outside_is_drawn_proposed_priced_and_told(note: None) -> None:
    drawn = {
        c.word("note")
        for n in range(30)
        if (c := legal_schedules.schedule(random.Random(n), [FWD], SM90)) is not None
    }
    assert {0, 1, 2} <= drawn
    assert estimate(PLAIN.with_words(note=1), FWD, SM90) == estimate(PLAIN, FWD, SM90) / 2
    assert heuristics.default(FWD, SM90).word("note") == 1
    assert "| `note=` | a whole number from 0 to 3 | `0` | So many notes" in words_table()


def test_a_word_that_is_taken_out_is_gone() -> None:
    register_word(NOTE)
    unregister_word("note")
    unregister_word("note")
    with pytest.raises(ScheduleError, match="'note=1' is neither a block"):
        Schedule.parse("note=1")
    assert "note" not in words_table() and heuristics.default(FWD, SM90).more == ()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (replace(NOTE, name="stages"), "'stages' cannot be registered"),
        (replace(NOTE, name="blocks"), "'blocks' cannot be registered"),
        (replace(NOTE, name="parse"), "'parse' cannot be registered"),
        (replace(NOTE, name="two words"), "'two words' cannot be registered"),
        (replace(NOTE, name="mma"), "there is a word 'mma' already"),
        (replace(NOTE, default=7), "with the default 7 among them"),
        (replace(NOTE, default="x y", values=("x y", "z")), "texts of letters, digits and dots"),
    ],
)
def test_words_that_cannot_be_registered(word: Word, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        register_word(word)


def test_a_word_is_registered_once(note: None) -> None:
    with pytest.raises(ScheduleError, match="there is a word 'note' already"):
        register_word(NOTE)
