"""Plans of kernels written in Python: one launch, made of a traced function or read from disk.

A record is found by a digest of all that reading the function depends on (``trace_digest.py``), the kinds
of the arguments, and which of their numbers are constants. Where the kernel turned out to need more of
these, the record says so, and the next look is for those."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transconv.compute import SampleOutcome, Workload, sizes_of
from transconv.ir import FuncCall, Kernel, Store, Tensor, find
from transconv.kernel.annotations import Group
from transconv.kernel.launch.arguments import Arguments, Number, Sizing, sizing
from transconv.passes import EMIT
from transconv.runtime import Launch, Plan, PlanStep, one_kernel_plan, plan_cache, register_reader
from transconv.support import KernelError, Unsupported, records
from transconv.target import Target


@dataclass(frozen=True, slots=True)
class LoweredKernel:
    """A kernel for given arguments. ``stages``: it after each pass; ``source``: its text; ``arguments``:
    the names of the kernel's parameters in the order of the launch; ``numbers``: those of them that are
    floats of the call; ``sizing``: how its integers became sizes that are arguments; ``fixed``: the places
    of those that the kernel needs to know; ``plain``: of those whose divisors do not matter."""

    name: str
    group: Group
    stages: tuple[tuple[str, Kernel], ...]
    source: str
    numbers: tuple[str, ...]
    warps: int
    num_stages: int
    sizing: Sizing
    fixed: frozenset[int]
    plain: frozenset[int]

    @property
    def kernel(self) -> Kernel:
        """The kernel that was emitted."""
        return self.stages[-1][1]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the launch."""
        return tuple(t.name for t in self.kernel.params)

    def stage(self, name: str) -> str:
        """The text after a stage. KernelError for an unknown name."""
        if name == EMIT.name:
            return self.source
        for stage, kernel in self.stages:
            if stage == name:
                return str(kernel)
        known = " ".join([*(s for s, _ in self.stages), EMIT.name])
        raise KernelError(f"there is no stage {name!r} of a kernel; expected one of {known}")


SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KernelWorkload(Workload):
    """A kernel for one kind of arguments. ``digest``: of what it is made from; ``arrays``: its parameters,
    those that are numbers last."""

    name: str
    digest: str
    precision: str
    arrays: tuple[Tensor, ...]
    sizes: str = ""  # those that are arguments

    by_user = False
    computations = ()  # what it means is its function (simulator/execution.py)
    result = ""
    results = ()
    shape_text = ""

    @property
    def math(self) -> str:
        return self.precision

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.arrays

    def refuse(self) -> None:
        """A plan that is not on disk is made where the function is."""
        raise Unsupported(
            "kernel:function", f"{self.name} is not on disk, and is lowered where it is called"
        )

    @property
    def title(self) -> str:
        return self.name

    @property
    def text(self) -> str:
        """What another process reads it back from, to find its plan on disk."""
        return f"{self} " + json.dumps(
            [self.precision, self.sizes, [plan_cache.tensor_content(t) for t in self.arrays]]
        )

    def __str__(self) -> str:
        return f"kernel {self.name} {self.digest}"

    def examine(self, tensors: dict[str, Any], result: Any) -> SampleOutcome:
        raise NotImplementedError("a call says what its result is")


@register_reader
def read_workload(text: str, direction: str, behind: str) -> KernelWorkload | None:
    """The kernel of a text; None if it is none."""
    head, _, rest = text.partition(" [")
    word, *names = head.split()
    if word != "kernel" or len(names) != 2 or direction or behind:
        return None
    try:
        precision, sizes, arrays = json.loads(f"[{rest}")
        named = sizes_of(records.text(sizes)) if sizes else None
        name, digest = records.name(names[0]), records.text(names[1])
        return KernelWorkload(
            name,
            digest,
            records.text(precision),
            tuple([plan_cache.tensor_of(t, named) for t in records.several(arrays)]),
            sizes,
        )
    except plan_cache.UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel and its plan. ``sizing``: how numbers of a call enter it; ``fixed``, ``plain``: the places
    of those that it needs to know, and of those whose divisors do not matter; ``stored``: the names of
    arrays that it writes; ``launches``: of arrays that are not aligned, and of aligned ones."""

    plan: Plan
    sizing: Sizing
    fixed: frozenset[int]
    plain: frozenset[int]
    stored: tuple[str, ...]
    launches: tuple[Launch, Launch] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        each = [Launch(self.plan, aligned, self.step.params) for aligned in (False, True)]
        object.__setattr__(self, "launches", tuple(each))

    @property
    def step(self) -> PlanStep:
        """Its launch."""
        return self.plan.steps[0]

    def values(self, numbers: tuple[int, ...]) -> dict[str, int] | None:
        """The sizes that are arguments for the numbers of a call; None for one that it does not fit."""
        if not self.sizing.fits(numbers):
            return None
        values, required = self.sizing.values(numbers), self.plan.required
        return values if required is None or required.takes(*values.values()) else None

    def why_not(self, numbers: tuple[int, ...]) -> str:
        """Why it does not take the numbers of a call; empty if it does."""
        if not self.sizing.fits(numbers):
            return "it does not fit"
        required = self.plan.required
        return "" if required is None else required.sizes.why_not(self.sizing.values(numbers))

    def launch(self, aligned: bool, values: Mapping[str, int]) -> Launch:
        """Its launch for sizes that are arguments."""
        found = self.launches[aligned]
        return found.at(values) if values else found


def compiled(low: LoweredKernel, target: Target, workload: KernelWorkload) -> CompiledKernel:
    """The kernel of a function that was read."""
    words = f"{workload} {low.source} {low.warps} {low.num_stages}".encode()
    file = f"kernel_{low.name[:75]}_{hashlib.blake2b(words, digest_size=8).hexdigest()}"
    plan = one_kernel_plan(workload, target, low.kernel, low.source, file, low.warps, low.num_stages)
    return CompiledKernel(plan, low.sizing, low.fixed, low.plain, stored_by(low.kernel))


def stored_by(kernel: Kernel) -> tuple[str, ...]:
    """The names of the arrays that a kernel writes."""
    written = [s.tensor for s in find(kernel, Store)]
    written += [a for s in find(kernel, FuncCall) for a in s.args if isinstance(a, Tensor)]
    return tuple(dict.fromkeys(t.name for t in written))


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What a kernel is asked for. ``made_of``: the digest of its function, empty where plans are not kept;
    ``kind``: of its arguments and words, all that is no number; ``numbers``: of the call."""

    name: str
    made_of: str
    kind: tuple[Any, ...]
    precision: str
    arguments: Arguments
    numbers: Sequence[Number]
    target: Target

    def workload(self, sizes: Sizing) -> KernelWorkload:
        """The kernel with some constants."""
        specs = [t for t in self.arguments.specs(sizes).values() if isinstance(t, Tensor)]
        arrays = tuple([t for last in (False, True) for t in specs if t.number is last])
        exprs = [str(e) for e in sizes.exprs]
        told = repr((SCHEMA, self.made_of, self.kind, exprs, sizes.first, sizes.sources))
        digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
        return KernelWorkload(self.name, digest, self.precision, arrays, str(sizes.sizes or ""))

    def record(self, workload: KernelWorkload) -> str:
        """The name of the record of a kernel."""
        return plan_cache.key(workload, self.target, False)

    def find(self, fixed: frozenset[int], plain: frozenset[int]) -> CompiledKernel | None:
        """The kernel that another process made for such a call; None if there is none."""
        numbers = tuple([n.value for n in self.numbers])
        while self.made_of:
            sizes = sizing(self.numbers, fixed, plain)
            workload = self.workload(sizes)
            content = plan_cache.DRAWER.get(self.record(workload))
            if content is None:
                return None
            try:
                own = content["kernel"]
                places = [
                    frozenset([records.whole(n, 0, len(numbers) - 1) for n in records.several(own[name])])
                    for name in ("fixed", "plain")
                ]
                stored = tuple([records.name(n) for n in records.several(own["stored"])])
                plan = plan_cache.read(content, workload, self.target, False, Plan, _never)
                plan.fixed = True
            except plan_cache.UNREADABLE:
                return None
            if places != [fixed, plain]:  # it needed more, and so may this call
                if not (fixed <= places[0] and plain <= places[1]):
                    return None
                fixed, plain = places
                continue
            found = CompiledKernel(plan, sizes, fixed, plain, stored)
            names = plan.required.names if plan.required else ()
            return found if names == sizes.names and not found.why_not(numbers) else None
        return None

    def keep(self, found: CompiledKernel, before: tuple[frozenset[int], frozenset[int]]) -> None:
        """Write a kernel to disk, for those who look for it with the constants that it has, and with those
        that were known ``before``."""
        if not self.made_of:
            return
        content = plan_cache.content_of(found.plan) | {
            "kernel": {
                "fixed": sorted(found.fixed),
                "plain": sorted(found.plain),
                "stored": list(found.stored),
            }
        }
        for fixed, plain in dict.fromkeys((before, (found.fixed, found.plain))):
            plan_cache.DRAWER.put(self.record(self.workload(sizing(self.numbers, fixed, plain))), content)


def _never() -> Plan:
    raise NotImplementedError("a kernel written in Python is lowered where it is called")
