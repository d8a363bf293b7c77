"""Kernels that are not there yet, processes that compile them, and plans that are kept on disk."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv import runtime
from transconv.backend_triton import Compilers, offline_compilation
from transconv.backend_triton.launch import compile_records
from transconv.backend_triton.launch.triton_kernel import TritonKernel
from transconv.backend_triton.offline_compilation import Child
from transconv.compute import Alone, Workload, parse
from transconv.conv import ConvProblem, ConvWorkload, Prop, compiler
from transconv.conv.compiler import CompiledDirection
from transconv.conv.relation import every
from transconv.errors import Unsupported
from transconv.runtime import (
    Batch,
    Plan,
    Waiting,
    check_records,
    estimated,
    is_estimated,
    plan_cache,
    prepare,
    steps,
)
from transconv.runtime import compiler as compiler_
from transconv.runtime.compilation import async_compile, batch_compile, compile_child, rehearsal_thread
from transconv.selection import choice, shortlist
from transconv.target import TARGETS, Target

ROOT = Path(__file__).parents[2]
SM90 = Target.parse("sm_90")
PROBLEM = ConvProblem.parse("mb2ic16ih6oc16oh6kh1ph0 dt=f16 tag=nhwc")


class Processes:
    """Stands in for compiling processes: jobs wait until the test answers them."""

    def __init__(self, *_: Any) -> None:
        self.jobs: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = []
        self.any_size = False
        self.begun = False  # whether processes work on them, so that none can be taken back
        self.there = False  # whether there are processes before there are jobs

    def begin(self) -> None:
        self.there = True

    def is_patient(self, job: dict[str, Any]) -> bool:
        return Compilers.is_patient(cast(Any, self), job)

    def submit(self, job: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> Callable[[], bool]:
        self.jobs.append((job, done))
        return lambda: not self.begun

    def answer(self, **said: Any) -> None:
        for _, done in self.jobs:
            done(said)
        self.jobs.clear()

    def close(self) -> None:
        self.jobs.clear()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[str]]:
    """The kernels that count as compiled, by their keys; an empty cache."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    found: set[str] = set()
    monkeypatch.setattr(TritonKernel, "is_ready", lambda self, aligned: self.key in found)
    compiler.forget()
    check_records.forget()
    async_compile.forget()
    yield found
    compiler.forget()
    check_records.forget()
    async_compile.forget()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(async_compile, "_pool", None)  # one of another test answers otherwise
    monkeypatch.setattr(async_compile, "Compilers", lambda *_: made)
    return made


def asked(mode: str, target: Target = SM90, **options: Any) -> CompiledDirection:
    return compiler.plan(PROBLEM, Prop.FWD, target, mode=mode, **options)


def refused(mode: str, **options: Any) -> Unsupported:
    with pytest.raises(Unsupported) as caught:
        asked(mode, **options)
    return caught.value


def test_background_refuses_until_a_process_has_compiled(there: set[str], processes: Processes) -> None:
    assert [refused("background").reason for _ in range(3)] == ["compiling"] * 3
    assert len(processes.jobs) == 1, "one job for a kernel, however often it is asked for"
    assert not list(plan_cache.DRAWER.items()), "whoever asks generates nothing"
    there |= {s.digest for s in asked("now").steps}
    compiler.forget()
    processes.answer(kernels=1, seconds=0.1)
    assert asked("background").steps[0].digest in there


def test_a_kernel_for_which_no_call_waits_is_made_ready_last(
    there: set[str], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of which others come before, and one of a single size next to one for any size; not where it was
    handed over ahead of calls."""
    added = list[bool]()
    monkeypatch.setattr(rehearsal_thread.thread, "add", lambda *given: added.append(given[-1]))
    monkeypatch.setattr(rehearsal_thread, "device_of", lambda target: "a device")
    works = [ConvWorkload(PROBLEM, prop) for prop in Prop]
    cases = ((), 0, False), ((2,), 2, False), ((), 0, True)
    for work, (sizes, later, general) in zip(works, cases, strict=True):
        processes.any_size = general
        with pytest.raises(Unsupported):
            async_compile.ready(work, SM90, None, False, Plan, True, "background", sizes, later)
    assert async_compile.ahead([async_compile.PlanRequest(works[0], SM90, True)], Plan, 2, hurried=False)
    processes.answer(kernels=1, seconds=0.1)
    assert added == [False, True, True, False]


def test_where_another_kernel_answers_the_caller_plans_and_reads_nothing(
    there: set[str], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process looks on disk for what is asked for behind a first kernel for any size."""
    looked: list[Workload] = []
    monkeypatch.setattr(plan_cache, "find", lambda workload, *_: looked.append(workload))
    monkeypatch.setattr(compiler_, "build", lambda *_: pytest.fail("the caller plans"))
    works = [ConvWorkload(PROBLEM, prop) for prop in Prop]
    for work, (sizes, later) in zip(works, (((2,), 0), ((2,), 1), ((), 0)), strict=True):
        for _ in range(3):
            with pytest.raises(Waiting):
                async_compile.ready(work, SM90, None, False, Plan, True, "background", sizes, later)
        processes.any_size = True  # as Compilers note it
    assert looked == works[:1] and len(processes.jobs) == 3


def test_a_process_waits_for_another_ones_start_unless_it_is_hurried(
    there: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first launch of a kernel that was compiled in the background waits for a C compiler."""
    seen = []
    monkeypatch.setattr(compile_child, "pretend", lambda *_: None)
    monkeypatch.setattr(TritonKernel, "compile", lambda self, aligned, patient: seen.append(patient))
    job = async_compile.PlanRequest(ConvWorkload(PROBLEM, Prop.FWD), SM90).job
    for hurried in ({}, {"hurried": True}):
        assert compile_child.answer(job | hurried)["kernels"] == 1
    assert seen == [True, False]


def test_never_compiles_nothing(there: set[str], processes: Processes) -> None:
    assert refused("never").reason == "compile:never" and not processes.jobs
    there |= {s.digest for s in asked("now").steps}
    assert asked("never").steps[0].digest in there


@pytest.mark.usefixtures("own_garbage")
def test_a_plan_that_is_read_keeps_no_ir(there: set[str]) -> None:
    """Objects that stay make Python's collector go through all of a program's: a plan has a few of its
    own, and what the passes made of it stays in the process that compiled it."""
    made = asked("now")
    there |= {s.digest for s in made.steps}
    asked("never")  # what is imported for it
    del made
    kept = []
    for _ in range(2):
        compiler.forget()
        gc.collect()
        before = {id(o) for o in gc.get_objects()}
        plan = asked("never")
        gc.collect()
        kept = [o for o in gc.get_objects() if id(o) not in before]
        del before
    assert plan.steps and len(kept) < 200
    assert not [o for o in kept if type(o).__module__ in ("transconv.ir.stmt", "transconv.ir.expr")]


def test_one_job_for_many_threads(there: set[str], processes: Processes) -> None:
    begin = threading.Barrier(4)
    reasons: list[str] = []

    def ask() -> None:
        begin.wait()
        reasons.append(refused("background").reason)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert reasons == ["compiling"] * 4 and len(processes.jobs) == 1


def test_a_failure_is_logged_and_remembered(
    there: set[str], processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    refused("background")
    with caplog.at_level(logging.WARNING, "transconv.ready"):
        processes.answer(reason="ptxas died", log="")
    error = refused("background")
    assert (error.reason, error.message) == ("compile:failed", "ptxas died") and not processes.jobs
    assert "ptxas died" in caplog.text


def test_a_kernel_that_does_not_compile_is_wrong(there: set[str], processes: Processes) -> None:
    digest = asked("now").steps[0].digest
    refused("background")
    processes.answer(
        kernels=1,
        wrong=[{"kernel": digest, "function": "f", "schedule": "s", "reason": "spilt", "keep": False}],
    )
    compiler.forget()
    assert check_records.is_wrong(digest) and asked("now").steps[0].digest != digest


def test_a_process_tries_another_schedule_where_one_spills(
    there: set[str], processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that asked takes the same one, without compiling the first."""
    sizes = [1000, 0]

    def compiled(self: TritonKernel, aligned: bool, patient: bool = True) -> None:
        self.spilled = sizes.pop(0)

    monkeypatch.setattr(TritonKernel, "compile", compiled)
    first = asked("now").steps[0].digest
    refused("background")
    job = processes.jobs[0][0]
    compiler.forget()
    found = compile_child._made(job, *compile_child._request(job), 0.0, compile_child.Room(0))
    assert [*map(tuple, found["spilled"])] == [(first, 1000)] and not found["wrong"] and not sizes
    compiler.forget()
    check_records.forget()
    processes.answer(**found)
    assert asked("now").steps[0].digest != first


def test_where_nothing_is_kept_the_caller_compiles(
    there: set[str], processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    refused("background")
    processes.answer(kernels=1)
    assert asked("background").steps and asked("background").steps
    assert caplog.text.count("is compiled here") == 1


def test_the_same_bits_or_the_interpreter_wait_for_nobody(there: set[str], processes: Processes) -> None:
    assert asked("background", deterministic=True).steps
    assert asked("never", target=TARGETS["interpreter"]).steps and not processes.jobs
    assert refused("never", deterministic=True).reason == "compile:never"


# -- plans kept on disk ----------------------------------------------------------------------------


def test_a_kept_plan_is_the_plan(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.parse("mb1ic16ih5oc16oh3kh3sh2ph1 dt=bf16 tag=nchw")
    for prop in (Prop.FWD, Prop.BWD_W):
        first = compiler.plan(problem, prop, SM90)
        compiler.forget()
        with monkeypatch.context() as m:
            m.setattr("transconv.runtime.compiler.lower", None)  # no pass runs
            second = compiler.plan(problem, prop, SM90)
        assert second.steps[0].triton is not first.steps[0].triton
        assert (second.source, second.schedule, second.why) == (first.source, first.schedule, first.why)
        assert second.workspaces == first.workspaces and second.order == first.order
        for a, b in zip(first.steps, second.steps, strict=True):
            same = ("does", "schedule", "source", "path", "params", "digest", "zero")
            assert [getattr(a, n) for n in same] == [getattr(b, n) for n in same]
            same = ("grid", "warps", "stages", "boxes", "early", "explicit", "types", "key")
            assert [getattr(a.triton, n) for n in same] == [getattr(b.triton, n) for n in same]
        assert second.steps[0].kernel is first.steps[0].kernel, "the passes run for those who ask"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "change",
    [{"digest": "0" * 32}, {"source": "import os"}, {"schedule": "nonsense"}, {"boxes": 3}, {"zero": {}}],
)
def test_a_kept_plan_that_makes_no_sense_is_made_again(there: set[str], change: dict[str, Any]) -> None:
    first = asked("now")
    ((name, content),) = plan_cache.DRAWER.items()
    content["steps"][0] |= change
    plan_cache.DRAWER.put(name, content)
    compiler.forget()
    assert asked("now").source == first.source


def test_a_kept_plan_of_any_size_is_the_plan_or_made_again(
    there: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a record says of sizes is the expressions and requirements of the kernel. One that is cut off,
    is another kernel's or names sizes that nobody knows is none."""
    text = """
        compute scale
            sizes  N=8 in 1..4096, K=300 in 1..8192, K % 4 == 0
            axes   n=N k=K
            read   x = X[n, k]
            store  Y[n, k] = 2*x
    """
    workload = Alone(parse(text))
    told = (workload, SM90, None, False, Plan)
    first = runtime.compiler.plan(*told)
    ((name, content),) = plan_cache.DRAWER.items()
    forget = compiler.forget
    forget()
    with monkeypatch.context() as m:
        m.setattr("transconv.runtime.compiler.lower", None)
        second = runtime.compiler.plan(*told)
    for of in (
        lambda p: p.required.sizes,
        lambda p: p.steps[0].triton.requires,
        lambda p: p.steps[0].triton.programs,
        lambda p: p.steps[0].triton.boxes,
    ):
        assert of(first) == of(second)
    with monkeypatch.context() as m:  # nothing is proved or counted again
        m.setattr("transconv.backend_triton.launch.triton_kernel.facts_of", None)
        m.setattr("transconv.runtime.plans.AtSizes", None)
        forget()
        assert runtime.compiler.plan(*told).formulas() == first.formulas()
    for change in (
        {"sizes": None},
        {"sizes": ""},
        {"sizes": "Q=8 in 1..9"},
        {"where": None},
        {"where": ["Q <= 4"]},
        {"sizes": 7},
        {"programs": "N*M"},
        {"programs": ""},
        {"programs": None},
        {"sizes": "N=8 in 1..4096, K=300 in 1..8192, K % 4 =="},
    ):
        broken = {**content, "steps": [{**content["steps"][0], **change}, *content["steps"][1:]]}
        plan_cache.DRAWER.put(name, broken)
        forget()
        made = runtime.compiler.plan(*told)
        assert made.steps[0].triton.requires == first.steps[0].triton.requires, change
        assert str(made.steps[0].triton.programs) == str(first.steps[0].triton.programs), change


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", Prop)
@pytest.mark.parametrize("padding", ["", "ph1"])
def test_numbers_of_sizes_that_may_be_negative_are_read_back(
    there: set[str], prop: Prop, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, a small image has no position of the result; their number is rounded up all the
    same, by a choice between two quotients."""
    side = 8 if padding else 6
    problem = ConvProblem.parse(f"mb2ic4ih8oc4oh{side}kh3{padding} dt=f16")
    workload = ConvWorkload(problem, prop, open=every(problem))
    made = runtime.plan(workload, SM90, None, False, CompiledDirection)
    runtime.forget()
    monkeypatch.setattr(compiler_, "build", lambda *_: pytest.fail("it is on disk"))
    found = runtime.plan(workload, SM90, None, False, CompiledDirection)
    for one, other in zip(made.steps, found.steps, strict=True):
        assert one.triton.programs is other.triton.programs
    assert found.formulas() == made.formulas()


@pytest.mark.parametrize("name", ["TRANSCONV_VERIFY", "TRANSCONV_DUMP", "TRANSCONV_DEBUG"])
def test_who_wants_to_see_the_passes_sees_them(
    there: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, {"TRANSCONV_DUMP": str(tmp_path), "TRANSCONV_DEBUG": "2"}.get(name, "1"))
    asked("now")
    assert not list(plan_cache.DRAWER.items())


# -- processes -------------------------------------------------------------------------------------


def test_the_child_answers_what_it_is_asked(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(TritonKernel, "compile", lambda self, *_: done.append(self.key))
    monkeypatch.setattr(compile_child, "pretend", lambda *_: None)
    question = compiler.question(PROBLEM, Prop.FWD, SM90, "bias+relu", aligned=False)
    answer = compile_child.answer(question.job)
    assert answer["kernels"] == len(done) >= 1 and not answer["wrong"]
    assert runtime.ready(
        question.workload, question.target, None, False, CompiledDirection, False, "now"
    ).source
    assert done == [
        s.digest for s in compiler.plan(PROBLEM, Prop.FWD, SM90, epilogue="bias+relu", aligned=False).steps
    ]


def test_a_batch_is_answered_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with too many kernels is left out, and a smaller one behind it is not; where all kernels are
    there, no plan is made. An error is that of its request."""
    made: list[set[str] | None] = [{"a", "b"}, None, {"a", "c"}, {"d", "e", "f"}, {"d"}]

    def plan(*_: object) -> SimpleNamespace:
        if (digests := made.pop(0)) is None:
            raise Unsupported("schedule", "no schedule is legal")
        return SimpleNamespace(digests=digests, steps=[*digests], schedule="")

    for name, value in (
        ("_request", lambda job: (None, SM90)),
        ("pretend", lambda *_: None),
        ("_compile", lambda *_: None),
    ):
        monkeypatch.setattr(compile_child, name, value)
    monkeypatch.setattr(compiler_, "plan", plan)
    monkeypatch.setattr(compiler_, "spills", lambda plan: [])
    job = {"deterministic": False, "aligned": True}
    first, refused, second, large, last, more = compile_child.answer({"batch": [job] * 6, "most": 4})[
        "each"
    ]
    assert [a.get("kernels") for a in (first, second, last)] == [2, 2, 1] and not made
    assert large["left"] and more == {"left": True} and "no schedule" in refused["reason"]


def test_a_batch_whose_process_died_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = list[object](), list[tuple[str, bool]]()

    class AtOnce(Processes):
        def submit(self, job, done) -> None:  # type: ignore[no-untyped-def]
            asked.append(job.get("most", job.get("direction")))
            done(
                {"died": True, "reason": "killed"}
                if "batch" in job or job["direction"] == "bwd_w"
                else {"kernels": 1}
            )

    several = Batch(tuple(compiler.question(PROBLEM, prop, SM90) for prop in Prop), most=6)
    alone = Batch(tuple(compiler.question(PROBLEM, Prop.FWD, SM90, e) for e in ("relu",)), each=9)
    monkeypatch.setattr(async_compile, "compilers", AtOnce)
    monkeypatch.setattr(async_compile, "there", lambda *_: None)
    report = prepare([several, alone], 2, lambda q, has: ended.append((q.workload.direction, has)))
    assert asked == ["fwd", 6, "fwd", "bwd_d", "bwd_w"], "the one with the most work first"
    assert ended == [("fwd", True), ("fwd", True), ("bwd_d", True), ("bwd_w", False)]
    assert (report.kernels, len(report.problems), report.there) == (3, 4, 0)
    assert [why for _, why in report.failures] == ["killed"]


def test_the_child_rehearses_and_keeps_no_plan(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_: list[str] = []
    monkeypatch.setattr(compile_child, "pretend", lambda *_: None)
    monkeypatch.setattr(compile_child.gc, "freeze", lambda: None)
    monkeypatch.setattr(TritonKernel, "compile", lambda self, *_: compiled_.append(self.key))
    like = compiler.question(PROBLEM, Prop.FWD, SM90)
    assert compile_child.answer(async_compile.START | like.job) == {}
    assert compiled_ == [s.digest for s in asked("now").steps]
    compiler.forget()
    for path in [p for p in Path(os.environ["TRANSCONV_CACHE"]).rglob("plans-*/*") if p.is_file()]:
        path.unlink()
    assert compile_child.answer(async_compile.START | like.job) == {} and not list(
        plan_cache.DRAWER.items()
    )
    assert compile_child.answer(async_compile.START | like.job | {"problem": "none"}) == {}


def test_the_child_ranks_schedules_alone(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonKernel, "compile", None)
    question = compiler.question(PROBLEM, Prop.FWD, SM90)
    asked = question.workload, SM90
    steps.estimated.cache_clear()
    assert not is_estimated(*asked)
    assert "kernels" not in compile_child.answer(question.job | {"rank": True})
    assert is_estimated(*asked)
    us = estimated(*asked)
    for forget in (steps.estimated.cache_clear, compiler.forget):
        forget()
    monkeypatch.setattr(choice, "ranked", None)
    assert estimated(*asked) == us > 0, "it is on disk, and so is the list"
    assert shortlist(1, *question.workload.computations, SM90, question.workload)


def test_a_program_ends_while_processes_work(tmp_path: Path) -> None:
    """No thread, no process, no exit handler holds it up."""
    script = tmp_path / "script.py"  # without a guard of its main module
    script.write_text(
        "from transconv.backend_triton import Compilers\n"
        "print('begun', flush=True)\n"
        "pool = Compilers('timeit', {}, 2)\n"  # a module that does not answer for a while
        "import atexit; atexit.register(pool.close)\n"
        "pool.submit({}, print)\n"
        "while not any(c.process for c in pool.children): pass\n"
        "print(*[c.process.pid for c in pool.children if c.process])\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    lines = ran.stdout.split()
    assert lines[0] == "begun" and lines.count("begun") == 1 and not ran.stderr
    assert not Path(f"/proc/{lines[1]}").exists()


def test_who_waits_for_an_answer_at_the_end_gets_one() -> None:
    """The pipes are not closed under the thread that reads them."""
    for _ in range(3):
        child, found = Child("timeit", {}), list[dict[str, Any]]()  # which does not answer for a while
        asking = threading.Thread(target=lambda: found.append(child.ask({}, 60.0)))  # noqa: B023
        asking.start()
        while child.process is None:
            pass
        child.close()
        asking.join(10.0)
        assert found[0]["died"] and not Path(child.folder.name).exists()
        assert child.ask({}, 60.0)["died"], "none is started anew"


def test_an_answer_after_the_end_is_heard_by_nobody() -> None:
    pool = Compilers("nothing", {}, 1)
    pool.close()
    pool.submit({}, lambda _: pytest.fail("heard"))
    assert not pool.children


def test_urgent_jobs_are_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait already keep their order."""
    free, taken, over = threading.Event(), list[Any](), threading.Event()

    class Answering:
        def __init__(self, *_: Any) -> None: ...

        def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            free.wait(10.0)
            return job

        def kill(self) -> None: ...

        close = kill

    monkeypatch.setattr(offline_compilation, "Child", Answering)
    pool = Compilers("nothing", {}, 1)

    def done(answer: dict[str, Any]) -> None:
        taken.append(answer["n"])
        if len(taken) == 10:
            over.set()

    pool.submit({"n": 0}, done)
    while not pool.jobs.empty():  # until the process has begun it
        time.sleep(0.01)
    pool.submit({"n": 6, "later": 2}, done)
    pool.submit({"n": 4.5, "one_size": True}, done)  # a kernel for any size answers its calls, too
    pool.submit({"n": 4.6, "one_size": True}, done)
    pool.submit({"n": 5, "later": 1}, done)
    pool.submit({"n": 0.5, "any_size": True}, done)
    for n in range(1, 5):
        pool.submit({"n": n} | ({"urgent": True} if n > 2 else {}), done)
    free.set()
    assert over.wait(10.0) and taken == [0, 3, 4, 0.5, 1, 2, 4.5, 4.6, 5, 6]
    pool.close()


def test_what_is_compiled_is_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Kernel:
        hash, name = "ab" * 32, "f"

    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_records, "folder", lambda: tmp_path)
    compile_records.forget()
    compile_records.note("k", True, Kernel)
    assert compile_records.is_there("k", True) and not compile_records.is_there("k", False)
    compile_records.forget()
    assert not compile_records.is_there("k", True), "Triton's folder was removed"
    place = tmp_path / compile_records.folder_of(Kernel.hash)
    place.mkdir()
    (place / "__grp__f.json").write_text("{}")
    assert compile_records.is_there("k", True)
    compile_records.forget()


def test_a_plan_is_there_when_all_of_its_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    question: Any = SimpleNamespace(aligned=True)
    for ready in ((True,), (True, True), (True, False), (False, True), (False,)):
        plan = SimpleNamespace(
            steps=[
                SimpleNamespace(triton=SimpleNamespace(is_ready=lambda _, one=one: one)) for one in ready
            ]
        )
        monkeypatch.setattr(async_compile, "planned", lambda *_, plan=plan: plan)
        assert async_compile.there(question, CompiledDirection) is (plan if all(ready) else None)
    monkeypatch.setattr(async_compile, "planned", lambda *_: None)
    assert async_compile.there(question, CompiledDirection) is None


def test_the_child_looks_for_cycles_sometimes(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[None] = []
    monkeypatch.setattr(compile_child.gc, "collect", lambda: looked.append(None))
    for _ in range(3 * compile_child.COLLECT):
        compile_child._look_for_cycles()
    assert len(looked) == 3


def test_what_is_forgotten_is_ranked_anew() -> None:
    text = "compute twice\n axes n=64\n read x = X[n]\n store Y[n] = x*2"
    first = shortlist(1, parse(text), SM90, Alone(parse(text)))
    assert shortlist(1, parse(text), SM90, Alone(parse(text)))[0] is first[0]
    compiler_.forget()
    assert shortlist(1, parse(text), SM90, Alone(parse(text)))[0] is not first[0]


def test_where_two_records_differ_is_told() -> None:
    one = {"a": 1, "b": {"c": [1, 2], "d": 3}, "e": [1]}
    other = {"a": 1, "b": {"c": [1, 5], "d": 4}, "e": [1, 2]}
    assert [line.partition(" is ")[0] for line in batch_compile._apart("", one, other)] == [
        "b.c[1]",
        "b.d",
        "e",
    ]
    assert not [*batch_compile._apart("", one, dict(one))]
