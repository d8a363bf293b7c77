"""``doctor``: checks whether transconv works on this machine, and prints one line for each check.

The chip, its clock and power limits, and the features that kernels use; the cache folders of transconv and
Triton; the table of tuned schedules in use; a convolution and a map, generated, run and compared. The data
of these two are small integers: products and sums are exact, so the result of a right kernel equals the
answer. None starts after three seconds."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from transconv.cli import measurement
from transconv.cli.arguments import installation, options, ranges
from transconv.cli.arguments.installation import BAD, NOTE, OK, Finding, guarded, printed, size
from transconv.selection import tuning_db
from transconv.support import ProblemError, Unsupported, knobs, why_untrusted, why_unwritable
from transconv.target import TARGETS, Target, detect, why_no_switches
from transconv.verify.machine import device, terminable


def add_to(verbs: object) -> None:
    made = options.add_verb(
        verbs,
        "doctor",
        "check whether transconv works on this machine",
        "Checks the installed packages, the chip and its features, the caches, the environment variables\n"
        "and the tuned schedules, and runs a convolution and an elementwise map. Prints one line for\n"
        "each check, which begins with ok, note (it works, but is unusual) or bad. Needs no network. The\n"
        "exit code is 1 if a line is bad.\n"
        "--measure also times layers and blocks of networks on the GPU, in at most five minutes, and\n"
        "--share writes a file of it that can be sent to the project (docs/board.md).",
        ("doctor", "doctor --json", "doctor --measure --share out.json"),
        doctor,
    )
    made.flag("--json", "print one JSON object instead of lines")
    made.flag("--measure", "also measure the GPU, if the checks are good")
    made.option("--share", "FILE", "write what is measured to a JSON file", None, ranges.output)
    made.option(
        "--seconds",
        "S",
        f"of --measure, all in all (default: {measurement.SECONDS})",
        measurement.SECONDS,
        ranges.limit,
    )


def doctor(words: argparse.Namespace) -> int:
    if words.share and not words.measure:
        raise ProblemError("--share has nothing to write; expected --measure --share FILE")
    with _quiet(), terminable():
        return printed(measured(words) if words.measure else findings(), words.json)


def measured(words: argparse.Namespace) -> Iterator[Finding]:
    """All findings, then those of what is measured."""
    checks = []
    for finding in findings():
        checks.append(finding)
        yield finding
    target = _target()
    if _device() != "cuda" or target.backend not in ("cuda", "hip"):
        yield measurement.said_without_gpu(words.share, words.seconds)
        return
    session = measurement.MeasuringSession(target, words.share, words.seconds)
    yield from guarded("measure", lambda: session.findings(checks))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warnings: ``doctor`` has a line for each."""
    log = logging.getLogger("transconv")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def findings() -> Iterator[Finding]:
    """All findings, each after those that it depends on."""
    given = knobs.given("TRANSCONV_", "TRITON_")  # before the interpreter is switched on
    where = _device()
    yield from guarded("software", installation.software)
    yield from guarded("chip", chip)
    yield from guarded("settings", lambda: installation.settings(given))
    yield from guarded("cache", caches)
    yield from guarded("tuned", lambda: tuned(_target()))
    if where:
        yield from guarded("self-test", lambda: selftest(where))
    else:
        yield Finding(
            "self-test",
            BAD,
            "not tried: torch cannot be imported or its GPU not be used",
            "see the lines above",
        )


def _device() -> str:
    """Where kernels run; empty where that is unknown, for reasons that other lines give."""
    try:
        return device()
    except Exception:  # torch is missing or broken in one of many ways, or no record fits the chip
        return ""


def _target() -> Target:
    try:
        return detect()
    except Unsupported:
        return Target.parse("interpreter")


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
        yield Finding(
            "chip",
            NOTE,
            "TRITON_INTERPRET=1 has kernels interpreted although there is a GPU",
            "unset TRITON_INTERPRET to use it",
        )
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info()
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    said = (
        f"{properties.name}, capability {properties.major}.{properties.minor}, {size(free)} of "
        f"{size(total)} free, {properties.multi_processor_count} multiprocessors, {kind}"
    )
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
            return Finding(
                "chip",
                BAD if maker == "NVIDIA" else NOTE,
                f"there is an {maker} device ({path}), but torch {torch.__version__}, "
                f"built for {build}, sees no GPU",
                f"install torch's build for {maker} GPUs, or the driver that it needs; "
                "python -c 'import torch; torch.cuda.init()' says more",
            )
    return Finding("chip", NOTE, f"no GPU: Triton's interpreter {INTERPRETED}")


def features(target: Target) -> Iterator[Finding]:
    """The chip's features for kernels, and those that TRANSCONV_FEATURES switches off."""
    if reason := why_no_switches():
        yield Finding("features", BAD, reason, f"unset {knobs.features.name}")
        return
    used = " ".join(sorted(target.features)) or "none"
    switched = [f"{'+' if on else '-'}{word}" for word, on in knobs.features()]
    said = (
        f"{used}; 16-bit products at {target.tflops:g} TFLOP/s, {target.bandwidth_gbs:g} GB/s, "
        f"{size(target.shared_bytes)} of shared memory"
        if target.backend != "interpreter"
        else used
    )
    if switched:
        yield Finding("features", NOTE, f"{said}; switched by {knobs.features.name}: {','.join(switched)}")
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
        return Finding(
            "clock",
            NOTE,
            f"{said}: kernels are slower than on an unlimited chip",
            f"nvidia-smi --power-limit={usual:.0f}, if you may",
        )
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
        done = subprocess.run(
            [tool, *which, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
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
            yield Finding("self-test", NOTE, f"{name}: not tried, what was before took {spent:.1f} s")
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
        return Finding(
            "self-test",
            BAD,
            f"{name}: {type(error).__name__}: {error}",
            "transconv run mb1ic8ih6oc16oh6kh3ph1 says more",
        )
    wrong = int((got.double().cpu() != wanted).sum())
    if wrong:
        return Finding(
            "self-test",
            BAD,
            f"{name}: {wrong} of {wanted.numel()} elements are wrong",
            "do not use these kernels; transconv check mb1ic8ih6oc16oh6kh3ph1 says more",
        )
    return None


def convolution(where: str) -> tuple[Any, Any]:
    """Ours, and torch's in f64 on the CPU: 16-bit and channels last on a GPU, f32 in the interpreter."""
    import torch

    import transconv

    generator = torch.Generator().manual_seed(0)
    channels, size = (32, 16) if where == "cuda" else (8, 6)
    dtype = torch.float16 if where == "cuda" else torch.float32
    x, w = (
        torch.randint(-2, 3, shape, generator=generator).double()
        for shape in ((1, channels, size, size), (16, channels, 3, 3))
    )
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


MOST = 50_000  # files that are counted in a folder
OWN = "set TRANSCONV_CACHE to a folder of yours"
OURS = "kernels are generated and checked anew in every process"
TRITONS = "kernels are compiled anew in every process"


def caches() -> Iterator[Finding]:
    """The folders of transconv and of Triton."""
    try:
        ours = knobs.cache()
    except (OSError, RuntimeError) as error:
        yield Finding("cache", BAD, f"cannot be found ({error}): {OURS}", OWN)
    else:
        yield folder("cache", ours, OURS, OWN, strict=True)
    if (at := _of_triton()) is not None:
        yield folder("triton", at, TRITONS, "set TRITON_CACHE_DIR to a folder of yours", strict=False)


def folder(check: str, at: Path, otherwise: str, todo: str, strict: bool) -> Finding:
    """One folder: its content, whether it is writable and trusted. ``otherwise``: the consequence if it is
    not; ``strict``: nothing is read from an untrusted folder."""
    try:
        if not at.exists():
            if reason := why_unwritable(at / "x"):
                return Finding(check, BAD, f"{at} cannot be made ({reason}): {otherwise}", todo)
            return Finding(check, OK, f"{at} is not there yet; it is made at the first use")
        reason = why_untrusted(at)
        held = _content(at)
    except OSError as error:
        return Finding(check, BAD, f"{at} cannot be read ({error.strerror or error}): {otherwise}", todo)
    if reason and strict:
        return Finding(check, BAD, f"{at} {reason}: it is not used, {otherwise}", todo)
    if reason:
        return Finding(
            check, NOTE, f"{at} {reason}: whoever writes there decides what your GPU runs", todo
        )
    if unwritable := why_unwritable(at / "x"):
        return Finding(
            check,
            BAD,
            f"{at} cannot be written to ({unwritable}): nothing new is kept, "
            f"so that what is not in it is found out by every process",
            todo,
        )
    return Finding(check, OK, f"{at}, {held}, writable and yours alone")


def _content(at: Path) -> str:
    """How much is in a folder."""
    count = total = 0
    for here, _, names in os.walk(at):
        for name in names:
            count += 1
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except OSError:  # another process has removed it
                continue
        if count > MOST:
            return f"more than {MOST} files, {size(total)} and more"
    return f"{count} files, {size(total)}"


def _of_triton() -> Path | None:
    """Where Triton keeps machine code; None if unknown."""
    try:
        from triton import knobs as table

        return Path(table.cache.dir)
    except Exception:  # an older Triton, or none: software() reports it
        return None


# -- the tuned table -------------------------------------------------------------------------------


def tuned(target: Target) -> Iterator[Finding]:
    """The rows of tuned schedules that are used on this chip."""
    switch, machine = knobs.tuned(), tuning_db.machine(target)
    if switch == "0":
        yield Finding(
            "tuned",
            NOTE,
            "switched off (TRANSCONV_TUNED=0): the estimate alone chooses",
            "unset TRANSCONV_TUNED to use what was tuned",
        )
        return
    counts: dict[str, int] = {}
    stale = 0
    for place, path in _tables(switch):
        try:
            found = tuning_db.load(path)
        except (OSError, ValueError) as error:
            yield Finding("tuned", BAD, f"{error}", "unset TRANSCONV_TUNED, or name another file")
            return
        mine = [r for r in found if r.machine == machine]
        counts[place] = sum(r.current for r in mine)
        stale += len(mine) - counts[place]
    kept = (tuning_db.of_mapping(x) for _, content in tuning_db.DRAWER.items() for x in _listed(content))
    counts["your cache"] = sum(r.current and r.machine == machine for r in kept if r)
    said = ", ".join(f"{n} rows of {place}" for place, n in counts.items())
    if target.backend == "interpreter":
        yield Finding("tuned", OK, f"{said} for {machine}: the interpreter needs none")
    elif not any(counts.values()):
        reason = f"; {stale} were measured with another version of Triton" if stale else ""
        yield Finding(
            "tuned",
            NOTE,
            f"{said} for {machine}{reason}: the estimate alone chooses",
            "transconv tune FILE finds better schedules for your layers",
        )
    else:
        yield Finding("tuned", OK, f"{said} for {machine}")


def _tables(switch: str) -> Iterator[tuple[str, Path]]:
    if switch != "1":
        yield switch, Path(switch)
    for place in sorted(files("transconv").joinpath("data").iterdir(), key=lambda p: p.name):
        if place.name.startswith("tuned_") and place.name.endswith(".csv"):
            yield f"the package's {place.name}", Path(str(place))


def _listed(content: dict[str, Any]) -> list[Any]:
    found = content.get("rows")
    return found if isinstance(found, list) else []
