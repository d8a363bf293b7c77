"""Stage 11c. In: kernel texts and the chips they are for. Out: registers, spills, shared memory,
instructions; no GPU is needed.

Compilers run in child processes (see offline_child.py), because bad IR can abort the process and
failures print whole modules. A child reads a JSON line per job, answers with one, and serves many,
so that starting it is paid for once. When it dies or hangs, the job it was at has failed and a new
child goes on with the next. Another Triton than the installed one does the work when its folder is
given (``pip install --target FOLDER triton==...``).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from transconv import knobs
from transconv.ir import DTYPES

BACKENDS = ("cuda", "hip")


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one chip. ``params``: each argument's element type in call order, and the
    extents of its box where it is a descriptor (none for a pointer). ``explicit``: the text is
    Gluon, not Triton. ``keep``: intermediate texts to bring back, such as ``("ttgir", "ptx")``."""

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


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes. ``registers`` per thread (AMD: vector and accumulation
    registers); ``spill_bytes`` of stack per thread; ``shared_bytes`` per program; ``words``: how
    often each telling instruction occurs; ``serialised``: the matrix unit waits after each."""

    function: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    words: dict[str, int]
    serialised: bool
    warnings: tuple[str, ...]
    seconds: float
    flaw: str = ""  # what is known to be wrong with the machine code
    texts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " ".join(f"{w}:{n}" for w, n in self.words.items())
        spilt = f"{self.spill_bytes} bytes spilt" if self.spill_bytes else "no spills"
        waits = ", matrix unit serialised" if self.serialised else ""
        wrong = f"; miscompiled: {self.flaw}" if self.flaw else ""
        return (f"{self.target}: {self.registers} registers, {spilt}, {self.shared_bytes} bytes "
                f"shared{waits}, {self.seconds:.1f} s; {words}{wrong}")


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """Why there is no code: one sentence, and what the compilers printed."""

    function: str
    target: str
    reason: str
    log: str = ""

    def __str__(self) -> str:
        return f"{self.target}: not compiled: {self.reason}"


Answer = Resources | CompileFailure


def compile_offline(jobs: Sequence[Job], timeout_s: float = 120.0, workers: int = 1,
                    triton: Path | None = None,
                    done: Callable[[Answer], None] | None = None) -> list[Answer]:
    """Compile every job; answers in the order of the jobs.

    ``timeout_s`` is the limit for one, ``workers`` the number of child processes, ``triton`` a
    folder with another Triton than the installed one; ``done`` hears of every answer as it comes,
    one at a time.
    """
    answers: list[Answer | None] = [_refused(job) for job in jobs]
    idle: SimpleQueue[_Child] = SimpleQueue()

    def one(job: Job) -> Answer:
        child = idle.get()
        try:
            return child.compile(job, timeout_s)
        finally:
            idle.put(child)

    with ExitStack() as stack:
        for _ in range(max(1, workers)):
            idle.put(stack.enter_context(_Child(triton)))
        pool = stack.enter_context(ThreadPoolExecutor(max(1, workers)))
        places = {pool.submit(one, job): i
                  for i, job in enumerate(jobs) if answers[i] is None}
        for task in as_completed(places):
            answers[places[task]] = task.result()
            if done is not None:
                done(task.result())
    return [a for a in answers if a is not None]


def triton_version(folder: Path | None = None) -> str:
    """The version of Triton in a folder, or of the installed one. Raises ValueError if there is
    none."""
    places = sys.path if folder is None else [str(folder)]
    for found in importlib.metadata.distributions(name="triton", path=places):
        return str(found.version)
    if folder is None:
        raise ValueError("there is no Triton installed; compiling needs one")
    raise ValueError(f"there is no Triton in {folder}; make it with: "
                     f"pip install --no-deps --target {folder} triton==VERSION")


def _refused(job: Job) -> CompileFailure | None:
    if job.backend in BACKENDS:
        return None
    return CompileFailure(job.function, job.target, f"{job.backend} is not compilable offline: its "
                          "compiler needs the vendor's driver stack")


class _Child:
    """A compiling process, started when there is work and again when it has died."""

    def __init__(self, triton: Path | None) -> None:
        self.triton = triton
        self.folder = tempfile.TemporaryDirectory(prefix="transconv-offline-")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.folder.cleanup()

    def compile(self, job: Job, timeout_s: float) -> Answer:
        """The answer to one job; a failure if the process died over it or had to be killed."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(_encoded(job)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; reading tells
        line = _line(process.stdout, timeout_s)
        if line is not None and line.endswith(b"\n"):
            return _decoded(json.loads(line))
        code = self._end()
        log = Path(self.folder.name, "stderr").read_text(errors="replace")
        reason = (f"no answer within {timeout_s:g} s" if line is None
                  else f"the compiler's process died ({_cause(code)})")
        return CompileFailure(job.function, job.target, reason, log[-20000:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            folder = self.folder.name
            root = str(Path(__file__).parents[2])
            path = root if self.triton is None else os.pathsep.join(
                [str(self.triton.absolute()), root])
            environment = knobs.child_environment(
                {"TRITON_CACHE_DIR": f"{folder}/cache", "TRITON_ALWAYS_COMPILE": "1",
                 "TMPDIR": folder, "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_INTERPRET": None}, path)
            with open(f"{folder}/stderr", "w+b") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "transconv.backend_triton.offline_child"], env=environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        return self.process

    def _end(self) -> int:
        """Kill what still runs; the exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        with process:
            return process.wait()


def _line(stream: IO[bytes], timeout_s: float) -> bytes | None:
    """The next line; what came before the end of the stream; None when time is up."""
    deadline = time.monotonic() + timeout_s
    got = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while not got.endswith(b"\n"):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return None
            # Answers come one at a time but may lie in the pipe together: take one line only.
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            got += byte
    return bytes(got)


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _encoded(job: Job) -> dict[str, Any]:
    """What a child is told: of element types the compiler's words, for it knows no rows from outside."""
    types = [(DTYPES[name], box) for name, box in job.params]
    return asdict(job) | {"params": [(t.signature, t.triton, box) for t, box in types]}


def _decoded(answer: dict[str, Any]) -> Answer:
    if "reason" in answer:
        return CompileFailure(**answer)
    return Resources(**{**answer, "warnings": tuple(answer["warnings"])})
