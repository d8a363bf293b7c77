"""A trial of a kernel: a program, the work, its groups and arrays; written to and read from one line.

    kernel work=5,7 group=2,3 seed=9 X=f32[4,6] Y=f32[1,5,7]! ;; i, j = group.work_offset() ;; ...

Statements inside of others begin with a ``>`` for each of them. Arrays with ``!`` are stored to: they
begin with the same number everywhere. The others are filled from the seed, with small numbers, or with any
of their type (``N=u8[4,6]~``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from transconv.errors import ProblemError
from transconv.kernel import Group
from transconv.kernel_trials.grammar import check

END = ";;"
CANARY = -77
TYPES = {"f32": "float32", "f16": "float16", "i32": "int32", "i8": "int8", "u8": "uint8", "i64": "int64",
         "bool": "bool_"}
FUNCTIONS = {"mixed": """@kernel.func
def mixed(a, b):
    if a.dtype == b.dtype:
        return np.where(a > b, a - b, b)
    return np.maximum(a, b)""", "own": """@kernel.func(inline=False)
def own(a, b):
    return np.where(a > b, a * 0.5, b - 1.0)""", "scoped": """def scoped(x):
    pass


@kernel.func(scoped, scope=WorkGroup)
def scoped_of_group(group, x):
    return x + group.id()[0]


@kernel.func(scoped, scope=SubGroup)
def scoped_of_sub_group(sg, x):
    return x - sg.subgroup_id()


@kernel.func(scoped, scope=WorkItem)
def scoped_of_item(item, x):
    return x * 2.0 + item.local_id()[0]"""}
IMPORTED = ("Group", "SubGroup", "WorkGroup", "WorkItem", "atomic_ref", "create_mapping", "kernel")
ARRAY = re.compile(rf"([A-Z]\w*)=({'|'.join(TYPES)})\[([\d,]*)\](!?)(~?)", re.ASCII)
NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)
MOST = 1 << 24  # elements of an array


@dataclass(frozen=True, slots=True)
class Drawn:
    """An array: its type, its sizes, whether the kernel stores to it, and whether it holds any number of
    its type (``u8[4]~``)."""

    dtype: str
    shape: tuple[int, ...]
    stored: bool = False
    full: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{'!' * self.stored}{'~' * self.full}"

    def said(self) -> str:
        """An expression of NumPy that makes it; ``draw`` is a generator."""
        kind = f"np.{TYPES[self.dtype]}"
        if self.stored:
            canary = {"u8": 77, "bool": False}.get(self.dtype, CANARY)
            return f"np.full({self.shape}, {canary}, {kind})"
        if self.dtype[0] == "f":  # few digits, so that sums are exact
            return f"(draw.integers(-32, 33, {self.shape}) / 8).astype({kind})"
        if self.full:  # its ends are likely
            least, most = f"np.iinfo({kind}).min", f"np.iinfo({kind}).max"
            return (f"np.where(draw.integers(0, 4, {self.shape}) > 0, "
                    f"draw.integers({least}, {most}, {self.shape}, {kind}, True), "
                    f"draw.choice(np.array([{least}, {most}, 0, 1], {kind}), {self.shape}))")
        low = 0 if self.dtype in ("u8", "bool") else -9
        return f"draw.integers({low}, {2 if self.dtype == 'bool' else 10}, {self.shape}).astype({kind})"


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """``work``: the sizes of the launch; ``group``: those of a group; ``lines``: statements, with a ``>``
    for each statement that they are inside of; ``sub``: the items of a sub-group, 0 if nothing is said."""

    work: tuple[int, ...]
    group: tuple[int, ...]
    seed: int
    arrays: tuple[tuple[str, Drawn], ...]
    lines: tuple[str, ...]
    sub: int = 0

    def __str__(self) -> str:
        head = [f"work={','.join(map(str, self.work))}", f"group={','.join(map(str, self.group))}",
                f"seed={self.seed}", *([f"sub={self.sub}"] if self.sub else []),
                *(f"{n}={a}" for n, a in self.arrays)]
        return f" {END} ".join(["kernel " + " ".join(head), *self.lines])

    @staticmethod
    def parse(line: str) -> KernelTrial:
        """Read a line. Raises ProblemError, one sentence, also for statements that do more than compute
        with the trial's arrays (grammar.py): they are executed."""
        head, *lines = (part.strip() for part in line.split(END))
        word, _, rest = head.partition(" ")
        said: dict[str, tuple[int, ...]] = {}
        arrays: list[tuple[str, Drawn]] = []
        for part in rest.split():
            name, _, value = part.partition("=")
            if name in ("work", "group", "seed", "sub") and NUMBERS.fullmatch(value):
                said[name] = _numbers(value)
            elif found := ARRAY.fullmatch(part):
                arrays.append((found[1], Drawn(found[2], _numbers(found[3]), bool(found[4]),
                                               bool(found[5]))))
            else:
                raise ProblemError(f"'{part}' in a trial of a kernel; expected work=, group=, seed=, or "
                                   "an array such as X=f32[4,6]")
        if word != "kernel" or {*said, "sub"} != {"work", "group", "seed", "sub"} or not lines:
            raise ProblemError(f"the trial '{line[:80]}'; expected kernel work= group= seed=, arrays, and "
                               f"statements behind {END}")
        made = KernelTrial(said["work"], said["group"], said["seed"][0], tuple(arrays), tuple(lines),
                           said.get("sub", (0,))[0])
        if len(dict(arrays)) < len(arrays) or any(prod(a.shape) > MOST for _, a in arrays):
            raise ProblemError(f"the arrays of '{line[:80]}'; expected each once, of at most {MOST} "
                               "elements")
        check(made.function(), [*FUNCTIONS], [*IMPORTED, "drawn"])
        return made

    @property
    def ragged(self) -> bool:
        """Whether groups reach beyond the work."""
        return any(w % g for w, g in zip(self.work, self.group, strict=True))

    @property
    def whole(self) -> bool:
        """Whether the statements say the same of all groups."""
        return any(a.full for _, a in self.arrays)

    @property
    def facts(self) -> dict[str, str]:
        """What the trial is about, to count by."""
        whole = "\n".join(self.lines)
        scopes = ("work-items", "workitems"), ("sub-groups", "subgroups"), ("group", "")
        said = {"scope": next(name for name, word in scopes if word in whole),
                "groups": f"{len(self.group)}D",
                "ragged": "yes" if self.ragged else "no", "whole": "yes" if self.whole else "no",
                "empty": "yes" if any(0 in a.shape for _, a in self.arrays) else "no",
                "dtype": ":".join(sorted({a.dtype for _, a in self.arrays}))}
        for name, words in (("loops", ("for ",)), ("branches", ("if ",)), ("products", (" @ ",)),
                            ("gathers", ("X[v", "X[abs", "Z[v")), ("writes", ("] = ", "out=")),
                            ("masks", (".mask",)), ("atomics", ("atomic_ref",)),
                            ("mappings", ("mapping=",)), ("functions", tuple(f"{n}(" for n in FUNCTIONS)),
                            ("reductions", ("axis=", ".sum()", ".max()"))):
            said[name] = "yes" if any(w in whole for w in words) else "no"
        return said

    def function(self) -> str:
        """The function of its statements."""
        names = ", ".join(["group", *(n for n, _ in self.arrays)])
        lines = []
        for line in self.lines:
            deep = len(line) - len(line.lstrip(">"))
            lines.append("    " * (deep + 1) + line.lstrip("> "))
        return "\n".join([f"def drawn({names}):", *lines]) + "\n"

    def kernel(self) -> str:
        """The kernel's source."""
        head = ["import numpy as np", f"from transconv.kernel import {', '.join(IMPORTED)}", ""]
        for name, text in FUNCTIONS.items():
            if f"{name}(" in "".join(self.lines):
                head += [*text.split("\n"), ""]
        return "\n".join([*head, "@kernel", self.function()])

    @property
    def launch(self) -> Group:
        """The group of the call."""
        return Group(self.work, self.group, self.sub or None)

    def making(self) -> Iterator[str]:
        """The statements that make the arrays."""
        yield f"draw = np.random.default_rng({self.seed})"
        for name, array in self.arrays:
            yield f"{name} = {array.said()}"

    def program(self) -> str:
        """A program that runs the kernel in the simulator and elsewhere, and prints where they differ from
        NumPy."""
        names = [n for n, _ in self.arrays]
        stored = [n for n, a in self.arrays if a.stored]
        given = ", ".join(f"{n}_0" if n in stored else n for n in names)
        lines = ["from transconv.kernel_trials import KernelTrial",
                 "from transconv.kernel_trials.numpy_answer import answered",
                 self.kernel(), *self.making(),
                 *(f"{n}_0 = {n}.copy()" for n in stored),
                 f"group = Group({self.work}, {self.group}, {self.sub or None})",
                 f"drawn.simulate(group, {given})",
                 f"drawn(group, {', '.join(names)})  # TRITON_INTERPRET=1, or arrays on a GPU",
                 f"trial = KernelTrial.parse({str(self)!r})", "said = trial.made()",
                 "answered(trial, said)",
                 *(f"print(np.argwhere(~np.isclose({m}, said[{n!r}], 2e-4, 2e-4, True)))"
                   for n in stored for m in (f"{n}_0", n))]
        return "\n".join(lines) + "\n"

    def made(self) -> dict[str, Any]:
        """The arrays."""
        import numpy as np

        names: dict[str, Any] = {"np": np}
        exec("\n".join(self.making()), names)
        return {n: names[n] for n, _ in self.arrays}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
