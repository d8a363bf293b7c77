"""The proof that a sample's bits do not depend on its batch, from what is computed, chosen and lowered.

Three things are shown of a workload, for any number of samples:

    choice     batches of all sizes ask for one plan: the request has the number of samples as a name,
               and an example that does not depend on it
    grouping   of every sum, where each term is added (``reduction_tree``): no such text has the number
    kernel     in what was lowered, the number decides how many programs there are and what is masked,
               where the samples are the ones that are summed also how long loops are, and nothing else
               about loops, steps and branches

One kernel computes all programs of all batches, and a sample's elements are in tiles whose lanes do the
same: what is left are the masks of lanes beyond the last sample, which change no other lane.

The tree of a sum says which terms a schedule adds to which, and when, as expressions of the summed axes:

    ic:64 oc:128 mb.oh.ow:64 | split_k=14 deal=1

    step = (mb*3136 + oh*56 + ow) // 64      a block of consecutive terms
    lane = (mb*3136 + oh*56 + ow) % 64       a term's place in it
    part = step % 14, turn = step // 14      the program that adds the step, and after how many others

The tile alone decides how terms of one step are added; steps of one part are added one after another, and
so are parts, by a second kernel. So two sums of which all terms have the same part, turn and lane are
grouped alike. A name that occurs in none of these expressions changes no grouping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transconv import ir
from transconv.compute import Compute, Workload, batch_axis
from transconv.ir import ONE, ZERO, Expr, Var, as_expr, free_vars, readable
from transconv.passes import STEP, lower
from transconv.runtime import Plan, PlanStep, build
from transconv.schedule import Block, Schedule, Scheduled, programs
from transconv.simplify import simplify
from transconv.support import TransconvError, Unsupported
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class ReductionTree:
    """The tree of a computation's sums over ``axes``: of a term its part, its turn in it, and the lanes of
    the step. ``unit``: what adds the terms of a step."""

    axes: tuple[str, ...]
    part: Expr
    turn: Expr
    lanes: tuple[Expr, ...]
    unit: str

    def depends(self, name: str) -> list[str]:
        """What of it depends on a size, in words; empty if the size changes no grouping."""
        own = {"part": (self.part,), "turn": (self.turn,), "lane": self.lanes}
        return [
            f"{what} = {readable(e)}"
            for what, each in own.items()
            for e in each
            if Var(name) in free_vars(e)
        ]

    def __str__(self) -> str:
        lanes = ", ".join(readable(e) for e in self.lanes) or "0"
        return (
            f"over {' '.join(self.axes)}: part = {readable(self.part)}, turn = {readable(self.turn)}, "
            f"lane = {lanes}; {self.unit}"
        )


def reduction_tree(compute: Compute, schedule: Schedule) -> ReductionTree | None:
    """The tree of the sums of a computation over its copies, groups merged; None if it sums nothing."""
    summed = [x.name for x in compute.axes_of("K")]
    if not summed:
        return None
    order = [a for a in schedule.order.split(".") if a] or summed
    step: Expr = ZERO
    total: Expr = ONE
    lanes: list[Expr] = []
    for block in _loops(order, schedule):
        place, size = _linear(block.axes, compute)
        step = step * _ceiling(size, block.extent) + place // block.extent
        total = total * _ceiling(size, block.extent)
        if block.extent > 1:
            lanes.append(simplify(place % block.extent))
    part, turn = _dealt(simplify(step), simplify(total), schedule, compute)
    dtype = compute.a.tensor.dtype
    unit = f"a step by {schedule.unit} of {dtype}, {schedule.warps} warps, swap={schedule.swap}"
    return ReductionTree(tuple(order), simplify(part), simplify(turn), tuple(lanes), unit)


def _loops(order: list[str], schedule: Schedule) -> Iterator[Block]:
    """The loops of the sum, outermost first, an axis without a block as a block of one position."""
    for axis in order:
        block = schedule.block_of(axis)
        if block is None or block.extent == 1:
            yield Block((axis,), 1)
        elif block.first == axis:
            yield block


def _linear(axes: tuple[str, ...], compute: Compute) -> tuple[Expr, Expr]:
    """The place of a position of fused axes, the last one fastest, and how many there are."""
    place: Expr = ZERO
    size: Expr = ONE
    for name in axes:
        own = _size(compute, name)
        place, size = place * own + Var(name), size * own
    return place, size


def _size(compute: Compute, axis: str) -> Expr:
    """How many positions an axis has."""
    extent = compute.axis(axis).extent
    return as_expr(compute.size(axis)) if extent is None else extent


def _ceiling(size: Expr, extent: int) -> Expr:
    return simplify((size + (extent - 1)) // extent) if extent > 1 else size


def _dealt(step: Expr, total: Expr, schedule: Schedule, compute: Compute) -> tuple[Expr, Expr]:
    """The part and the turn of a step, of ``total``."""
    if schedule.reduce == "stream":  # ranges of the steps of all tiles, which end where tiles do
        tiles = _tiles(schedule, compute)
        chunk = _ceiling_by(total * tiles, schedule.programs)
        at = Var("tile") * total + step
        return at // chunk, at % chunk
    if schedule.split_k == 1:
        return ZERO, step
    if schedule.deal:
        return step % schedule.split_k, step // schedule.split_k
    chunk = _ceiling_by(total, schedule.split_k)
    return step // chunk, step % chunk


def _ceiling_by(number: Expr, parts: int) -> Expr:
    return simplify((number + (parts - 1)) // parts)


def _tiles(schedule: Schedule, compute: Compute) -> Expr:
    """The number of tiles of a result, as an expression of sizes that are arguments."""
    if compute.named is None:
        return as_expr(programs(schedule, compute))
    found: Expr = ONE
    within = {a for b in schedule.blocks for a in b.axes}
    free = [x for x in compute.axes if compute.kind(x.name) != "K"]
    for x in free:
        if x.name not in within:
            found = found * _size(compute, x.name)
    for block in schedule.blocks:
        if compute.kind(block.first) != "K":
            found = found * _ceiling(_linear(block.axes, compute)[1], block.extent)
    return found


BATCHES = (1, 2, 3, 5, 8, 13, 32, 64)
"""Numbers of samples whose requests are compared."""


@dataclass(frozen=True, slots=True)
class ProofLine:
    """A line of a certificate: what it is about, whether it holds, and why."""

    about: str
    holds: bool
    why: str

    def __str__(self) -> str:
        return f"{'proved ' if self.holds else 'REFUSED'}  {self.about}: {self.why}"


@dataclass(frozen=True, slots=True)
class BatchCertificate:
    """What was found of a workload."""

    title: str
    findings: tuple[ProofLine, ...] = field(default=())

    @property
    def holds(self) -> bool:
        """Whether the bits of a sample's result depend on the sample alone."""
        return bool(self.findings) and all(f.holds for f in self.findings)

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        return "\n".join([f"{self.title}", *(f"  {f}" for f in self.findings), f"  the proof {verdict}"])


def prove(workload: Workload, target: Target, schedule: Schedule | None = None) -> BatchCertificate:
    """The certificate of a workload of numbers. ``schedule``: one to look at in place of the choice. What
    has no form for any number of samples is refused in it."""
    try:
        form, sizes = workload.of_any_batch()
    except TransconvError as error:
        return BatchCertificate(workload.title, (ProofLine("form", False, str(error)),))
    found = [chosen_alike(workload, form)]
    try:
        plan = build(form, target, schedule, None, schedule is None, Plan)
    except TransconvError as error:
        return BatchCertificate(workload.title, (*found, ProofLine("schedule", False, str(error))))
    names = [*sizes] or sorted(_numbers_of_samples(plan))
    for name in names:
        found += of_plan(plan, name)
    if not names:
        found.append(ProofLine("samples", False, "none of its sizes is a number of samples"))
    return BatchCertificate(workload.title, tuple(found))


def _numbers_of_samples(plan: Plan) -> set[str]:
    """The names along which the tensors of a plan hold samples, where sizes are names already."""
    found: set[str] = set()
    for step in plan.steps:
        axis = batch_axis(step.compute)
        extent = None if axis is None else step.compute.axis(axis).extent
        found |= {v.name for v in ir.free_vars(extent)} if extent is not None else set()
    return found


def of_plan(plan: Plan, name: str) -> list[ProofLine]:
    """What is found of the kernels of a plan; ``name``: the number of samples."""
    return [found for step in plan.steps for found in of_step(step, name, plan.target)]


def chosen_alike(workload: Workload, form: Workload) -> ProofLine:
    """Whether other batches have the same form, and with it the same schedule and kernel."""
    others = [n for n in BATCHES if workload.with_batch(n).of_any_batch()[0] != form]
    if others:
        said = f"a batch of {others[0]} asks for another kernel than this one"
        return ProofLine("choice", False, said)
    return ProofLine(
        "choice", True, f"batches of {', '.join(map(str, BATCHES))} ask for {' '.join(form.text.split())}"
    )


def refuse_grouping(plan: Plan, names: Sequence[str]) -> None:
    """Raise Unsupported for a plan in which one of the names, numbers of samples, decides what is added to
    what."""
    for step in plan.steps:
        tree = reduction_tree(Scheduled(step.compute, step.schedule, plan.target).main, step.schedule)
        wrong = [why for name in names if tree is not None for why in tree.depends(name)]
        if wrong:
            raise Unsupported(
                "invariant:grouping", f"{step.compute.name}: the number of samples decides {wrong[0]}"
            )


def of_step(step: PlanStep, name: str, target: Target) -> Iterator[ProofLine]:
    """What is found of a kernel of a plan; ``name``: the number of samples."""
    compute, schedule = step.compute, step.schedule
    main = Scheduled(compute, schedule, target).main
    tree = reduction_tree(main, schedule)
    if tree is None:
        yield ProofLine(f"{compute.name} grouping", True, "it sums nothing")
    elif wrong := tree.depends(name):
        yield ProofLine(f"{compute.name} grouping", False, f"{name} decides {'; '.join(wrong)}")
    else:
        yield ProofLine(f"{compute.name} grouping", True, f"no {name} in {tree}")
    is_summed = any(
        ir.Var(name) in ir.free_vars(x.extent) for x in main.axes_of("K") if x.extent is not None
    )
    yield of_kernel(step.kernel, name, is_summed, compute.name)
    yield from of_stages(compute, schedule, target, name)


def of_stages(compute: Compute, schedule: Schedule, target: Target, name: str) -> Iterator[ProofLine]:
    """Whether the number of samples decides which terms a step of a kernel has: looked at where steps have
    their name still."""
    if compute.does != "compute":
        return
    for stage, kernel in lower(compute, schedule, target, "proof", compute.math):
        steps = [let.value for let in ir.find(kernel, ir.Let) if let.var is STEP]
        if steps:
            told = _told(kernel)
            wrong = [e for e in steps if ir.Var(name) in _resolved(e, told)]
            why = f"after {stage} a step is {ir.readable(steps[0])}"
            yield ProofLine(
                f"{compute.name} steps", not wrong, why + (f", told by {name}" if wrong else "")
            )
            return


def of_kernel(kernel: ir.Kernel, name: str, is_summed: bool, title: str) -> ProofLine:
    """Whether the number of samples decides nothing of a kernel's loops and branches but how many programs
    there are, and where sums over samples end."""
    told, wrong = _told(kernel), list[str]()
    for loop in ir.find(kernel, ir.For):
        if loop.kind in ("grid", "dealt"):
            continue
        ends = [] if is_summed or loop.until is None else [loop.until]
        for e in (loop.start, *ends):
            if ir.Var(name) in _resolved(e, told):
                wrong.append(f"the loop over {loop.var.name} has {ir.readable(e)}")
    for branch in ir.find(kernel, ir.If):
        if ir.Var(name) in _resolved(branch.cond, told) and _adds(branch):
            wrong.append(f"a branch at {ir.readable(branch.cond)} adds to sums")
    if wrong:
        return ProofLine(f"{title} kernel", False, f"{name} decides: {'; '.join(wrong)}")
    return ProofLine(f"{title} kernel", True, f"no loop and no branch of {kernel.name} depends on {name}")


def _adds(branch: ir.If) -> bool:
    """Whether something may be added up within a branch: a variable changes, or a unit is called."""
    return bool([*ir.find(branch, ir.Update), *ir.find(branch, ir.FuncCall)])


def _told(kernel: ir.Kernel) -> dict[ir.Var, ir.Expr]:
    """What names stand for."""
    return {let.var: let.value for let in ir.find(kernel, ir.Let)}


def _resolved(e: ir.Expr, told: dict[ir.Var, ir.Expr]) -> set[ir.Var]:
    """The names that an expression is made of, through those that stand for others."""
    left, seen = [*ir.free_vars(e)], set[ir.Var]()
    while left:
        var = left.pop()
        if var not in seen:
            seen.add(var)
            left += [*ir.free_vars(told[var])] if var in told else []
    return seen


def table(certificates: Sequence[BatchCertificate]) -> str:
    """Certificates one below another."""
    return "\n".join(map(str, certificates))
