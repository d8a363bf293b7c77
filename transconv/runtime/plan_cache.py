"""Plans on disk, which another process or machine made: texts and launches.

Choosing schedules and running the passes take most of the time of a start. A record has what launches
need, so that neither is done again; the kernels' IR is made again only when it is asked for. A record's
key is a digest of all that the plan depends on, including this package's files. Its texts are executed:
records are sealed with a key of the user's (``support/records.py``), and each field is judged as it is
read. What a record says is compared with what the passes make in ``compilation/batch_compile.py``."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from transconv.backend_triton import TritonKernel, unspecialised, write
from transconv.compute import Workload, of_sizes, sizes_of
from transconv.cost import CostFormula
from transconv.ir import DTYPES, Expr, Layout, LayoutBlock, Sizes, Tensor
from transconv.passes import STAGES, running, stages
from transconv.runtime import check_records
from transconv.runtime.compilation.plan_request import PlanRequest
from transconv.runtime.plans import LoweredStep, Plan, PlanStep
from transconv.runtime.steps import digest_of
from transconv.schedule import Schedule, registered_words
from transconv.selection import files_digest, stamp
from transconv.support import Content, Drawer, knobs, records, triton_version
from transconv.target import Target

SCHEMA = 4
DRAWER = Drawer("plans", SCHEMA, longest=1 << 22, lasting=False, sealed=True)
MOST_PROGRAMS = (1 << 31) - 1  # of a launch
TEXT = 1 << 20  # characters of a kernel's text
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading a record that is none may raise; errors of schedules and computations are ValueErrors."""
Made = TypeVar("Made", bound=Plan)
Again = Callable[[], Plan]  # makes the plan by running the passes


def keeps() -> bool:
    """Whether plans are read and written: not if the user sets a schedule, dumps, traces or verifies the
    passes, or has registered words or passes that other processes lack."""
    return not (
        knobs.schedule()
        or knobs.verify()
        or knobs.dump()
        or knobs.debug() >= 2
        or registered_words()
        or len(stages()) != len(STAGES)
    )


def key(workload: Workload, target: Target, deterministic: bool) -> str:
    """The name of a plan's record; empty if plans are neither read nor written."""
    if not keeps():
        return ""
    return name_of(
        workload,
        target,
        deterministic,
        workload.direction,
        workload.behind,
        [str(t) for t in workload.tensors],
    )


def name_of(workload: Workload, target: Target, *more: Any) -> str:
    """A digest of a workload, of what its plan depends on, and of ``more``."""
    told = (
        SCHEMA,
        triton_version(),
        sorted(running().items()),
        type(workload).__name__,
        str(workload),
        workload.math,
        stamp(workload, target),
        *more,
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def keep(plan: Plan) -> None:
    """Write a plan to disk; not one of a given schedule."""
    name = key(plan.workload, plan.target, plan.deterministic)
    if name and not plan.fixed:
        DRAWER.put(name, content_of(plan))


def content_of(plan: Plan) -> Content:
    """What the record of a plan has."""
    return {
        "files": files_digest(),
        "target": plan.target.name,
        "why": plan.why,
        "question": PlanRequest(plan.workload, plan.target, plan.deterministic).job,
        "schedule": str(plan.schedule),
        "rejected": plan.rejected,
        "tuned": plan.tuned,
        "workspaces": [tensor_content(t) for t in plan.workspaces.values()],
        "estimated": [[list(map(str, f.counts)), [*map(list, f.lines)], f.us] for f in plan.formulas()]
        if plan.required
        else [],
        "steps": [_step(s) for s in plan.steps],
    }


def find(
    workload: Workload, target: Target, deterministic: bool, kind: type[Made], again: Again
) -> Made | None:
    """The plan of a record; None if there is none, if it is unreadable, or if one of its kernels is known
    to be wrong."""
    name = key(workload, target, deterministic)
    content = DRAWER.get(name) if name else None
    if content is None:
        return None
    try:
        plan = read(content, workload, target, deterministic, kind, functools.cache(again))
    except UNREADABLE:
        return None
    digests = [s.digest for s in plan.steps]
    if any(map(check_records.is_wrong, digests)):
        return None
    return None if check_records.is_passed_over(digests, plan.rejected, plan.tuned) else plan


def read(
    content: Content,
    workload: Workload,
    target: Target,
    deterministic: bool,
    kind: type[Made],
    again: Again,
) -> Made:
    """The plan of a record's content, each field of which is judged by its type and range and against the
    others. Raises what is ``UNREADABLE`` for what is not as ``keep`` writes it."""
    if content["target"] != target.name or content["files"] != files_digest():
        raise ValueError(f"{content['target']!r:.80}; expected a plan of this version for {target.name}")
    listed, sizes = records.several(content["steps"]), None
    if sized := next((s["sizes"] for s in listed if s["sizes"] is not None), None):
        sizes = sizes_of(records.text(sized))
    spaces = {t.name: t for t in [tensor_of(t, sizes) for t in records.several(content["workspaces"])]}
    given = {t.name: t for t in workload.tensors}
    if given.keys() & spaces.keys() or len(spaces) < len(content["workspaces"]):
        raise ValueError(f"workspaces {', '.join(spaces)}; expected names of their own")
    steps = tuple([_read(s, target, again, at, given | spaces) for at, s in enumerate(listed)])
    if missing := [
        n for n in workload.results if 0 not in given[n].shape and all(n not in s.params for s in steps)
    ]:
        raise ValueError(f"no kernel stores {missing[0]}")
    plan = kind(
        workload,
        target,
        Schedule.parse(records.text(content["schedule"])),
        steps,
        spaces,
        rejected=records.whole(content["rejected"], most=1 << 16),
        why=records.text(content["why"]),
        tuned=records.flag(content["tuned"]),
        deterministic=deterministic,
    )
    if plan.required:
        plan.estimated = tuple(
            [_formula(f, plan.required.sizes) for f in records.several(content["estimated"])]
        )
    return plan


def _step(step: PlanStep) -> Content:
    run = step.triton
    sized = (
        {
            "sizes": str(run.sizes),
            "where": list(map(str, run.requires.where)),
            "programs": str(run.programs),
        }
        if run.requires
        else {"sizes": None}
    )
    return {
        **sized,
        "does": step.does,
        "schedule": str(step.schedule),
        "source": step.source,
        "function": run.function,
        "file": step.path.stem if step.path else run.function,
        "grid": run.grid,
        "warps": run.warps,
        "stages": run.stages,
        "fuse": run.fuse,
        "boxes": [b and [tensor_content(b[0]), list(b[1])] for b in run.boxes],
        "explicit": run.explicit,
        "early": run.early,
        "params": list(step.params),
        "types": list(run.types),
        "digest": step.digest,
        "zero": step.zero and step.zero.name,
    }


def _read(kept: Content, target: Target, again: Again, at: int, known: Mapping[str, Tensor]) -> PlanStep:
    """A step; ``known``: the tensors of the call and the plan's workspaces, by name."""
    schedule, source = Schedule.parse(records.text(kept["schedule"])), records.text(kept["source"], TEXT)
    function = records.name(kept["function"])
    if not re.search(rf"^def {function}\(", source, re.MULTILINE):
        raise ValueError(f"{function}: the text defines no such function")
    if (kept["warps"], kept["stages"]) != (schedule.warps, schedule.stages):
        raise ValueError(f"{function}: warps and stages are not those of {schedule}")
    sizes = sizes_of(records.text(kept["sizes"])) if kept["sizes"] is not None else None
    if unspecialised(source) != (sizes.names if sizes else ()):
        raise ValueError(f"{function}: it takes other sizes")
    params = tuple([known[records.name(n)] for n in records.several(kept["params"])])
    types, fuse = tuple([t.dtype.torch for t in params]), records.flag(kept["fuse"])
    if not params or kept["types"] != [*types]:
        raise ValueError(f"{function}: its tensors are of other types")
    if kept["digest"] != digest_of(source, schedule, target, () if fuse else types):
        raise ValueError(f"{function}: the text is another")
    boxes = _boxes(kept["boxes"], params, sizes)
    explicit, early = records.flag(kept["explicit"]), records.flag(kept["early"])
    path, words = write(source, records.name(kept["file"])), (schedule.warps, schedule.stages)
    grid: int | Expr = records.whole(kept["grid"], most=MOST_PROGRAMS)
    requires = None
    if sizes:
        where = tuple([of_sizes(records.text(c), sizes) for c in records.several(kept["where"])])
        requires, grid = replace(sizes, where=where), of_sizes(records.text(kept["programs"]), sizes)
    run = TritonKernel(
        source,
        function,
        path,
        grid,
        *words,
        boxes,
        explicit,
        early,
        types,
        kept["digest"],
        fuse,
        sizes,
        requires,
    )

    def lowered() -> LoweredStep:
        step = again().steps[at]
        return LoweredStep(step.compute, step.kernel)

    zero = None if kept["zero"] is None else known[records.name(kept["zero"])]
    return PlanStep(
        records.name(kept["does"]),
        schedule,
        lowered,
        source,
        path,
        run,
        tuple([t.name for t in params]),
        kept["digest"],
        zero,
    )


def _boxes(kept: Any, params: tuple[Tensor, ...], sizes: Sizes | None) -> tuple[Any, ...]:
    """The boxes of a step: for each tensor None, or as what it is seen and the extents, within its
    memory."""
    listed = records.several(kept)
    if listed and len(listed) != len(params):
        raise ValueError(f"{len(listed)} boxes of {len(params)} tensors")
    made: list[Any] = []
    for box, tensor in zip(listed, params, strict=False):
        if box is None:
            made.append(None)
            continue
        seen, extents = box
        view = tensor_of(seen, sizes)
        extents = [records.whole(n, 1, 1 << 16) for n in records.several(extents)]
        if (
            (view.name, view.dtype) != (tensor.name, tensor.dtype)
            or len(extents) != len(view.dims)
            or (not sizes and not view.planes and view.layout.span > tensor.layout.span)
        ):
            raise ValueError(f"a box of {view}; expected one of {tensor}")
        made.append((view, tuple(extents)))
    return tuple(made)


def _formula(kept: Any, sizes: Sizes) -> CostFormula:
    counts, lines, us = kept
    return CostFormula(
        tuple([of_sizes(records.text(c), sizes) for c in records.several(counts)]),
        tuple([(n, t) for n, t in records.several(lines)]),
        us,
    )


def tensor_content(tensor: Tensor) -> Content:
    """What a record has of a tensor."""
    lay = tensor.layout
    return {
        "name": tensor.name,
        "dims": list(tensor.dims),
        "shape": list(tensor.shape),
        "dtype": lay.dtype.name,
        "blocks": [[b.dim, b.size, b.stride] for b in lay.blocks],
        "offset": lay.offset,
        "near": tensor.near and tensor.near.name,
        "copy_of": tensor.copy_of,
        "parts_of": tensor.parts_of,
        "planes": tensor.planes,
        "extents": list(map(str, tensor.extents)),
        "pitches": list(map(str, tensor.pitches)),
        "every": list(tensor.every),
    }


def tensor_of(kept: dict[str, Any], sizes: Sizes | None = None) -> Tensor:
    """The tensor of a record's content. Raises what is ``UNREADABLE``."""
    dims = tuple([records.text(d) for d in records.several(kept["dims"], 64)])
    shape = tuple([records.whole(n) for n in records.several(kept["shape"])])
    blocks = tuple(
        [
            LayoutBlock(records.whole(d, most=len(dims) - 1), records.whole(n), records.whole(step))
            for d, n, step in records.several(kept["blocks"])
        ]
    )
    every = tuple([records.whole(n, 1) for n in records.several(kept["every"])])
    if len(shape) != len(dims) or len(every) not in (0, len(dims)):
        raise ValueError(f"{len(shape)} sizes of {len(dims)} dims")
    layout = Layout(DTYPES[kept["dtype"]], len(dims), blocks, records.whole(kept["offset"]))
    near = None if kept["near"] is None else DTYPES[kept["near"]]
    extents, pitches = (
        tuple([of_sizes(records.text(e), sizes) for e in records.several(kept[name])]) if sizes else ()
        for name in ("extents", "pitches")
    )
    copy_of, parts_of = (kept[n] and records.name(kept[n]) for n in ("copy_of", "parts_of"))
    return Tensor(
        records.name(kept["name"]),
        dims,
        shape,
        layout,
        near,
        copy_of,
        parts_of,
        records.flag(kept["planes"]),
        extents,
        pitches,
        every=every,
    )
