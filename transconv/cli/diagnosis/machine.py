"""``doctor``: the chip, its clock and power limits, and the features that kernels use.

Also here: ``doctor``: a convolution and a map, generated, run and compared; none starts after three
seconds.

Data are small integers: products and sums are exact, so the result of a right kernel equals the answer.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.cli.diagnosis.findings import BAD, NOTE, OK, Finding, size
from transconv.errors import Unsupported
from transconv.target import TARGETS, Target, detect, why_no_switches

# Device files, and the vendor of the driver that makes each.
DRIVERS = (("/dev/nvidia0", "NVIDIA"), ("/dev/kfd", "AMD"))
QUERY = "clocks.sm,clocks.max.sm,power.limit,power.default_limit"
INTERPRETED = "runs kernels for tests, and torch computes calls"


def chip() -> Iterator[Finding]:
    """The current device, its clock and power, and its features."""
    import torch

    if not torch.cuda.is_available():
        yield _without(torch)
        yield from features(TARGETS["interpreter"])
        return
    if knobs.interpret():
        yield Finding("chip", NOTE, "TRITON_INTERPRET=1 has kernels interpreted although there is a GPU",
                      "unset TRITON_INTERPRET to use it")
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    said = (f"{properties.name}, capability {properties.major}.{properties.minor}, {size(free)} of "
            f"{size(total)} free, {properties.multi_processor_count} multiprocessors, {kind}")
    try:
        target = detect(torch.cuda.current_device())
    except Unsupported as error:
        yield Finding("chip", BAD, f"{said}: {error}", "torch computes every call on this chip")
        return
    yield Finding("chip", OK, f"{said}; compiled for {target}")
    if not torch.version.hip:
        yield clocks(_smi(str(getattr(properties, "uuid", ""))))
    yield from features(target)


def _without(torch: Any) -> Finding:
    """The finding where torch sees no GPU."""
    for path, maker in DRIVERS:
        if Path(path).exists():
            build = torch.version.cuda or torch.version.hip or "CPUs alone"
            return Finding("chip", BAD if maker == "NVIDIA" else NOTE,
                           f"there is an {maker} device ({path}), but torch {torch.__version__}, "
                           f"built for {build}, sees no GPU",
                           f"install torch's build for {maker} GPUs, or the driver that it needs; "
                           "python -c 'import torch; torch.cuda.init()' says more")
    return Finding("chip", NOTE, f"no GPU: Triton's interpreter {INTERPRETED}")


def features(target: Target) -> Iterator[Finding]:
    """The chip's features for kernels, and those that TRANSCONV_FEATURES switches off."""
    if reason := why_no_switches():
        yield Finding("features", BAD, reason, f"unset {knobs.features.name}")
        return
    used = " ".join(sorted(target.features)) or "none"
    switched = [f"{'+' if on else '-'}{word}" for word, on in knobs.features()]
    said = (f"{used}; 16-bit products at {target.tflops:g} TFLOP/s, {target.bandwidth_gbs:g} GB/s, "
            f"{size(target.shared_bytes)} of shared memory" if target.backend != "interpreter" else used)
    if switched:
        yield Finding("features", NOTE,
                      f"{said}; switched by {knobs.features.name}: {','.join(switched)}")
    else:
        yield Finding("features", OK, said)


# -- clock and power -------------------------------------------------------------------------------


def clocks(line: str) -> Finding:
    """From a line of nvidia-smi (``QUERY``)."""
    cells = [_number(cell) for cell in line.split(",")]
    if len(cells) != 4 or cells[1] is None:
        return Finding("clock", NOTE, "clock and power limit cannot be read (nvidia-smi)")
    now, most, limit, usual = cells
    said = f"{now or 0:.0f} of {most:.0f} MHz"
    if limit is None or usual is None:
        return Finding("clock", OK, f"{said}; the power limit cannot be read")
    said += f", power limit {limit:.0f} W of {usual:.0f} W"
    if limit < 0.99 * usual:
        return Finding("clock", NOTE, f"{said}: kernels are slower than on an unlimited chip",
                       f"nvidia-smi --power-limit={usual:.0f}, if you may")
    return Finding("clock", OK, said)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _smi(uuid: str) -> str:
    """A line of numbers about a device; empty if unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    which = [f"--id=GPU-{uuid.removeprefix('GPU-')}"] if uuid else []
    try:
        done = subprocess.run([tool, *which, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0]


SECONDS = 3.0
MAP = "compute doubled\n axes m=16 n=32\n read x = X[m, n]\n store Y[m, n] = x*2 + 1"


def selftest(where: str) -> Iterator[Finding]:
    """Run both on a device, ``cuda`` or ``cpu`` (in Triton's interpreter, which is switched on). A test
    begins only while there is time."""
    spent = 0.0
    for name, run in (("convolution", convolution), ("map", mapped)):
        if spent > SECONDS:
            yield Finding("self-test", NOTE,
                          f"{name}: not tried, what was before took {spent:.1f} s")
            continue
        began = time.perf_counter()
        found = _tried(name, where, run)
        took = time.perf_counter() - began
        spent += took
        on = "the GPU" if where == "cuda" else "Triton's interpreter"
        yield found or Finding("self-test", OK, f"{name}: right on {on}, {took:.1f} s")


def _tried(name: str, where: str, run: Callable[[str], tuple[Any, Any]]) -> Finding | None:
    """The failure of a test, or None."""
    import torch

    try:
        with _all_ours(), torch.no_grad():
            got, wanted = run(where)
    except Exception as error:
        return Finding("self-test", BAD, f"{name}: {type(error).__name__}: {error}",
                       "python -m transconv run mb1ic8ih6oc16oh6kh3ph1 says more")
    wrong = int((got.double().cpu() != wanted).sum())
    if wrong:
        return Finding("self-test", BAD, f"{name}: {wrong} of {wanted.numel()} elements are wrong",
                       "do not use these kernels; python -m transconv check "
                       "mb1ic8ih6oc16oh6kh3ph1 says more")
    return None


def convolution(where: str) -> tuple[Any, Any]:
    """Ours, and torch's in f64 on the CPU: 16-bit and channels last on a GPU, f32 in the interpreter."""
    import torch

    import transconv

    generator = torch.Generator().manual_seed(0)
    channels, size = (32, 16) if where == "cuda" else (8, 6)
    dtype = torch.float16 if where == "cuda" else torch.float32
    x, w = (torch.randint(-2, 3, shape, generator=generator).double()
            for shape in ((1, channels, size, size), (16, channels, 3, 3)))
    here = x.to(where, dtype).contiguous(memory_format=torch.channels_last)
    got = transconv.conv2d(here, w.to(where, dtype), padding=1)
    return got, torch.nn.functional.conv2d(x, w, padding=1)


def mapped(where: str) -> tuple[Any, Any]:
    """An elementwise computation, and its answer."""
    import torch

    import transconv

    x = torch.arange(16 * 32, device=where, dtype=torch.float32).view(16, 32)
    return transconv.computation(MAP)(x), x.double().cpu() * 2 + 1


@contextmanager
def _all_ours() -> Iterator[None]:
    """Switch off the fallback to torch, and compute CPU tensors in the interpreter."""
    import transconv

    switches = transconv.config
    before = switches.fallback, switches.cpu
    switches.fallback, switches.cpu = "error", "interpret"
    try:
        yield
    finally:
        switches.fallback, switches.cpu = before
