"""Tuning of computations by themselves: rows of their text, which plans of functions use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuning.workers import time_of
from transconv import runtime
from transconv.__main__ import main
from transconv.cli.arguments import computations
from transconv.compute import Alone, Compute, parse
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.runtime import Plan
from transconv.selection import choice, tuning_db
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.tuning import measure
from transconv.tuning.session import Limits, Session, TuningJob, log_of, of_log
from transconv.verify import computation

pytestmark = pytest.mark.usefixtures("nothing_known")
SM90 = Target.parse("sm_90")
ROWS = parse(
    "compute rows\n tensor X bf16 [4096, 1024]\n axes n=4096 | k=1024\n read x = X[n, k]\n"
    " store Y[n] = sum(x; k)"
)
CHAIN = parse("compute chain\n axes n=100000\n read x = X[n]\n store Y[n] = relu(x + 1)")
SMALL = "compute rows\n axes n=6 | k=20\n read x = X[n, k]\n store Y[n] = sum(x; k)"
TWO = parse("""compute two
    axes   n=512 | k=1024
    read   x = X[n, k]
    let    m = max(x; k)
    store  Y[0] = sum(m; n)""")


def tuned(compute: Compute, at: int = 3) -> str:
    """Keep a row that says that another schedule than the first is the fastest."""
    schedule = str(heuristics.candidates(compute, SM90)[at])
    assert tuning_db.remember([tuning_db.make(Alone(compute), SM90, schedule, 9.5, 4)]) == 1
    return schedule


def test_winners_of_a_session_are_what_plans_use(tmp_path: Path) -> None:
    log = log_of(tmp_path / "trials.csv")
    made = Session(
        [TuningJob(Alone(c), {"layer": c.name}) for c in (ROWS, CHAIN)],
        SM90,
        Limits(trials=6, trial_s=30.0, jobs=1),
        log,
        {"device": "made up", "torch": "0"},
        say=lambda line: None,
        workers="tests.tuning.workers",
    )
    found = made.run()
    assert [r.problem for r in found] == [str(ROWS), str(CHAIN)]
    for row in found:
        tried = [x["schedule"] for x in log.rows if x["problem"] == row.problem and x["us"]]
        assert row.schedule == min(tried, key=time_of) and row.tried == len(tried)
    again = of_log(log_of(tmp_path / "trials.csv").rows)  # the texts have several lines
    assert {(r.key, r.schedule) for r in again} == {(r.key, r.schedule) for r in found}
    assert tuning_db.remember(found) == 2
    plan = runtime.plan(Alone(ROWS), SM90, None, False, Plan)
    assert str(plan.schedule) == found[0].schedule and plan.why.startswith("tuned for this problem")


def test_a_row_speaks_of_its_computation_alone() -> None:
    schedule = tuned(ROWS)
    first = choice.ranked(ROWS, SM90, Alone(ROWS))[0]
    assert (str(first.schedule), first.source) == (schedule, "tuned")
    other = parse(str(ROWS).replace("4096", "2048"))
    assert choice.ranked(other, SM90, Alone(other))[0].source == "estimate"


def test_a_kernel_of_several_has_its_own_row() -> None:
    first, second = computations.of_kernels(TWO, SM90)
    schedule = tuned(second, at=1)
    plan = runtime.plan(Alone(TWO), SM90, None, False, Plan)
    mains = {s.compute.name: str(s.schedule) for s in plan.steps if s.compute.does == "compute"}
    assert mains[second.name] == schedule
    assert mains[first.name] == str(heuristics.default(first, SM90))


def test_rows_of_problems_and_of_computations_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ConvWorkload(ConvProblem.parse("mb32ic64ih28oc128oh28kh3ph1 dt=bf16 tag=nhwc"), Prop.FWD)
    (dense,) = problem.computations
    wanted = {
        w: str(heuristics.candidates(c, SM90)[2]) for w, c in ((problem, dense), (Alone(CHAIN), CHAIN))
    }
    tuning_db.save(tmp_path / "tuned.csv", [tuning_db.make(w, SM90, s, 9.5, 4) for w, s in wanted.items()])
    assert len(tuning_db.load(tmp_path / "tuned.csv")) == 2
    monkeypatch.setenv("TRANSCONV_TUNED", str(tmp_path / "tuned.csv"))
    tuning_db.forget()
    for work, compute in ((problem, dense), (Alone(CHAIN), CHAIN)):
        first = choice.ranked(compute, SM90, work)[0]
        assert (str(first.schedule), first.source) == (wanted[work], "tuned")


def test_long_texts_are_keys_and_damaged_ones_are_not() -> None:
    many = "\n".join(f" read x{i} = X{i}[n]" for i in range(60))
    added = " + ".join(f"x{i}" for i in range(60))
    long = parse(f"compute long\n axes n=640\n{many}\n store Y[n] = {added}")
    assert len(str(long)) > tuning_db.LONGEST
    tuned(long, at=1)
    assert choice.ranked(long, SM90, Alone(long))[0].source == "tuned"
    assert tuning_db.workload_of("compute nonsense") is None
    assert tuning_db.workload_of(str(ROWS)) == Alone(ROWS)


def test_what_the_user_says_of_convolutions_is_not_for_computations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = parse(
        "compute product\n axes m=64 n=64 | k=64\n read x = X[m, k]\n read w = W[n, k]\n"
        " store Y[m, n] = sum(x*w; k)"
    )
    monkeypatch.setenv("TRANSCONV_SCHEDULE", "mb.oh.ow:64 oc:64 ic:32 | mma")
    assert choice.ranked(product, SM90, Alone(product))[0].source == "estimate"


def test_an_illegal_row_is_passed_over() -> None:
    tuning_db.remember([tuning_db.make(Alone(ROWS), SM90, "k:4096 | fma | red=lane", 1.0, 2)])
    assert choice.ranked(ROWS, SM90, Alone(ROWS))[0].source == "estimate"


# -- the command -----------------------------------------------------------------------------------


def test_the_command_makes_a_job_of_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of two computations, one of which takes two kernels."""
    file, source = tmp_path / "tuned.csv", tmp_path / "computes.txt"
    source.write_text(f"# rows\n{SMALL}\n{TWO}\n")
    target = Target.parse("interpreter")

    def run(self: Session) -> list[tuning_db.TuningRecord]:
        asked.extend(self.jobs)
        return [
            tuning_db.make(j.workload, target, str(heuristics.default(j.phases()[0], target)), 1.0, 2)
            for j in self.jobs
        ]

    asked: list[TuningJob] = []
    monkeypatch.setattr(Session, "run", run)
    assert main(["tune", str(source), "--db", str(file)]) == 0
    page = capsys.readouterr().out
    assert "times say nothing about a GPU" in page and f"3 of 3 are kept in {file}" in page
    assert [j.about["layer"] for j in asked] == ["rows", "two_1", "two_2"]
    assert {r.problem for r in tuning_db.load(file)} == {j.workload.text for j in asked}


@pytest.mark.parametrize("whole", [1 << 22, 0])
def test_a_trial_is_checked_and_timed(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; all elements, or those of samples."""
    monkeypatch.setattr(computation, "WHOLE", whole)
    monkeypatch.setattr(measure, "kept", measure.KeptCases())
    schedule = "n:8 k:32 | fma"
    assert measure.compile_trial(SMALL, "", "", schedule)["kernels"] == 1
    found = measure.measure_trial(SMALL, "", "", schedule, 1.0)
    assert (found["verdict"], found["max_err"]) == ("right", 0.0) and found["us"] > 0
    assert measure.measure_trial(SMALL, "", "", "n:8 | fma | red=warp")["verdict"] == "refused"
    monkeypatch.setattr(Plan, "run", lambda self, tensors: tensors["Y"].fill_(0.5))
    assert measure.measure_trial(SMALL, "", "", schedule)["verdict"] == "wrong"
