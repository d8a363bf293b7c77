"""The report of a bisection: a line for each stage, and the stage that is wrong."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from transconv.ir import Kernel, readable

PARTS = ("ir", "emitter", "compiler")


@dataclass(frozen=True, slots=True)
class Blame:
    """The result. ``stage``: ``compute``, ``naive``, a pass, ``emit``, ``compiler``, or empty
    if all stages that could be asked are right; ``rule``: of the simplifier, if one is unsound;
    ``diff``: of the kernel's text before and after the stage; ``text``: the whole report;
    ``verdict``: on the last stage that was asked, in words."""

    stage: str
    rule: str
    diff: str
    text: str
    verdict: str = ""

    def __bool__(self) -> bool:
        return bool(self.stage)


class BisectReport:
    """Builds the report, a line for each stage."""

    def __init__(self, title: str) -> None:
        self.lines = [title]
        self.verdict = ""

    def say(self, stage: str, verdict: str) -> None:
        """Add a line."""
        self.verdict = verdict
        self.lines.append(f"  {stage:<11} {verdict}")

    def guilty(self, stage: str, reason: str, rule: str = "", diff: str = "") -> Blame:
        """Record the first wrong stage, which ends the search."""
        self.say(stage, f"WRONG: {reason}")
        return self.end(stage, rule, diff)

    def end(self, stage: str, rule: str = "", diff: str = "") -> Blame:
        """The whole report; ``stage`` is empty where none is wrong."""
        verdict = self.verdict
        if rule:
            self.say("", f"by a rule of the simplifier, {rule}")
        tail = ["", *diff.splitlines()] if diff else []
        name = rule.partition(":")[0].partition(" (")[0]
        return Blame(stage, name, diff, "\n".join([*self.lines, *tail]), verdict)


def changes(before: Kernel | None, after: Kernel, earlier: str, later: str) -> str:
    """The statements that changed, as a unified diff."""
    old = readable(before).splitlines() if before is not None else []
    return "\n".join(difflib.unified_diff(old, readable(after).splitlines(), earlier, later,
                                          lineterm="", n=1))
