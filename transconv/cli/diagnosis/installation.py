"""``doctor``: which software is installed, whether it is supported, and which variables are set.

``doctor``: the cache folders of transconv and Triton, and the table of tuned schedules in use.
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.cli.diagnosis.findings import BAD, NOTE, OK, Finding, size
from transconv.disk_cache import why_untrusted, why_unwritable
from transconv.selection.tuning_db import record, store
from transconv.target import Target
from transconv.version import __version__

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
    Dependency("torch", "2.11", "2.13"),
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
        return Finding(name, BAD, f"{found} cannot be imported: {type(error).__name__}: {error}",
                       install)
    if numbers(found) < numbers(package.oldest):
        return Finding(name, BAD, f"{found} is older than {package.oldest}", install)
    if numbers(found) > numbers(package.newest):
        return Finding(name, NOTE, f"{found} is newer than what the tests run with "
                       f"({package.newest})", package.later)
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
            yield Finding("setting", NOTE, f"{said}: the installed Triton reads no such variable",
                          f"did you mean {near[0]}?" if near else "")
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
        return Finding("setting", NOTE, f"{said}: no kernel's first result is compared",
                       f"unset {knob.name} unless all kernels were checked before")
    if knob.name in UNUSUAL:
        return Finding("setting", NOTE, f"{said}: {UNUSUAL[knob.name]}",
                       f"unset {knob.name} if that is not meant")
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


MOST = 50_000  # files that are counted in a folder
OWN = "set TRANSCONV_CACHE to a folder of yours"
OURS = "kernels are generated and checked anew in every process"
TRITONS = "kernels are compiled anew in every process"


def caches() -> Iterator[Finding]:
    """The folders of transconv and of Triton."""
    try:
        ours = knobs.cache()
    except (OSError, RuntimeError) as error:
        yield Finding("cache", BAD, f"cannot be found ({error}): {OURS}", OWN)
    else:
        yield folder("cache", ours, OURS, OWN, strict=True)
    if (at := _triton_folder()) is not None:
        yield folder("triton", at, TRITONS, "set TRITON_CACHE_DIR to a folder of yours",
                     strict=False)


def folder(check: str, at: Path, otherwise: str, todo: str, strict: bool) -> Finding:
    """One folder: its content, whether it is writable and trusted. ``otherwise``: the consequence if it is
    not; ``strict``: nothing is read from an untrusted folder."""
    try:
        if not at.exists():
            if reason := why_unwritable(at / "x"):
                return Finding(check, BAD, f"{at} cannot be made ({reason}): {otherwise}", todo)
            return Finding(check, OK, f"{at} is not there yet; it is made at the first use")
        reason = why_untrusted(at)
        held = _content(at)
    except OSError as error:
        return Finding(check, BAD, f"{at} cannot be read ({error.strerror or error}): {otherwise}",
                       todo)
    if reason and strict:
        return Finding(check, BAD, f"{at} {reason}: it is not used, {otherwise}", todo)
    if reason:
        return Finding(check, NOTE, f"{at} {reason}: whoever writes there decides what your GPU runs",
                       todo)
    if unwritable := why_unwritable(at / "x"):
        return Finding(check, BAD, f"{at} cannot be written to ({unwritable}): nothing new is kept, "
                       f"so that what is not in it is found out by every process", todo)
    return Finding(check, OK, f"{at}, {held}, writable and yours alone")


def _content(at: Path) -> str:
    """How much is in a folder."""
    count = total = 0
    for here, _, names in os.walk(at):
        for name in names:
            count += 1
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except OSError:  # another process has removed it
                continue
        if count > MOST:
            return f"more than {MOST} files, {size(total)} and more"
    return f"{count} files, {size(total)}"


def _triton_folder() -> Path | None:
    """Where Triton keeps machine code; None if unknown."""
    try:
        from triton import knobs as table

        return Path(table.cache.dir)
    except Exception:  # an older Triton, or none: software() reports it
        return None


# -- the tuned table -------------------------------------------------------------------------------


def tuned(target: Target) -> Iterator[Finding]:
    """The rows of tuned schedules that are used on this chip."""
    switch, machine = knobs.tuned(), record.machine(target)
    if switch == "0":
        yield Finding("tuned", NOTE, "switched off (TRANSCONV_TUNED=0): the estimate alone chooses",
                      "unset TRANSCONV_TUNED to use what was tuned")
        return
    counts: dict[str, int] = {}
    stale = 0
    for place, path in _tables(switch):
        try:
            found = store.load(path)
        except (OSError, ValueError) as error:
            yield Finding("tuned", BAD, f"{error}", "unset TRANSCONV_TUNED, or name another file")
            return
        mine = [r for r in found if r.machine == machine]
        counts[place] = sum(r.current for r in mine)
        stale += len(mine) - counts[place]
    kept = (record.of_mapping(x) for _, content in store.DRAWER.items() for x in _listed(content))
    counts["your cache"] = sum(r.current and r.machine == machine for r in kept if r)
    said = ", ".join(f"{n} rows of {place}" for place, n in counts.items())
    if target.backend == "interpreter":
        yield Finding("tuned", OK, f"{said} for {machine}: the interpreter needs none")
    elif not any(counts.values()):
        reason = f"; {stale} were measured with another version of Triton" if stale else ""
        yield Finding("tuned", NOTE, f"{said} for {machine}{reason}: the estimate alone chooses",
                      "python -m transconv tune FILE finds better schedules for your layers")
    else:
        yield Finding("tuned", OK, f"{said} for {machine}")


def _tables(switch: str) -> Iterator[tuple[str, Path]]:
    if switch != "1":
        yield switch, Path(switch)
    for place in sorted(files("transconv").joinpath("data").iterdir(), key=lambda p: p.name):
        if place.name.startswith("tuned_") and place.name.endswith(".csv"):
            yield f"the package's {place.name}", Path(str(place))


def _listed(content: dict[str, Any]) -> list[Any]:
    found = content.get("rows")
    return found if isinstance(found, list) else []
