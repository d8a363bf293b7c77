"""The outcome of a run of requests: lines, a summary, a report in JSON.

The words and the last line are benchdnn's. A failure is followed by the command that repeats it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transconv.disk_cache import replace_named
from transconv.verify.benchdnn.requests import BenchdnnRequest
from transconv.version import __version__

STATUSES = ("PASSED", "SKIPPED", "MISTRUSTED", "UNIMPLEMENTED", "INVALID_ARGUMENTS", "FAILED",
            "LISTED", "INITIALIZED", "EXECUTED")
COUNTED = STATUSES[:7]  # in benchdnn's last line, in its order; what was only run has passed
BAD = ("FAILED", "INVALID_ARGUMENTS")
DOUBTFUL = (*BAD, "UNIMPLEMENTED", "MISTRUSTED", "SKIPPED")  # what --strict does not let pass
MOST_TOLD = 3  # failing schedules of one problem that are printed


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What came of a request; ``row`` is the worker's (see benchdnn/run.py)."""

    place: int
    request: BenchdnnRequest
    status: str
    reason: str = ""
    row: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """``12:FAILED (reason) command``, and one more command for each other failing schedule."""
        failures: list[tuple[str, str]] = self.row.get("failures", [])
        schedule = failures[0][0] if self.status == "FAILED" and failures else ""
        told = f" ({self.reason})" if self.reason else ""
        yield f"{self.place}:{self.status}{told} {self.request.repeat(schedule)}"
        for schedule, reason in failures[1:MOST_TOLD]:
            yield f"    also ({reason}) {self.request.repeat(schedule)}"
        if len(failures) > MOST_TOLD:
            yield f"    and {len(failures) - MOST_TOLD} more failing schedules; see --json"

    def entry(self) -> dict[str, Any]:
        """The result as JSON has it."""
        failures = [{"schedule": c, "reason": r, "repeat": self.request.repeat(c)}
                    for c, r in self.row.get("failures", [])]
        more = {k: v for k, v in self.row.items() if k not in ("status", "reason", "fatal", "trace")}
        return {"place": self.place, "status": self.status, "reason": self.reason,
                "repeat": self.request.repeat(), "read": self.request.where, **more,
                "failures": failures}


@dataclass(slots=True)
class BenchdnnReport:
    """The results of a run in the order of the requests, and what had no effect."""

    remarks: dict[str, str]
    results: list[RequestOutcome] = field(default_factory=list)
    asked: int = 0  # problems, those that were not reached too
    stopped: int = 0  # the exit code of a run that was stopped

    @property
    def counts(self) -> Counter[str]:
        return Counter(r.status for r in self.results)

    def last_line(self) -> str:
        """``tests:N passed:N ...``; problems that were only made or run count as passed."""
        counts = self.counts
        counts["PASSED"] += counts["INITIALIZED"] + counts["EXECUTED"]
        return f"tests:{len(self.results)} " + " ".join(
            f"{word.lower()}:{counts[word]}" for word in COUNTED)

    def reasons(self) -> list[tuple[str, str, int]]:
        """(status, reason, how often) of everything that was not checked."""
        found = Counter((r.status, r.reason) for r in self.results
                        if r.status in ("SKIPPED", "UNIMPLEMENTED", "INVALID_ARGUMENTS"))
        return [(status, reason, n) for (status, reason), n in found.most_common()]

    def summary(self) -> Iterator[str]:
        """The lines after the last problem."""
        for status, reason, n in self.reasons():
            yield f"{status} {n}: {reason}"
        for option, reason in self.remarks.items():
            yield f"no effect: {option}: {reason}"
        plans = sum(r.row.get("plans", 0) for r in self.results)
        too_large = sum(r.row.get("too_large", 0) for r in self.results)
        rejected = sum(r.row.get("rejected", 0) for r in self.results)
        if plans > len(self.results):
            yield (f"{plans} plans were checked" + (f", {too_large} of them take more than the "
                                                    "device has" if too_large else ""))
        answers = Counter(r.row["answers"] for r in self.results if "answers" in r.row)
        for named, n in answers.most_common():
            yield f"{n} problems beside {named}"
        if rejected:
            yield (f"{rejected} better schedules were passed over: their first results were wrong "
                   "(--schedules=all shows them)")
        if self.stopped:
            yield f"stopped: {len(self.results)} of {self.asked} problems have ended"
        yield self.last_line()

    def code(self, strict: bool = False) -> int:
        """0 if nothing failed, else 1; ``strict``: also if anything was not checked. 130 or 143 of a
        run that was stopped."""
        return self.stopped or int(any(self.counts[word] for word in (DOUBTFUL if strict else BAD)))

    def write(self, path: Path, command: str) -> None:
        """Everything as JSON."""
        results = sorted(self.results, key=lambda r: r.place)
        content = {"command": command, "machine": machine(), "summary": self.last_line(),
                   "counts": dict(self.counts), "asked": self.asked, "stopped": bool(self.stopped),
                   "reasons": [{"status": s, "reason": r, "count": n} for s, r, n in self.reasons()],
                   "no_effect": self.remarks, "results": [r.entry() for r in results]}
        replace_named(path, json.dumps(content, indent=1, default=str) + "\n")


def machine() -> dict[str, str]:
    """What the results were made with."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": name, **packages()}


def packages() -> dict[str, str]:
    """The versions of this package and those below it; empty where there is none."""
    found = {"transconv": __version__}
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
