"""Child processes: a task that hangs or crashes fails alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest

from transconv.verify import machine
from transconv.verify.machine import Pool, Task, WorkerTask, _serve, is_fatal


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers as they are started outside of the tests."""
    monkeypatch.setattr(machine, "multiprocessing", multiprocessing)


def work(what: str) -> dict[str, Any]:
    """A worker's function, found by name in the children."""
    if what == "hang":
        time.sleep(60)
    if what == "rest":
        time.sleep(0.3)
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ValueError("no such thing")
    if what == "fault":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"told": what, "pid": os.getpid(), "seen": os.environ.get("SEEN", "")}


def pool(processes: int = 1, capacity: float = float("inf")) -> Pool:
    group = WorkerTask(f"{__name__}:work", processes, {"SEEN": "yes"})
    return Pool({"a": group, "b": group}, capacity)


@pytest.mark.usefixtures("started_anew")
def test_every_task_gets_its_own_fate() -> None:
    tasks = [
        Task("a", {"what": w}, limit_s=2)
        for w in ("one", "hang", "two", "die", "three", "raise", "fault", "four")
    ]
    found = {t.payload["what"]: row for t, row in pool().run(tasks)}
    assert found["hang"] == {"error": "timeout"}
    assert found["die"] == {"error": "crash"}
    assert found["raise"]["error"] == "ValueError: no such thing"
    assert found["fault"]["fatal"]
    assert [found[w]["told"] for w in ("one", "two", "three", "four")] == ["one", "two", "three", "four"]
    assert found["one"]["seen"] == "yes"
    # A process is kept until it fails; after a fault of the GPU it is not used again.
    pids = [found[w]["pid"] for w in ("one", "two", "three", "four")]
    assert len(set(pids)) == 4


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RuntimeError("CUDA error: misaligned address"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered"), True),
        (RuntimeError("Triton Error [HIP]:  Code: 700, Message: an illegal memory access"), True),
        (MemoryError("out of memory"), True),
        (RuntimeError("failed to legalize operation that was explicitly marked illegal"), False),
        (ValueError("out of resource: shared memory, Required: 262144"), False),
    ],
)
def test_what_no_process_survives(error: Exception, fatal: bool) -> None:
    """After the second kind of error every later launch in the process fails, too."""
    assert is_fatal(error) == fatal


@pytest.mark.slow
def test_followers_start_after_an_answer_of_the_first() -> None:
    tasks = [Task("a", {"what": w}, then=Task("b", {"what": f"after {w}"})) for w in ("x", "die", "raise")]
    found = [(t.group, t.payload["what"], row.get("told")) for t, row in pool().run(tasks)]
    assert sorted(found, key=str) == [
        ("a", "die", None),
        ("a", "raise", None),
        ("a", "x", "x"),
        ("b", "after raise", "after raise"),
        ("b", "after x", "after x"),
    ]


def test_tasks_can_be_added_while_running() -> None:
    made = pool()
    told = []
    for task, _ in made.run([Task("a", {"what": "1"})]):
        told.append(task.payload["what"])
        if len(told) < 3:
            made.add(Task("a", {"what": str(len(told) + 1)}))
    assert told == ["1", "2", "3"]


LOCKS = []


def with_a_lock() -> dict[str, Any]:
    """Holds a named semaphore until the process ends."""
    LOCKS.append(multiprocessing.Lock())
    return {"pid": os.getpid()}


@pytest.mark.every(2)
@pytest.mark.usefixtures("started_anew")
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_idle_workers_end_by_themselves(start: str) -> None:
    """A killed one would leave its semaphore, of which Python warns when this process ends."""
    made = Pool(
        {"a": WorkerTask(f"{__name__}:with_a_lock", 1), "b": WorkerTask(f"{__name__}:work", 1)},
        start=start,
    )
    found = {}
    for task, row in made.run([Task("a", {}), Task("b", {"what": "hang"}, limit_s=2)]):
        found |= {w.group: w.process for w in made.workers}
        assert row["error"] == "timeout" if task.group == "b" else row["pid"] == found["a"].pid
    assert found["a"].exitcode == 0


@pytest.mark.slow
def test_a_spent_budget_starts_nothing_more() -> None:
    tasks = [Task("a", {"what": w}) for w in ("one", "hang", "two")]
    start = time.monotonic()
    found = [(t.payload["what"], row.get("error")) for t, row in pool().run(tasks, 4, grace_s=0.5)]
    assert ("hang", "out of budget") in found
    assert all(what != "two" for what, _ in found)
    assert time.monotonic() - start < 30


def test_capacity_limits_what_runs_at_once() -> None:
    tasks = [Task("a", {"what": str(i)}, weight=0.6) for i in range(4)]
    tasks.append(Task("a", {"what": "big"}, weight=5))
    found = [t.payload["what"] for t, _ in pool(2, capacity=1).run(tasks)]
    assert found == ["0", "1", "2", "3", "big"]


def test_a_worker_whose_parent_is_gone_ends() -> None:
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    child = start.Process(target=_serve, args=(there, f"{__name__}:work", {}))
    child.start()
    there.close()
    assert here.recv() is None
    here.send({"what": "rest"})
    here.close()  # while it works
    child.join(30)
    assert child.exitcode == 0
