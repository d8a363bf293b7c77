"""The package as a user has it: its distributions are built from a copy of the sources, and the wheel is
installed in an empty environment, to which the libraries of this one are lent. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.shown import ROOT

NAMES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


def clean() -> dict[str, str]:
    """This process's environment without what points at the checkout or sets the package."""
    foreign = ("PYTHON", "TRANSCONV_", "TRITON_", "XDG_", "VIRTUAL_ENV", "PYTEST_")
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def ran(*words: object, cwd: Path) -> str:
    """Standard output of a command in a clean environment, with a cache folder of its own."""
    done = subprocess.run(
        [str(w) for w in words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=clean() | {"XDG_CACHE_HOME": str(cwd / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def copy_sources(folder: Path) -> None:
    """Copy into a folder what the distributions are built from."""
    for name in NAMES:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "transconv", folder / "transconv", ignore=shutil.ignore_patterns("__pycache__"))


def build(source: Path, *options: str) -> Path:
    """Build the distributions of a folder of sources. Returns the folder of what was built."""
    ran(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", source / "dist", cwd=source)
    return source / "dist"


def environment(wheel: Path, folder: Path) -> Path:
    """Make an environment with a wheel alone, and lend it this one's libraries. Returns its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    quiet = ("--quiet", "--no-compile", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    ran(*pip, *quiet, wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    torchrun = folder / "bin" / "torchrun"  # a lent library brings no commands
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    return python
