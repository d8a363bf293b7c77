"""The child process of offline_compilation.py: ``python -m transconv.backend_triton.offline_child`` reads
jobs, each a line of JSON, compiles each with Triton, and answers with a line of JSON.

What a compiled Triton kernel uses: registers, spills, shared memory, and its instructions.

Read from the machine code alone, without a GPU. The words are opcodes that say which units a
kernel uses: ``HGMMA`` is the asynchronous matrix unit of sm_90, ``LDGSTS`` a copy past the
registers, ``UTMALDG`` a box copied by the tensor-copy engine, ``v_mfma`` AMD's matrix unit. A word
ending in ``.128`` counts those that move 16 bytes per lane."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any

from transconv.backend_triton import machine_code
from transconv.backend_triton.launch import compile_records
from transconv.backend_triton.launch.jit_module import load
from transconv.backend_triton.machine_code import listing
from transconv.backend_triton.miscompiles import flaw
from transconv.backend_triton.offline_compilation import serve

SASS_WORDS = tuple(
    "HGMMA QGMMA IGMMA HMMA QMMA OMMA IMMA DMMA UTCHMMA UTCQMMA UTCOMMA UTCIMMA UTMALDG UTMASTG UTMAREDG "
    "LDGSTS LDG STG RED ATOMG LDSM STSM LDS STS FFMA FFMA2 HFMA2 DFMA USETMAXREG LDL STL".split()
)
SASS_WIDE = ("LDGSTS", "LDG", "STG")
AMD_WORDS = tuple(
    "v_mfma v_mfma_scale v_smfmac v_wmma v_swmmac v_dot buffer_load buffer_store global_load "
    "global_load_lds global_store global_atomic buffer_atomic ds_read ds_load ds_write ds_store v_fma "
    "v_pk_fma v_dual_fma scratch_load scratch_store".split()
)
AMD_WIDE = ("buffer_load", "buffer_store", "global_load", "global_store")

# ptxas's warning when matrix instructions cannot overlap.
SERIALISED = re.compile(r"C75(?:10|15)\b|serialized")
# Triton gives each of a program's 256 threads 256 registers (``.maxnreg``), one more than there are.
HARMLESS = re.compile(r"Too many maxnreg specified for entry \S+, will be ignored")


def of_cuda(kernel: Any, log: str, listed: bool) -> dict[str, Any]:
    """Registers, stack and, if it is to be listed, words from the cubin; ``log`` is ptxas's output."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage_text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=False,
        )
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage_text.stdout + usage_text.stderr))
    if "REG" not in usage:
        raise RuntimeError(f"cuobjdump printed no registers: {usage_text.stderr.strip()[-200:]}")
    found = re.findall(
        r"^\s*\S+\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)",
        listing(kernel.asm) if listed else "",
        re.MULTILINE,
    )
    opcodes = Counter(name for name, _ in found)
    opcodes.update(f"{name}.128" for name, how in found if ".128" in how and name in SASS_WIDE)
    return {
        "registers": int(usage["REG"]),
        "spill_bytes": int(usage["STACK"]) + int(usage.get("LOCAL", 0)),
        "words": {w: opcodes[w] for w in _with_wide(SASS_WORDS, SASS_WIDE) if opcodes[w]},
        "serialised": bool(SERIALISED.search(log)),
    }


def of_hip(kernel: Any, log: str, listed: bool) -> dict[str, Any]:
    """Registers, spills and words from the assembly text of an AMD chip, which is always there."""
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    opcodes = Counter(re.findall(r"^\s+([a-z][a-z0-9_]*)", text, re.MULTILINE))
    words = {w: sum(n for op, n in opcodes.items() if op.startswith(w)) for w in AMD_WORDS}
    for w in AMD_WIDE:
        words[f"{w}.128"] = sum(
            n for op, n in opcodes.items() if op.startswith(w) and op.endswith(("dwordx4", "b128"))
        )
    # The count of vector registers includes those for accumulation. What is spilt to them, or from
    # scalar to vector registers, costs no memory; the private segment is what does.
    return {
        "registers": number("vgpr_count"),
        "spill_bytes": number("private_segment_fixed_size"),
        "words": {w: words[w] for w in _with_wide(AMD_WORDS, AMD_WIDE) if words[w]},
        "serialised": False,
    }


def of_xpu(kernel: Any, log: str, listed: bool) -> dict[str, Any]:
    """Registers, spills and words from the listing of Intel's compiler, which makes the machine code."""
    listing = machine_code.listing_of(kernel.asm["spv"], kernel.metadata.target.arch["name"])
    return {
        "registers": machine_code.registers(listing),
        "spill_bytes": machine_code.spilt(listing),
        "words": machine_code.words_of(listing),
        "serialised": False,
    }


READERS = {"cuda": of_cuda, "hip": of_hip, "xpu": of_xpu}


def _with_wide(words: tuple[str, ...], wide: tuple[str, ...]) -> list[str]:
    """The words in their order, each followed by its 16-byte kind."""
    return [name for w in words for name in ((w, f"{w}.128") if w in wide else (w,))]


def warnings(log: str) -> tuple[str, ...]:
    """The lines of a compiler's log that warn of something, each once."""
    lines = (line.strip() for line in log.splitlines() if not HARMLESS.search(line))
    return tuple(dict.fromkeys(x for x in lines if re.search(r"\bwarning\b", x, re.IGNORECASE)))


def main() -> None:
    """Answer jobs until standard input ends."""
    serve(_compile)


def _compile(job: dict[str, Any], noise: IO[bytes]) -> dict[str, Any]:
    started = time.perf_counter()
    kernel = compiled(job)
    seconds = time.perf_counter() - started
    sys.stdout.flush()
    noise.seek(0)
    log = noise.read().decode(errors="replace")
    found = READERS[job["backend"]](kernel, log, job["words"])
    if asked := job.get("sanitizer", ""):  # how often its intermediate texts name it
        texts = " ".join(str(kernel.asm.get(kind, "")).lower() for kind in ("ttgir", "llir"))
        found["words"] = {asked: texts.count(asked)} if asked in texts else {}
    return {
        "function": job["function"],
        "target": job["target"],
        **found,
        "shared_bytes": kernel.metadata.shared,
        "seconds": round(seconds, 3),
        "warnings": warnings(log),
        "flaw": flaw(kernel.asm),
        "texts": {k: str(kernel.asm[k]) for k in job["keep"] if k in kernel.asm},
        **(_code(kernel) if job["code"] else {}),
    }


def compiled(job: dict[str, Any]) -> Any:
    """A job's kernel, compiled by the Triton of this process."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    compile_records.remember()
    # Set explicitly: the default differs between Triton's releases.
    options = {
        "num_warps": job["warps"],
        "num_stages": job["stages"],
        "enable_fp_fusion": job.get("fuse", True),
    }
    arch, lanes = job["arch"], job["warp_size"]
    if job["backend"] == "xpu":
        machine_code.forget_the_driver()
        arch = machine_code.device_of(arch, lanes, job["dots"])
        options["threads_per_warp"] = lanes
    if asked := job.get("sanitizer", ""):
        options["instrumentation_mode"] = asked
        sanitize(asked)
    return triton_compile(_source(job), target=GPUTarget(job["backend"], arch, lanes), options=options)


def sanitize(name: str) -> None:
    """Switch a sanitizer of Triton on in this process, which releases ask for in two ways. GSan asks a
    device for its shared memory, to take all of it; there is none here, and it takes what it needs."""
    from triton import knobs
    from triton.runtime.driver import driver

    knobs.compilation.instrumentation_mode = name
    if name == "gsan":
        utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 0})
        driver.set_active(SimpleNamespace(get_current_device=lambda: 0, utils=utils))


# The metadata of a compiled kernel that its launch needs.
LAUNCH = tuple(
    "num_warps num_ctas shared global_scratch_size profile_scratch_size launch_cooperative_grid "
    "tensordesc_meta name".split()
)


def _code(kernel: Any) -> dict[str, Any]:
    """The machine code, and the metadata for its launch."""
    code = next(kernel.asm[kind] for kind in ("cubin", "hsaco", "spv") if kind in kernel.asm)
    return {
        "code": base64.b64encode(code).decode(),
        "launch": {key: getattr(kernel.metadata, key, None) for key in LAUNCH},
    }


def _source(job: dict[str, Any]) -> Any:
    """The input of Triton's compiler: the kernel, its argument types, and their known divisors."""
    text = job["source"]
    if job["backend"] == "xpu":  # its release 3.3 takes the constant of such a comparison first
        text = re.sub(r"(\w+\.dtype\.primitive_bitwidth) == (\d+)", r"\2 == \1", text)
    function = load(text, job["function"])
    types = [
        _descriptor(word, element, box, job["explicit"]) if box else f"*{word}"
        for word, element, box in job["params"]
    ]
    passed = job.get("numbers", 0)
    types = types[: len(types) - passed] + [t.removeprefix("*") for t in types[len(types) - passed :]]
    types += ["i32"] * job.get("sizes", 0)  # sizes that are arguments
    signature = dict(zip(function.arg_names, types, strict=True))
    # A pointer from torch's allocator is a multiple of 16 bytes; without that fact no load is wide.
    known = [["tt.divisibility", 16]] if job.get("aligned", True) else []
    aligned = {(i,): known for i, t in enumerate(types) if t.startswith("*") and known}
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
