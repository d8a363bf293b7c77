"""Kernels drawn at random: sources of a few lines that NumPy's rules allow, with arrays of drawn sizes."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

import numpy as np

from transconv.kernel import Group, KernelFunction, kernel

Array = np.ndarray[Any, np.dtype[Any]]
UNARY = ("-{0}", "abs({0})", "np.square({0})", "np.maximum({0}, 1)", "np.clip({0}, -2, 2)", "{0} * 3",
         "np.sign({0})", "{0}.astype(np.float32)", "np.exp(-abs({0}))", "np.where({0} > 0, {0}, 7)")
BINARY = ("{0} + {1}", "{0} - {1}", "{0} * {1}", "np.maximum({0}, {1})", "np.minimum({0}, {1})",
          "np.where({0} > {1}, {0}, {1})", "np.where(({0} < {1}) | ({0} > 2), {1}, {0})")
REDUCED = ("sum", "max", "min", "mean", "prod")


@dataclass(frozen=True)
class Drawn:
    """A source, the kernel of it, and its arguments."""

    text: str
    kernel: KernelFunction
    group: Group
    arguments: dict[str, Array]


class Draw:
    """Draws one kernel. ``tiles``: the names of tiles so far, each with its shape."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.seed = seed
        self.rows, self.cols = (int(n) for n in self.random.integers(1, 7, 2))
        self.lines: list[str] = []
        self.tiles: dict[str, tuple[int, ...]] = {}
        self.count = 0

    def one(self, of: Any) -> Any:
        return of[int(self.random.integers(len(of)))]

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def fitting(self, shape: tuple[int, ...]) -> list[str]:
        """The tiles that broadcast to a shape, and as they do, with dimensions of one element."""
        found = [n for n, s in self.tiles.items() if s == shape]
        if len(shape) == 2:
            found += [n for n, s in self.tiles.items() if s == shape[1:]]
            found += [f"{n}[:, None]" for n, s in self.tiles.items() if s == shape[:1]]
        return found

    def bind(self, text: str, shape: tuple[int, ...], indent: str = "    ") -> str:
        name = self.name()
        self.lines.append(f"{indent}{name} = {text}")
        self.tiles[name] = shape
        return name

    def step(self) -> None:
        """One more line, or a loop."""
        name = self.one(list(self.tiles))
        shape = self.tiles[name]
        kind = self.random.random()
        if kind < 0.25:
            self.bind(self.one(UNARY).format(name), shape)
        elif kind < 0.55:
            self.bind(self.one(BINARY).format(name, self.one(self.fitting(shape))), shape)
        elif kind < 0.7 and len(shape) == 2:
            axis = int(self.random.integers(2))
            self.bind(f"{name}.{self.one(REDUCED)}(axis={axis})", (shape[1 - axis],))
        elif kind < 0.76 and len(shape) == 2:
            self.bind(f"{name}.T", shape[::-1])
        elif kind < 0.82:
            at = int(self.random.integers(shape[0]))
            self.bind(f"{name}.copy()", shape)
            self.lines.append(f"    t{self.count}[{at}] = {self.one((2, -3))}")
        elif kind < 0.88 and len(shape) == 2:
            others = [n for n, s in self.tiles.items() if len(s) == 2 and s[0] == shape[1]]
            if others:
                other = self.one(others)
                self.bind(f"{name} @ {other}", (shape[0], self.tiles[other][1]))
        else:
            self.loop(name, shape)

    def loop(self, name: str, shape: tuple[int, ...]) -> None:
        acc = self.bind(f"{name} * 1.0", shape)
        stop = self.one(("3", "i + 1", "X.shape[0]"))
        self.lines.append(f"    for k in range({stop}):")
        other = self.one(self.fitting(shape))
        if self.random.random() < 0.5:
            self.lines.append(f"        if k {self.one(('<', '>', '=='))} 1:")
            self.lines.append(f"            {acc} = {acc} - 1.0")
        self.lines.append(f"        {acc} = {acc} * 0.5 + {other} * (k + 1)")

    def made(self) -> Drawn:
        """The kernel."""
        shape = (self.rows, self.cols)
        self.bind(f"group.load(X[i:], shape={shape})", shape)
        self.bind(f"group.load(Z[:, i:], shape={shape})", shape)
        self.bind(f"group.load(V[i * 2:], shape=({self.cols},))", (self.cols,))
        for _ in range(int(self.random.integers(2, 7))):
            self.step()
        stored = list(self.tiles)[-2:]
        arguments = self.arrays()
        for at, name in enumerate(stored):
            self.lines.append(f"    group.store(Y{at}[i], {name})")
            arguments[f"Y{at}"] = np.full((2, *self.tiles[name]), -77.0, np.float32)
        head = f"def drawn(group, {', '.join(arguments)}):\n    i, = group.id()\n"
        text = head + "\n".join(self.lines) + "\n"
        return Drawn(text, compiled(text, f"drawn_{self.seed}.py"), Group(2, 1), arguments)

    def arrays(self) -> dict[str, Array]:
        def sizes() -> tuple[int, int]:
            rows, cols = self.random.integers(0, 9, 2)
            return int(rows), int(cols)

        def values(*shape: int) -> Array:
            made = self.random.integers(-4, 5, shape)
            return made.astype(self.one((np.float32, np.float32, np.int32)))

        return {"X": values(*sizes()), "Z": values(*sizes()), "V": values(sizes()[0])}


def compiled(text: str, file: str) -> KernelFunction:
    """The kernel of a source, which is registered so that its lines are found."""
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names: dict[str, Any] = {"np": np}
    exec(compile(text, file, "exec"), names)
    return kernel(names["drawn"])  # type: ignore[no-any-return]
