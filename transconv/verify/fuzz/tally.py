"""Counts the outcomes of trials: lines to print, and a report in JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from transconv.verify.fuzz.trial_run import GOOD, Row


@dataclass(slots=True)
class Tally:
    """The outcomes of trials: rows of those that did not pass, and counts of all by their properties."""

    asked: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    facts: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    bad: list[Row] = field(default_factory=list)
    large: list[Row] = field(default_factory=list)  # trials that exceed a resource of the device
    ended: set[int] = field(default_factory=set)  # numbers of drawn trials
    refusals: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    spent: Counter[str] = field(default_factory=Counter)
    silent: int = 0  # answers of mostly zeros
    problems: int = 0  # of trials with several sets of scales and zero points, each

    def add(self, row: Row) -> None:
        status = row["status"]
        self.asked += 1
        self.problems += row.get("problems", 1)
        self.statuses[status] += 1
        asked = {**row["facts"], "way": row["way"], "device": row.get("device", "none")}
        for name, word in asked.items():
            self.facts.setdefault(name, {}).setdefault(word, Counter())[status] += 1
        for name in ("seconds", "generate_s", "compile_s"):
            self.spent[name] += row.get(name, 0.0)
        self.spent["kernels"] += row.get("kernels", 0)
        self.silent += status == "passed" and row.get("nonzero", 1.0) < 0.3
        if "number" in row:
            self.ended.add(row["number"])
        if status not in GOOD:
            self.bad.append(row)
        elif status != "passed":
            self.refusals[row["reason"][:160]] += 1
            if status == "resources":
                self.large.append({"line": row["line"], "reason": row["reason"]})

    @property
    def ok(self) -> bool:
        return not self.bad

    def describe(self) -> list[str]:
        """The last lines of a run."""
        said = ", ".join(f"{n} {word}" for word, n in self.statuses.most_common())
        per = self.spent["seconds"] / max(1, self.asked)
        parts = [f"{self.spent[name] / max(1, self.asked) * 1e3:.0f} ms {what}" for name, what in
                 (("generate_s", "to generate"), ("compile_s", "to compile and start"))
                 if self.spent[name]]
        several = f" of {self.problems} problems" if self.problems > self.asked else ""
        rates = f"{self.rate:.1f}/s" + (f", {self.problems / self.seconds:.0f} problems/s"
                                       if several and self.seconds else "")
        lines = [f"{self.asked} trials{several} in {self.seconds:.0f} s ({rates}): "
                 f"{said or 'none'}",
                 f"  {self.spent['kernels']:.0f} kernels, {per * 1e3:.0f} ms a trial"
                 + (f", of them {', '.join(parts)}" if parts else "")
                 + f"; {self.silent} answers were mostly zeros"]
        lines += [f"  {n} times {reason}" for reason, n in self.refusals.most_common(5)]
        return lines

    @property
    def rate(self) -> float:
        return self.asked / self.seconds if self.seconds else 0.0

    def next(self, first: int) -> int:
        """The first number of a drawn trial, from ``first`` on, that has not ended."""
        return next(n for n in count(first) if n not in self.ended)

    def to_json(self) -> dict[str, object]:
        """Everything worth keeping: counts by dimension and status, lines of what is not good."""
        return {"asked": self.asked, "problems": self.problems, "seconds": round(self.seconds, 1),
                "per second": round(self.rate, 2),
                "statuses": dict(self.statuses), "mostly zeros": self.silent,
                "spent": {k: round(v, 1) for k, v in self.spent.items()},
                "counts": {name: {word: dict(c) for word, c in sorted(words.items())}
                           for name, words in sorted(self.facts.items())},
                "refusals": dict(self.refusals.most_common(50)), "out of resources": self.large,
                "not good": self.bad}
