"""Beside everything, needs only the knobs. How choices are kept on disk: verdicts, tuning results.

A ``Drawer`` is a folder in the cache with a small JSON file for each key. Files are replaced whole,
carry a checksum, and are read only from a folder that the user owns and nobody else can write to.
What is kept here is never executed, and whoever reads it checks that it makes sense. Nothing here
raises OSError: where the disk refuses, work goes on without it, and one message of the logger
``transconv.cache`` says so.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transconv import knobs

try:
    import fcntl
except ImportError:  # Windows: writers then do not wait for each other
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("transconv.cache")

PARTIAL = ".transconv-part-"  # begins the names of files that are being written
STALE = 3600.0  # seconds after which such a file belongs to a process that died
PATIENCE = 5.0  # seconds to wait for another writer

Content = dict[str, Any]

_told: set[tuple[str, str]] = set()
_swept: set[Path] = set()


def tell(place: Path | str, reason: str) -> None:
    """Say once per process what is wrong with a place in the cache."""
    if (str(place), reason) not in _told:
        _told.add((str(place), reason))
        log.warning("cache %s: %s", place, reason)


def forget() -> None:
    """Tell everything again, and look for left-over files again."""
    _told.clear()
    _swept.clear()


# -- folders ---------------------------------------------------------------------------------------


def folder(*inside: str) -> Path | None:
    """The cache folder, or a folder inside of it, made with mode 0700 where it is missing.

    None, and one message, when it cannot be had or cannot be trusted: it must belong to the user
    and be writable by nobody else, and so must a link that leads to it.
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
            reason = _distrust(at)
        except OSError as error:
            reason = f"cannot be made or read ({_words(error)})"
        if reason:
            tell(at, f"{reason}; nothing is read from it or kept in it. Kernels are generated and "
                     "checked anew in every process. TRANSCONV_CACHE names another folder")
            return None
    return at


def _distrust(at: Path) -> str:
    """Why the content of a folder may be another user's, or empty. Raises OSError."""
    link, status = at.lstat(), at.stat()
    if hasattr(os, "geteuid"):
        if link.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {link.st_uid}" + (" (a link)" if stat.S_ISLNK(link.st_mode)
                                                       else "")
        if status.st_uid != os.geteuid():
            return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}; " \
               f"chmod 700 makes it yours alone)"
    return ""


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


# -- files -----------------------------------------------------------------------------------------


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see all of the old text or all of the new, whenever the process
    dies. Raises OSError; the old text then still stands."""
    _sweep(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{PARTIAL}{path.stem[:60]}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def keep_text(path: Path, text: str) -> bool:
    """``replace_text``, and a message where the disk refuses."""
    try:
        replace_text(path, text)
    except OSError as error:
        tell(path.parent, f"cannot be written to ({_words(error)}); what is not kept is found out "
                          "again by the next process")
        return False
    return True


def read_text(path: Path, longest: int) -> str | None:
    """The text of a plain file; None where there is none that we could have written."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        tell(path, "is a link, which is not followed" if error.errno == errno.ELOOP
             else f"cannot be read ({_words(error)})")
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                tell(path, "is no plain file, and is not read")
                return None
            data = file.read(longest + 1)
    except OSError as error:
        tell(path, f"cannot be read ({_words(error)})")
        return None
    if len(data) > longest:
        tell(path, f"has more than {longest} bytes, and is not read")
        return None
    return data.decode("utf-8", "replace")


def _sweep(at: Path) -> None:
    """Remove what processes that died while writing left in a folder; once per process."""
    if at in _swept:
        return
    _swept.add(at)
    with suppress(OSError):
        for left in at.glob(f"{PARTIAL}*"):
            with suppress(OSError):
                if time.time() - left.lstat().st_mtime > STALE:
                    left.unlink()


# -- drawers ---------------------------------------------------------------------------------------


class Drawer:
    """Records of one kind: JSON objects by key, safe under many processes and threads.

    ``schema`` is the version of their form; another version lives in another folder. A file longer
    than ``longest`` bytes is not read. Keys are of ``A-Za-z0-9_.-``, at most 120 characters.
    """

    def __init__(self, kind: str, schema: int, longest: int = 1 << 23) -> None:
        self.name, self.longest = f"{kind}-{schema}", longest

    def path(self, key: str) -> Path | None:
        """Where a record is kept; None when there is no trusted folder. Raises ValueError for a
        key that can be no name of a file."""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}", key):
            raise ValueError(f"{key!r} cannot name a record of {self.name}")
        at = folder(self.name)
        return at and at / f"{key}.json"

    def get(self, key: str) -> Content | None:
        """A record; None when there is none, or none that is whole."""
        path = self.path(key)
        if path is None or (text := read_text(path, self.longest)) is None:
            return None
        reason, content = self._parse(key, text)
        if reason:
            tell(path, f"{reason}; the file is ignored, and replaced when there is news")
        return content

    def put(self, key: str, content: Content) -> bool:
        """Keep a record in the place of what was there. Whether the disk has it now; one that is
        longer than what is read is not kept."""
        path = self.path(key)
        if path is None:
            return False
        text = self._text(key, content)
        if len(text.encode()) > self.longest:
            tell(path, f"would have more than {self.longest} bytes; news are not kept")
            return False
        return keep_text(path, text)

    def update(self, key: str, change: Callable[[Content | None], Content]) -> Content:
        """Replace a record by what ``change`` makes of it (None: there is none), while no other
        thread or process does. Returns the new record, also where the disk refuses it."""
        with self._alone():
            old = self.get(key)
            new = change(None if old is None else dict(old))
            if new != old:
                self.put(key, new)
        return new

    def items(self) -> Iterator[tuple[str, Content]]:
        """All records that are whole, by key."""
        at = folder(self.name)
        try:
            names = sorted(p.stem for p in at.glob("[!.]*.json")) if at else []
        except OSError as error:
            tell(at or self.name, f"cannot be listed ({_words(error)})")
            return
        for key in names:
            with suppress(ValueError):  # a name that is not ours
                content = self.get(key)
                if content is not None:
                    yield key, content

    def drop(self, key: str) -> None:
        """Remove a record, if it is there."""
        path = self.path(key)
        if path is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                tell(path, f"cannot be removed ({_words(error)})")

    def _text(self, key: str, content: Content) -> str:
        whole = {"drawer": self.name, "key": key, "checksum": _checksum(content),
                 "content": content}
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"

    def _parse(self, key: str, text: str) -> tuple[str, Content | None]:
        """Why a text is no record, or the record."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "is damaged", None
        content = found.get("content") if isinstance(found, dict) else None
        if not isinstance(content, dict) or found.get("checksum") != _checksum(content):
            return "is damaged or was changed by hand", None
        if (found.get("drawer"), found.get("key")) != (self.name, key):
            return "speaks of something else", None
        return "", content

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other writers; but not for ever, and not where files cannot be locked."""
        root = folder()
        if root is None or fcntl is None:
            yield
            return
        try:
            handle = os.open(root / f".{self.name}.lock",
                             os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:  # then the record cannot be written either, and that is told
            yield
            return
        try:
            if reason := _lock(handle):
                tell(root, f"{reason}; going on without waiting for other writers")
            yield
        finally:
            os.close(handle)  # which unlocks


def _lock(handle: int) -> str:
    """Lock an open file among threads and processes; why that failed."""
    limit = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError:
            if time.monotonic() > limit:
                return f"another process has held the lock for {PATIENCE:g} s"
            time.sleep(0.002)
        except OSError as error:
            return f"files cannot be locked ({_words(error)})"


def _checksum(content: Content) -> str:
    """Of a record, whatever the order of its keys. It finds damage, not malice."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
