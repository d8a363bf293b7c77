"""A tuning session: with made-up times in real processes, and once in Triton's interpreter."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from tests.docs.test_readme import TUNE
from tests.tuning.workers import time_of
from transconv.__main__ import main
from transconv.conv import ConvWorkload, Epilogue, compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.relation import computes
from transconv.selection import tuning_db
from transconv.target.records import TARGETS
from transconv.tuning import search
from transconv.tuning.session import Limits, Session, TuningJob, log_of, of_log, read_log
from transconv.tuning.table import CsvTable

pytestmark = pytest.mark.usefixtures("nothing_known")
SM90 = TARGETS["sm_90"]
DENSE = ConvProblem.parse("mb32ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc")
SUMMED = ConvProblem.parse("mb32ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc")


def session(
    tmp_path: Path, *jobs: TuningJob, said: list[str] | None = None, **limits: float
) -> tuple[Session, CsvTable]:
    log = log_of(tmp_path / "trials.csv")
    bounds = Limits(**{"trials": 8, "trial_s": 5.0, "jobs": 1} | limits)  # type: ignore[arg-type]
    return Session(
        jobs,
        SM90,
        bounds,
        log,
        {"device": "made up", "torch": "0"},
        say=(said if said is not None else []).append,
        workers="tests.tuning.workers",
    ), log


def job(problem: ConvProblem = DENSE, prop: Prop = Prop.FWD, epilogue: str = "") -> TuningJob:
    return TuningJob(ConvWorkload(problem, prop, Epilogue.parse(epilogue)), {"layer": "a layer"})


def test_winners_of_a_session_are_what_plans_use(tmp_path: Path) -> None:
    said: list[str] = []
    made, log = session(tmp_path, job(), job(SUMMED, Prop.BWD_W), job(), said=said, jobs=2)
    found = made.run()
    assert [r.direction for r in found] == ["fwd", "bwd_w"]  # a job that comes twice is done once
    for r in found:
        tried = [x for x in log.rows if x["direction"] == r.direction]
        assert len(tried) == 8 == len({x["schedule"] for x in tried})
        assert r.schedule == min((x["schedule"] for x in tried), key=time_of)
        assert (r.us, r.tried, r.machine) == (pytest.approx(time_of(r.schedule), rel=1e-5), 8, "sm_90x132")
        assert {x["triton_s"] for x in tried} == {"0.5"}
    assert {(r.key, r.schedule) for r in of_log(log.rows)} == {(r.key, r.schedule) for r in found}
    assert sum("estimated to be the best" in line for line in said) == 2
    assert tuning_db.remember(found) == 2
    plan = compiler.plan(DENSE, Prop.FWD, SM90)
    assert str(plan.schedule) == found[0].schedule and plan.why.startswith("tuned for this problem")


def test_wrong_and_crashing_schedules_lose_and_only_they(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = [str(c) for c in search.ranking(computes(DENSE, Prop.FWD), SM90)[:4]]
    best, second = sorted(ranked, key=time_of)[:2]
    monkeypatch.setenv("TUNING_TEST", f"{best}\n{second}")
    made, log = session(tmp_path, job(), trials=6)  # four of the ranking, two around the best
    (winner,) = made.run()
    verdicts = {x["schedule"]: x["verdict"] for x in log.rows}
    assert (verdicts.pop(best), verdicts.pop(second)) == ("crash", "wrong")
    assert set(verdicts.values()) == {"right"} and winner.schedule in verdicts and winner.tried == 4
    assert not any(x["us"] for x in log.rows if x["verdict"] != "right")


def test_a_session_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    first, log = session(tmp_path, job(), trials=4)
    first.run()
    known = list(log.rows)
    again, log = session(tmp_path, job(), trials=7)
    (winner,) = again.run()
    assert log.rows[:4] == known and len(log.rows) == 7
    assert winner.tried == sum(x["verdict"] == "right" for x in log.rows)
    third, log = session(tmp_path, job(), trials=7)
    start = time.monotonic()
    assert third.run() == [winner] and len(log.rows) == 7
    assert time.monotonic() - start < 2, "processes were started for nothing"


@pytest.mark.slow
def test_logs_with_older_names_of_columns_go_on(tmp_path: Path) -> None:
    """Logs had the direction in ``prop`` and a layer's own in ``direction``."""
    first, log = session(tmp_path, job(), trials=4)
    (winner,) = first.run()
    today = log.path.read_text()
    older = today.replace(
        "layer_kind,layer_direction,problem,direction,behind", "kind,direction,problem,prop,epilogue"
    ).replace(",schedule,", ",config,")
    assert older.split("\n")[0] != today.split("\n")[0]
    log.path.write_text(older)
    assert read_log(log.path) == log.rows and log.path.read_text() == older
    again, log = session(tmp_path, job(), trials=4)
    assert log.path.read_text() == today
    assert again.run() == [winner] == of_log(log.rows) and len(log.rows) == 4


@pytest.mark.slow
def test_the_budget_is_kept_and_what_was_found_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, log = session(tmp_path, job(), trials=3)
    done.run()
    monkeypatch.setenv("TUNING_TEST", "hang")
    said: list[str] = []
    late, log = session(tmp_path, job(), job(SUMMED), trials=6, total_s=3, said=said)
    monkeypatch.setattr("transconv.verify.machine.Pool.run.__defaults__", (float("inf"), 0.5))
    start = time.monotonic()
    found = late.run()
    assert time.monotonic() - start < 15
    assert [r.problem for r in found] == [str(DENSE)] and len(log.rows) == 3
    assert any(line.startswith("unfinished: a layer") for line in said)


@pytest.mark.slow
def test_a_trial_that_hangs_loses_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNING_TEST", "hang")
    made, log = session(tmp_path, job(), trials=2, trial_s=0.5)
    assert made.run() == []
    assert {x["verdict"] for x in log.rows} == {"timeout"} and len(log.rows) == 2


def test_nothing_to_compute_is_nothing_to_tune(tmp_path: Path) -> None:
    empty = ConvProblem.parse("mb0ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc")
    said: list[str] = []
    integer = ConvProblem.parse("mb1ic64ih8oc64oh8kh3ph1 dt=f64")
    made, log = session(tmp_path, job(empty), said=said)
    assert made.run() == [] and log.rows == [] and said == []
    assert tuning_db.make(ConvWorkload(integer, Prop.FWD), SM90, "x", 1.0, 1).triton


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_tunes_in_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of the README."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    file = tmp_path / "tuned.csv"
    words = [*shlex.split(TUNE)[1:], "--jobs", "1", "--budget-ms", "1", "--db", str(file)]
    assert main(words) == 0
    page = capsys.readouterr().out
    assert "right: 2 of 2" in page and f"1 of 1 are kept in {file}" in page
    (one,) = tuning_db.load(file)
    assert (one.machine, one.tried, one.direction) == ("interpreterx1", 2, "fwd")
    log = log_of(tmp_path / "tuned.trials.csv").rows
    assert {r["verdict"] for r in log} == {"right"} and all(float(r["max_err"]) == 0 for r in log)
    monkeypatch.setenv("TRANSCONV_TUNED", str(file))
    problem = ConvProblem.parse(one.problem)
    plan = compiler.plan(problem, Prop.FWD, TARGETS["interpreter"])
    assert str(plan.schedule) == one.schedule and plan.why.startswith("tuned")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.json"], "no such file: nothing.json"),
        (["mb1ic16"], "expected"),
        (["mb1ic16ih6oc16oh6kh3ph1", "--prop", "up"], "direction 'up' is unknown"),
        (["mb1ic16ih6oc16oh6kh3ph1", "--db", __file__], "holds no row of tuned schedules"),
        (["compute x\n axes n=4\n store Y[n] = q"], "'q' is not known"),
        (
            ["compute x\n axes n=4 k=3\n read x = X[n, k]\n store Y[n] = x"],
            "expected k in its coordinates",
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
