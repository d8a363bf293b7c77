"""Seals of records that are executed: HMAC-SHA256 under a key of the user's, outside of the cache.

Whoever can write into the cache folder but cannot read the key can make no record that is read. The key is
made at the first use, in a file of mode 0600 (``TRANSCONV_KEY``). Where there is none, sealed records are
neither read nor written; the logger ``transconv.cache`` says why, once.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from transconv.support import knobs
from transconv.support.files import PARTIAL, tell, why_foreign, why_reached, words

WITHOUT = ("plans and what names compiled kernels are neither read from the cache nor kept in it, and are "
           "made anew in every process. TRANSCONV_KEY names another file")


def key() -> bytes | None:
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
    return isinstance(found, str) and found.isascii() and hmac.compare_digest(
        found, seal(secret, *told))


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
            return (f"can be read by others (mode {stat.S_IMODE(status.st_mode):04o}; remove it, and "
                    "another is made)"), None
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
