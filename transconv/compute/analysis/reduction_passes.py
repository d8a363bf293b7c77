"""Sweeps: how often a computation loops over its reduced axes, and what it does in each loop.

    read  x = X[n, k]                       sweep 0: x, top = max(x; k)
    let   top = max(x; k)                   sweep 1: x, e, total = sum(e; k)
    let   e = exp(x - top)                  sweep 2: x, e, store Y[n, k]
    let   total = sum(e; k)
    store Y[n, k] = e / total

A reduction is known at the end of its sweep; steps that depend on it belong to a later one. A step that
varies within a row is evaluated again in every sweep that needs it; other steps are evaluated once, before
the first sweep that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transconv.compute.steps import Reduction, Step, Write, used
from transconv.ir import Var


@dataclass(frozen=True, slots=True)
class Sweep:
    """``before``: steps of a whole row; ``steps``: steps of every element, in order, including the sweep's
    reductions and stores."""

    before: tuple[Step, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """All sweeps, and the steps of a whole row after the last one. Without a reduction there are no
    sweeps."""

    each: tuple[Sweep, ...]
    behind: tuple[Step, ...]


def sweeps(steps: tuple[Step, ...], reduced: Iterable[str]) -> Sweeps:
    """The fewest sweeps over the reduced axes that evaluate the steps; each reduction is over all of these
    axes."""
    known = _Levels(steps, reduced)
    count = 1 + max((known.level[i] for i in known.ends), default=-1)
    within = [known.needed(i for i in known.ends if known.level[i] == number) for number in range(count)]
    places = known.places(within)
    before = [tuple(s for i, s in enumerate(steps) if places.get(i) == number)
              for number in range(count + 1)]
    each = [tuple(steps[i] for i in sorted(found)) for found in within]
    return Sweeps(tuple(Sweep(b, e) for b, e in zip(before, each, strict=False)), before[count])


class _Levels:
    """For each step, by its index: the steps that it uses, the number of sweeps that must end before it
    (``level``), and whether it varies within a row (``inside``). ``ends``: the reductions and stores of
    sweeps."""

    def __init__(self, steps: tuple[Step, ...], reduced: Iterable[str]) -> None:
        axes = {Var(a) for a in reduced}
        self.steps = steps
        made: dict[Var, int] = {}
        self.used: list[list[int]] = []
        self.level: list[int] = []
        self.inside: list[bool] = []
        for i, step in enumerate(steps):
            mentioned = used(step)
            needed = sorted(made[v] for v in mentioned if v in made)
            self.used.append(needed)
            self.level.append(max((self.level[j] + self.reduces(j) for j in needed), default=0))
            self.inside.append(self.reduces(i) or not axes.isdisjoint(mentioned)
                               or any(self.inside[j] and not self.reduces(j) for j in needed))
            if not isinstance(step, Write):
                made[step.var] = i
        self.ends = [i for i, s in enumerate(steps)
                     if self.inside[i] and isinstance(s, (Reduction, Write))]

    def reduces(self, i: int) -> bool:
        return isinstance(self.steps[i], Reduction)

    def needed(self, ends: Iterable[int]) -> set[int]:
        """The steps within a row that some ends need, including these."""
        found: set[int] = set()
        left = list(ends)
        while left:
            at = left.pop()
            if at not in found:
                found.add(at)
                left += [j for j in self.used[at] if self.inside[j] and not self.reduces(j)]
        return found

    def places(self, within: list[set[int]]) -> dict[int, int]:
        """The sweep before which each step of a whole row is evaluated: the first that needs it, for a
        store the earliest possible. A value that nothing needs is left out."""
        found: dict[int, int] = {}
        for number, sweep in reversed(list(enumerate(within))):
            found |= {j: number for i in sweep for j in self.used[i] if not self.inside[j]}
        for i in reversed(range(len(self.steps))):
            if self.inside[i]:
                continue
            if isinstance(self.steps[i], Write):
                found[i] = self.level[i]
            if i in found:
                for j in self.used[i]:
                    if not self.inside[j]:
                        found[j] = min(found[i], found.get(j, found[i]))
        return found
