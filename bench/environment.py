"""What a number was measured on, for every row of a table; and where workers keep kernels."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from argparse import ArgumentTypeError
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("device", "torch", "triton", "commit")


@cache
def commit() -> str:
    """The commit of the checkout, with ``+`` if files differ from it; TRANSCONV_COMMIT where there
    is no repository."""
    if given := os.environ.get("TRANSCONV_COMMIT"):
        return given
    try:
        short = _git("rev-parse", "--short", "HEAD")
        return short + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@cache
def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name().replace(" ", "_")
    return "cpu"


def expect_gpu(command: str) -> None:
    """Raise ValueError where there is no GPU, before a command touches the rows that it wrote on one."""
    if device_name() == "cpu":
        raise ValueError(f"there is no GPU; `python -m bench {command}` measures on one")


def at_hand(device: str = "") -> str:
    """For ``type=``: this device (``cuda``, ``cpu``), or the one there is. Raises ArgumentTypeError
    for one that is not."""
    import torch

    if not re.fullmatch(r"|cpu|cuda(:[0-9]{1,3})?", device):
        raise ArgumentTypeError(f"'{device}' is no device; expected cpu, cuda or cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentTypeError(f"{device}: torch finds no GPU; expected cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str]:
    """The columns VERSIONS."""
    found = {"device": device_name(), "commit": commit()}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def threads() -> str:
    """How many threads a measurement on the CPU has: OMP_NUM_THREADS, or the cores that this process may
    run on. One more than there are cores, and every call waits for a thread that spins."""
    if given := os.environ.get("OMP_NUM_THREADS"):
        return given
    mine = getattr(os, "sched_getaffinity", None)
    return str(len(mine(0)) if mine else os.cpu_count() or 1)


def worker_environment(cache_folder: str = "") -> dict[str, str]:
    """Variables of every worker: one shared cache of compiled kernels, one thread each."""
    folder = Path(cache_folder or Path(tempfile.gettempdir()) / f"transconv-bench-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRANSCONV_CACHE": str(folder / "kernels"),
        "OMP_NUM_THREADS": "1",
        "TRANSCONV_COMMIT": commit(),
    }
