"""The cache folder, and how text files are kept in it safely.

Files are replaced whole. They are read only if they are the user's, no other user can write to them or
to their folder, and none decides which folder that is. When the disk fails, work continues without it:
only ``replace_text`` and ``replace_data`` raise OSError; elsewhere the logger ``transconv.cache`` reports
it once. Records are in ``records.py``.

Files that a user names may be anywhere and belong to any user: they are read up to a size limit and
written whole, and errors are raised."""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from transconv.support import knobs

log = logging.getLogger("transconv.cache")

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package, in whichever folder of it a file is that asks."""
PARTIAL = ".transconv-part-"  # begins the names of files that are being written
LONGEST = 1 << 28  # bytes of a file that a user names
STALE = 3600.0  # seconds after which such a file belongs to a process that died


@functools.cache
def tell(place: Path | str, reason: str) -> None:
    """Log once per process what is wrong with a place in the cache."""
    log.warning("cache %s: %s", place, reason)


def forget() -> None:
    """Log every message again, and look for left-over files again."""
    tell.cache_clear()
    _sweep.cache_clear()


# -- folders ---------------------------------------------------------------------------------------


def folder(*inside: str) -> Path | None:
    """The cache folder, or a folder inside of it, made with mode 0700 where it is missing.

    None, and one message, when it cannot be had or cannot be trusted: it must belong to the user
    and be writable by no other user; folders and links on the way to it must be the user's or root's, and
    nobody else may rename what lies there."""
    try:
        at = knobs.cache()
    except (OSError, RuntimeError) as error:  # its parents are closed to us; there is no home
        tell("folder", f"cannot be found, nothing is kept ({error})")
        return None
    if _is_trusted(at, inside):
        return at.joinpath(*inside)
    for name in ("", *inside):
        at = at / name
        try:
            at.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = why_untrusted(at)
        except OSError as error:
            reason = f"cannot be made or read ({words(error)})"
        if reason:
            tell(
                at,
                f"{reason}; nothing is read from it or kept in it. Kernels are generated and "
                "checked anew in every process. TRANSCONV_CACHE names another folder",
            )
            return None
    return at


def _is_trusted(at: Path, inside: tuple[str, ...]) -> bool:
    """Whether a folder and those inside of it are there and trusted: the way to the last one, which leads
    through the others, is looked at once."""
    places = [os.path.join(at, *inside[:n]) for n in range(len(inside) + 1)]
    try:
        return all(map(os.path.isdir, places)) and not (
            why_reached(Path(places[-1]), of=-1) or any(why_foreign(os.stat(p)) for p in places)
        )
    except OSError:
        return False


def why_untrusted(at: Path) -> str:
    """Why the content of a folder may be another user's, or empty. Raises OSError."""
    status = at.stat()
    return why_reached(at, of=-1) or why_foreign(status, " (mode {:04o}; chmod 700 makes it yours alone)")


def why_reached(at: Path, of: int | None = None) -> str:
    """Why another user decides where a path leads, or empty: a link or a folder on the way belongs to one,
    or others may rename what lies in it. ``of``: where the way ends, -1 before its last place. Raises
    OSError."""
    if not hasattr(os, "geteuid"):
        return ""
    trusted = {os.geteuid(), 0}
    for here, status in [*_way(at)][:of]:
        if here == "/":
            trusted.add(status.st_uid)  # in a user namespace of its own, a container's root is nobody
        is_link = stat.S_ISLNK(status.st_mode)
        if status.st_uid not in trusted:
            return (
                f"is reached through {here}, a link of user {status.st_uid}"
                if is_link
                else f"is reached through {here}, which belongs to user {status.st_uid}"
            )
        writers = 0 if is_link or status.st_mode & stat.S_ISVTX else status.st_mode & 0o022
        if writers & 0o002 or (writers and not _is_private(status.st_gid, os.geteuid())):
            return (
                f"is reached through {here}, where others can replace it (mode "
                f"{stat.S_IMODE(status.st_mode):04o}; chmod go-w {here} ends that)"
            )
    return ""


def why_foreign(
    status: os.stat_result, written: str = " (mode {:04o})", also: tuple[int, ...] = ()
) -> str:
    """Why another user may have written what has this status, or empty. ``written``: what follows on the
    words that others can write to it; ``also``: owners who may besides the user."""
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), *also):
        return f"belongs to user {status.st_uid}"
    if os.name == "posix" and status.st_mode & 0o022:
        return f"can be written to by others{written.format(stat.S_IMODE(status.st_mode))}"
    return ""


def _way(at: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The folders and links in a path, from the root on and the path itself last, with those in the paths
    of links. Raises OSError."""
    here, todo = "/", str(at.absolute()).split("/")[::-1]
    yield here, os.lstat(here)
    for _ in range(1000):  # links in a circle have no end
        if not todo:
            return
        name = todo.pop()
        if name in ("", "."):
            continue
        found = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        status = os.lstat(found)
        yield found, status
        if stat.S_ISLNK(status.st_mode):
            to = os.readlink(found)
            here = "/" if to.startswith("/") else here
            todo += to.split("/")[::-1]
        else:
            here = found
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(at))


@functools.lru_cache(maxsize=16)
def _is_private(group: int, owner: int) -> bool:
    """Whether a group is a user's own, as many systems make one for each."""
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(owner), grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and {*found.gr_mem} <= {user.pw_name}


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
        tell(
            path.parent,
            f"cannot be written to ({words(error)}); what is not kept is found out "
            "again by the next process",
        )
        return False
    return True


def leave_text(folder: Path, name: str, text: str) -> None:
    """Write a file for people into a folder that they named; a failure of the disk is logged. A link of
    that name is replaced, not followed. Raises ValueError for a name that is a path."""
    if name in ("", ".", "..") or os.path.basename(name) != name:
        raise ValueError(f"{name!r} is no name of a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / name, text)
    except OSError as error:
        tell(folder, f"cannot be written to ({words(error)})")


def read_text(path: Path, longest: int) -> str | None:
    """The text of a regular file of the user's, to which no other user can write; None where there is
    none. The file is opened once, and what is open is looked at: nobody can change it meanwhile."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        tell(
            path,
            "is a link, which is not followed"
            if error.errno == errno.ELOOP
            else f"cannot be read ({words(error)})",
        )
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            reason = why_foreign(status) if stat.S_ISREG(status.st_mode) else "is no plain file"
            if reason:
                tell(path, f"{reason}, and is not read")
                return None
            data = file.read(longest + 1)
    except OSError as error:
        tell(path, f"cannot be read ({words(error)})")
        return None
    if len(data) > longest:
        tell(path, f"has more than {longest} bytes, and is not read")
        return None
    return data.decode("utf-8", "replace")


@functools.cache
def _sweep(at: Path) -> None:
    """Remove the partial files of processes that died while writing; once per process."""
    with suppress(OSError):
        for left in at.glob(f"{PARTIAL}*"):
            with suppress(OSError):
                if time.time() - left.lstat().st_mtime > STALE:
                    left.unlink()


# -- files that a user names -------------------------------------------------------------------------


def read_named(path: Path, expected: str, longest: int = LONGEST) -> str:
    """The text of a file. Raises ValueError for one that is no text or is too long (``expected`` says
    what it should be), OSError, with the same words for one that is not there."""
    try:
        with path.open("rb") as file:
            data = file.read(longest + 1)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no such file: {path}; expected {expected}") from error
    if len(data) > longest:
        raise ValueError(f"{path} has more than {longest} bytes; expected {expected}")
    if b"\0" in data:
        raise ValueError(f"{path}: this is no text; expected {expected}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text; expected {expected}") from error


def replace_named(path: Path, text: str) -> None:
    """Write a file, and the folders that it lies in, so that it is never half there. A pipe or a device
    is written to as it is. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays, its target is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        with suppress(OSError):
            fresh.chmod(path.stat().st_mode & 0o777)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def why_unwritable(path: Path) -> str:
    """Why a file cannot be made or replaced, or empty. Nothing is left behind."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return "it is not ours to write"
        if path.exists() and not path.is_file():
            return ""
        within = path.resolve().parent
        while not within.exists():
            within = within.parent
        if not within.is_dir():
            return f"{within} is no folder"
        with tempfile.TemporaryFile(dir=within):
            return ""
    except (OSError, RuntimeError, ValueError) as error:
        return words(error) if isinstance(error, OSError) else str(error)
