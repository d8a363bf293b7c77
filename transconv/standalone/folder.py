"""Writes a folder of files, all of them or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def check(directory: Path, force: bool) -> None:
    """Raises FileExistsError for a folder that is not empty, unless ``force``; NotADirectoryError for a
    path that is no folder."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise NotADirectoryError(f"'{directory}' is no folder; expected a new one, or an empty one")
    if not force and any(directory.iterdir()):
        raise FileExistsError(f"'{directory}' is not empty; expected a new or empty folder, or --force "
                              "(force=True), which replaces files of the same names and leaves others")


def write(directory: Path, files: Mapping[str, bytes], force: bool = False) -> None:
    """Write files by their paths in a folder, which is made. They are written elsewhere first, so that a
    folder with half of them is never seen. Raises as ``check``, ValueError for a path out of the folder,
    OSError where nothing can be written."""
    check(directory, force)
    for name in files:
        if not name or os.path.isabs(name) or {"", ".", ".."} & {*name.replace(os.sep, "/").split("/")}:
            raise ValueError(f"{name!r} is no path in the folder '{directory}'")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:  # it names another path, which nobody asked for
        raise OSError(f"'{directory}' cannot be written: {error.strerror}; expected a folder that can be "
                      "made") from error
    try:
        for name, content in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if directory.is_symlink() or directory.exists() and any(directory.iterdir()):
            for name in files:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(made / name, directory / name)
        else:
            made.chmod(0o777 & ~_mask())
            os.replace(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _mask() -> int:
    """The umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
