"""The caches: in memory what this process made and need not make again (``Cache``), and in a folder
records, such as verdicts, plans and tuning results, each with a checksum or a seal.

Each module that keeps something in memory has a cache at its top; ``forget_all`` empties them all, so that
everything is made or read anew. What a function of its arguments keeps is ``functools.cache``'s.

A ``Drawer`` is a folder in the cache with a small JSON file for each key (see ``files.py`` for how a file
is written and read). Records whose content is executed, or names what is, are sealed; the others carry a
checksum, which finds damage alone, and are choices. The readers of both check the content.

Fields of records are judged as they are read: types, ranges and names. Each function gives the value, or
raises ValueError with what was expected of it. Python's bool is an int, and JSON's numbers have any size:
neither passes for what it is not.

A seal is HMAC-SHA256 under a key of the user's, outside of the cache. Whoever can write into the cache
folder but cannot read the key can make no record that is read. The key is made at the first use, in a file
of mode 0600 (``TRANSCONV_KEY``). Where there is none, sealed records are neither read nor written; the
logger ``transconv.cache`` says why, once."""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import keyword
import os
import re
import secrets
import stat
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from transconv.support import knobs
from transconv.support.files import (
    PARTIAL,
    folder,
    keep_text,
    read_text,
    tell,
    why_foreign,
    why_reached,
    words,
)

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dict of at most ``bound`` entries, and what it is of. It is read as a dict is, which is what calls
    that come back do. Each step of ``keep`` is one of a dict's own, so that threads need no lock."""

    __slots__ = ("bound", "name")  # as fast to read as a dict
    every: ClassVar[list[Cache[Any, Any]]] = []

    def __init__(self, name: str, bound: int = 1 << 16) -> None:
        super().__init__()
        self.name, self.bound = name, bound
        self.every.append(self)

    def keep(self, key: K, value: V) -> V:
        """Keep a value, and return the one that is kept: another thread's, if it was there before. Where
        there is no room, all others are dropped."""
        if len(self) >= self.bound and key not in self:
            self.clear()
        return self.setdefault(key, value)

    def forget(self) -> None:
        """Drop all entries."""
        self.clear()


def forget_all() -> None:
    """Empty every cache."""
    for cache in Cache.every:
        cache.forget()


try:
    import fcntl
except ImportError:  # Windows: writers then do not wait for each other
    fcntl = None  # type: ignore[assignment]

KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}")
PATIENCE = 5.0  # seconds to wait for another writer

Content = dict[str, Any]
"""What a record holds: a JSON object."""


class Drawer:
    """Records of one kind: JSON objects by key, safe under many processes and threads.

    ``schema`` is the version of their form; another version lives in another folder. A file longer
    than ``longest`` bytes is not read. Keys are of ``A-Za-z0-9_.-``, at most 120 characters. Records that
    can be made again are not ``lasting``: nobody waits until the disk has them, and the few that a
    machine without power damages are ignored for their checksums. ``sealed``: only who has the user's key
    can write one that is read; without a key there are none."""

    def __init__(
        self, kind: str, schema: int, longest: int = 1 << 23, lasting: bool = True, sealed: bool = False
    ) -> None:
        self.name, self.longest, self.lasting = f"{kind}-{schema}", longest, lasting
        self.sealed = sealed

    def path(self, key: str) -> Path | None:
        """Where a record is kept; None when there is no trusted folder, or no key for its seal. Raises
        ValueError for a key that can be no name of a file."""
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} cannot name a record of {self.name}")
        at = folder(self.name)
        return None if self.sealed and user_key() is None else at and at / f"{key}.json"

    def get(self, key: str) -> Content | None:
        """A record; None when there is none, or none that is whole."""
        path = self.path(key)
        if path is None or (text := read_text(path, self.longest)) is None:
            return None
        reason, content = self._parse(key, text)
        if reason:
            tell(path, f"{reason}; the file is ignored, and replaced when there is news")
        return content

    def put(self, key: str, content: Content, lasting: bool = True) -> bool:
        """Write or replace a record, which lasts only in a drawer whose records do. Whether it was
        written; one longer than ``longest`` is not."""
        path = self.path(key)
        if path is None:
            return False
        text = self._text(key, content)
        if len(text.encode()) > self.longest:
            tell(path, f"would have more than {self.longest} bytes; news are not kept")
            return False
        return keep_text(path, text, lasting and self.lasting)

    def update(
        self, key: str, change: Callable[[Content | None], Content], lasting: bool = True
    ) -> Content:
        """Replace a record by the result of ``change`` (given None: there is none) under a lock against
        other threads and processes. Returns the new record, also where writing it fails."""
        with self._alone():
            old = self.get(key)
            new = change(None if old is None else dict(old))
            if new != old:
                self.put(key, new, lasting)
        return new

    def items(self) -> Iterator[tuple[str, Content]]:
        """All records that are whole, by key."""
        for key in self.keys():
            content = self.get(key)
            if content is not None:
                yield key, content

    def keys(self) -> list[str]:
        """The keys of all files that may be records, whole or not."""
        at = folder(self.name)
        try:
            names = sorted(p.stem for p in at.glob("[!.]*.json")) if at else []
        except OSError as error:
            tell(at or self.name, f"cannot be listed ({words(error)})")
            return []
        return [n for n in names if KEY.fullmatch(n)]

    def drop(self, key: str) -> None:
        """Remove a record, if it is there."""
        path = self.path(key)
        if path is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                tell(path, f"cannot be removed ({words(error)})")

    def why_ignored(self, key: str) -> str:
        """Why a record that is there is not read, or empty: for somebody who asks."""
        path = self.path(key)
        text = None if path is None else read_text(path, self.longest)
        return "cannot be read" if text is None else self._parse(key, text)[0]

    def _text(self, key: str, content: Content) -> str:
        whole = {
            "drawer": self.name,
            "key": key,
            self._mark: self._marked(key, content),
            "content": content,
        }
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"

    def _parse(self, key: str, text: str) -> tuple[str, Content | None]:
        """Why a text is no record, or the record."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "is damaged", None
        content = found.get("content") if isinstance(found, dict) else None
        if not isinstance(content, dict) or not self._is_marked(key, content, found.get(self._mark)):
            return (
                "is not sealed with this user's key"
                if self.sealed
                else "is damaged or was changed by hand"
            ), None
        if (found.get("drawer"), found.get("key")) != (self.name, key):
            return "speaks of something else", None
        return "", content

    @property
    def _mark(self) -> str:
        return "seal" if self.sealed else "checksum"

    def _marked(self, key: str, content: Content) -> str:
        """The checksum of a content, or its seal in the place of a key."""
        if not self.sealed:
            return _checksum(content)
        secret = user_key()
        if secret is None:
            raise RuntimeError(f"{self.name}: there is no key")
        return seal(secret, self.name, key, _text(content))

    def _is_marked(self, key: str, content: Content, found: object) -> bool:
        if not self.sealed:
            return found == _checksum(content)
        secret = user_key()
        return secret is not None and is_sealed(found, secret, self.name, key, _text(content))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other writers, at most ``PATIENCE``, and not where files cannot be locked."""
        root = folder()
        if root is None or fcntl is None:
            yield
            return
        try:
            handle = os.open(
                root / f".{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError:  # then writing the record fails too, which is logged
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
            return f"files cannot be locked ({words(error)})"


def _text(content: Content) -> str:
    """A record's content, whatever the order of its keys."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _checksum(content: Content) -> str:
    """Of a record. It finds damage, not malice."""
    return hashlib.blake2b(_text(content).encode(), digest_size=16).hexdigest()


LARGEST = (1 << 63) - 1  # of what a kernel counts


def is_name(text: object) -> bool:
    """Whether it is a name that a generated text or a file may have: a word that Python reads as it is
    written, which is no path and no code."""
    return (
        isinstance(text, str)
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and unicodedata.is_normalized("NFKC", text)
    )


def name(value: Any) -> str:
    """A name (``is_name``)."""
    if not is_name(value):
        raise ValueError(f"{value!r:.80}; expected a name")
    return str(value)


def text(value: Any, longest: int = 1 << 16) -> str:
    """A text of at most so many characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{value!r:.80}; expected a text of at most {longest} characters")
    return value


def whole(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """An integer in a range."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.80}; expected a whole number in {least}..{most}")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError(f"{value!r:.80}; expected true or false")
    return value


def several(value: Any, most: int = 1 << 12) -> list[Any]:
    """A list of at most so many items."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{value!r:.80}; expected a list of at most {most} items")
    return value


WITHOUT = (
    "plans and what names compiled kernels are neither read from the cache nor kept in it, and are "
    "made anew in every process. TRANSCONV_KEY names another file"
)


def user_key() -> bytes | None:
    """The user's key, made if there is none; None, and one message, where it cannot be had."""
    try:
        path = knobs.key()
    except (OSError, RuntimeError) as error:  # there is no home
        tell("key", f"cannot be found ({error}); {WITHOUT}")
        return None
    return _key_of(path)


@functools.cache
def _key_of(path: Path) -> bytes | None:
    try:
        reason, found = _read_or_make(path)
    except (OSError, RuntimeError) as error:  # links in a circle; there is no home
        why = words(error) if isinstance(error, OSError) else error
        reason, found = f"cannot be made or read ({why})", None
    if reason:
        tell(path, f"the key {reason}; {WITHOUT}")
    return found


def seal(secret: bytes, *told: str) -> str:
    """The seal of texts under a key, as hexadecimal digits."""
    made = hmac.new(secret, digestmod="sha256")
    for text in told:
        data = text.encode()
        made.update(b"%d:" % len(data) + data)
    return made.hexdigest()


def is_sealed(found: object, secret: bytes, *told: str) -> bool:
    """Whether something is the seal of texts."""
    return isinstance(found, str) and found.isascii() and hmac.compare_digest(found, seal(secret, *told))


def forget() -> None:
    """Clear the keys in memory, so that files are read again."""
    _key_of.cache_clear()


def _read_or_make(path: Path) -> tuple[str, bytes | None]:
    """Why there is no key, or the key. Raises OSError."""
    if path.resolve().is_relative_to(knobs.cache().resolve()):
        return "lies in the cache, which it is to protect", None
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_reached(path.parent):
        return reason, None
    if not os.path.lexists(path):
        _make(path)
    if reason := why_reached(path):
        return reason, None
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return "is no plain file", None
        if reason := why_foreign(status):
            return reason, None
        if os.name == "posix" and status.st_mode & 0o077:
            return (
                f"can be read by others (mode {stat.S_IMODE(status.st_mode):04o}; remove it, and "
                "another is made)"
            ), None
        text = file.read(100).decode("ascii", "replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        return "is damaged (remove it, and another is made)", None
    return "", bytes.fromhex(text)


def _make(path: Path) -> None:
    """Write a key, whole and never over another one. Raises OSError."""
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL)  # mode 0600, and there was none
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(f"{secrets.token_hex(32)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(fresh, path)
        except FileExistsError:  # another process was faster
            pass
        except OSError:  # a file system without links; what a slower process sealed counts as damaged
            os.replace(fresh, path)
    finally:
        with suppress(OSError):
            os.unlink(fresh)
