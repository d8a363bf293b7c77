"""Launchers of computations as Python text: sizes are read from a call's tensors, which are looked at
first.

    def sizes_of_scale(X):                          from the text's line of sizes, and its tensors
        expect_dims("scale", X=(X, 2))
        M, K = X.shape[0], X.shape[1]
        expect_shapes("scale", X=(X, (M, K), None))
        expect(1 <= M <= 4096, "scale", "M in 1..4096")
        return M, K,
    def run_scale_float16(X, M, K):                 from the plan of one element type
        Y = X.new_empty((M, K, ), dtype=torch.float16)
        _kernels.scale_mk_f0e1[((M * K + 1023) // 1024, )](X, Y, M, K, num_warps=4, num_stages=1)
        return Y

The word ``bf16`` of a text stands for the element type of a call: there is a plan for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transconv.backend_triton import is_explicit
from transconv.compute import Alone, Compute, differentiate, parse
from transconv.ir import DType, Expr, Tensor, Var, python_of, readable
from transconv.runtime.compiler import build
from transconv.runtime.plans import Plan, PlanStep
from transconv.runtime.standalone.reference_check import safe
from transconv.schedule import Schedule, why_not
from transconv.selection import shortlist
from transconv.support import ComputeError, Unsupported
from transconv.target import Target

CALLS_TYPE = "bf16"  # the word of a text that stands for the type of a call
PROPOSED = 40  # schedules that are looked at for one that is legal on every chip
MOST_THREADS = 1024  # of a program, on every chip
RANKED_FOR = "sm_80"  # has tiles, and none of the copy engines that other chips lack
GRADIENT = "_gradient"  # begins the rest of the name of a text that computes gradients


@dataclass(frozen=True)
class PlannedText:
    """One computation and its plans by element type. ``gradients``: the texts of its gradients in the
    order
    in which they run; they read dY, the gradient of the result Y, and store dX, that of the operand X."""

    compute: Compute
    plans: Mapping[DType, Plan]
    follows_call: bool  # whether tensors have the type of a call
    gradients: tuple[PlannedText, ...] = ()

    @property
    def name(self) -> str:
        return self.compute.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its sizes."""
        return self.compute.named.names if self.compute.named else ()

    @cached_property
    def stored(self) -> tuple[Tensor, ...]:
        return tuple(dict.fromkeys(w.view.tensor for w in self.compute.writes))

    @cached_property
    def read(self) -> tuple[Tensor, ...]:
        written = {t.name for t in self.stored}
        return tuple(t for t in self.compute.tensors if t.name not in written)

    @property
    def results(self) -> tuple[str, ...]:
        """The stored tensors that are results: those with a gradient, if it has gradients."""
        stored = [t.name for t in self.stored]
        read = {t.name for g in self.gradients for t in g.read}
        return tuple(n for n in stored if not self.gradients or f"d{n}" in read)

    def type_of(self, tensor: Tensor) -> str:
        """torch's type of a tensor, as text; None for that of a call."""
        follows = self.follows_call and tensor.dtype.name == CALLS_TYPE
        return "None" if follows else f"torch.{tensor.dtype.torch}"


@dataclass(frozen=True)
class Planning:
    """What plans are made for: the element types of calls, the chips, and schedules that are passed
    over, as computation and schedule, since their machine code was looked at."""

    types: tuple[DType, ...]
    targets: tuple[Target, ...]
    passed_over: frozenset[tuple[str, str]] = frozenset()


def read_texts(text: str, planning: Planning) -> list[PlannedText]:
    """The computations of a file, each with the gradients behind it: texts named NAME_gradient..., or, of
    one whose sizes are numbers, those that are derived. Raises ComputeError for a text that cannot be
    read, Unsupported for one without kernels."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = [p for p in re.split(r"(?m)^(?=compute\s)", "\n".join(lines)) if p.strip()]
    made: list[tuple[str, list[str]]] = []
    for part in parts:
        name = parse(part).name
        if made and name.startswith(parse(made[-1][0]).name + GRADIENT):
            made[-1][1].append(part)
        else:
            made.append((part, []))
    return [_planned(part, gradients, planning) for part, gradients in made]


def _planned(part: str, gradients: Sequence[str], planning: Planning) -> PlannedText:
    compute = parse(part)
    if compute.named is None and not gradients:
        try:
            gradients = [str(c) for c in differentiate(compute).computes]
        except ComputeError:
            gradients = ()  # such a text has none
    behind = tuple(_planned_alone(g, planning) for g in gradients)
    made = _planned_alone(part, planning, behind)
    told = {t.name for t in (*made.read, *made.stored)} | {f"d{t.name}" for t in made.stored}
    for g in behind:
        if missing := [t.name for t in g.read if t.name not in told]:
            raise ComputeError(
                f"{g.name} reads {missing[0]}; expected tensors of {made.name}, gradients of its results "
                f"({' '.join(f'd{t.name}' for t in made.stored)}), or what a text before it stores"
            )
        told |= {t.name for t in g.stored}
    return made


def _planned_alone(part: str, planning: Planning, gradients: tuple[PlannedText, ...] = ()) -> PlannedText:
    word = re.compile(rf"\b{CALLS_TYPE}\b")
    compute = parse(part)
    typed = [t for t in compute.tensors if t.dtype.name == CALLS_TYPE]
    each = (
        [(t, parse(word.sub(t.name, part))) for t in planning.types]
        if typed
        else [(compute.tensors[0].dtype, compute)]
    )
    plans = {}
    for dtype, text in each:

        def choose(c: Compute, target: Target) -> Schedule:
            return _everywhere(c, target, planning)

        plans[dtype] = build(Alone(text), Target.parse(RANKED_FOR), None, choose, False, Plan)
    made = PlannedText(compute, plans, bool(typed), gradients)
    _refuse(made)
    return made


def _everywhere(compute: Compute, target: Target, planning: Planning) -> Schedule:
    """The best schedule for one chip that is legal on all, copies nothing and is not passed over."""
    targets = (target, *planning.targets)
    for listed in shortlist(PROPOSED, compute, target, Alone(compute)):
        schedule = listed.schedule
        if (str(compute), str(schedule)) in planning.passed_over or schedule.pack:
            continue
        if all(
            why_not(schedule, compute, t) is None and schedule.warps * t.warp_size <= MOST_THREADS
            for t in targets
        ):
            return schedule
    raise Unsupported(
        "export:everywhere",
        f"{compute.name}: none of {PROPOSED} schedules is legal on {' '.join(t.name for t in targets)}; "
        "export for fewer chips (--target)",
    )


def _refuse(made: PlannedText) -> None:
    """Raise Unsupported for what the launchers lack."""
    for t in (*made.read, *made.stored):
        if safe(t.name, ()) != t.name or t.name in made.names:
            raise Unsupported("export:name", f"{made.name}: {t.name} cannot be the name of an argument")
    if not made.read:
        raise Unsupported("export:reads", f"{made.name} reads no tensor, whose device it would run on")
    alone = {e.name for t in made.read for e in t.bounds if isinstance(e, Var)}
    if missing := [n for n in made.names if n not in alone]:
        raise Unsupported(
            "export:sizes",
            f"{made.name}: the size {missing[0]} is no dim of a tensor that is read; expected one, "
            f"such as a view [.., {missing[0]}, ..] of it",
        )
    for plan in made.plans.values():
        if plan.padding or any(s.triton.boxes or is_explicit(s.kernel) for s in plan.steps):
            raise Unsupported(
                "export:boxes", f"{made.name}: a kernel for one kind of chip ({plan.schedule})"
            )


# -- text ------------------------------------------------------------------------------------------


def launcher_lines(made: PlannedText) -> Iterator[str]:
    """The functions ``sizes_of_NAME``, ``shapes_of_NAME`` and ``run_NAME_TYPE``."""
    names, read = made.names, [t.name for t in made.read]
    yield f"def sizes_of_{made.name}({', '.join(read)}):"
    yield f'    """{_listed(names) or "No size"} of a call; ValueError for tensors that do not fit."""'
    dims = ", ".join(f"{t.name}=({t.name}, {len(t.shape)})" for t in made.read)
    yield f'    expect_dims("{made.name}", {dims})'
    for name in names:
        tensor, dim = _place(name, made.read)
        yield f"    {name} = {tensor}.shape[{dim}]"
    shapes = ", ".join(f"{t.name}=({t.name}, ({_dims(t, names)}), {made.type_of(t)})" for t in made.read)
    yield f'    expect_shapes("{made.name}", {shapes})'
    if made.compute.named:
        for size in made.compute.named.each:
            said = f"{size.name} in {size.least}..{size.most}"
            yield f'    expect({size.least} <= {size.name} <= {size.most}, "{made.name}", "{said}")'
        yield from _conditions(made.name, made.compute.named.where, names)
    yield f"    return {_listed(names) or '()'}"
    yield ""
    yield ""
    yield f"def shapes_of_{made.name}({', '.join(names)}):"
    yield '    """The shapes and types of what is stored; None: the type of the call."""'
    yield f"    return {_listed([f'(({_dims(t, names)}), {made.type_of(t)})' for t in made.stored])}"
    for dtype, plan in made.plans.items():
        yield ""
        yield ""
        yield from _run_lines(made, dtype, plan)


def _run_lines(made: PlannedText, dtype: DType, plan: Plan) -> Iterator[str]:
    names = made.names
    given = ", ".join([*(t.name for t in made.read), *names])
    yield f"def run_{made.name}_{dtype.torch}({given}):"
    near = made.read[0].name
    if plan.required is not None:
        own = [c for c in plan.required.sizes.where if c not in made.compute.named.where]  # type: ignore[union-attr]
        yield from _conditions(made.name, own, names)
    for t in made.stored:
        kind = f"torch.{dtype.torch}" if made.type_of(t) == "None" else made.type_of(t)
        yield f"    {t.name} = {near}.new_empty(({_dims(t, names)}), dtype={kind})"
    for name, t in plan.workspaces.items():
        room = python_of(t.room, names)
        yield f"    {name} = {near}.new_empty(({room},), dtype=torch.{t.dtype.torch})"
    for step in plan.steps:
        yield from _launch_lines(step, names)
    yield f"    return {', '.join(t.name for t in made.stored)}"


def _launch_lines(step: PlanStep, names: Sequence[str]) -> Iterator[str]:
    if step.zero is not None:
        yield f"    {step.zero.name}.zero_()"
    run = step.triton
    yield f"    _kernels.{step.kernel.name}[({python_of(run.programs, names)},)]("
    given = ", ".join([*step.params, *run.names])
    yield f"        {given}, num_warps={run.warps}, num_stages={run.stages})"


def _conditions(title: str, where: Sequence[Expr], names: Sequence[str]) -> Iterator[str]:
    for condition in where:
        yield f'    expect({python_of(condition, names)}, "{title}", "{readable(condition)}")'


def _place(name: str, read: Sequence[Tensor]) -> tuple[str, int]:
    """A tensor and its dim that a size is read from."""
    return next((t.name, d) for t in read for d, e in enumerate(t.bounds) if e == Var(name))


def _dims(tensor: Tensor, names: Sequence[str]) -> str:
    return _listed([python_of(e, names) for e in tensor.bounds])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) + ("," if len(names) == 1 else "")


def text_record(made: PlannedText) -> dict[str, Any]:
    """What the package's table says of a text."""
    return {
        "name": made.name,
        "reads": [t.name for t in made.read],
        "stores": [t.name for t in made.stored],
        "results": list(made.results),
        "types": [dtype.torch for dtype in made.plans],
        "gradients": [g.name for g in made.gradients],
    }
