"""Checks the emitted and the compiled kernels of a workload whose IR is right.

The text runs under Triton's interpreter, in a process of its own where this one compiles kernels;
then, on a GPU, as it is compiled.

Also here: finds an index of a kernel that overflows 32 bits.

Tensors of more than 2^31 elements are too large to interpret, but their indices need no tensors: every
index expression of the kernel is computed at corners and random points of the loops and lanes, once
as it is typed, each intermediate value wrapped around at the width of its node, once in 64 bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from transconv import knobs
from transconv.errors import TransconvError
from transconv.ir import (
    Alloc,
    Array,
    Const,
    Evaluator,
    Expr,
    Fault,
    For,
    FuncCall,
    If,
    Kernel,
    Lane,
    Let,
    Load,
    Memory,
    MemoryRead,
    Node,
    Seq,
    Stmt,
    Store,
    Tensor,
    Update,
    Var,
    find,
    free_vars,
    readable,
)
from transconv.runtime import Plan
from transconv.target import Target, detect
from transconv.verify.bisect.subject import BisectSubject
from transconv.verify.computation import case_of

CHILD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class EmittedVerdict:
    """``text``: what was found, in words; ``source``: what is to be read, if it is ``wrong``."""

    wrong: bool
    text: str
    source: str = ""


def ask_emitter(subject: BisectSubject, seed: int = 0, isolated: bool = True) -> EmittedVerdict:
    """Run the emitted text under Triton's interpreter; ``isolated``: in a process of its own, which
    a wrong kernel may kill (and which knows nothing of what was changed in this one)."""
    if any(schedule.via == "gluon" for _, schedule in subject.steps()):
        return EmittedVerdict(False, "not asked: Triton's interpreter does not run Gluon")
    if isolated or not knobs.interpret():
        return _in_a_child(subject, seed)
    from transconv.verify.machine import executable

    target = executable(subject.target, "cpu")
    try:
        plan = subject.plan(target)
        wrong = _run(plan, subject, "cpu", seed)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # whatever Triton's interpreter raises about a text
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(subject, target))
    return EmittedVerdict(bool(wrong), wrong or "right", plan.source if wrong else "")


def _run(plan: Plan, subject: BisectSubject, device: str, seed: int) -> str:
    """What is wrong with a plan's result."""
    return next(filter(None, (c.launched(plan, device).problem for c in subject.cases(seed))), "")


def _source(subject: BisectSubject, target: Target) -> str:
    try:
        return subject.plan(target).source
    except Exception as error:  # it could not even be written
        return str(error)


def _in_a_child(subject: BisectSubject, seed: int) -> EmittedVerdict:
    """What ``bisect`` says of the emitted text where Triton interprets it."""
    command = [sys.executable, "-m", "transconv", "bisect", *subject.words(), "--limit", str(1 << 62),
               "--seed", str(seed), "--target", subject.target.name, "--parts", "emitter", "--json",
               "--here", *(["--schedule", str(subject.schedule)] if subject.schedule else [])]
    root = str(Path(__file__).resolve().parents[3])
    environment = knobs.child_environment({knobs.interpret.name: "1"}, root)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS,
                              check=False, env=environment)
        if done.returncode < 0:
            return EmittedVerdict(True, f"Triton's interpreter died of signal {-done.returncode}",
                                  _source(subject, subject.target))
        told = json.loads(done.stdout)
        return EmittedVerdict(told["stage"] == "emit", str(told["verdict"]), str(told["diff"]))
    except subprocess.TimeoutExpired:
        return EmittedVerdict(False,
                              f"not asked: no answer from Triton's interpreter in {CHILD_SECONDS} s")
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return EmittedVerdict(False, f"not asked: Triton's interpreter did not start: {last}")


def no_compiler(target: Target) -> str:
    """Why the compiled kernel cannot be run here; empty if it can."""
    machine = detect()
    if knobs.interpret():
        return "kernels are interpreted here"
    if machine.backend == "interpreter":
        return "there is no GPU"
    return "" if machine.name == target.name else f"this machine is {machine.name}"


def ask_compiler(small: BisectSubject, asked: BisectSubject, seed: int = 0) -> EmittedVerdict:
    """Run the compiled kernel on the GPU: in the small size, then in the size that was asked for."""
    if why := no_compiler(small.target):
        return EmittedVerdict(False, f"not asked: {why}")
    try:
        plan = small.plan()
        if wrong := _run(plan, small, "cuda", seed):
            return EmittedVerdict(True, wrong, plan.source)
        if asked.workload == small.workload:
            return EmittedVerdict(False, "right")
        plan = replace(asked, schedule=asked.schedule or small.schedule).plan()
        wrong = _in_full(asked, plan)
    except TransconvError as error:
        return EmittedVerdict(False, f"not asked: {error}")
    except Exception as error:  # Triton's compiler, or the driver
        return EmittedVerdict(True, f"{type(error).__name__}: {error}", _source(small, small.target))
    if wrong:
        wrong = f"right in the small size, but for {asked.workload} {wrong}"
        return EmittedVerdict(True, wrong, plan.source)
    return EmittedVerdict(False, f"right, for {asked.workload} too")


def _in_full(asked: BisectSubject, plan: Plan) -> str:
    return case_of(asked.workload.text, asked.workload.direction, asked.workload.behind).same(plan).reason


POINTS = 256


class _Typed(Evaluator):
    """Integers of less than 64 bits wrap around, in every step."""

    def __init__(self, at: dict[Expr, Array], wraps: bool) -> None:
        super().__init__(Memory({}), {}, 1)
        self.at, self.wraps = at, wraps

    def value(self, e: Expr) -> Array:
        found = self.at.get(e)
        if found is None:
            found = super().value(e)
        if self.wraps and e.dtype.is_integer and e.dtype.bits == 32:
            return found.astype(np.int64).astype(np.int32).astype(np.int64)
        return found.astype(np.int64) if e.dtype.is_integer else found

    def forbid(self, bad: Array, reason: str) -> None:
        pass


def overflow(kernel: Kernel, seed: int = 0) -> str:
    """The first index that overflows, in words; empty if none does at the points that were tried."""
    return _Walk(np.random.default_rng(seed)).statements(kernel.body)


class _Walk:
    """Goes through a kernel in program order; ``known`` is what has a value at every point, as it
    is typed and in 64 bits."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.known: tuple[dict[Expr, Array], dict[Expr, Array]] = ({}, {})

    def draw(self, leaf: Expr, stop: int, first: int = 0) -> None:
        last = max(first, stop - 1)
        drawn = self.random.integers(first, last + 1, POINTS)
        drawn[:POINTS // 4] = first
        drawn[POINTS // 4:POINTS // 2] = last
        drawn = self.random.permutation(drawn)
        drawn[0], drawn[1] = last, first  # a point with all ends, and one at the start
        for values in self.known:
            values[leaf] = drawn

    def statements(self, s: Stmt) -> str:
        """What is wrong with the accesses of a statement, in words."""
        match s:
            case Seq(stmts):
                return next(filter(None, map(self.statements, stmts)), "")
            case For():
                self.draw(s.var, s.stop, int(s.start.value) if isinstance(s.start, Const) else 0)
                return self.statements(s.body)
            case If():
                return self.statements(s.then) or (self.statements(s.other) if s.other else "")
            case Let(var, value) if (value.dtype.kind in ("index", "int", "bool")
                                     and not find(value, MemoryRead)):
                self.bind(var, value)  # an unread name may overflow
                return ""
            case Alloc() | Update():
                return ""
        return next(filter(None, map(self.differs, _indices(s))), "")

    def bind(self, var: Var, value: Expr) -> None:
        made = self.both(value)
        if made is not None:
            for values, found in zip(self.known, made, strict=True):
                values[var] = found

    def both(self, e: Expr) -> tuple[Array, Array] | None:
        """Its values as typed and in 64 bits; None where it depends on what is not known."""
        for lane in find(e, Lane):
            if lane not in self.known[0]:
                self.draw(lane, lane.extent)
        if not all(v in self.known[0] for v in free_vars(e)) or find(e, MemoryRead):
            return None
        try:
            with np.errstate(all="ignore"):
                typed, wide = (_Typed(at, wraps).compute(e)
                               for at, wraps in zip(self.known, (True, False), strict=True))
        except (Fault, KeyError):
            return None
        return typed, wide

    def differs(self, access: tuple[str, Expr, Expr]) -> str:
        name, offset, mask = access
        made, masks = self.both(offset), self.both(mask)
        if made is None or masks is None:
            return ""
        bad = (made[0] != made[1]) & (masks[0] | masks[1]) | (masks[0] != masks[1])
        if not bad.any():
            return ""
        at = int(np.argmax(bad))
        what = mask if masks[0].flat[at % masks[0].size] != masks[1].flat[at % masks[1].size] else offset
        here = ", ".join(f"{v}={int(self.known[1][v].flat[at])}" for v in sorted(
            {*free_vars(what), *find(what, Lane)}, key=str))
        values = made if what is offset else masks
        short, right = (int(v.flat[at % v.size]) for v in values)
        return (f"the index `{readable(what)}` into {name} does not fit into its type: at {here} it "
                f"is {right}, and becomes {short}")


def _indices(at: Node) -> Iterator[tuple[str, Expr, Expr]]:
    """Tensor, offset and mask of every access of a statement."""
    for load in find(at, Load):
        yield load.tensor.name, load.offset, load.mask
    match at:
        case Store(tensor, offset, _, mask):
            yield tensor.name, offset, mask
        case FuncCall() if at.func.name == "atomic_add":
            into, where, _, condition = at.args
            assert isinstance(into, Tensor)
            assert isinstance(where, Expr) and isinstance(condition, Expr)
            yield into.name, where, condition
