"""A trial of a kernel: a program, the work, its groups and arrays; written to and read from one line.

    kernel work=5,7 group=2,3 seed=9 X=f32[4,6] Y=f32[1,5,7]! ;; i, j = group.work_offset() ;; ...

Statements inside of others begin with a ``>`` for each of them. Arrays with ``!`` are stored to: they
begin with the same number everywhere. The others are filled from the seed, with small numbers, or with any
of their type (``N=u8[4,6]~``).

A line comes from a command or a file; its statements must be those of grammar.py before they are executed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from transconv.ir import Memory
from transconv.ir import run as interpret
from transconv.kernel import Group, KernelFunction
from transconv.kernel.trials.grammar import FUNCTIONS, IMPORTED, check
from transconv.kernel.trials.numpy_answer import answered
from transconv.support import ProblemError, executed
from transconv.verify.fuzz.trial import Trial, TrialRun, less

END = ";;"
CANARY = -77
TYPES = {
    "f32": "float32",
    "f16": "float16",
    "i32": "int32",
    "i8": "int8",
    "u8": "uint8",
    "i64": "int64",
    "bool": "bool_",
}
ARRAY = re.compile(rf"([A-Z]\w*)=({'|'.join(TYPES)})\[([\d,]*)\](!?)(~?)", re.ASCII)
NUMBERS = re.compile(r"\d{1,18}(,\d{1,18})*", re.ASCII)
MOST = 1 << 24  # elements of an array
NEAR = 2e-4  # floats: of 1, and of the value
VALUE = re.compile(r"\bv\d+\b")
ASSIGNED = re.compile(r"(>*) ?(v\d+) = (.*)")


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
            return (
                f"np.where(draw.integers(0, 4, {self.shape}) > 0, "
                f"draw.integers({least}, {most}, {self.shape}, {kind}, True), "
                f"draw.choice(np.array([{least}, {most}, 0, 1], {kind}), {self.shape}))"
            )
        low = 0 if self.dtype in ("u8", "bool") else -9
        return f"draw.integers({low}, {2 if self.dtype == 'bool' else 10}, {self.shape}).astype({kind})"


@dataclass(frozen=True, slots=True)
class KernelTrial(Trial):
    """A trial of a kernel. ``work``: the sizes of the launch; ``group``: those of a group; ``lines``:
    statements, with a ``>`` for each statement that they are inside of; ``sub``: the items of a sub-group,
    0 if nothing is said."""

    work: tuple[int, ...]
    group: tuple[int, ...]
    seed: int
    arrays: tuple[tuple[str, Drawn], ...]
    lines: tuple[str, ...]
    sub: int = 0

    refusals = ()

    def __str__(self) -> str:
        head = [
            f"work={','.join(map(str, self.work))}",
            f"group={','.join(map(str, self.group))}",
            f"seed={self.seed}",
            *([f"sub={self.sub}"] if self.sub else []),
            *(f"{n}={a}" for n, a in self.arrays),
        ]
        return f" {END} ".join(["kernel " + " ".join(head), *self.lines])

    @staticmethod
    def parse(line: str) -> KernelTrial:
        """Read a line. Raises ProblemError, one sentence, also for statements that do more than compute
        with the trial's arrays (``check``): they are executed."""
        head, *lines = (part.strip() for part in line.split(END))
        word, _, rest = head.partition(" ")
        said: dict[str, tuple[int, ...]] = {}
        arrays: list[tuple[str, Drawn]] = []
        for part in rest.split():
            name, _, value = part.partition("=")
            if name in ("work", "group", "seed", "sub") and NUMBERS.fullmatch(value):
                said[name] = _numbers(value)
            elif found := ARRAY.fullmatch(part):
                arrays.append(
                    (found[1], Drawn(found[2], _numbers(found[3]), bool(found[4]), bool(found[5])))
                )
            else:
                raise ProblemError(
                    f"'{part}' in a trial of a kernel; expected work=, group=, seed=, or "
                    "an array such as X=f32[4,6]"
                )
        if word != "kernel" or {*said, "sub"} != {"work", "group", "seed", "sub"} or not lines:
            raise ProblemError(
                f"the trial '{line[:80]}'; expected kernel work= group= seed=, arrays, and "
                f"statements behind {END}"
            )
        made = KernelTrial(
            said["work"],
            said["group"],
            said["seed"][0],
            tuple(arrays),
            tuple(lines),
            said.get("sub", (0,))[0],
        )
        if len(dict(arrays)) < len(arrays) or any(prod(a.shape) > MOST for _, a in arrays):
            raise ProblemError(
                f"the arrays of '{line[:80]}'; expected each once, of at most {MOST} elements"
            )
        check(made.function())
        return made

    @property
    def ragged(self) -> bool:
        """Whether groups reach beyond the work."""
        return any(w % g for w, g in zip(self.work, self.group, strict=True))

    @property
    def whole(self) -> bool:
        """Whether the statements say the same of all groups."""
        return any(a.full for _, a in self.arrays)

    def run(self, run: TrialRun) -> str:
        """In the simulator, and in one engine more, which both have to agree with plain NumPy. A program
        that the simulator refuses has been drawn wrongly: an error, as is one refused elsewhere alone."""
        run.row["kernels"] = 1
        with tempfile.TemporaryDirectory(dir=run.scratch or None) as folder:
            return difference(self, run, Path(folder))

    def simpler(self) -> Iterator[KernelTrial]:
        return simpler(self)

    @property
    def facts(self) -> dict[str, str]:
        whole = "\n".join(self.lines)
        scopes = ("work-items", "workitems"), ("sub-groups", "subgroups"), ("group", "")
        said = {
            "scope": next(name for name, word in scopes if word in whole),
            "groups": f"{len(self.group)}D",
            "ragged": "yes" if self.ragged else "no",
            "whole": "yes" if self.whole else "no",
            "empty": "yes" if any(0 in a.shape for _, a in self.arrays) else "no",
            "dtype": ":".join(sorted({a.dtype for _, a in self.arrays})),
        }
        for name, words in (
            ("loops", ("for ",)),
            ("branches", ("if ",)),
            ("products", (" @ ",)),
            ("gathers", ("X[v", "X[abs", "Z[v")),
            ("writes", ("] = ", "out=")),
            ("masks", (".mask",)),
            ("atomics", ("atomic_ref",)),
            ("mappings", ("mapping=",)),
            ("functions", tuple(f"{n}(" for n in FUNCTIONS)),
            ("reductions", ("axis=", ".sum()", ".max()")),
        ):
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

    def body(self) -> str:
        """The kernel, and the functions that it calls."""
        called = [f"{text}\n" for name, text in FUNCTIONS.items() if f"{name}(" in "".join(self.lines)]
        return "\n".join([*called, "@kernel", self.function()])

    def kernel(self) -> str:
        """The kernel's source."""
        return f"import numpy as np\nfrom transconv.kernel import {', '.join(IMPORTED)}\n\n{self.body()}"

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
        """It runs the kernel in the simulator and elsewhere, and prints where they differ from NumPy."""
        names = [n for n, _ in self.arrays]
        stored = [n for n, a in self.arrays if a.stored]
        given = ", ".join(f"{n}_0" if n in stored else n for n in names)
        lines = [
            "from transconv.kernel.trials.trial import KernelTrial",
            "from transconv.kernel.trials.numpy_answer import answered",
            self.kernel(),
            *self.making(),
            *(f"{n}_0 = {n}.copy()" for n in stored),
            f"group = Group({self.work}, {self.group}, {self.sub or None})",
            f"drawn.simulate(group, {given})",
            f"drawn(group, {', '.join(names)})  # TRITON_INTERPRET=1, or arrays on a GPU",
            f"trial = KernelTrial.parse({str(self)!r})",
            "said = trial.made()",
            "answered(trial, said)",
            *(
                f"print(np.argwhere(~np.isclose({m}, said[{n!r}], 2e-4, 2e-4, True)))"
                for n in stored
                for m in (f"{n}_0", n)
            ),
        ]
        return "\n".join(lines) + "\n"

    def made(self) -> dict[str, Any]:
        """The arrays."""
        names = executed("\n".join(self.making()), {"np": np})
        return {n: names[n] for n, _ in self.arrays}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


# -- runs --------------------------------------------------------------------------------------------


def difference(trial: KernelTrial, run: TrialRun, folder: Path) -> str:
    """What differs from plain NumPy; empty if nothing does."""
    function, group = loaded(trial.kernel(), folder), trial.launch
    wanted = trial.made()
    answered(trial, wanted)
    run.row["nonzero"] = _written(trial, wanted)
    for stage, got in _elsewhere(trial, function, group, run):
        for name, array in trial.arrays:
            reason = _apart(name, wanted[name], got[name], array.stored)
            if reason:
                return f"{stage}: {reason}"
    return ""


def _elsewhere(
    trial: KernelTrial, function: KernelFunction, group: Group, run: TrialRun
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arrays after other engines, the simulator first."""
    started, row = time.perf_counter(), run.row
    given = trial.made()
    with np.errstate(all="ignore"):
        function.simulate(group, *given.values())
    yield "in the simulator", given
    given = trial.made()
    if run.way == "numpy":
        low = function.lower(group, *given.values(), target=run.target)
        row["generate_s"] = round(time.perf_counter() - started, 4)
        for stage, kernel in (low.stages[0], low.stages[-1]) if group.count else ():
            buffers = {t.name: np.array(given[t.name], t.dtype.numpy).reshape(-1) for t in kernel.params}
            with np.errstate(all="ignore"):
                interpret(kernel.at(kernel.sizes.like) if kernel.sizes else kernel, Memory(buffers))
            yield f"after {stage}", {n: buffers[n].reshape(v.shape) for n, v in given.items()}
        return
    import torch

    device = run.device
    tensors = {n: torch.tensor(v, device=device) for n, v in given.items()}
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        function(group, *tensors.values())
    if device == "cuda":
        torch.cuda.synchronize()
        row["compile_s"] = round(time.perf_counter() - started, 4)
    yield (
        "on the GPU" if device == "cuda" else "in Triton's interpreter",
        {n: t.cpu().numpy() for n, t in tensors.items()},
    )


def _apart(name: str, want: Any, got: Any, stored: bool) -> str:
    """Where two arrays differ, the first place."""
    if stored and want.dtype.kind == "f":
        same = np.isclose(got, want, NEAR, NEAR, True)
    else:
        same = got == want
    if same.all():
        return ""
    at = tuple(int(n) for n in np.argwhere(~same)[0])
    return (
        f"{name}{list(at)} is {got[at]}, in NumPy {want[at]}; {int((~same).sum())} of {same.size} differ"
    )


def _written(trial: KernelTrial, arrays: dict[str, Any]) -> float:
    """The share of elements that were stored."""
    stored = [arrays[n] for n, a in trial.arrays if a.stored and a.shape and 0 not in a.shape]
    total = sum(a.size for a in stored)
    return round(sum(int((a != CANARY).sum()) for a in stored) / total, 3) if total else 1.0


def loaded(text: str, folder: Path) -> KernelFunction:
    """The kernel of a source, written to a file, as its lines are read from there."""
    # A name for each text: Python keeps what it compiled of a file by its size and the second of its date.
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    path = folder / f"drawn_kernel_{digest}_{os.getpid()}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: KernelFunction = module.drawn
    found.source  # noqa: B018 - read while the file is there
    return found


# -- simpler trials ----------------------------------------------------------------------------------


def simpler(trial: KernelTrial) -> Iterator[KernelTrial]:
    """Programs that differ from this one in one respect, and define every value that they use."""
    for made in _ways(trial):
        if made != trial and made.lines and _defined(made.lines) and _is_read(made := _unused(made)):
            yield made


def _is_read(trial: KernelTrial) -> bool:
    """Whether its line is one: a part of an expression may be none."""
    try:
        return KernelTrial.parse(str(trial)) == trial
    except ProblemError:
        return False


def _ways(trial: KernelTrial) -> Iterator[KernelTrial]:
    for lines in (*_fewer(trial.lines), *_unwrapped(trial.lines), *_values(trial.lines)):
        yield replace(trial, lines=tuple(lines))
    for at in range(len(trial.work)):
        for sizes, field in ((trial.work, "work"), (trial.group, "group")):
            for n in less(sizes[at]):
                changed = (*sizes[:at], n, *sizes[at + 1 :])
                yield (replace(trial, work=changed) if field == "work" else replace(trial, group=changed))
    for at, (name, array) in enumerate(trial.arrays):
        for other in _smaller(array):
            yield replace(trial, arrays=(*trial.arrays[:at], (name, other), *trial.arrays[at + 1 :]))


def _smaller(array: Drawn) -> Iterator[Drawn]:
    plain = "f32" if array.dtype[0] == "f" else "i32"
    if array.dtype != plain and not array.full and array.dtype != "bool":
        yield replace(array, dtype=plain)
    for at, size in enumerate(array.shape):
        for n in less(size):
            yield replace(array, shape=(*array.shape[:at], n, *array.shape[at + 1 :]))


def _deep(line: str) -> int:
    return len(line) - len(line.lstrip(">"))


def _behind(lines: tuple[str, ...], at: int) -> int:
    """The first line behind a statement and what is inside of it."""
    end = at + 1
    while end < len(lines) and _deep(lines[end]) > _deep(lines[at]):
        end += 1
    return end


def _fewer(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Without a statement and what is inside of it, the last first; an ``else`` goes with its ``if``."""
    for at in reversed(range(len(lines))):
        end = _behind(lines, at)
        yield lines[:at] + lines[end:]
        if end < len(lines) and lines[end].lstrip("> ").startswith("else"):
            yield lines[:at] + lines[_behind(lines, end) :]


def _unwrapped(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What is inside of a branch in its place."""
    for at, line in enumerate(lines):
        if line.endswith(":") and not line.lstrip("> ").startswith(("def ", "else", "for ")):
            end = _behind(lines, at)
            yield (
                lines[:at]
                + tuple(x[1:].lstrip() if _deep(x) == 1 else x[1:] for x in lines[at + 1 : end])
                + lines[end:]
            )


def _values(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """An earlier value, or a part in brackets, for an expression."""
    for at, line in enumerate(lines):
        found = ASSIGNED.fullmatch(line)
        if found is None:
            continue
        head, target, value = found.groups()
        lead = f"{head} " if head else ""
        known = [m[2] for x in lines[:at] if (m := ASSIGNED.fullmatch(x)) and _deep(x) <= len(head)]
        parts = [*VALUE.findall(value), *known[:3], *re.findall(r"\(([^()]+)\)", value)]
        for other in dict.fromkeys(parts):
            if other not in (value, target) and len(other) < len(value) and VALUE.search(other):
                yield (*lines[:at], f"{lead}{target} = {other}", *lines[at + 1 :])
        for old in dict.fromkeys(VALUE.findall(value)):
            if known and old not in (known[0], target):
                yield (
                    *lines[:at],
                    f"{lead}{target} = " + re.sub(rf"\b{old}\b", known[0], value),
                    *lines[at + 1 :],
                )


def _defined(lines: tuple[str, ...]) -> bool:
    """Whether each value is assigned before it is used, and each block has a statement."""
    known: dict[str, int] = {}
    for at, line in enumerate(lines):
        deep = _deep(line)
        found = ASSIGNED.fullmatch(line)
        for name in VALUE.findall(found[3] if found else line):
            if known.get(name, 99) > deep:
                return False
        known = {n: d for n, d in known.items() if d <= deep}
        if found:
            known.setdefault(found[2], deep)
        inside = at + 1 < len(lines) and _deep(lines[at + 1]) > deep
        if line.endswith(":") != inside or (inside and _deep(lines[at + 1]) > deep + 1):
            return False
        if line.lstrip("> ").startswith("else") and not _follows_if(lines, at):
            return False
    return True


def _follows_if(lines: tuple[str, ...], at: int) -> bool:
    before = next((x for x in reversed(lines[:at]) if _deep(x) <= _deep(lines[at])), "")
    return _deep(before) == _deep(lines[at]) and before.lstrip("> ").startswith("if ")


def _unused(trial: KernelTrial) -> KernelTrial:
    """Without the arrays that no statement mentions."""
    whole = "\n".join(trial.lines)
    kept = tuple((n, a) for n, a in trial.arrays if re.search(rf"\b{n}\b", whole))
    return replace(trial, arrays=kept) if kept else trial
