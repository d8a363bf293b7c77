"""``doctor``: the cache folders of transconv and Triton, and the table of tuned schedules in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from transconv import knobs
from transconv.cli.diagnosis.findings import BAD, NOTE, OK, Finding, size
from transconv.disk_cache import why_untrusted, why_unwritable
from transconv.selection.tuning_db import record, store
from transconv.target import Target

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
    if (at := _of_triton()) is not None:
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


def _of_triton() -> Path | None:
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
