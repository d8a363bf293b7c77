"""Offline compilation: from kernel texts and chips to registers, spills, shared memory and instructions.
No GPU is needed.

Compilers run in child processes (see offline/worker.py, offline/child.py), because bad IR can abort the
process and failures print whole modules. When a child dies or hangs, its job has failed and a new child
continues with the next. Another Triton than the installed one is used when its folder is given (``pip
install --target FOLDER triton==...``).
"""

from __future__ import annotations

import base64
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from transconv.backend_triton.offline.worker import Child
from transconv.ir import DTYPES

BACKENDS = ("cuda", "hip")
"""The backends that compile without a GPU."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel for one chip. ``params``: each argument's element type in call order, and the
    extents of its box where it is a descriptor (none for a pointer). ``explicit``: the text is
    Gluon, not Triton. ``keep``: intermediate texts to bring back, such as ``("ttgir", "ptx")``;
    ``code``: return the machine code too, and the metadata for its launch."""

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
    sizes: int = 0  # 32-bit arguments after the tensors
    numbers: int = 0  # the last of the params, which are passed themselves, not by address
    fuse: bool = True  # whether products and sums may become one instruction


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel uses. ``registers`` per thread (AMD: vector and accumulation
    registers); ``spill_bytes`` of stack per thread; ``shared_bytes`` per program; ``words``: counts of
    the instructions of interest; ``serialised``: the matrix unit waits after each. Where
    ``CompileJob.code`` is set: ``code``, the machine code (cubin, hsaco), and ``launch``, Triton's
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
        return (f"{self.target}: {self.registers} registers, {spilt}, {self.shared_bytes} bytes "
                f"shared{waits}, {self.seconds:.1f} s; {words}{wrong}")


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


def compile_offline(jobs: Sequence[CompileJob], timeout_s: float = 120.0, workers: int = 1,
                    triton: Path | None = None,
                    done: Callable[[Answer], None] | None = None) -> list[Answer]:
    """Compile every job; answers in the order of the jobs.

    ``timeout_s`` is the limit for one, ``workers`` the number of child processes, ``triton`` a
    folder with another Triton than the installed one; ``done`` is called with each answer, one at a
    time.
    """
    answers: list[Answer | None] = [_refused(job) for job in jobs]
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


def _refused(job: CompileJob) -> CompileFailure | None:
    if job.backend in BACKENDS:
        return None
    return CompileFailure(job.function, job.target, f"{job.backend} is not compilable offline: its "
                          "compiler needs the vendor's driver stack")


def _child(triton: Path | None) -> Child:
    """A compiling process with its own cache, and the Triton of a folder."""
    path = () if triton is None else (str(triton.absolute()),)
    return Child("transconv.backend_triton.offline.child", {
        "TRITON_CACHE_DIR": "{folder}/cache", "TRITON_ALWAYS_COMPILE": "1", "TMPDIR": "{folder}",
        "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_INTERPRET": None}, path)


def _encoded(job: CompileJob) -> dict[str, Any]:
    """A job as JSON. Element types are Triton's names: the child has no types that users add."""
    types = [(DTYPES[name].boxed if box else DTYPES[name], box) for name, box in job.params]
    return asdict(job) | {"params": [(t.signature, t.triton, box) for t, box in types]}


def _decoded(job: CompileJob, answer: dict[str, Any]) -> Answer:
    if "reason" in answer:
        return CompileFailure(job.function, job.target, answer["reason"], answer["log"])
    return Resources(**{**answer, "warnings": tuple(answer["warnings"]),
                        "code": base64.b64decode(answer.get("code", ""))})
