"""Offline compilation: from kernel texts and chips to registers, spills, shared memory and instructions.
No GPU is needed.

Compilers run in child processes (``Child``; offline_child.py), because bad IR can abort the
process and failures print whole modules. When a child dies or hangs, its job has failed and a new child
continues with the next. Another Triton than the installed one is used when its folder is given (``pip
install --target FOLDER triton==...``).

A child reads a JSON line per job and answers with one (``serve``). It serves many jobs, to spread the cost
of its start. It is started by its module's name and never runs the program's own main module. Pools of
children (``Compilers``) exist while there is work and end with the program."""

from __future__ import annotations

import base64
import importlib.metadata
import itertools
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, PriorityQueue, SimpleQueue
from typing import IO, Any

from transconv.backend_triton import machine_code
from transconv.ir import DTYPES
from transconv.support import files, knobs

Job = dict[str, Any]
CLOSING_S = 1.0  # how long ``close`` waits for a thread that gets an answer
ROOT = str(files.PACKAGE.parent)


class Child:
    """A process that runs ``module``, started at the first job and again after it has died.
    ``environment``: changes to this process's; {folder} stands for a temporary folder of the child.
    ``path``: searched for modules first."""

    def __init__(
        self, module: str, environment: Mapping[str, str | None], path: Sequence[str] = ()
    ) -> None:
        self.module, self.environment, self.path = module, environment, (*path, ROOT)
        self.folder = tempfile.TemporaryDirectory(prefix="transconv-child-")
        self.process: subprocess.Popen[bytes] | None = None
        self.lock, self.closed = threading.Lock(), False
        self.busy = threading.Lock()  # held during a job

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kill the process for good. Another thread may be in ``ask``: it gets the answer that the process
        died, and starts none anew."""
        with self.lock:
            self.closed, process = True, self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, also during a job of another thread."""
        self.kill()
        # Who waits for an answer reads the end of it; only then the pipes are closed.
        if self.busy.acquire(timeout=CLOSING_S):
            try:
                self.end()
            finally:
                self.busy.release()
        self.folder.cleanup()

    def ask(self, job: Job, timeout_s: float) -> Job:
        """The answer to one job; it has ``reason``, ``log`` and ``died`` if the process died, was ended or
        was killed at the time limit."""
        with self.busy:
            return self._asked(job, timeout_s)

    def _asked(self, job: Job, timeout_s: float) -> Job:
        process = self._running()
        if process is None:
            return {"reason": "the compiler's process was ended", "log": "", "died": True}
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; the read below reports that
        line = _line(process.stdout, timeout_s)
        if line is not None and line.endswith(b"\n"):
            answer: Job = json.loads(line)
            return answer
        code = self.end()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        log = Path(self.folder.name, "stderr")
        said = log.read_text(errors="replace")[-20000:] if log.exists() else ""
        return {
            "reason": f"no answer within {timeout_s:g} s"
            if line is None
            else f"the compiler's process died ({how})",
            "log": said,
            "died": True,
        }

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process, started if there is none; None after ``close``."""
        with self.lock:
            if self.process is None and not self.closed:
                folder = self.folder.name
                changes = {k: v and v.format(folder=folder) for k, v in self.environment.items()}
                with open(f"{folder}/stderr", "w+b") as errors:
                    self.process = subprocess.Popen(
                        [sys.executable, "-m", self.module],
                        stdin=subprocess.PIPE,
                        env=knobs.child_environment(changes, os.pathsep.join(self.path)),
                        stdout=subprocess.PIPE,
                        stderr=errors,
                    )
            return self.process

    def end(self) -> int:
        """Kill the process if it still runs; its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        with process:
            return process.wait()


def _line(stream: IO[bytes], timeout_s: float) -> bytes | None:
    """The next line, or the rest at the end of the stream; None when time is up."""
    deadline = time.monotonic() + timeout_s
    got = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while not got.endswith(b"\n"):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return None
            # The pipe may hold several answers: take one line only.
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            got += byte
    return bytes(got)


def serve(handle: Callable[[Job, IO[bytes]], Job]) -> None:
    """Read a JSON line per job from standard input, answer with one each on standard output. ``handle``
    gets the file that holds the compilers' output; an exception of it is an answer with ``reason``."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Compilers use the standard streams; jobs and answers go through duplicates of them.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in asked:
        job = json.loads(line)
        with tempfile.TemporaryFile() as noise:
            kept = os.dup(1), os.dup(2)
            sys.stdout.flush()
            os.dup2(noise.fileno(), 1)
            os.dup2(noise.fileno(), 2)
            try:
                answer: Job | None = None
                try:
                    answer = handle(job, noise)
                except Exception as cause:
                    failed = cause
                sys.stdout.flush()
                noise.seek(0)
                log = noise.read().decode(errors="replace")
            finally:
                os.dup2(kept[0], 1)
                os.dup2(kept[1], 2)
                os.close(kept[0])
                os.close(kept[1])
            if answer is None:
                answer = {"reason": reason_of(failed), "log": f"{failed}\n{log}"[-20000:]}
            print(json.dumps(answer), file=answers, flush=True)


def reason_of(failed: Exception) -> str:
    """The first line of a compiler's error that states a reason."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip(" ^=")]
    telling = [x for x in lines if "error" in x.lower() or "must" in x.lower()]
    return f"{type(failed).__name__}: {(telling or lines or ['no message'])[0][:300]}"


IDLE_S = 20.0  # a process without work ends after this time
LIMIT_S = 600.0  # seconds that one job may take
Done = Callable[[dict[str, Any]], None]
Take = Callable[[], bool]
"""True once, for the first caller: unless a process has begun the job, it is the caller's."""


class Compilers:
    """Hands jobs to at most ``workers`` children of a module, those that are ``urgent`` before others, and
    behind these the ``later`` ones, by that number. Jobs for one size are later, too, from the first on
    that is for ``any_size``: its kernel answers the calls of theirs as well.
    Daemon threads wait for the answers: the end of the program waits for none, and ``close`` kills the
    children. ``first``: a job for each new child, before it takes one out of the queue."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str | None],
        workers: int,
        first: dict[str, Any] | None = None,
    ) -> None:
        self.module, self.environment, self.workers = module, environment, max(1, workers)
        self.first = first
        self.jobs: PriorityQueue[tuple[int, int, Take, dict[str, Any], Done]] = PriorityQueue()
        self.count = itertools.count()
        self.lock = threading.Lock()
        self.children: set[Child] = set()
        self.any_size = False  # whether there was a job for any size
        self.closed = False

    def begin(self) -> None:
        """Start the children before there are jobs, for which they wait ``IDLE_S``."""
        with self.lock:
            while len(self.children) < self.workers and not self.closed:
                self._start()

    def is_patient(self, job: Mapping[str, Any]) -> bool:
        """Whether another job's kernel answers the calls of this one's meanwhile."""
        return bool(job.get("later")) or (self.any_size and bool(job.get("one_size")))

    def submit(self, job: dict[str, Any], done: Done) -> Take:
        """Queue a job; ``done`` is called with the answer in another thread, never after ``close``.
        What comes back takes the job out of the queue."""
        take: Take = partial(threading.Lock().acquire, False)  # the first who acquires it has the job
        with self.lock:
            turn = 0 if job.get("urgent") else 1 + job.get("later", 0)
            self.any_size |= job.get("any_size", False)
            self.jobs.put((turn, next(self.count), take, job, done))
            if len(self.children) < self.workers and not self.closed:
                self._start()
        return take

    def _start(self) -> None:
        child = Child(self.module, self.environment)
        self.children.add(child)
        threading.Thread(
            target=self._serve, args=(child, self.first), daemon=True, name="transconv-compiler"
        ).start()

    def _serve(self, child: Child, first: dict[str, Any] | None) -> None:
        if first is not None:
            _asked(child, first)
        while True:
            try:
                turn, number, take, job, done = self.jobs.get(timeout=IDLE_S)
            except Empty:
                with self.lock:
                    if not self.jobs.empty():
                        continue
                    self.children.discard(child)
                child.close()
                return
            if turn == 1 and self.is_patient(job):
                self.jobs.put((2, number, take, job, done))
                continue
            if not take():
                continue
            answer = _asked(child, job)
            if self.closed:
                return
            done(answer)

    def close(self) -> None:
        """End all children, also during jobs."""
        self.closed = True
        with self.lock:
            children, self.children = self.children, set()
        for child in children:  # all at once
            child.kill()
        for child in children:
            child.close()


def _asked(child: Child, job: dict[str, Any]) -> dict[str, Any]:
    """The child's answer; that it died, where the system starts no process."""
    try:
        return child.ask(job, LIMIT_S)
    except OSError as error:
        return {"reason": f"no process was started: {error}", "log": "", "died": True}


BACKENDS = ("cuda", "hip")
"""The backends that the installed Triton compiles for, without a GPU; ``backends_of`` of another one."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one chip. ``params``: each argument's element type in call order, and the
    extents of its box where it is a descriptor (none for a pointer). ``explicit``: the text is
    Gluon, not Triton. ``keep``: intermediate texts to bring back, such as ``("ttgir", "ptx")``;
    ``code``: return the machine code too, and the metadata for its launch; ``words``: count the
    instructions of an NVIDIA chip, whose disassembler takes as long as the compilers;
    ``sanitizer``: that of Triton whose checks the kernel gets."""

    source: str
    function: str
    params: tuple[tuple[str, tuple[int, ...]], ...]
    target: str
    backend: str
    arch: int | str
    warp_size: int
    warps: int = 4
    stages: int = 3
    keep: tuple[str, ...] = ()
    explicit: bool = False
    code: bool = False
    words: bool = True
    sizes: int = 0  # 32-bit arguments after the tensors
    numbers: int = 0  # the last of the params, which are passed themselves, not by address
    fuse: bool = True  # whether products and sums may become one instruction
    dots: bool = True  # whether the chip has a matrix unit; Triton knows it of others than Intel's
    sanitizer: str = ""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel uses. ``registers`` per thread (AMD: vector and accumulation
    registers); ``spill_bytes`` of stack per thread; ``shared_bytes`` per program; ``words``: counts of
    the instructions of interest (``CompileJob.words``); ``serialised``: the matrix unit waits after each.
    Where ``CompileJob.code`` is set: ``code``, the machine code (cubin, hsaco), and ``launch``, Triton's
    metadata for its launch."""

    function: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    words: dict[str, int]
    serialised: bool
    warnings: tuple[str, ...]
    seconds: float
    flaw: str = ""  # a known miscompile in the machine code
    texts: dict[str, str] = field(default_factory=dict)
    code: bytes = field(default=b"", repr=False)
    launch: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " ".join(f"{w}:{n}" for w, n in self.words.items())
        spilt = f"{self.spill_bytes} bytes spilt" if self.spill_bytes else "no spills"
        waits = ", matrix unit serialised" if self.serialised else ""
        wrong = f"; miscompiled: {self.flaw}" if self.flaw else ""
        return (
            f"{self.target}: {self.registers} registers, {spilt}, {self.shared_bytes} bytes "
            f"shared{waits}, {self.seconds:.1f} s; {words}{wrong}"
        )


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """Why a compile failed: one sentence, and the compilers' output."""

    function: str
    target: str
    reason: str
    log: str = ""

    def __str__(self) -> str:
        return f"{self.target}: not compiled: {self.reason}"


Answer = Resources | CompileFailure
"""The result of a job."""


def compile_offline(
    jobs: Sequence[CompileJob],
    timeout_s: float = 120.0,
    workers: int = 1,
    triton: Path | None = None,
    done: Callable[[Answer], None] | None = None,
) -> list[Answer]:
    """Compile every job; answers in the order of the jobs.

    ``timeout_s`` is the limit for one, ``workers`` the number of child processes, ``triton`` a folder with
    another Triton than the installed one; ``done`` is called with each answer, one at a time."""
    backends = backends_of(triton)
    answers: list[Answer | None] = [_refused(job, backends) for job in jobs]
    idle: SimpleQueue[Child] = SimpleQueue()

    def one(job: CompileJob) -> Answer:
        child = idle.get()
        try:
            return _decoded(job, child.ask(_encoded(job), timeout_s))
        finally:
            idle.put(child)

    with ExitStack() as stack:
        for _ in range(max(1, workers)):
            idle.put(stack.enter_context(_child(triton)))
        pool = stack.enter_context(ThreadPoolExecutor(max(1, workers)))
        places = {pool.submit(one, job): i for i, job in enumerate(jobs) if answers[i] is None}
        for task in as_completed(places):
            answers[places[task]] = task.result()
            if done is not None:
                done(task.result())
    return [a for a in answers if a is not None]


def triton_version(folder: Path | None = None) -> str:
    """The version of Triton in a folder, or of the installed one; of the release for Intel GPUs with
    that of ``ocloc``, which makes the machine code. Raises ValueError if there is none."""
    found = _distribution("triton", folder)
    if found is not None:
        return found
    if folder is not None and (found := _distribution(machine_code.RELEASE, folder)):
        return f"{found}/{machine_code.ocloc_release()}"
    if folder is None:
        raise ValueError("there is no Triton installed; compiling needs one")
    raise ValueError(
        f"there is no Triton in {folder}; make it with: "
        f"pip install --no-deps --target {folder} triton==VERSION"
    )


def _distribution(name: str, folder: Path | None) -> str | None:
    """The version of a distribution in a folder, or in the environment; None if it is not there."""
    places = sys.path if folder is None else [str(folder)]
    found = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
    return None if found is None else str(found.version)


def backends_of(folder: Path | None = None) -> tuple[str, ...]:
    """The backends that the Triton of a folder, or the installed one, compiles for."""
    return ("xpu",) if folder and _distribution(machine_code.RELEASE, folder) else BACKENDS


@lru_cache(maxsize=8)
def cuobjdump_chips(folder: Path | None) -> frozenset[int]:
    """The NVIDIA chips whose machine code the ``cuobjdump`` of a folder's Triton, of the installed one, or
    that TRITON_CUOBJDUMP_PATH names, reads."""
    place = (
        Path(str(importlib.metadata.distribution("triton").locate_file(""))) if folder is None else folder
    )
    own = place / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = knobs.given("TRITON_CUOBJDUMP_PATH").get("TRITON_CUOBJDUMP_PATH", own)
    page = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True).stdout
    return frozenset(int(n) for n in re.findall(r"'sm_(\d+)'", page))


def compiles_for(
    backend: str, arch: int | str, folder: Path | None = None, since: tuple[int, ...] = ()
) -> bool:
    """Whether the Triton of a folder, or the installed one, compiles for a chip, with what makes the
    machine code or reads it. ``since``: the oldest release that does. Raises ValueError where there is no
    ``ocloc``."""
    if backend not in backends_of(folder):
        return False
    if backend == "xpu":
        return arch in machine_code.ocloc_devices()
    if tuple(int(n) for n in re.findall(r"\d+", triton_version(folder))[:3]) < since:
        return False
    return backend != "cuda" or int(arch) in cuobjdump_chips(folder)


def _refused(job: CompileJob, backends: Sequence[str]) -> CompileFailure | None:
    if job.backend in backends:
        return None
    return CompileFailure(
        job.function,
        job.target,
        f"{job.backend} is not compilable offline by this Triton, which compiles for "
        f"{' and '.join(backends)}",
    )


def _child(triton: Path | None) -> Child:
    """A compiling process with its own cache, and the Triton of a folder."""
    path = () if triton is None else (str(triton.absolute()),)
    return Child(
        "transconv.backend_triton.offline_child",
        {
            "TRITON_CACHE_DIR": "{folder}/cache",
            "TRITON_ALWAYS_COMPILE": "1",
            "TMPDIR": "{folder}",
            "TRITON_DUMP_PTXAS_LOG": "1",
            "TRITON_INTERPRET": None,
        },
        path,
    )


def _encoded(job: CompileJob) -> dict[str, Any]:
    """A job as JSON. Element types are Triton's names: the child has no types that users add."""
    types = [(DTYPES[name].boxed if box else DTYPES[name], box) for name, box in job.params]
    return asdict(job) | {"params": [(t.signature, t.triton, box) for t, box in types]}


def _decoded(job: CompileJob, answer: dict[str, Any]) -> Answer:
    if "reason" in answer:
        return CompileFailure(job.function, job.target, answer["reason"], answer["log"])
    return Resources(
        **{
            **answer,
            "warnings": tuple(answer["warnings"]),
            "code": base64.b64decode(answer.get("code", "")),
        }
    )
