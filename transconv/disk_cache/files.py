"""The cache folder, and how text files are kept in it safely.

Files are replaced whole, and are read only from a folder that the user owns and no other user can write
to. When the disk fails, work continues without it: only ``replace_text`` and ``replace_data`` raise
OSError; elsewhere the logger ``transconv.cache`` reports it once. Records are in ``records.py``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from transconv import knobs

log = logging.getLogger("transconv.cache")

PARTIAL = ".transconv-part-"  # begins the names of files that are being written
STALE = 3600.0  # seconds after which such a file belongs to a process that died

_logged: set[tuple[str, str]] = set()
_swept: set[Path] = set()


def tell(place: Path | str, reason: str) -> None:
    """Log once per process what is wrong with a place in the cache."""
    if (str(place), reason) not in _logged:
        _logged.add((str(place), reason))
        log.warning("cache %s: %s", place, reason)


def forget() -> None:
    """Log every message again, and look for left-over files again."""
    _logged.clear()
    _swept.clear()


# -- folders ---------------------------------------------------------------------------------------


def folder(*inside: str) -> Path | None:
    """The cache folder, or a folder inside of it, made with mode 0700 where it is missing.

    None, and one message, when it cannot be had or cannot be trusted: it must belong to the user
    and be writable by no other user, and no link on the way to it may be another user's.
    """
    try:
        at = knobs.cache()
    except (OSError, RuntimeError) as error:  # its parents are closed to us; there is no home
        tell("folder", f"cannot be found, nothing is kept ({error})")
        return None
    for name in ("", *inside):
        at = at / name
        try:
            at.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = why_untrusted(at)
        except OSError as error:
            reason = f"cannot be made or read ({words(error)})"
        if reason:
            tell(at, f"{reason}; nothing is read from it or kept in it. Kernels are generated and "
                     "checked anew in every process. TRANSCONV_CACHE names another folder")
            return None
    return at


def why_untrusted(at: Path) -> str:
    """Why the content of a folder may be another user's, or empty. Raises OSError."""
    status = at.stat()
    if hasattr(os, "geteuid"):
        for link in _links(at):
            if (owner := link.lstat().st_uid) not in (os.geteuid(), 0):
                return f"is reached through {link}, a link of user {owner}"
        if status.st_uid != os.geteuid():
            return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}; " \
               f"chmod 700 makes it yours alone)"
    return ""


def _links(at: Path) -> Iterator[Path]:
    """The links in the path of a folder, those in the paths of links included. Raises OSError."""
    done, todo = Path("/"), list(reversed(at.absolute().parts[1:]))
    for _ in range(1000):  # at.stat() has refused links in a circle
        if not todo:
            return
        here = done / todo.pop()
        if here.is_symlink():
            yield here
            to = here.readlink()
            done = Path("/") if to.is_absolute() else done
            todo += reversed(to.parts[1:] if to.is_absolute() else to.parts)
        else:
            done = done.parent if here.name == ".." else here


def words(error: OSError) -> str:
    """The system's reason."""
    return error.strerror or str(error) or type(error).__name__


# -- files -----------------------------------------------------------------------------------------


def replace_text(path: Path, text: str, lasting: bool = True) -> None:
    """``replace_data`` of a text."""
    replace_data(path, text.encode("utf-8"), lasting)


def replace_data(path: Path, data: bytes, lasting: bool = True) -> None:
    """Write a file so that readers see all of the old content or all of the new, whenever the process
    dies; if ``lasting``, also when the machine does. Raises OSError; the old content then still stands."""
    _sweep(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{PARTIAL}{path.stem[:60]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def keep_text(path: Path, text: str, lasting: bool = True) -> bool:
    """``replace_text``; a failure of the disk is logged. Whether it succeeded."""
    try:
        replace_text(path, text, lasting)
    except OSError as error:
        tell(path.parent, f"cannot be written to ({words(error)}); what is not kept is found out "
                          "again by the next process")
        return False
    return True


def leave_text(folder: Path, name: str, text: str) -> None:
    """Write a file for people into a folder that they named; a failure of the disk is logged. A link of
    that name is replaced, not followed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / name, text)
    except OSError as error:
        tell(folder, f"cannot be written to ({words(error)})")


def read_text(path: Path, longest: int) -> str | None:
    """The text of a regular file; None where there is none that this module could have written."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        tell(path, "is a link, which is not followed" if error.errno == errno.ELOOP
             else f"cannot be read ({words(error)})")
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                tell(path, "is no plain file, and is not read")
                return None
            data = file.read(longest + 1)
    except OSError as error:
        tell(path, f"cannot be read ({words(error)})")
        return None
    if len(data) > longest:
        tell(path, f"has more than {longest} bytes, and is not read")
        return None
    return data.decode("utf-8", "replace")


def _sweep(at: Path) -> None:
    """Remove the partial files of processes that died while writing; once per process."""
    if at in _swept:
        return
    _swept.add(at)
    with suppress(OSError):
        for left in at.glob(f"{PARTIAL}*"):
            with suppress(OSError):
                if time.time() - left.lstat().st_mtime > STALE:
                    left.unlink()
