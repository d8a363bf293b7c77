"""Stage 11c, the child of offline.py: ``python -m transconv.backend_triton.offline_child`` reads a job as
a line of JSON, has Triton compile it, and answers with one; it serves many.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

from transconv.backend_triton import resources
from transconv.backend_triton.flaws import flaw
from transconv.backend_triton.module import load


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
    types = [_descriptor(word, element, box, job["explicit"]) if box else f"*{word}"
             for word, element, box in job["params"]]
    signature = dict(zip(function.arg_names, types, strict=True))
    # A pointer from torch's allocator is a multiple of 16 bytes; without knowing, no load is wide.
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    if job["explicit"]:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(function, signature, {}, aligned)
    from triton.compiler import ASTSource

    return ASTSource(function, signature, {}, aligned)


def _descriptor(word: str, element: str, box: Sequence[int], explicit: bool) -> str:
    """The type of a box's descriptor, whose elements signatures and the language call ``word`` and
    ``element``; an explicit kernel's says how it lies in shared memory."""
    if not explicit:
        return f"tensordesc<{word}{list(box)}>"
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(box), getattr(gl, element))
    return f"tensordesc<{word}{list(box)},{layout!r}>"


if __name__ == "__main__":
    main()
