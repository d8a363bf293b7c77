"""The proof that a sample's bits do not depend on its batch, from what is computed, chosen and lowered.

Four things are shown of a workload, for any number of samples:

    choice     batches of all sizes ask for one of few plans: the request has the number of samples as a
               name, and one of few examples of it
    grouping   of every sum, where each term is added (``reduction_tree``): no such text has the number
    kernel     in what was lowered, the number decides how many programs there are and what is masked,
               where the samples are the ones that are summed also how long loops are, and nothing else
               about loops, steps and branches
    plans      those for few samples and for many have the same trees, added by the same unit

The kernels of a plan compute all programs of all its batches, and a sample's elements are in tiles whose
lanes do the same: what is left are the masks of lanes beyond the last sample, which change no other lane.
Kernels of several plans have other tiles, and other machine code; what adds up products is the same
instruction, which is called with the same terms in the same order.

The tree of a sum says which terms a schedule adds to which, and when, as expressions of the summed axes:

    ic:64 oc:128 mb.oh.ow:64 | split_k=14 deal=1

    step = (mb*3136 + oh*56 + ow) // 64      a block of consecutive terms
    lane = (mb*3136 + oh*56 + ow) % 64       a term's place in it
    part = step % 14, turn = step // 14      the program that adds the step, and after how many others

The tile alone decides how terms of one step are added; depthwise kernels may add one term after another,
whatever the tile is. Steps of one part are added one after another, and so are parts, by a second kernel.
So two sums of which all terms have the same part, turn and lane are grouped alike. A name that occurs in
none of these expressions changes no grouping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from transconv import ir
from transconv.compute import Compute, Workload, batch_axis, in_bands
from transconv.cost import is_small
from transconv.ir import ONE, ZERO, Expr, Var, as_expr, free_vars, readable
from transconv.passes import STEP, decided, lower, resolved
from transconv.runtime import Plan, PlanStep, build
from transconv.schedule import Block, Schedule, Scheduled, programs
from transconv.selection import chain, conversion
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
    if not summed or any(not x.size for x in compute.axes_of("K")):
        return None
    if one_by_one := chain(schedule, compute):
        turn = simplify(_linear(one_by_one, compute)[0])
        unit = f"one term after another by {schedule.unit} of {compute.a.tensor.dtype}"
        return ReductionTree(one_by_one, ZERO, turn, (), unit)
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
    unit = f"a step by {_unit(compute, schedule)}"
    return ReductionTree(tuple(order), simplify(part), simplify(turn), tuple(lanes), unit)


def _unit(compute: Compute, schedule: Schedule) -> str:
    """What adds the terms of a step, in words: an instruction, or lanes, as all of the schedule has it."""
    dtype = compute.a.tensor.dtype
    if schedule.unit != "mma" or compute.b is None:
        return f"{schedule.unit} of {dtype}, {schedule}"
    by = "one warp" if is_small(schedule, compute) else "a group of warps"
    unit = f"mma of {dtype}, an instruction of {by}, merge={schedule.merge}"
    return ", ".join(filter(None, (unit, conversion(schedule, compute))))


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
        examples = {n for c in form.computations for n in in_bands(c)}
        batches = sorted({*BATCHES, *examples}) if sizes else ()
        forms = {n: workload.with_batch(n).of_any_batch()[0] for n in batches} or {1: form}
    except TransconvError as error:
        return BatchCertificate(workload.title, (ProofLine("form", False, str(error)),))
    plans, found = list[Plan](), [chosen_alike(forms)]
    for form in dict.fromkeys(forms.values()) if found[0].holds else ():
        try:
            plans.append(build(form, target, schedule, None, schedule is None, Plan))
        except TransconvError as error:
            found.append(ProofLine("schedule", False, str(error)))
    names = [*sizes] or sorted({name for plan in plans for name in _numbers_of_samples(plan)})
    for name in names:
        found += of_plans(plans, name)
    if plans and not names:
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


def of_plans(plans: Sequence[Plan], name: str) -> list[ProofLine]:
    """What is found of plans for several examples of one number of samples, ``name``, and of whether they
    add up alike."""
    found = [line for plan in plans for step in plan.steps for line in of_step(step, name, plan)]
    found = [*dict.fromkeys(found)]  # of several plans with one kernel
    each = [_trees(plan) for plan in plans]
    for title, tree in each[0].items() if len(each) > 1 else ():
        others = [str(trees.get(title, "no sum")) for trees in each if trees.get(title) != tree]
        alike = f"{len(each)} plans for few and many samples add up alike"
        why = f"{tree}, and {others[0]}" if others else alike
        found.append(ProofLine(f"{title} plans", not others, why))
    if odd := sorted(set().union(*each) - each[0].keys()) if each else []:
        found.append(ProofLine("plans", False, f"only some have {', '.join(odd)}"))
    return found


def _computed(step: PlanStep, plan: Plan) -> list[Compute]:
    """The computations of a launch that adds up, which may have all stride phases; none of a copy."""
    phases = [c for c in plan.workload.computations if c.phase]
    together = step.does == "compute" and phases and step.compute.name not in {c.name for c in phases}
    return phases if together else [] if step.does in ("pack", "unpack") else [step.compute]


def _trees(plan: Plan) -> dict[str, ReductionTree | None]:
    """The trees of a plan's sums, by the names of computations."""
    return {
        c.name: reduction_tree(Scheduled(c, step.schedule, plan.target).main, step.schedule)
        for step in plan.steps
        for c in _computed(step, plan)
    }


PLANS = 4  # that the batches of a workload may ask for


def chosen_alike(forms: Mapping[int, Workload]) -> ProofLine:
    """Whether batches have one of few forms, and with it one of few plans, by their numbers of samples."""
    each: dict[Workload, list[int]] = {}
    for number, form in forms.items():
        each.setdefault(form, []).append(number)
    if len(each) > PLANS:
        said = f"a batch of {list(each.values())[PLANS][0]} asks for another kernel than {PLANS} others"
        return ProofLine("choice", False, said)
    told = {" ".join(form.text.split()): ", ".join(map(str, n)) for form, n in each.items()}
    return ProofLine("choice", True, "; ".join(f"batches of {n} ask for {f}" for f, n in told.items()))


def refuse_grouping(plan: Plan, names: Sequence[str]) -> None:
    """Raise Unsupported for a plan in which one of the names, numbers of samples, decides what is added to
    what."""
    for title, tree in _trees(plan).items():
        wrong = [why for name in names if tree is not None for why in tree.depends(name)]
        if wrong:
            raise Unsupported("invariant:grouping", f"{title}: the number of samples decides {wrong[0]}")


def of_step(step: PlanStep, name: str, plan: Plan) -> Iterator[ProofLine]:
    """What is found of a kernel of a plan; ``name``: the number of samples."""
    is_summed = False
    for compute in _computed(step, plan) or [step.compute]:
        main = Scheduled(compute, step.schedule, plan.target).main
        tree = reduction_tree(main, step.schedule)
        wrong = tree.depends(name) if tree is not None else []
        why = f"{name} decides {'; '.join(wrong)}" if wrong else f"no {name} in {tree}"
        why = why if tree is not None else "it sums nothing"
        yield ProofLine(f"{compute.name} grouping", not wrong, why)
        ends = [x.extent for x in main.axes_of("K") if x.extent is not None]
        is_summed = is_summed or any(ir.Var(name) in ir.free_vars(e) for e in ends)
        yield from of_stages(compute, step.schedule, plan.target, name)
    yield of_kernel(step.kernel, name, is_summed, step.compute.name)


def of_stages(compute: Compute, schedule: Schedule, target: Target, name: str) -> Iterator[ProofLine]:
    """Whether the number of samples decides which terms a step of a kernel has: looked at where steps have
    their name still."""
    if compute.does != "compute":
        return
    for stage, kernel in lower(compute, schedule, target, "proof", compute.math):
        lets = ir.find(kernel, ir.Let)
        steps = [let.value for let in lets if let.var is STEP]
        if steps:
            told = {let.var: (let.value,) for let in lets}
            wrong = [e for e in steps if ir.Var(name) in resolved(e, told)]
            why = f"after {stage} a step is {ir.readable(steps[0])}"
            yield ProofLine(
                f"{compute.name} steps", not wrong, why + (f", told by {name}" if wrong else "")
            )
            return


def of_kernel(kernel: ir.Kernel, name: str, is_summed: bool, title: str) -> ProofLine:
    """Whether the number of samples decides nothing of a kernel's loops and branches but how many programs
    there are, and where sums over samples end."""
    if wrong := decided(kernel, name, is_summed):
        return ProofLine(f"{title} kernel", False, f"{name} decides: {'; '.join(wrong)}")
    return ProofLine(f"{title} kernel", True, f"no loop and no branch of {kernel.name} depends on {name}")
