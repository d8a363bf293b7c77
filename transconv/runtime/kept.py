"""Beside the compiler. Plans on disk, which another process made: texts and launches.

Choosing schedules and running the passes take most of the time of a start. A record has what launches
need, so that neither is done again; the kernels' IR is made again only when it is asked for. A record's
key is a digest of all that the plan depends on, including this package's files. Its texts are executed:
like Triton's machine code they are as safe as their folder, and nothing is read from a folder that others
can write to (``disk_cache``).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from transconv import knobs
from transconv.backend_triton import Launcher, SizedLauncher, unspecialised, write
from transconv.compute import Workload, of_sizes, sizes_of
from transconv.cost import Formula
from transconv.disk_cache import Content, Drawer
from transconv.ir import DTYPES, Layout, LayoutBlock, Sizes, Tensor
from transconv.passes import STAGES, running, stages
from transconv.runtime import verdicts
from transconv.runtime.plans import Lowered, Plan, Step
from transconv.runtime.steps import digest_of
from transconv.schedule import Schedule, registered_words
from transconv.selection import files_digest, stamp
from transconv.target import Target, triton_version

SCHEMA = 2
DRAWER = Drawer("plans", SCHEMA, longest=1 << 22, lasting=False)
Made = TypeVar("Made", bound=Plan)
Again = Callable[[], Plan]  # makes the plan by running the passes


def keeps() -> bool:
    """Whether plans are read and written: not if the user sets a schedule, dumps, traces or verifies the
    passes, or has registered words or passes that other processes lack."""
    return not (knobs.schedule() or knobs.verify() or knobs.dump() or knobs.debug() >= 2
                or registered_words() or len(stages()) != len(STAGES))


def key(workload: Workload, target: Target, deterministic: bool) -> str:
    """The name of a plan's record; empty if plans are neither read nor written."""
    if not keeps():
        return ""
    told = (SCHEMA, triton_version(), deterministic, sorted(running().items()),
            type(workload).__name__, str(workload), workload.direction, workload.behind, workload.math,
            [str(t) for t in workload.tensors], stamp(workload, target))
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def keep(plan: Plan) -> None:
    """Write a plan to disk; not one of a given schedule."""
    name = key(plan.workload, plan.target, plan.deterministic)
    if name and not plan.fixed:
        DRAWER.put(name, {
            "files": files_digest(), "target": plan.target.name,
            "problem": plan.workload.text, "direction": plan.workload.direction, "why": plan.why,
            "schedule": str(plan.schedule), "rejected": plan.rejected, "tuned": plan.tuned,
            "workspaces": [_told(t) for t in plan.workspaces.values()],
            "estimated": [[list(map(str, f.counts)), [*map(list, f.lines)], f.us]
                          for f in plan.formulas()] if plan.required else [],
            "steps": [_step(s) for s in plan.steps]})


def find(workload: Workload, target: Target, deterministic: bool, kind: type[Made],
         again: Again) -> Made | None:
    """The plan of a record; None if there is none, if it is unreadable, or if one of its kernels is known
    to be wrong."""
    name = key(workload, target, deterministic)
    content = DRAWER.get(name) if name else None
    if content is None:
        return None
    made = functools.cache(again)
    try:
        steps = tuple(_read(s, target, made, at) for at, s in enumerate(content["steps"]))
        sizes = next((s.launcher.sizes for s in steps if isinstance(s.launcher, SizedLauncher)), None)
        spaces = [_tensor(t, sizes) for t in content["workspaces"]]
        plan = kind(workload, target, Schedule.parse(content["schedule"]), steps,
                    {t.name: t for t in spaces}, rejected=int(content["rejected"]),
                    why=str(content["why"]), tuned=content["tuned"] is True,
                    deterministic=deterministic)
        if plan.required:
            plan.estimated = tuple([_formula(f, plan.required.sizes) for f in content["estimated"]])
    except (KeyError, TypeError, ValueError, AttributeError):  # a ScheduleError is a ValueError
        return None
    return None if any(verdicts.is_wrong(s.digest) for s in plan.steps) else plan


def _step(step: Step) -> Content:
    run = step.launcher
    sized = {"sizes": str(run.sizes), "where": list(map(str, run.requires.where)),
             "programs": str(run.programs)} if isinstance(run, SizedLauncher) else {"sizes": None}
    return {**sized, "does": step.does, "schedule": str(step.schedule), "source": step.source,
            "function": run.function, "grid": run.grid, "warps": run.warps, "stages": run.stages,
            "boxes": [b and [_told(b[0]), list(b[1])] for b in run.boxes], "explicit": run.explicit,
            "early": run.early, "params": list(step.params), "types": list(run.types),
            "digest": step.digest, "zero": None if step.zero is None else _told(step.zero)}


def _read(kept: Content, target: Target, again: Again, at: int) -> Step:
    schedule, source, function = Schedule.parse(kept["schedule"]), str(kept["source"]), kept["function"]
    if kept["digest"] != digest_of(source, schedule, target):
        raise ValueError(f"{function}: the text is another")
    sizes = sizes_of(kept["sizes"]) if kept["sizes"] else None
    if unspecialised(source) != (sizes.names if sizes else ()):
        raise ValueError(f"{function}: it takes other sizes")
    boxes = tuple(b and (_tensor(b[0], sizes), tuple(b[1])) for b in kept["boxes"])
    path = write(source, function)
    words, types = (kept["warps"], kept["stages"]), tuple(kept["types"])
    if sizes:
        run: Launcher = SizedLauncher(source, function, path, of_sizes(kept["programs"], sizes), sizes,
                                      *words, kept["early"], types, kept["digest"], boxes,
                                      kept["explicit"], requires=replace(
                                          sizes, where=tuple([of_sizes(c, sizes) for c in kept["where"]])))
    else:
        run = Launcher(source, function, path, kept["grid"], *words, boxes, kept["explicit"],
                       kept["early"], types, kept["digest"])

    def lowered() -> Lowered:
        step = again().steps[at]
        return Lowered(step.compute, step.kernel)

    zero = None if kept["zero"] is None else _tensor(kept["zero"])
    return Step(str(kept["does"]), schedule, lowered, source, path, run, tuple(kept["params"]),
                kept["digest"], zero)


def _formula(kept: Any, sizes: Sizes) -> Formula:
    counts, lines, us = kept
    return Formula(tuple([of_sizes(c, sizes) for c in counts]), tuple([(n, t) for n, t in lines]), us)


def _told(tensor: Tensor) -> Content:
    lay = tensor.layout
    return {"name": tensor.name, "dims": list(tensor.dims), "shape": list(tensor.shape),
            "dtype": lay.dtype.name, "blocks": [[b.dim, b.size, b.stride] for b in lay.blocks],
            "offset": lay.offset, "near": tensor.near and tensor.near.name,
            "copy_of": tensor.copy_of, "parts_of": tensor.parts_of, "planes": tensor.planes,
            "extents": list(map(str, tensor.extents)), "pitches": list(map(str, tensor.pitches)),
            "every": list(tensor.every)}


def _tensor(kept: dict[str, Any], sizes: Sizes | None = None) -> Tensor:
    blocks = tuple(LayoutBlock(*b) for b in kept["blocks"])
    layout = Layout(DTYPES[kept["dtype"]], len(kept["dims"]), blocks, kept["offset"])
    near = kept["near"] and DTYPES[kept["near"]]
    extents, pitches = (tuple(of_sizes(e, sizes) for e in kept[name]) if sizes else ()
                        for name in ("extents", "pitches"))
    return Tensor(kept["name"], tuple(kept["dims"]), tuple(kept["shape"]), layout, near,
                  kept["copy_of"], kept["parts_of"], kept["planes"], extents, pitches,
                  every=tuple(kept["every"]))
