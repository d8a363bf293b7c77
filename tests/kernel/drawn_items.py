"""Kernels of work-items drawn at random: numbers, branches in branches, loops, rows of arrays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

HEAD = """import numpy as np
from transconv.kernel import kernel

@kernel
def drawn(group, X, Z, K, Y, S):
    @group.workitems
    def inner(item):
        i, j = item.global_id()
        a, b = item.local_id()
        if i < K.shape[0] and j < K.shape[1]:
"""


@dataclass
class Drawing:
    """``names``: of numbers: ``f`` floats, ``e`` exact ones, ``i`` integers. ``deep``: branches around."""

    draw: random.Random
    names: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    deep: int = 3

    def name(self, kinds: str) -> str:
        return self.draw.choice([n for n, k in self.names.items() if k in kinds])

    def say(self, text: str) -> None:
        self.lines.append("    " * self.deep + text)

    def value(self) -> tuple[str, str]:
        """An expression, and its kind."""
        f, g, i = self.name("fe"), self.name("fe"), self.name("i")
        return self.draw.choice((
            (f"{f} + {g} * 0.5", "f"), (f"np.maximum({f}, {g})", "f"), (f"abs({f})", self.names[f]),
            (f"{f} / (abs({g}) + 1.5)", "f"), (f"np.where({self.name('ei')} > 0, {f}, {g})", "f"),
            (f"{f} * {i} * 0.125", "f"), ("X[i % X.shape[0], j % X.shape[1]]", "e"),
            ("Z[i].sum() * 0.125", "f"), ("Z[j].max()", "e"),
            (f"(X[i % X.shape[0]] * {f}).sum() * 0.125", "f"), (f"min({f}, 1.5)", "f")))

    def test(self) -> str:
        e, i = self.name("e"), self.name("i")
        return self.draw.choice((f"{e} > 0.25", f"{i} % 2 == 0", f"{e} < 0.5 and {i} > -3", f"not {i} > 2",
                                 "i > j", f"a == b or {e} > 1.0", "X.shape[0] > 4"))

    def statement(self) -> None:
        kind = self.draw.randrange(6)
        if kind < 3 or self.deep > 4:
            text, found = self.value()
            if self.deep > 3:  # names of branches end with these
                target = self.name("f")
                self.say(f"{target} = {text}")
            else:
                self.say(f"v{len(self.names)} = {text}")
                self.names[f"v{len(self.names)}"] = found
        elif kind == 3 and self.deep == 3:
            i = self.name("i")
            self.say(f"v{len(self.names)} = {i} * 3 - {self.name('i')} // 2 + a")
            self.names[f"v{len(self.names)}"] = "i"
        elif kind == 4:
            self.say(f"if {self.test()}:")
            self.inside()
            if self.draw.random() < 0.5:
                self.say("else:")
                self.inside()
        else:
            self.say(f"for k in range({self.draw.choice(('3', 'X.shape[1]'))}):")
            self.deep += 1
            target = self.name("f")
            self.say(f"{target} = {target} * 0.5 + X[i % X.shape[0], k % X.shape[1]]")
            self.deep -= 1

    def inside(self) -> None:
        self.deep += 1
        for _ in range(self.draw.randrange(1, 3)):
            self.statement()
        self.deep -= 1


def source(seed: int) -> str:
    """A kernel; it stores the last numbers to Y, one after the other, and an integer to S."""
    d = Drawing(random.Random(seed))
    for text, kind in (("X[i % X.shape[0], j % X.shape[1]]", "e"), ("K[i, j]", "i"),
                       ("v0 * 0.5 + 1.0", "f"), ("Z[i % Z.shape[0], 0] - v0", "f")):
        d.say(f"v{len(d.names)} = {text}")
        d.names[f"v{len(d.names)}"] = kind
    for _ in range(d.draw.randrange(3, 8)):
        d.statement()
    floats = [n for n, k in d.names.items() if k in "fe"]
    for n, name in enumerate(floats[-3:]):
        d.say(f"Y[{n}, i, j] = {name}")
    d.say(f"S[i, j] = {d.name('i')}")
    return HEAD + "\n".join([*d.lines, "    inner()"]) + "\n"
