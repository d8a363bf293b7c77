"""Tuned rows take part in choices; wrong rows of a database can cost speed, but not correctness."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

import transconv
from transconv import runtime
from transconv.__main__ import main
from transconv.conv import ConvWorkload, Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.errors import ScheduleError
from transconv.runtime import check_records
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.selection import choice, transfer, tuning_db
from transconv.selection.tuning_db import TuningRecord
from transconv.support import knobs
from transconv.target.records import TARGETS

pytestmark = pytest.mark.usefixtures("nothing_known")
SM90 = TARGETS["sm_90"]
DENSE = ConvProblem.parse("mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
FORWARD = ConvWorkload(DENSE, Prop.FWD)
OTHER_BATCH = ConvProblem.parse("mb64ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc")
LIKE = "mb:4 oh:4 ow:4 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 stages=4 warps=4"
SLOWER = "mb:4 oh:4 ow:4 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4"


def row(
    problem: ConvProblem = DENSE, schedule: str = SLOWER, prop: str = "fwd", **changes: object
) -> TuningRecord:
    made = TuningRecord(
        ConvWorkload(problem, Prop(prop)).text,
        prop,
        "",
        "sm_90x132",
        schedule,
        12.5,
        16,
        tuning_db.LOWERING,
        check_records.triton_version(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def first(problem: ConvProblem = DENSE, epilogue: str = "", prop: Prop = Prop.FWD) -> choice.Choice:
    workload = ConvWorkload(problem, prop, Epilogue.parse(epilogue))
    return choice.ranked(workload.computations[0], SM90, workload)[0]


# -- rows ------------------------------------------------------------------------------------------


def test_rows_are_text_and_back() -> None:
    found = [row(), row(OTHER_BATCH, kind="res", us=0.25), row(prop="bwd_w")]
    text = tuning_db.write_rows(found)
    assert set(tuning_db.read_rows(text)) == set(found)
    assert tuning_db.write_rows(tuning_db.read_rows(text)) == text
    assert all(tuning_db.of_mapping(tuning_db.mapping(r)) == r for r in found)
    newer = replace(found[0], us=9.0)
    assert tuning_db.merged(found, [newer]) == [newer, *found[1:]]


@pytest.mark.parametrize("text", ["", "\0", "a,b\n1,2\n", "problem,prop\nx,fwd\n", '"', "\udcff"])
def test_what_is_no_table_has_no_rows(text: str) -> None:
    assert tuning_db.read_rows(text) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"us": "nan"},
        {"us": "-1"},
        {"us": "inf"},
        {"us": "fast"},
        {"tried": "1e3"},
        {"lowering": ""},
        {"config": "x" * 2000},
        {"tried": "9" * 5000},
    ],
)
def test_rows_that_make_no_sense_are_left_out(changes: dict[str, str]) -> None:
    assert tuning_db.of_mapping({**tuning_db.mapping(row()), **changes}) is None
    assert tuning_db.of_mapping({**tuning_db.mapping(row()), "more": 1}) is None
    assert tuning_db.of_mapping([1]) is None


# -- choices ---------------------------------------------------------------------------------------


def test_a_tuned_schedule_is_chosen_by_plans_and_explained() -> None:
    plain = first()
    assert plain.source == "estimate" and str(plain.schedule) != SLOWER
    tuning_db.remember([row()])
    found = first()
    assert (str(found.schedule), found.source) == (SLOWER, "tuned")
    assert found.why == ("tuned for this problem on sm_90x132: 12.5 us, the fastest of 16 tried")
    plan = compiler.plan(DENSE, Prop.FWD, SM90)
    assert str(plan.schedule) == SLOWER and plan.why == found.why
    lines = choice.reasons(
        found,
        choice.ranked(computes(DENSE, Prop.FWD)[0], SM90, FORWARD),
        computes(DENSE, Prop.FWD)[0],
        SM90,
    )
    text = " ".join(" ".join(lines).split())
    assert f"the estimate alone would take {plain.schedule}" in text
    assert "392 tiles on 132 programs are 2.97 waves, 3% of the last one idle" in text


def test_atomic_sums_are_passed_over_where_the_same_bits_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = ConvProblem.parse("mb4ic16ih16oc16oh16kh3ph1 dt=f32")
    atomic = "ic:16 oc:16 oh.ow:32 split_k=4 reduce=atomic"
    tuning_db.remember([row(p, atomic, "bwd_w")])

    def plan(**more: bool) -> list[str]:
        return [s.schedule.reduce for s in compiler.plan(p, Prop.BWD_W, SM90, **more).steps]

    assert plan() == ["atomic"] and "atomic" not in plan(deterministic=True) and plan() == ["atomic"]
    monkeypatch.setenv("TRANSCONV_SCHEDULE", atomic)
    compiler.forget()
    assert plan() == ["atomic"]
    for ask in (
        lambda: plan(deterministic=True),
        lambda: compiler.plan(p, Prop.BWD_W, SM90, atomic, deterministic=True),
        lambda: compiler.build(
            p, Prop.BWD_W, SM90, choose=lambda *_: Schedule.parse(atomic), deterministic=True
        ),
    ):
        with pytest.raises(ScheduleError, match="atomic sums differ from run to run, .*=partials"):
            ask()


def test_the_same_kernels_serve_both_ways_of_torchs_switch() -> None:
    once = compiler.plan(DENSE, Prop.FWD, SM90)
    same = compiler.plan(DENSE, Prop.FWD, SM90, deterministic=True)
    assert same.deterministic and not once.deterministic and same.steps is once.steps
    check_records.record(once.steps[0].digest, check_records.WRONG, keep=False)
    try:
        other = compiler.replan(same)
        assert other.deterministic and other.steps[0].digest != once.steps[0].digest
        assert compiler.plan(DENSE, Prop.FWD, SM90).steps[0].digest == other.steps[0].digest
    finally:
        check_records.forget()


def test_show_tells_where_a_schedule_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    tuning_db.remember([row()])
    words = ["show", *str(DENSE).split(), "--stage", "schedule"]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert f"schedule   {SLOWER}" in page and "chosen     tuned for this problem" in page
    assert main([*words, "--schedule", LIKE]) == 0
    assert "chosen     by the caller" in capsys.readouterr().out


def test_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuning_db.remember([row()])
    monkeypatch.setenv("TRANSCONV_TUNED", "0")
    assert first().source == "estimate"
    file = tmp_path / "mine.csv"
    other = SLOWER.replace("oc:128", "oc:64")
    tuning_db.save(file, [row(schedule=other)])
    monkeypatch.setenv("TRANSCONV_TUNED", str(file))
    assert str(first().schedule) == other  # before what the cache has
    monkeypatch.setenv("TRANSCONV_TUNED", str(tmp_path / "nothing.csv"))
    assert first().source != "estimate"  # what cannot be read counts as not set
    with pytest.raises(ValueError, match="0, 1 or the file of a tuning database"):
        knobs.tuned.checked()


@pytest.mark.parametrize(
    "changes",
    [
        {"lowering": tuning_db.LOWERING + 1},
        {"triton": "2.1.0"},
        {"machine": "sm_90x114"},
        {"machine": "sm_80x108"},
        {"prop": "bwd_w"},
    ],
)
def test_rows_of_other_versions_and_machines_do_not_count(changes: dict[str, object]) -> None:
    tuning_db.remember([row(**changes)])
    assert first().source == "estimate"


def test_another_patch_of_triton_is_the_same() -> None:
    major, minor = check_records.triton_version().split(".")[:2]
    tuning_db.remember([row(triton=f"{major}.{minor}.99")])
    assert first().source == "tuned"


def test_a_schedule_for_all_phases_is_split_as_far_as_each_phase_goes() -> None:
    schedule = "mb.qh.qw:64 ic:64 oc:64 | mma | a=gather b=gather | split_k=3 stages=3 warps=4"
    tuning_db.remember([row(schedule=schedule, prop="bwd_d")])
    for compute in computes(DENSE, Prop.BWD_D):
        found = choice.ranked(compute, SM90, ConvWorkload(DENSE, Prop.BWD_D))[0]
        if found.source == "tuned":
            assert found.schedule.split_k <= 3 and why_not(found.schedule, compute, SM90) is None
    assert any(
        choice.ranked(a, SM90, ConvWorkload(DENSE, Prop.BWD_D))[0].source == "tuned"
        for a in computes(DENSE, Prop.BWD_D)
    )


def test_explain_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import transconv
    from transconv.calls.settings import settings

    monkeypatch.setattr(settings, "cpu", "interpret")
    x, w = torch.randn(1, 16, 6, 6), torch.randn(16, 16, 3, 3)
    before = transconv.explain(x, w, padding=1).parts[0]
    assert before.why == "the heuristics estimate it to be fast" and before.problem is not None
    schedule = before.schedule.replace("stages=4", "stages=2")
    tuning_db.remember([row(before.problem, schedule, machine="interpreterx1")])
    compiler.forget()
    after = transconv.explain(x, w, padding=1)
    assert after.parts[0].schedule == schedule != before.schedule
    assert "tuned for this problem on interpreterx1: 12.5 us" in str(after)


# -- neighbours ------------------------------------------------------------------------------------


def test_neighbours_are_of_the_same_kind_and_sorted() -> None:
    def nearby(text: str) -> float | None:
        found = transfer.nearest(FORWARD, [row(ConvProblem.parse(text))])
        return found[0][0] if found else None

    same = "ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc"
    assert nearby(f"mb32{same}") == 0
    assert nearby(f"mb64{same}") == pytest.approx(0.5)
    assert nearby(f"mb32{same}".replace("bf16", "f16")) == pytest.approx(0.25)
    assert nearby("mb32ic128ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc") == pytest.approx(1)
    for unlike in (
        "mb32ic64ih56oc128oh56kh3ph1 dt=bf16 tag=nhwc",  # stride
        "mb32ic64ih56oc128oh28kh1sh2ph0 dt=bf16 tag=nhwc",  # taps
        "g2mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",
        "mb32ic8ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc",  # few channels
        "mb32768ic64ih448oc128oh224kh3sh2ph1 dt=bf16 tag=nhwc",
    ):
        assert nearby(unlike) is None, unlike
    found = transfer.nearest(FORWARD, [row(OTHER_BATCH), row(), row(kind="res")])
    assert [away for away, _, _ in found] == [0, 0.5, 0.5]


def test_a_neighbour_may_correct_the_estimate_as_far_as_it_was_wrong_there() -> None:
    as_many_waves = ConvProblem.parse(f"{DENSE}".replace("mb32", "mb36"))  # the same estimate is best
    there = computes(as_many_waves, Prop.FWD)[0]
    by_estimate = choice.ranked(there, SM90)
    tuning_db.remember([row(as_many_waves, str(by_estimate[0].schedule))])
    assert first().schedule == choice.ranked(computes(DENSE, Prop.FWD)[0], SM90)[0].schedule
    tuning_db.remember([row(as_many_waves, SLOWER)])
    found = first()
    assert found.source == "near" and str(found.schedule) == SLOWER
    assert "like the schedule tuned for mb36ic64ih56" in found.why and "distance 0.08" in found.why
    # A schedule that is not credible for this workload is not used, whatever its row says.
    absurd = "mb.oh.ow:16 oc:16 ic:16 | mma | a=gather b=gather | stages=2 warps=4"
    tuning_db.remember([row(as_many_waves, absurd)])
    assert first().source == "estimate"


def test_blocks_of_a_neighbour_are_clipped() -> None:
    small = ConvProblem.parse("mb32ic32ih56oc32oh28kh3sh2ph1 dt=bf16 tag=nhwc")
    compute = computes(small, Prop.FWD)[0]
    choices = choice.ranked(compute, SM90)
    found = transfer.relatives(Schedule.parse(SLOWER), [c.schedule for c in choices], compute, SM90)
    assert found and all(why_not(c, compute, SM90) is None for c in found)
    for schedule in found:
        extents = {b.axes: b.extent for b in schedule.blocks}
        assert extents["oc",] <= 32 and extents["ic",] <= 32


def test_another_epilogue_of_the_same_problem_is_near() -> None:
    tuning_db.remember([row()])
    assert first(epilogue="bias+relu").away == transfer.OTHER_KIND
    tuning_db.remember([row(kind="point")])
    assert first(epilogue="bias+relu").source == "tuned"


def test_channels_first_takes_what_was_tuned_for_channels_last() -> None:
    """Over copies: this one takes 69.5 us on an H200, the first estimate 80.5 (h200_trials_nchw.csv)."""
    last = ConvProblem.parse("mb128ic512ih7oc512oh7kh3ph1 dt=bf16 tag=nhwc")
    apart = last.with_layout("abx")
    plain, winner = (
        first(apart),
        Schedule.parse("mb:32 oh:8 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 stages=3 warps=8"),
    )
    tuning_db.remember([row(last, schedule=str(winner))])
    found = first(apart)
    assert found.source == "near" and found.away == choice.OTHER_ORDER
    assert found.schedule == replace(winner, pack="a.b.c")
    assert found.us <= choice.SLACK * plain.us
    assert f"like the schedule tuned for {last} fwd" in found.why
    # What was tuned for tensors that lie so comes first; a slow schedule does not come at all.
    tuning_db.remember([row(apart, schedule=str(plain.schedule))])
    assert first(apart).source == "tuned"


@pytest.mark.slow
def test_a_slow_schedule_is_not_taken_over_copies() -> None:
    tuning_db.remember([row(schedule=LIKE)])
    assert first().source == "tuned"
    assert first(DENSE.with_layout("abx")).source == "estimate"


# -- hostile rows ----------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "schedule",
    [
        "",
        "rubbish",
        "oc:3 | mma",
        "nope:16 | mma",
        SLOWER.replace("stages=4", "stages=100000"),
        SLOWER.replace("programs=132", "programs=999999999"),
        SLOWER + " split_k=4000000",
        SLOWER + " unroll=1 order=kw.kh",
        "oc:16 | mma | stages=² warps=4",
        "| fma | unroll=1 stages=2 warps=4",
        "mb.oh.ow:1048576 oc:16 ic:16 | mma",
        "mb.oh.ow:16 oc:16 ic:16 | mma | a=gather b=gather | stages=2 warps=32",
    ],
)
def test_a_bad_schedule_is_passed_over(schedule: str) -> None:
    plain = first().schedule
    tuning_db.remember([row(schedule=schedule), row(OTHER_BATCH, schedule)])
    assert first().schedule == plain
    assert compiler.build(DENSE, Prop.FWD, SM90).schedule == plain


@pytest.mark.parametrize("problem", ["", "junk", "mb0ic1ih1oc1oh1kh1", "ic64ih56 oc3", "mb" + "9" * 90])
def test_a_bad_problem_is_passed_over(problem: str) -> None:
    name = FORWARD.group("sm_90x132")
    tuning_db.DRAWER.put(
        name, {"rows": [tuning_db.mapping(replace(row(), problem=problem)), tuning_db.mapping(row())]}
    )
    assert first().source == "tuned"


@pytest.mark.parametrize(
    "content", [{"rows": "all"}, {"rows": [1, None, {"problem": 1}]}, {}, {"rows": [[["deep"]]]}]
)
def test_a_bad_record_is_no_record(content: dict[str, object]) -> None:
    tuning_db.DRAWER.put(FORWARD.group("sm_90x132"), content)
    assert first().source == "estimate"
    tuning_db.remember([row()])
    assert first().source == "tuned"


def test_a_damaged_file_of_rows_is_told_once_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.csv"
    file.write_text("these\nare\nno rows\n")
    monkeypatch.setenv("TRANSCONV_TUNED", str(file))
    assert first().source == "estimate"
    first()
    assert caplog.text.count("holds no row of tuned schedules") == 1
    with pytest.raises(ValueError, match="expected the columns"):
        tuning_db.load(file)


def test_a_kernel_that_fails_to_generate_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = first().schedule
    tuning_db.remember([row()])
    real = runtime.compiler.lower

    def fails(compute: object, schedule: Schedule, *rest: object) -> object:
        if str(schedule) == SLOWER:
            raise ZeroDivisionError("a bug in a pass")
        return real(compute, schedule, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime.compiler, "lower", fails)
    assert compiler.build(DENSE, Prop.FWD, SM90).schedule == plain
    assert "a row of the tuning database is passed over" in caplog.text


def test_a_tuned_kernel_that_is_known_to_be_wrong_is_passed_over() -> None:
    tuning_db.remember([row()])
    tuned = compiler.build(DENSE, Prop.FWD, SM90)
    check_records.record(check_records.variant(tuned.steps[0].digest, True), check_records.WRONG)
    try:
        after = compiler.build(DENSE, Prop.FWD, SM90)
        assert str(after.schedule) != SLOWER and after.rejected == 1
    finally:
        check_records.forget()


# -- many writers ----------------------------------------------------------------------------------


def write(cache: str, start: int) -> None:
    import os

    os.environ["TRANSCONV_CACHE"] = cache
    for i in range(10):
        tuning_db.remember(
            [row(replace(DENSE, name="").with_dtype("bf16"), us=1.0 + i, kind=f"{start}-{i}")]
        )


@pytest.mark.slow
def test_nothing_is_lost_between_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(str(tmp_path / "cache"), n)) for n in range(4)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    tuning_db.forget()
    found = tuning_db.rows_of(FORWARD.group("sm_90x132"))
    assert {r.kind for r in found} == {f"{n}-{i}" for n in range(4) for i in range(10)}


def test_a_truncated_record_counts_as_none() -> None:
    tuning_db.remember([row()])
    path = tuning_db.DRAWER.path(FORWARD.group("sm_90x132"))
    assert path is not None and json.loads(path.read_text())
    path.write_text(path.read_text()[:-40])
    tuning_db.forget()
    assert first().source == "estimate"


def test_the_digest_of_files_is_of_the_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test, a page or a file of the user's beside the package makes no plan anew."""
    walked: list[str] = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda root: walked.append(root) or walk(root))
    before = tuning_db.files_digest.__wrapped__()
    assert [Path(root) for root in walked] == [Path(transconv.__file__).resolve().parent]
    monkeypatch.setattr(os, "walk", lambda root: [t for t in walk(root) if not t[0].endswith("selection")])
    assert tuning_db.files_digest.__wrapped__() != before


# -- what ships ------------------------------------------------------------------------------------


def shipped_rows() -> list[TuningRecord]:
    text = files("transconv").joinpath("data", "tuned_h200.csv").read_text(encoding="utf-8")
    rows = tuning_db.read_rows(text)
    assert len(rows) == len(text.splitlines()) - 1 and text == tuning_db.write_rows(rows)
    return rows


# An epilogue of each kind that tuned rows know.
OF_KIND = {"": "", "point": "relu", "res": "res"}


def assert_is_what_plans_use(r: TuningRecord) -> None:
    """A call with any epilogue of the row's kind gets its schedule."""
    problem, prop = ConvProblem.parse(r.problem), Prop(r.direction)
    schedule = transfer.fitted(Schedule.parse(r.schedule), computes(problem, prop)[0], SM90)
    tuning_db.remember([r])
    assert first(problem, OF_KIND[r.kind], prop).schedule == schedule


def test_a_row_of_each_kind_that_ships_is_what_plans_use() -> None:
    assert all(Epilogue.parse(text).kind == kind for kind, text in OF_KIND.items())
    for kind, r in {r.kind: r for r in shipped_rows()}.items():
        assert kind in OF_KIND
        assert_is_what_plans_use(r)


@pytest.mark.every(9)
@pytest.mark.parametrize("part", range(9))
def test_every_row_that_ships_is_a_legal_schedule_of_its_problem(part: int) -> None:
    for at, r in enumerate(shipped_rows()[part::9]):
        problem = ConvProblem.parse(r.problem)
        assert r.machine == "sm_90x132" and ConvWorkload(problem, Prop(r.direction)).text == r.problem
        schedule = Schedule.parse(r.schedule)
        for a in computes(problem, Prop(r.direction)):
            assert transfer.believable(transfer.fitted(schedule, a, SM90), a, SM90), r
        if at % 10 == 0:
            assert_is_what_plans_use(r)
