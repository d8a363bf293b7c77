"""The child process of offline/compilation.py: ``python -m transconv.backend_triton.offline.child`` reads
jobs, each a line of JSON, compiles each with Triton, and answers with a line of JSON.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from transconv.backend_triton.launch.jit_module import load
from transconv.backend_triton.miscompiles.signs import flaw
from transconv.backend_triton.offline import resources
from transconv.backend_triton.offline.worker import serve


def main() -> None:
    """Answer jobs until standard input ends."""
    serve(_compile)


def _compile(job: dict[str, Any], noise: IO[bytes]) -> dict[str, Any]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    source = _source(job)
    # Set explicitly: the default differs between Triton's releases.
    options = {"num_warps": job["warps"], "num_stages": job["stages"],
               "enable_fp_fusion": job.get("fuse", True)}
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
            "texts": {k: str(kernel.asm[k]) for k in job["keep"] if k in kernel.asm},
            **(_code(kernel) if job["code"] else {})}


# The metadata of a compiled kernel that its launch needs.
LAUNCH = ("num_warps", "num_ctas", "shared", "global_scratch_size", "profile_scratch_size",
          "launch_cooperative_grid", "tensordesc_meta", "name")


def _code(kernel: Any) -> dict[str, Any]:
    """The machine code, and the metadata for its launch."""
    code = next(kernel.asm[kind] for kind in ("cubin", "hsaco") if kind in kernel.asm)
    return {"code": base64.b64encode(code).decode(),
            "launch": {key: getattr(kernel.metadata, key, None) for key in LAUNCH}}


def _source(job: dict[str, Any]) -> Any:
    """The input of Triton's compiler: the kernel, its argument types, and their known divisors."""
    function = load(job["source"], job["function"])
    types = [_descriptor(word, element, box, job["explicit"]) if box else f"*{word}"
             for word, element, box in job["params"]]
    passed = job.get("numbers", 0)
    types = types[:len(types) - passed] + [t.removeprefix("*") for t in types[len(types) - passed:]]
    types += ["i32"] * job.get("sizes", 0)  # sizes that are arguments
    signature = dict(zip(function.arg_names, types, strict=True))
    # A pointer from torch's allocator is a multiple of 16 bytes; without that fact no load is wide.
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t.startswith("*")}
    if job["explicit"]:
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(function, signature, {}, aligned)
    from triton.compiler import ASTSource

    return ASTSource(function, signature, {}, aligned)


def _descriptor(word: str, element: str, box: Sequence[int], explicit: bool) -> str:
    """The type of a box's descriptor. ``word`` and ``element``: the element type's names in signatures and
    in the language. An explicit kernel's type includes the layout in shared memory."""
    if not explicit:
        return f"tensordesc<{word}{list(box)}>"
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(box), getattr(gl, element))
    return f"tensordesc<{word}{list(box)},{layout!r}>"


if __name__ == "__main__":
    main()
