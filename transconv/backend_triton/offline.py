"""Stage 11c. In: kernel texts and the chips they are for. Out: registers, spills, shared memory,
instructions; no GPU is needed.

Compilers run in a child process (``python -m transconv.backend_triton.offline``), because bad IR
can abort the process and failures print whole modules. The child reads one JSON object, answers
with one JSON line per job, and serves many, so that starting it is paid for once. When it dies or
hangs, the job it was at has failed and a new child goes on with the next.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from transconv import knobs
from transconv.backend_triton import resources
from transconv.backend_triton.module import load

BACKENDS = ("cuda", "hip")
SIGNATURE = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "i8": "i8", "i32": "i32"}


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel for one chip. ``params``: each argument's element type in call order, and the
    extents of its box where it is a descriptor (none for a pointer). ``keep``: intermediate texts
    to bring back, such as ``("ttgir", "ptx")``."""

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
    texts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = " ".join(f"{w}:{n}" for w, n in self.words.items())
        spilt = f"{self.spill_bytes} bytes spilt" if self.spill_bytes else "no spills"
        flaw = ", matrix unit serialised" if self.serialised else ""
        return (f"{self.target}: {self.registers} registers, {spilt}, {self.shared_bytes} bytes "
                f"shared{flaw}, {self.seconds:.1f} s; {words}")


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


def compile_offline(jobs: Sequence[Job], timeout_s: float = 120.0) -> list[Answer]:
    """Compile every job; answers in the order of the jobs. ``timeout_s`` is the limit for one."""
    answers: dict[int, Answer] = {}
    for i, job in enumerate(jobs):
        if job.backend not in BACKENDS:
            answers[i] = CompileFailure(job.function, job.target,
                                        f"{job.backend} is not compilable offline: its compiler "
                                        "needs the vendor's driver stack")
    left = [i for i in range(len(jobs)) if i not in answers]
    while left:
        for i, answer in zip(list(left), _child([jobs[i] for i in left], timeout_s), strict=False):
            answers[i] = answer
        left = [i for i in left if i not in answers]
    return [answers[i] for i in range(len(jobs))]


def _child(jobs: Sequence[Job], timeout_s: float) -> Iterator[Answer]:
    """Answers of one child, in order; the last one is a failure if it died or had to be killed."""
    package_root = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="transconv-offline-") as folder:
        environment = knobs.child_environment(
            {"TRITON_CACHE_DIR": f"{folder}/cache", "TRITON_ALWAYS_COMPILE": "1", "TMPDIR": folder,
             "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_INTERPRET": None}, package_root)
        with (open(f"{folder}/stderr", "w+b") as errors, subprocess.Popen(
                [sys.executable, "-m", "transconv.backend_triton.offline"], env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child):
            assert child.stdin is not None and child.stdout is not None
            try:
                try:
                    child.stdin.write(json.dumps({"jobs": [asdict(j) for j in jobs]}).encode())
                    child.stdin.close()
                except BrokenPipeError:
                    pass  # it died at once; reading tells
                for job in jobs:
                    line = _line(child.stdout, timeout_s)
                    if line is None or not line.endswith(b"\n"):
                        timed_out = line is None
                        child.kill()
                        code = child.wait()
                        errors.seek(0)
                        log = errors.read().decode(errors="replace")
                        reason = (f"no answer within {timeout_s:g} s" if timed_out
                                  else f"the compiler's process died ({_cause(code)})")
                        yield CompileFailure(job.function, job.target, reason, log[-20000:])
                        return
                    yield _decoded(json.loads(line))
            finally:
                child.kill()


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
    """Read the jobs from standard input, answer with a JSON line each on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print on both streams; answers have their own
    for job in json.load(sys.stdin)["jobs"]:
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
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    function = load(job["source"], job["function"])
    types = [f"tensordesc<{SIGNATURE[dtype]}{list(box)}>" if box else f"*{SIGNATURE[dtype]}"
             for dtype, box in job["params"]]
    signature = dict(zip(function.arg_names, types, strict=True))
    # A pointer from torch's allocator is a multiple of 16 bytes; without knowing, no load is wide.
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    options = {"num_warps": job["warps"], "num_stages": job["stages"], "enable_fp_fusion": True}
    target = GPUTarget(job["backend"], job["arch"], job["warp_size"])
    started = time.perf_counter()
    kernel = triton_compile(ASTSource(function, signature, {}, aligned), target=target,
                            options=options)
    seconds = time.perf_counter() - started
    sys.stdout.flush()
    noise.seek(0)
    log = noise.read().decode(errors="replace")
    read = resources.of_cuda if job["backend"] == "cuda" else resources.of_hip
    return {"function": job["function"], "target": job["target"], **read(kernel, log),
            "shared_bytes": kernel.metadata.shared, "seconds": round(seconds, 3),
            "warnings": resources.warnings(log),
            "texts": {k: str(kernel.asm[k]) for k in job["keep"] if k in kernel.asm}}


if __name__ == "__main__":
    main()
