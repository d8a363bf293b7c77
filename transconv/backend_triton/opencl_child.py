"""The child process of launch/triton_kernel.py: ``python -m transconv.backend_triton.opencl_child`` reads
jobs, each a line of JSON, compiles each kernel to SPIR-V with Triton's release for Intel GPUs, executes
it on a CPU through OpenCL, and answers with a line of JSON.

Kernels are compiled without the matrix unit and without messages that move boxes, which CPUs lack:
products are multiply-adds of each lane. Nothing else differs from what is compiled for a chip.

Arguments lie in a file that both processes map: the address of an argument is where it lies in the mapping
(shared virtual memory of the whole system, as OpenCL calls it)."""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import sys
import time
from collections.abc import Sequence
from ctypes.util import find_library
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from transconv.backend_triton.offline_child import compiled
from transconv.backend_triton.offline_compilation import serve

CPU = 1 << 1  # CL_DEVICE_TYPE_CPU
ARGUMENTS = 0x1191  # CL_KERNEL_NUM_ARGS
LOG = 0x1183  # CL_PROGRAM_BUILD_LOG
SIZE = ctypes.c_size_t
NO_CPU = "there is no OpenCL for CPUs; expected pip install 'transconv[opencl]'"


class OpenClError(RuntimeError):
    """A call of OpenCL that did not succeed."""


class OpenCl:
    """A CPU with a queue of its own."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(loader())
        device, count = ctypes.c_void_p(), ctypes.c_uint()
        platforms = (ctypes.c_void_p * 16)()
        if self.library.clGetPlatformIDs(16, platforms, ctypes.byref(count)):
            raise OpenClError(NO_CPU)
        for platform in platforms[: count.value]:
            found = self.library.clGetDeviceIDs(
                ctypes.c_void_p(platform), ctypes.c_ulong(CPU), 1, ctypes.byref(device), None
            )
            if found == 0:
                break
        else:
            raise OpenClError(NO_CPU)
        self.device = device
        self.context = self.made("clCreateContext", None, 1, ctypes.byref(device), None, None)
        self.queue = self.made("clCreateCommandQueueWithProperties", self.context, device, None)

    def call(self, name: str, *arguments: Any) -> None:
        """A function that returns whether it succeeded. Raises OpenClError."""
        if code := getattr(self.library, name)(*arguments):
            raise OpenClError(f"{name} returned {code}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """A function that returns an object, and takes last where to say whether it succeeded. Raises
        OpenClError."""
        function, code = getattr(self.library, name), ctypes.c_int()
        function.restype = ctypes.c_void_p
        found = function(*arguments, ctypes.byref(code))
        if code.value or not found:
            raise OpenClError(f"{name} returned {code.value}")
        return ctypes.c_void_p(found)

    def kernel(self, spirv: bytes, name: str) -> ctypes.c_void_p:
        """The kernel of this name in SPIR-V, built for the CPU. Raises OpenClError with the log."""
        program = self.made("clCreateProgramWithIL", self.context, spirv, SIZE(len(spirv)))
        if self.library.clBuildProgram(program, 1, ctypes.byref(self.device), b"", None, None):
            log = ctypes.create_string_buffer(1 << 16)
            self.call("clGetProgramBuildInfo", program, self.device, LOG, SIZE(len(log)), log, None)
            raise OpenClError(f"the program is not built: {log.value.decode(errors='replace')[:4000]}")
        return self.made("clCreateKernel", program, name.encode())

    def run(
        self,
        kernel: ctypes.c_void_p,
        arguments: Sequence[ctypes.c_void_p | ctypes.c_int | ctypes.c_float],
        shared: int,
        programs: int,
        lanes: int,
    ) -> None:
        """Run so many programs with so many lanes each, and wait for them. ``shared``: bytes of local
        memory, which is the last argument of a kernel that has one more than is given."""
        for at, value in enumerate(arguments):
            if isinstance(value, ctypes.c_void_p):
                self.call("clSetKernelArgSVMPointer", kernel, at, value)
            else:
                self.call("clSetKernelArg", kernel, at, SIZE(ctypes.sizeof(value)), ctypes.byref(value))
        known = ctypes.c_uint()
        self.call("clGetKernelInfo", kernel, ARGUMENTS, SIZE(4), ctypes.byref(known), None)
        for at in range(len(arguments), known.value):
            self.call("clSetKernelArg", kernel, at, SIZE(max(shared, 16)), None)
        sizes = (SIZE * 1)(programs * lanes), (SIZE * 1)(lanes)
        self.call("clEnqueueNDRangeKernel", self.queue, kernel, 1, None, *sizes, 0, None, None)
        self.call("clFinish", self.queue)


def loader() -> str:
    """The library of OpenCL that this environment has, or the system."""
    own = Path(sys.prefix, "lib", "libOpenCL.so.1")
    found = str(own) if own.exists() else find_library("OpenCL")
    if found is None:
        raise OpenClError(NO_CPU)
    return found


@lru_cache(maxsize=1)
def opencl() -> OpenCl:
    """The CPU of this process."""
    return OpenCl()


# -- SPIR-V --------------------------------------------------------------------------------------------

HEADER, BOUND = 5, 3  # words, and the one with the least number that names nothing
EXTENSION, EXECUTION_MODE, CAPABILITY = 10, 16, 17  # instructions
INTEGER, CONSTANT, BARRIER = 21, 43, 224
SHUFFLES = (345, 346, 347, 348)
ATTRIBUTES = 5892  # the capability KernelAttributesINTEL, and with it
WORKGROUP = 5893  # the execution mode MaxWorkgroupSizeINTEL
ATTRIBUTES_EXTENSION = b"SPV_INTEL_kernel_attributes\0"
PROGRAM, ORDERED = 2, 0x110  # the scope of a program's lanes; before and after, in local memory too


def for_cpus(spirv: bytes) -> tuple[bytes, bool]:
    """SPIR-V as OpenCL for CPUs executes it, and whether lanes exchange values in it.

    Attributes of kernels for Intel's GPUs are dropped: the runtime refuses them; they promise something to
    the compiler and change no result. After each shuffle all lanes wait: without that the runtime moves a
    shuffle whose result one lane stores behind the branch of that lane, where the others have no value
    (docs/intel.md)."""
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    scope, order = words[BOUND], words[BOUND] + 1
    kept = [*words[:BOUND], words[BOUND] + 2, *words[BOUND + 1 : HEADER]]
    at, exchanged = HEADER, False
    while at < len(words):
        count, kind = words[at] >> 16, words[at] & 0xFFFF
        whole = words[at : at + count]
        text = struct.pack(f"<{count - 1}I", *whole[1:])
        gone = (
            (kind == CAPABILITY and whole[1] == ATTRIBUTES)
            or (kind == EXECUTION_MODE and whole[2] == WORKGROUP)
            or (kind == EXTENSION and text.startswith(ATTRIBUTES_EXTENSION))
        )
        if not gone:
            kept += whole
        if kind == INTEGER and whole[2] == 32:
            for name, value in ((scope, PROGRAM), (order, ORDERED)):
                kept += (4 << 16 | CONSTANT, whole[1], name, value)
        if kind in SHUFFLES:
            exchanged = True
            kept += (4 << 16 | BARRIER, scope, scope, order)
        at += count
    return struct.pack(f"<{len(kept)}I", *kept), exchanged


# -- jobs ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def built(text: str) -> tuple[ctypes.c_void_p, int, int, float, float]:
    """The kernel of a job in JSON, its bytes of local memory and its lanes, and the seconds that Triton
    and OpenCL took. Where lanes exchange values, one warp executes each program: after a barrier Intel's
    runtime (2024.2 to 2026.2) may give all warps what the last one computed before it."""
    started, job = time.perf_counter(), json.loads(text)
    kernel = compiled(job)
    spirv, exchanged = for_cpus(kernel.asm["spv"])
    if (exchanged or kernel.metadata.shared) and job["warps"] > 1:
        job["warps"] = 1
        kernel = compiled(job)
        spirv, _ = for_cpus(kernel.asm["spv"])
    between = time.perf_counter()
    made = opencl().kernel(spirv, kernel.metadata.name)
    lanes = job["warps"] * job["warp_size"]
    return made, kernel.metadata.shared, lanes, between - started, time.perf_counter() - between


def execute(job: dict[str, Any], noise: IO[bytes]) -> dict[str, Any]:
    """Compile a job's kernel, run it on the arguments in its file; the seconds of both compilers and of
    the run. ``arguments``: offsets in the file, or numbers with the name of their type."""
    place, arguments, programs = job.pop("file"), job.pop("arguments"), job.pop("programs")
    kernel, shared, lanes, triton_s, opencl_s = built(json.dumps(job, sort_keys=True))
    started = time.perf_counter()
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        first = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(first)
        given = [_argument(value, base) for value in arguments]
        opencl().run(kernel, given, shared, programs, lanes)
        del first, given  # the mapping has to be free to be closed
    return {
        "lanes": lanes,
        "triton_s": triton_s,
        "opencl_s": opencl_s,
        "run_s": time.perf_counter() - started,
    }


def _argument(value: Any, base: int) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(value, int):
        return ctypes.c_void_p(base + value)
    kind, number = value
    return ctypes.c_float(number) if kind == "float" else ctypes.c_int(number)


if __name__ == "__main__":
    serve(execute)
