"""Kernels drawn at random: statements over tiles of one shape, their rows and columns, loops and branches.

Comparisons are of exact values alone, so that engines that round otherwise decide alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

HEAD = """import numpy as np
from transconv.kernel import kernel

@kernel
def drawn(group, X, Z, K, Y, S):
    i, j = group.work_offset()
    R, C = group.shape
"""


@dataclass
class Drawing:
    """``names``: of tiles with their kind: the shape (``RC``, ``R1``, ``1C``) and ``f`` for floats, ``e``
    for exact floats, ``i`` for integers."""

    draw: random.Random
    names: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def name(self, kinds: str = "fei", shape: str = "") -> str:
        found = [n for n, k in self.names.items() if k[2] in kinds and k.startswith(shape)]
        return self.draw.choice(found)

    def new(self, text: str, kind: str) -> None:
        name = f"v{len(self.names)}"
        self.lines.append(f"    {name} = {text}")
        self.names[name] = kind


def _shape(*kinds: str) -> str:
    """The shape of tiles that are combined."""
    rows = "R" if any(k[0] == "R" for k in kinds) else "1"
    return rows + ("C" if any(k[1] == "C" for k in kinds) else "1")


def _two(d: Drawing) -> None:
    a, b = d.name("fe"), d.name("fe")
    op = d.draw.choice(("{} + {}", "{} - {} * 0.5", "{} * np.tanh({})", "np.maximum({}, {})",
                        "{} / (abs({}) + 1.5)"))
    exact = "maximum" in op and d.names[a][2] == d.names[b][2] == "e"
    d.new(op.format(a, b), _shape(d.names[a], d.names[b]) + ("e" if exact else "f"))


def _one(d: Drawing) -> None:
    a = d.name("fe")
    op = d.draw.choice(("-{}", "abs({})", "np.exp(-abs({}))", "np.clip({}, -1.0, 1.5)", "{}**2 * 0.25",
                        "np.sqrt(abs({}))", "{}.copy()"))
    exact = op[:3] in ("-{}", "abs", "np.", "{}.") and "exp" not in op and "sqrt" not in op
    d.new(op.format(a), d.names[a][:2] + (d.names[a][2] if exact else "f"))


def _whole(d: Drawing) -> None:
    a, b = d.name("i"), d.name("i")
    op = d.draw.choice(("{} + {}", "{} * 3 - {}", "np.minimum({}, {})", "{} // 3 + {} % 5",
                        "({} & 7) | ({} & 3)"))
    d.new(op.format(a, b), _shape(d.names[a], d.names[b]) + "i")


def _chosen(d: Drawing) -> None:
    test, a, b = d.name("ei"), d.name("fe"), d.name("fe")
    text = d.draw.choice((f"np.where({test} > {d.draw.choice((-1, 0, 1))}, {a}, {b})",
                          f"np.where({test}.mask, 2.0, {a})",
                          f"np.where(({test} < 0) & ({d.name('ei')} >= 1), {a}, 0.5)"))
    used = [d.names[n] for n in d.names if n in text.replace("(", " ").replace(")", " ").replace(",", " ")
            .replace(".", " ").split()]
    d.new(text, _shape(*used) + "f")


def _reduced(d: Drawing) -> None:
    a = d.name()
    shape, kind = d.names[a][:2], d.names[a][2]
    axis = d.draw.choice((0, 1))
    op = d.draw.choice(("max", "min", "sum", "mean") if kind != "i" else ("max", "min", "sum"))
    scale = " * 0.125" if op == "sum" and kind != "i" else ""
    left = ("1" + shape[1], shape[0] + "1")[axis]
    rounds = op in ("sum", "mean") and kind != "i"
    d.new(f"{a}.{op}(axis={axis}, keepdims=True){scale}", left + ("f" if rounds else kind))


def _counted(d: Drawing) -> None:
    a = d.name("i")
    d.new(f"{a}.argmax(axis=1)[:, None]", d.names[a][0] + "1i")


def _moved(d: Drawing) -> None:
    step = d.draw.randrange(4)
    part = d.draw.choice((f"X[i + {step}:, j:]", f"Z[i:, {step}:]", f"X[{step}::2, j:]"))
    d.new(f"group.load({part}, shape=(R, C))", "RCe")


def _written(d: Drawing) -> None:
    a, b = d.name("fe", "RC"), d.name("fe")
    d.new(f"{a}.copy()", "RC" + d.names[a][2])
    name = f"v{len(d.names) - 1}"
    part = d.draw.choice(("[0] = 1.5", "[:, 0] = -2.0", f"[:] = {b}"))
    d.lines.append(f"    {name}{part}")
    d.names[name] = "RCf" if d.names[b][2] == "f" else d.names[name]


def _looped(d: Drawing) -> None:
    a, b = d.name("f", "RC"), d.name("fe")
    acc = f"v{len(d.names)}"
    trips = d.draw.choice(("3", "X.shape[1] // 3", "i + 1"))
    d.lines += [f"    {acc} = {a} * 1.0", f"    for k in range({trips}):",
                f"        {acc} = {acc} * 0.5 + {b}",
                f"        if k {d.draw.choice(('== 1', '> i', '% 2 == 0'))}:",
                f"            {acc} = {acc} + group.load(X[i + k:, j:], shape=(R, C))"]
    d.names[acc] = "RCf"


def _multiplied(d: Drawing) -> None:
    a, b = d.name("fe", "RC"), d.name("fe", "RC")
    d.new(f"({a} @ {b}.T) @ {d.name('fe', 'RC')} * 0.0625", "RCf")


STATEMENTS = (_two, _two, _one, _whole, _chosen, _reduced, _reduced, _counted, _moved, _written, _looped,
              _multiplied)


def source(seed: int) -> str:
    """A kernel; it stores the last values to Y, one after the other, and an integer to S."""
    d = Drawing(random.Random(seed))
    d.new("group.load(X[i:, j:], shape=(R, C))", "RCe")
    d.new("group.load(Z[i:, j:], shape=(R, C))", "RCe")
    d.new("group.load(K[i:, j:], shape=(R, C))", "RCi")
    d.new("v0 * 0.5 + v1", "RCf")
    for _ in range(d.draw.randrange(4, 9)):
        d.draw.choice(STATEMENTS)(d)
    return HEAD + "\n".join([*d.lines, *_stores(d)]) + "\n"


def _stores(d: Drawing) -> Iterator[str]:
    last = list(d.names)[-3:]
    for n, name in enumerate(last):
        yield f"    group.store(Y[{n}, i:, j:], {name} + group.zeros(shape=(R, C)))"
    yield f"    group.store(S[i:, j:], {d.name('i')} + group.zeros(shape=(R, C), dtype=np.int32))"
