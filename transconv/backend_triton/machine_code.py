"""The machine code of compiled kernels: its instructions, and the memory of a thread that it needs.

An ELF file of 64 bits, little endian, is read without a disassembler where no text is needed.

For Intel GPUs, without one, it is made by Triton's release for them, and ``ocloc``, Intel's offline
compiler:

    text --Triton's release (a folder of its own)--> SPIR-V --ocloc--> machine code, and its listing

What a kernel takes is read from the listing: registers of a hardware thread (128, or 256 where half as
many threads run), bytes that are spilt, and instructions. The words for these:

    dpas                 products on the matrix unit (XMX)
    mad.f                a multiply-add of floats, element by element
    load.ugm, store.ugm  messages to memory, by each lane; ``….128``: 16 bytes for each
    load_block2d.ugm     a message that moves a box of two dimensions
    load.slm, store.slm  messages to shared local memory
    sync.bar             waiting for the whole program
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transconv.support import knobs

LISTED = 1 << 12
"""The most instructions in Triton's listing."""
WORDS = 16  # bytes of an instruction from sm_70 on
PROGBITS, EXECUTABLE = 1, 0x4  # type and flag of a section
_INSTRUCTION = re.compile(r"^\s*(/\*[0-9a-f]{4,}\*/)\s+([^;]*;)", re.MULTILINE)


def listing(asm: Mapping[str, Any]) -> str:
    """The instructions, one a line behind their addresses or, in Triton's listing, what controls them.
    ``asm``: the texts that Triton keeps of a kernel. Raises RuntimeError where the disassembler fails."""
    try:
        text: str = asm["sass"]
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            "Triton's cuobjdump does not read this machine code; sm_103 and sm_121 need that of CUDA 12.9 "
            "or later, which TRITON_CUOBJDUMP_PATH may name (.newest/triton/backends/nvidia/bin/cuobjdump)"
        ) from error
    cubin = asm.get("cubin", b"")
    return _read(cubin) if cubin and text.count("\n") >= LISTED else text


def _read(cubin: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        )
    return "\n".join(f"{at}\t{what}" for at, what in _INSTRUCTION.findall(said.stdout))


def instructions(cubin: bytes) -> Iterator[tuple[int, int]]:
    """The two words of each instruction in an ELF file (64 bits, little endian), without a disassembler;
    none of bytes that are no such file."""
    for kind, flags, part in _sections(cubin):
        if kind == PROGBITS and flags & EXECUTABLE:
            yield from struct.iter_unpack("<QQ", part[: len(part) // WORDS * WORDS])


def _sections(cubin: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and bytes of each section; none of bytes that are no such file."""
    if cubin[:4] != b"\x7fELF":
        return
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    for n in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", cubin, table + n * size)
        yield kind, flags, cubin[begin : begin + length]


FRAME_SIZE = 0x04, 0x11  # format and attribute in .nv.info: a symbol, and the bytes of its stack
INFO = 0x70000000  # type of the sections .nv.info
_SEGMENT = re.compile(r"\.private_segment_fixed_size:\s*(\d+)")


def stack_bytes(asm: Mapping[str, Any]) -> int:
    """Bytes of memory that a thread of a kernel needs, most of them for values that have no register; 0
    where that is not known. ``asm``: the texts that Triton keeps of a kernel."""
    if found := _SEGMENT.search(asm.get("amdgcn", "")):
        return int(found[1])
    return max(_frames(asm.get("cubin", b"")), default=0)


def _frames(cubin: bytes) -> Iterator[int]:
    """The stack of each function of an ELF file."""
    for kind, _, part in _sections(cubin):
        at = 0
        while kind == INFO and at + 4 <= len(part):
            form, attribute, size = struct.unpack_from("<BBH", part, at)
            if (form, attribute) == FRAME_SIZE and at + 12 <= len(part):
                yield struct.unpack_from("<I", part, at + 8)[0]
            at += 4 + (size if form == FRAME_SIZE[0] else 0)  # other forms have their value in place


RELEASE = "triton-xpu"
"""The distribution of Triton's release for Intel GPUs, whose module is named ``triton``, too."""
INTEL_WORDS = tuple(
    "dpas mad.f load.ugm load.ugm.128 load_block2d.ugm store.ugm store.ugm.128 store_block2d.ugm "
    "atomic.ugm load.slm store.slm sync.bar".split()
)
LARGE = "-cl-intel-256-GRF-per-thread"
LIMIT_S = 500.0
# A line of the listing: perhaps a predicate, the operation, where it is executed, what is written.
LINE = re.compile(
    r"^\s*(?:\([^)]*\)\s+)*([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)\s+\(\d+\|M\d+\)(.*)", re.MULTILINE
)
MESSAGE = re.compile(
    r"(load_block2d|store_block2d|load|store|atomic)\w*\.(ugm|slm)(?:\.d(\d+)(?:u32)?(?:x(\d+)(t?))?)?"
)


def device_of(arch: str, lanes: int, dots: bool) -> dict[str, Any]:
    """What Triton's release asks the driver of a device, for a chip with so many lanes to a warp;
    ``dots``: whether it has a matrix unit, and with that messages that move boxes."""
    return {
        "name": arch,
        "architecture": 0,
        "type": "gpu",
        "vendor": "Intel",
        "platform_name": "",
        "version": "",
        "driver_version": "",
        "is_available": True,
        "gpu_eu_count": 512,
        "gpu_subslice_count": 64,
        "threads_per_eu": 8,
        "max_work_group_size": 1024,
        "max_num_sub_groups": 1024 // lanes,
        "sub_group_sizes": [lanes, 32],
        "has_fp64": True,
        "has_subgroup_matrix_multiply_accumulate": dots,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": dots,
        "has_subgroup_2d_block_io": dots,
        "has_bfloat16_conversions": dots,
        "local_mem_size": 131072,
        "max_shared_mem": 131072,
    }


def forget_the_driver() -> None:
    """Have Triton's release take a device for what it is told, where it would compile a C file against the
    headers of the driver to name it."""
    from triton.backends import backends

    names = backends["intel"].compiler.__init__.__globals__
    loader = next(name for name in names if name.startswith("compile_module"))
    names[loader] = lambda *_: SimpleNamespace(parse_device_arch=lambda _: "")


# -- ocloc ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def ocloc_release() -> str:
    """The release of the installed ``ocloc``, such as 26.27. Raises ValueError if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        _ocloc("query", "OCL_DRIVER_VERSION", folder=folder)
        found = [path.read_text() for path in Path(folder).glob("OCL_DRIVER_VERSION*")]
    return ".".join("".join(found).split(".")[:2])


@lru_cache(maxsize=1)
def ocloc_devices() -> frozenset[str]:
    """The chips that the installed ``ocloc`` compiles for, by its names. Raises ValueError if there is
    none."""
    return devices_in(_ocloc("compile", "--help"))


def devices_in(page: str) -> frozenset[str]:
    """The names of chips in the help of ``ocloc compile``."""
    lines = re.findall(r"<device_type> can be: (.*)", page)
    return frozenset(name for line in lines for name in re.split(r"[,\s]+", line))


def _ocloc(*words: str, folder: str = "", environment: dict[str, str | None] | None = None) -> str:
    """What ``ocloc`` prints. Raises ValueError if it is not installed, RuntimeError where it fails."""
    if shutil.which("ocloc") is None:
        raise ValueError(
            "there is no ocloc, Intel's offline compiler; install it with: apt-get install "
            "intel-opencl-icd (in later releases of Debian intel-ocloc)"
        )
    done = subprocess.run(
        ["ocloc", *words],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=folder or None,
        timeout=LIMIT_S,
        env=knobs.child_environment(environment or {}, ""),
    )
    said = done.stdout + done.stderr
    if done.returncode and "--help" not in words:  # of which 22.43 makes an error
        raise RuntimeError(f"ocloc {words[0]} failed: {said.strip()[-2000:]}")
    return said


def command(spirv: Path, device: str, options: str = "") -> list[str]:
    """The words of the command that compiles SPIR-V for a chip."""
    more = ["-options", options] if options else []
    return [
        "compile",
        "-spirv_input",
        "-file",
        str(spirv),
        "-device",
        device,
        "-out_dir",
        str(spirv.parent),
        *more,
    ]


def listing_of(spirv: bytes, device: str) -> str:
    """The listing of the machine code that runs: with 256 registers for a thread where 128 spill, as
    Triton's release has it (TRITON_XPU_GEN_NATIVE_CODE)."""
    listing = _listing(spirv, device, "")
    return _listing(spirv, device, LARGE) if spilt(listing) else listing


def _listing(spirv: bytes, device: str, options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "kernel.spv")
        place.write_bytes(spirv)
        log = _ocloc(
            *command(place, device, options),
            environment={"IGC_ShaderDumpEnable": "1", "IGC_DumpToCustomDir": folder},
        )
        # The compiler tries again, with other limits, where the first code spills: the last one runs.
        found = sorted(Path(folder).glob("*.asm"), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            raise RuntimeError(f"ocloc wrote no listing: {log.strip()[-2000:]}")
        return found[-1].read_text(errors="replace")


def registers(listing: str) -> int:
    """The registers that a hardware thread has."""
    found = re.search(r"^//\.thread_config numGRF=(\d+)", listing, re.MULTILINE)
    if found is None:
        raise RuntimeError("the listing does not tell the registers of a thread")
    return int(found[1])


def spilt(listing: str) -> int:
    """The bytes that a hardware thread spills."""
    found = re.search(r"^//\.spill size (\d+)", listing, re.MULTILINE)
    return int(found[1]) if found else 0


def words_of(listing: str) -> dict[str, int]:
    """How often the instructions of ``INTEL_WORDS`` occur."""
    found = Counter({"sync.bar": len(re.findall(r"^[^/\n]*\bsync\.bar\b", listing, re.MULTILINE))})
    for name, rest in LINE.findall(listing):
        if message := MESSAGE.match(name):
            kind, memory, bits, many, together = message.groups()
            found[f"{kind}.{memory}"] += 1
            if not together and int(bits or 0) * int(many or 1) >= 128:
                found[f"{kind}.{memory}.128"] += 1
        elif name.startswith("dpas"):
            found["dpas"] += 1
        elif name in ("mad", "mac") and re.match(r"\s*\S+:(f|df|hf|bf)\b", rest):
            found["mad.f"] += 1
    return {w: found[w] for w in INTEL_WORDS if found[w]}
