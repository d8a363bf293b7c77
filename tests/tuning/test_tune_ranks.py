"""Tuning over ranks: with made-up times in real processes of two ranks, whole, and with one that dies; the
command under torchrun, in Triton's interpreter."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import ports
from tests.docs.test_readme import TUNE
from tests.shown import ROOT
from tests.tuning.test_tune_session import SM90, job
from tests.tuning.workers import time_of
from transconv.selection import tuning_db
from transconv.tuning import ranks
from transconv.tuning.ranks import Ranks, meet
from transconv.tuning.session import Limits, Session, groups, log_of, of_log
from transconv.verify.machine import Task

pytestmark = pytest.mark.usefixtures("nothing_known")
TRIALS = 12


OTHER = """
import os, sys
from transconv.tuning import ranks
from transconv.tuning.ranks import meet
from transconv.tuning.session import groups

class Dies(ranks.Server):
    def tell(self, task, row):
        if self.told >= 3:
            os._exit(9)
        super().tell(task, row)

if __name__ == "__main__":
    ranks.Server = Dies
    with meet({"machine": "one"}, 1, 30) as between:
        ranks.serve(groups(1, "tests.tuning.workers"), between)
"""


def started(rank: int, port: int, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def pair(gone_s: float = 30, about: str = "one") -> list[Ranks]:
    """Two ranks of this process."""
    from torch.distributed import HashStore

    store = HashStore()
    machines = "one", about
    return [Ranks(store, rank, 2, {"machine": machines[rank]}, 1, gone_s) for rank in range(2)]


def served(between: Ranks) -> Any:
    """Rank 1."""
    with between:
        return ranks.serve(groups(1, "tests.tuning.workers"), between)


def tuned(tmp_path: Path, between: Ranks) -> Session:
    """A session of rank 0, after the other rank has come."""
    until = time.monotonic() + 60
    while between.get("here/1") is None and time.monotonic() < until:
        time.sleep(0.02)
    session = Session(
        [job()],
        SM90,
        Limits(trials=TRIALS, jobs=1),
        log_of(tmp_path / "trials.csv"),
        {"device": "made up", "torch": "0"},
        say=lambda line: None,
        workers="tests.tuning.workers",
        pool=partial(ranks.Dealer, ranks=between),
    )
    between.end("", [{"schedule": row.schedule} for row in session.run()])
    return session


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(tmp_path: Path) -> None:
    first, second = pair()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(served, second)
        with first:
            session = tuned(tmp_path, first)
        ran, found = answer.result(30)
    assert 2 <= ran <= TRIALS - 2
    alone = Session(
        [job()],
        SM90,
        Limits(trials=TRIALS, jobs=2),
        log_of(tmp_path / "alone.csv"),
        {"device": "made up", "torch": "0"},
        say=lambda line: None,
        workers="tests.tuning.workers",
    )
    assert alone.run() == session.winners() == of_log(session.log.rows)
    assert found == [{"schedule": row.schedule} for row in session.winners()]
    assert {x["schedule"] for x in alone.log.rows} == {x["schedule"] for x in session.log.rows}
    assert len(session.log.rows) == TRIALS and {x["triton_s"] for x in session.log.rows} == {"0.5"}


@pytest.mark.slow
def test_a_rank_that_dies_loses_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = ports(1)
    script = tmp_path / "dies.py"
    script.write_text(OTHER)
    second = started(1, port, str(script))
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_PORT", str(port))
    assert ranks.started()
    with meet({"machine": "one"}, 1, 2) as between:
        session = tuned(tmp_path, between)
    assert second.wait(30) == 9
    assert "rank 1 is gone (no sign of life for 2 s); " in capsys.readouterr().out
    assert len({x["schedule"] for x in session.log.rows}) == TRIALS == len(session.log.rows)
    assert {x["verdict"] for x in session.log.rows} == {"right"}
    (winner,) = session.winners()
    assert winner.schedule == min((x["schedule"] for x in session.log.rows), key=time_of)
    assert of_log(log_of(tmp_path / "trials.csv").rows) == [winner]


def test_ranks_that_disagree_all_end_with_an_error(tmp_path: Path) -> None:
    first, second = pair(about="another machine")
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(served, second)
        with pytest.raises(ValueError, match="ranks 0 and 1 cannot tune together.*another machine"), first:
            tuned(tmp_path, first)
        with pytest.raises(ValueError, match="rank 1 stops: rank 0 ended with ranks 0 and 1 cannot"):
            answer.result(30)


def test_without_a_sign_of_rank_0_the_others_end_with_an_error() -> None:
    with pytest.raises(ConnectionError, match="rank 1 stops: rank 0, .*no sign of life for 1 s"):
        served(pair(gone_s=1)[1])


def test_a_trial_with_which_two_ranks_are_gone_is_given_up() -> None:
    from torch.distributed import HashStore

    store, task = HashStore(), Task("compile", {}, then=Task("gpu", {}))
    between = [Ranks(store, rank, 3, {}, 1, 30) for rank in range(3)]
    dealer, ended = ranks.Dealer(groups(1), between[0]), []
    for rank in (1, 2):
        between[rank].put(f"here/{rank}", {"jobs": 1, "about": {}})
    dealer.others[0].out = {0: task}
    for rank in (1, 2):
        list(dealer.exchange(False, False))
        between[rank].put(f"left/{rank}", "out of memory")
        ended += list(dealer._lost_with(dealer.others[rank - 1]))
        dealer.others[1].out = {0: task}
    assert ended == [(task, {"error": "crash"})]


@pytest.mark.slow
def test_the_store_of_rank_0_is_gone(tmp_path: Path) -> None:
    (port,) = ports(1)
    script = (
        "import os; from transconv.tuning.ranks import meet\n"
        "with meet({}, 1, 30) as between:\n"
        "    while between.get('here/1') is None: pass\n"
        "    os._exit(9)"
    )
    first = started(0, port, "-c", script)
    second = started(1, port, "-m", "transconv", "tune", *shlex.split(TUNE)[2:])
    assert first.wait(60) == 9
    said = second.communicate(timeout=60)[1]
    assert second.returncode == 2 and "rank 1 stops: rank 0, which deals trials" in said, said


def on_two_ranks(words: list[str], timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    start = "-m torch.distributed.run --standalone --nproc-per-node 2 -m transconv".split()
    return subprocess.run(
        [sys.executable, *start, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=timeout,
        env={**os.environ, **variables},
    )


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "tuned.csv"
    words = [*shlex.split(TUNE)[1:], "--jobs", "1", "--budget-ms", "1", "--trials", "6", "--db", str(file)]
    ran = on_two_ranks(words, 200, TRANSCONV_VERIFY="0", OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    assert "one process compiles on each of 2 ranks" in ran.stdout and "rank 1 had " in ran.stdout
    assert f"1 of 1 are kept in {file}" in ran.stdout
    (row,) = tuning_db.load(file)
    assert row.tried == 6 and len(log_of(tmp_path / "tuned.trials.csv").rows) == 6


def killed(tmp_path: Path, words: list[str], trials: int) -> None:
    """Rank 1 is killed with all its processes after some trials: rank 0 names it and ends the search."""
    file, log = tmp_path / "tuned.csv", tmp_path / "tuned.trials.csv"
    words = ["-m", "transconv", *words, "--trials", str(trials), "--gone-after", "4", "--db", str(file)]
    (port,) = ports(1)
    first, second = (started(rank, port, *words) for rank in range(2))
    began = time.monotonic()
    try:
        while first.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 3):
            assert time.monotonic() - began < 100
            time.sleep(0.05)
        os.killpg(second.pid, signal.SIGKILL)
        print(f"killed after {time.monotonic() - began:.1f} s", flush=True)
        out, said = first.communicate(timeout=100)
    finally:
        for process in (first, second):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    print(f"over after {time.monotonic() - began:.1f} s: {out[-1500:]} {said[-1500:]}", flush=True)
    assert first.returncode == 0 and second.wait(10) == -signal.SIGKILL
    assert "rank 1" in out + said and f"1 of 1 are kept in {file}" in out
    (row,) = tuning_db.load(file)
    assert row.tried == len(log_of(log).rows) == trials


@pytest.mark.slow
def test_a_rank_of_the_command_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    killed(tmp_path, [*shlex.split(TUNE)[1:], "--jobs", "1", "--budget-ms", "1"], 8)


ON_GPUS = (
    "tune mb32ic64ih56oc128oh28kh3sh2ph1 --dtype bf16 --layout nhwc --prop fwd --jobs 6 --limit 15 "
    "--compile-limit 30"
).split()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus(tmp_path: Path) -> None:
    file = tmp_path / "tuned.csv"
    words = [*ON_GPUS, "--trials", "16", "--time-budget", "30", "--db", str(file)]
    ran = on_two_ranks(words, 90)
    print(ran.stdout[-1500:], ran.stderr[-500:], flush=True)
    assert ran.returncode == 0 and "on each of 2 ranks" in ran.stdout and "rank 1 had " in ran.stdout
    (row,) = tuning_db.load(file)
    assert row.us > 0 and row.tried > 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_rank_on_a_gpu_is_killed(tmp_path: Path) -> None:
    killed(tmp_path, ON_GPUS, 16)
