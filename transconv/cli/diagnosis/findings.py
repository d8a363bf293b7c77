"""The findings of ``doctor``: one line for each check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from transconv.errors import one_line
from transconv.version import __version__

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """``check``: the subject. ``state``: ok, note (it works, but most users need another setting) or bad.
    ``found``: the state in words, and why it is not good. ``todo``: what to do about it."""

    check: str
    state: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        todo = f"; {self.todo}" if self.todo else ""
        return one_line(f"{self.state:<4} {self.check:<9} {self.found}{todo}")


def printed(findings: Iterable[Finding], as_json: bool) -> int:
    """Print a line for each finding as it comes, or one JSON object of all; the exit code."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    bad, notes = (sum(f.state == state for f in found) for state in (BAD, NOTE))
    if as_json:
        print(json.dumps({"transconv": __version__, "good": not bad,
                          "findings": [mapping(f) for f in found]}, indent=1))
    else:
        print(f"\n{len(found)} lines, {bad} bad, {notes} to note: transconv "
              f"{'does not work here as it should' if bad else 'works here'}")
    return int(bool(bad))


def mapping(finding: Finding) -> dict[str, str]:
    """A finding as a JSON object."""
    return {name: getattr(finding, name) for name in ("check", "state", "found", "todo")}


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a function, and a bad one where it fails itself."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(check, BAD, f"could not be found out: {type(error).__name__}: {error}",
                      "the lines above may say why; otherwise please report it")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
