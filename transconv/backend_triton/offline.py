"""Stage 11c. In: kernel texts and the chips they are for. Out: registers, spills, shared memory,
instructions; no GPU is needed.

Compilers run in child processes (``python -m transconv.backend_triton.offline``), because bad IR
can abort the process and failures print whole modules. A child reads a JSON line per job, answers
with one, and serves many, so that starting it is paid for once. When it dies or hangs, the job it
was at has failed and a new child goes on with the next. Another Triton than the installed one does
the work when its folder is given (``pip install --target FOLDER triton==...``).
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
from transconv.backend_triton import resources
from transconv.backend_triton.flaws import flaw
from transconv.backend_triton.module import load
from transconv.ir.dtype import DTYPES

BACKENDS = ("cuda", "hip")
SIGNATURE = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "i8": "i8", "i32": "i32"}


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
            process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
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
                    [sys.executable, "-m", "transconv.backend_triton.offline"], env=environment,
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


def _decoded(answer: dict[str, Any]) -> Answer:
    if "reason" in answer:
        return CompileFailure(**answer)
    return Resources(**{**answer, "warnings": tuple(answer["warnings"])})


# -- the child -------------------------------------------------------------------------------------


def main() -> None:
    """Read a JSON line per job from standard input, answer with one each on standard output."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Compilers print on both streams and may read; questions and answers have their own.
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
                answer: dict[str, Any] | None = None
                try:
                    answer = _compile(job, noise)
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
                answer = {"function": job["function"], "target": job["target"],
                          "reason": _reason(failed), "log": f"{failed}\n{log}"[-20000:]}
            print(json.dumps(answer), file=answers, flush=True)


def _reason(failed: Exception) -> str:
    """The first telling line of a compiler's error."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip(" ^=")]
    telling = [x for x in lines if "error" in x.lower() or "must" in x.lower()]
    return f"{type(failed).__name__}: {(telling or lines or ['no message'])[0][:300]}"


def _compile(job: dict[str, Any], noise: IO[bytes]) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    source = _source(job)
    # Said and not left to Triton, whose newer releases have another default.
    options = {"num_warps": job["warps"], "num_stages": job["stages"], "enable_fp_fusion": True}
    target = GPUTarget(job["backend"], job["arch"], job["warp_size"])
    started = time.perf_counter()
    kernel = triton_compile(source, target=target, options=options)
    seconds = time.perf_counter() - started
    sys.stdout.flush()
    noise.seek(0)
    log = noise.read().decode(errors="replace")
    read = resources.of_cuda if job["backend"] == "cuda" else resources.of_hip
    return {"function": job["function"], "target": job["target"], **read(kernel, log),
            "shared_bytes": kernel.metadata.shared, "seconds": round(seconds, 3),
            "warnings": resources.warnings(log), "flaw": flaw(kernel.asm),
            "texts": {k: str(kernel.asm[k]) for k in job["keep"] if k in kernel.asm}}


def _source(job: dict[str, Any]) -> Any:
    """What Triton compiles: the kernel with the types of its arguments and what is known of them."""
    function = load(job["source"], job["function"])
    types = [_descriptor(dtype, box, job["explicit"]) if box else f"*{SIGNATURE[dtype]}"
             for dtype, box in job["params"]]
    signature = dict(zip(function.arg_names, types, strict=True))
    # A pointer from torch's allocator is a multiple of 16 bytes; without knowing, no load is wide.
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    if job["explicit"]:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(function, signature, {}, aligned)
    from triton.compiler import ASTSource

    return ASTSource(function, signature, {}, aligned)


def _descriptor(dtype: str, box: Sequence[int], explicit: bool) -> str:
    """The type of a box's descriptor; an explicit kernel's says how it lies in shared memory."""
    if not explicit:
        return f"tensordesc<{SIGNATURE[dtype]}{list(box)}>"
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(box), getattr(gl, DTYPES[dtype].triton))
    return f"tensordesc<{SIGNATURE[dtype]}{list(box)},{layout!r}>"


if __name__ == "__main__":
    main()
