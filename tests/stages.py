"""A plan's kernels after every pass, run by the interpreter and compared with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.reference import convolve, integers, pack, unpack
from transconv.compute.compute import Compute
from transconv.conv import compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.ir import Kernel
from transconv.ir.interp.evaluate import Memory
from transconv.ir.interp.kernel import run
from transconv.ir.rules.verifier import verify
from transconv.passes import NAIVE, PIPELINE, levels
from transconv.schedule.legality import why_not
from transconv.schedule.schedule import Schedule
from transconv.selection.proposals import heuristics
from transconv.target.records import TARGETS, Target

# Shrinking a kernel takes minutes; the message already says how to repeat a failure.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
DRAWN = settings(
    deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False, phases=PHASES
)
SM90 = TARGETS["sm_90"]
SM100 = TARGETS["sm_100"]  # boxes, and no left operand that is overwritten while it is read
LEVELS = [levels()[name] for name in (NAIVE.name, *(p.name for p in PIPELINE))]
SPLIT = 2  # the parts of a split sum only exist once `blockwise`, the second pass, has made them

Launches = list[list[tuple[str, Kernel]]]


def shapes(p: ConvProblem) -> dict[str, tuple[int, ...]]:
    return {"src": (p.mb, p.ic, *p.i), "wei": (p.oc, p.icg, *p.k), "dst": (p.mb, p.oc, *p.o)}


def small_schedules(compute: Compute, draw: st.DrawFn) -> Schedule:
    """A legal schedule with small tiles, as a heuristic or a person could choose it."""
    legal = heuristics.candidates(compute, SM90)
    few = [c for c in legal if all(b.extent <= 64 for b in c.blocks)] or legal
    schedule = draw(st.sampled_from(few[:40]))
    words: dict[str, Any] = {
        "swap": draw(st.sampled_from([0, 0, 1])),
        "group_m": draw(st.sampled_from([1, 2, 8])),
        "unroll": draw(st.sampled_from([0, 0, 1])),
        "split_k": draw(st.sampled_from([1, 1, 2, 3])),
        "reduce": draw(st.sampled_from(["partials", "atomic"])),
        "order": ".".join(draw(st.permutations([x.name for x in compute.axes_of("K")]))),
    }
    for name, value in words.items():
        other = replace(schedule, **{name: value})
        if why_not(other, compute, SM90) is None:
            schedule = other
    return schedule


def launches_of(
    steps: Sequence[tuple[Compute, Schedule]],
    switches: dict[str, bool] | None = None,
    target: Target = SM90,
) -> Launches:
    """Per launch of a plan: its kernel as it is first written, and after every pass."""
    return [
        compiler.lower(compute, schedule, target, "conv", "ieee", switches) for compute, schedule in steps
    ]


def wrong_stages(p: ConvProblem, prop: Prop, launches: Launches, seed: int = 0) -> list[str]:
    """The stages after which the kernels do not give the reference's answer. Workspaces, and the
    padding between rows of a copy, hold NaN. What a pass has left as it was is not run again."""
    rng = np.random.default_rng(seed)
    a, b, c = prop.roles
    values = {n: integers(rng, shapes(p)[n], 2) for n in (a, b)}
    expected = convolve(p, prop, values[a], values[b])
    layouts = {n: getattr(p, n).layout for n in ("src", "wei", "dst")}
    tensors = {t for launch in launches for t in launch[0][1].params}
    # The sum of the parts writes the result where it belongs: without it, a copy of it stays a copy.
    first = SPLIT if any(t.parts_of for t in tensors) and any(t.copy_of == c for t in tensors) else 0
    wrong, right = [], dict[tuple[Kernel, ...], bool]()
    for stage in range(first, len(PIPELINE) + 1):
        kernels = [launch[stage][1] for launch in launches]
        if stage < SPLIT:
            kernels = [k for k in kernels if not any(t.parts_of for t in k.params)]
        for kernel in kernels:
            verify(kernel, LEVELS[stage], launches[0][stage][0])
        if (same := tuple(kernels)) in right:
            wrong += [] if right[same] else [launches[0][stage][0]]
            continue
        buffers = {n: pack(v, layouts[n]) for n, v in values.items()}
        buffers[c] = np.zeros(layouts[c].span, layouts[c].dtype.numpy)
        for k in sorted(kernels, key=_copies):
            # Of a copy some see planes that lack a row; who copies sees all of it.
            for t in (t for t in k.params if t.name not in layouts):
                buffers[t.name] = np.full(t.layout.span, np.nan, t.dtype.numpy)
        memory = Memory(buffers)
        for kernel in kernels:
            for t in kernel.params:  # parts of several phases lie in one workspace, each in its own way
                if t.parts_of and len(memory.buffers[t.name]) != t.layout.span:
                    memory = Memory(
                        memory.buffers | {t.name: np.full(t.layout.span, np.nan, t.dtype.numpy)}
                    )
            memory.new_launch()
            run(kernel, memory)
        got = unpack(memory.buffers[c], layouts[c], shapes(p)[c])
        right[same] = np.array_equal(got, expected)
        if not right[same]:
            wrong.append(launches[0][stage][0])
    return wrong


def _copies(kernel: Kernel) -> bool:
    """Whether a kernel sees a tensor and the copy of it."""
    names = {t.name for t in kernel.params}
    return any(t.copy_of in names for t in kernel.params)
