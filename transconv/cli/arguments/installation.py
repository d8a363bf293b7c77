"""The findings of ``doctor``, one line for each check, and the first of them, which need no library: which
software is installed, whether it is supported, and which variables are set."""

from __future__ import annotations

import difflib
import importlib
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transconv.support import __version__, knobs, one_line

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of ``doctor``. ``check``: the subject. ``state``: ok, note (it works, but most users need
    another setting) or bad. ``found``: the state in words, and why it is not good. ``todo``: what to do
    about it."""

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
        print(
            json.dumps(
                {"transconv": __version__, "good": not bad, "findings": [asdict(f) for f in found]},
                indent=1,
            )
        )
    else:
        print(
            f"\n{len(found)} lines, {bad} bad, {notes} to note: transconv "
            f"{'does not work here as it should' if bad else 'works here'}"
        )
    return int(bool(bad))


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a function, and a bad one where it fails itself."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(
            check,
            BAD,
            f"could not be found out: {type(error).__name__}: {error}",
            "the lines above may say why; otherwise please report it",
        )


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)


@dataclass(frozen=True, slots=True)
class Dependency:
    """A dependency: the oldest version that works, the newest that the tests run with, and a remark on
    later ones."""

    name: str
    oldest: str
    newest: str
    later: str = ""


# The oldest versions equal those of pyproject.toml; a test compares them.
PACKAGES = (
    Dependency("torch", "2.10", "2.13"),
    Dependency("triton", "3.6", "3.9"),
    Dependency(
        "numpy",
        "1.26",
        "2.3",
        "Triton 3.6's interpreter fails with numpy 2.4 where a loop "
        "bound is not a constant: without a GPU, pip install 'numpy<2.4'",
    ),
    Dependency("sympy", "1.12", "1.14"),
    Dependency("jinja2", "3.1", "3.1"),
    Dependency("tqdm", "4.60", "4.70"),
)

# Variables that change results or speed also at legal values, and how.
UNUSUAL = {
    knobs.schedule.name: "every kernel is made with this schedule, or refused",
    knobs.passes.name: "passes are switched",
    knobs.features.name: "features of the chip are switched",
    knobs.dump.name: "every stage of every kernel is written there",
}


def software() -> Iterator[Finding]:
    """transconv, Python, and every dependency."""
    yield Finding("transconv", OK, f"{__version__} in {Path(__file__).parents[2]}")
    yield python(sys.version_info[:2])
    for package in PACKAGES:
        yield installed(package)


def incomplete(error: ImportError) -> Iterator[Finding]:
    """The finding where a dependency of every verb cannot be imported."""
    yield from software()
    yield Finding("self-test", BAD, f"not tried: {error}", "see the lines above")


def python(found: tuple[int, ...]) -> Finding:
    """This interpreter."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if found < OLDEST_PYTHON:
        return Finding("python", BAD, f"{text} is too old", "install Python 3.10 or later")
    if found > NEWEST_PYTHON:
        return Finding("python", NOTE, f"{text} is newer than what the tests run with (3.14)")
    return Finding("python", OK, text)


def installed(package: Dependency) -> Finding:
    """One dependency: its version, and whether it can be imported."""
    name = package.name
    install = f"pip install '{name}>={package.oldest}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, BAD, "not installed", install)
    try:
        importlib.import_module(name)
    except Exception as error:  # a shared library that it loads may be missing or incompatible
        return Finding(name, BAD, f"{found} cannot be imported: {type(error).__name__}: {error}", install)
    if numbers(found) < numbers(package.oldest):
        return Finding(name, BAD, f"{found} is older than {package.oldest}", install)
    if numbers(found) > numbers(package.newest):
        return Finding(
            name, NOTE, f"{found} is newer than what the tests run with ({package.newest})", package.later
        )
    return Finding(name, OK, found)


def numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


# -- variables -------------------------------------------------------------------------------------


def settings(given: Mapping[str, str]) -> Iterator[Finding]:
    """One line for each TRANSCONV_* and TRITON_* variable that is set."""
    ours = {k.name: k for k in knobs.KNOBS if k.name.startswith("TRANSCONV_")}
    former = {k.former: k for k in knobs.KNOBS if k.former}
    for name, text in given.items():
        said = f"{name}={text}"
        if name in former:
            yield Finding("setting", NOTE, f"{said} is the former name of {former[name].name}")
        elif name in ours:
            yield _ours(ours[name], said)
        elif name.startswith("TRANSCONV_") and (hint := knobs.unknown(name)):
            yield Finding("setting", BAD, f"{said}: there is no such variable, so it has no effect", hint)
        elif name.startswith("TRITON_") and (known := _of_triton()) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield Finding(
                "setting",
                NOTE,
                f"{said}: the installed Triton reads no such variable",
                f"did you mean {near[0]}?" if near else "",
            )
        else:
            yield Finding("setting", OK, said)
    if not given:
        yield Finding("settings", OK, "no TRANSCONV_* or TRITON_* variable is set")


def _ours(knob: knobs.Knob[object], said: str) -> Finding:
    from transconv.selection import schedule_of_user
    from transconv.target import why_no_switches

    try:
        with suppress(OSError, RuntimeError):  # a cache that cannot be reached has a line of its own
            knob.checked()
        if knob.name == knobs.features.name and (reason := why_no_switches()):
            raise ValueError(reason)
        if knob.name == knobs.schedule.name:
            schedule_of_user()
    except ValueError as error:
        return Finding("setting", BAD, str(error), f"unset {knob.name}, or set it right")
    if knob.name == knobs.trust.name and knobs.trust() == "never":
        return Finding(
            "setting",
            NOTE,
            f"{said}: no kernel's first result is compared",
            f"unset {knob.name} unless all kernels were checked before",
        )
    if knob.name in UNUSUAL:
        return Finding(
            "setting", NOTE, f"{said}: {UNUSUAL[knob.name]}", f"unset {knob.name} if that is not meant"
        )
    return Finding("setting", OK, said)


def _of_triton() -> set[str]:
    """The names of the variables that Triton reads; none where it keeps no list of them."""
    try:
        from triton import knobs as table
    except Exception:  # software() has a line about that
        return set()
    kind = getattr(table, "base_knobs", ())
    groups = [vars(type(group)) for group in vars(table).values() if isinstance(group, kind)]
    return {str(row.key) for group in groups for row in group.values() if hasattr(row, "key")}
