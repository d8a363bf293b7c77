"""Expected instructions of a kernel's machine code, by one table of rules over its schedule and its chip.

A rule says when it holds and names words of which at least one must occur (see
``backend_triton.resources`` for what they mean). No rule knows a problem by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from transconv.compute import Compute, axis_strides
from transconv.cost import ASYNCHRONOUS, count
from transconv.ir import View
from transconv.schedule import Schedule, aligned
from transconv.target import Target

WIDEST = 16  # bytes that one lane moves at most


@dataclass(frozen=True, slots=True)
class Expected:
    """At least one of the words, and why."""

    words: tuple[str, ...]
    reason: str

    def missing(self, words: dict[str, int]) -> str | None:
        """None if one of them occurs, else a sentence."""
        if any(words.get(w) for w in self.words):
            return None
        return f"no {' or '.join(self.words)} in the machine code: {self.reason}"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the rules ask about a kernel. ``left``, ``right``: rows and columns of the tile as the
    matrix unit sees it; ``lane_bytes``: what a lane can take at once of an operand that is gathered,
    0 if none is; ``steps`` of the loop; ``bits`` of an operand's element."""

    backend: str
    features: frozenset[str]
    lanes: int  # of a warp
    matrix: bool
    precision: str  # how f32 is multiplied: ieee, tf32, tf32x3
    bits: int
    left: int
    right: int
    lane_bytes: int
    boxes: bool
    box_store: bool
    box_behind: bool  # of 16 bits
    steps: int
    warps: int
    stages: int
    sums_only: bool
    atomic: bool
    scaled: bool = False

    @property
    def cuda(self) -> bool:
        return self.backend == "cuda"

    @property
    def asynchronous(self) -> bool:
        """Whether the tile is large enough for a whole group of warps to multiply together."""
        return self.left >= 64 and self.warps % 4 == 0

    @property
    def exact32(self) -> bool:
        """Whether f32 is multiplied as it is, which matrix units of CUDA chips cannot."""
        return self.bits == 32 and self.precision == "ieee"


def facts(schedule: Schedule, compute: Compute, target: Target, precision: str) -> KernelFacts:
    """The facts of one kernel."""
    work = count(schedule, compute, target)
    # Asynchronous matrix units take f32 from shared memory along K only; other rows are transposed
    # on the way, element by element.
    along_k = work.bits == 32 and bool(ASYNCHRONOUS & target.features)
    gathered = [
        _at_once(view, schedule, compute, target.warp_size, along_k)
        for view, word in ((compute.a, schedule.a), (compute.b, schedule.b))
        if view is not None and word == "gather"
    ]
    return KernelFacts(
        target.backend,
        target.features,
        target.warp_size,
        schedule.unit == "mma" and compute.b is not None,
        precision if precision in target.precisions else "ieee",
        work.bits,
        work.left,
        work.right,
        max(gathered, default=0),
        "box" in (schedule.a, schedule.b),
        schedule.c == "box",
        schedule.behind == "box" and compute.c.tensor.dtype.bits == 16,
        work.steps,
        schedule.warps,
        schedule.stages,
        compute.b is None,
        schedule.split_k > 1 and schedule.reduce == "atomic",
        bool(schedule.scaled),
    )


def _at_once(view: View, schedule: Schedule, compute: Compute, lanes: int, along_k: bool) -> int:
    """Bytes that a lane can take with one access: a power of two up to 16 where one axis alone, the
    tensor's innermost, makes a side of the tile, and every row begins at a multiple of it; else one
    element. (Fused axes are left out: their masks and divisions may forbid it.)"""
    strides, size = axis_strides(view, compute), view.tensor.dtype.bytes
    blocks = [b for b in schedule.blocks if any(strides[a] for a in b.axes)]
    along = next((b.first for b in blocks if len(b.axes) == 1 and strides[b.first] == 1), None)
    if along is None or (along_k and compute.kind(along) != "K"):
        return size
    steps = [strides[x.name] for x in compute.axes if x.name != along and x.size > 1]
    steps += [strides[""], compute.size(along), prod(b.extent for b in blocks) // (schedule.warps * lanes)]
    vector = WIDEST // size
    while vector > 1 and any(s % vector for s in steps):
        vector //= 2
    return min(vector, aligned(view, (along,), compute)) * size


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of instructions: ``words`` must occur where ``holds``; ``reason`` is told when none does."""

    holds: Callable[[KernelFacts], bool]
    words: tuple[str, ...]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        lambda f: f.matrix and "wgmma" in f.features and f.asynchronous and not f.exact32,
        ("HGMMA", "IGMMA", "QGMMA"),
        "the schedule says mma, and its tile fills the asynchronous matrix unit",
    ),
    Rule(
        lambda f: f.matrix and "tcgen05" in f.features and f.asynchronous and not f.exact32 and f.bits > 8,
        ("UTCHMMA",),
        "the schedule says mma, and its tile fills the asynchronous matrix unit",
    ),
    Rule(
        lambda f: f.matrix and f.cuda and not f.exact32,
        (
            "HMMA",
            "HGMMA",
            "UTCHMMA",
            "IMMA",
            "IGMMA",
            "QMMA",
            "QGMMA",
            "OMMA",
            "UTCQMMA",
            "UTCOMMA",
            "UTCIMMA",
        ),
        "the schedule says mma",
    ),
    Rule(
        lambda f: f.scaled,
        ("UTCQMMA", "UTCOMMA", "QMMA", "OMMA", "v_mfma_scale"),
        "the schedule says scaled=1: the matrix unit multiplies elements of 8 or 4 bits",
    ),
    Rule(
        lambda f: f.matrix and f.backend == "hip" and f.lanes == 64, ("v_mfma",), "the schedule says mma"
    ),
    Rule(
        lambda f: f.matrix and f.backend == "hip" and f.lanes == 32 and f.bits <= 16,
        ("v_wmma",),
        "the schedule says mma",
    ),
    Rule(
        lambda f: (
            f.matrix
            and f.backend == "xpu"
            and "mma" in f.features
            and (f.bits <= 16 or (f.bits == 32 and f.precision != "ieee"))
        ),
        ("dpas",),
        "the schedule says mma",
    ),
    Rule(
        lambda f: f.cuda and f.bits == 32 and (f.exact32 or not f.matrix) and not f.sums_only,
        ("FFMA", "FFMA2"),
        "f32 is multiplied as it is",
    ),
    Rule(lambda f: f.cuda and f.bits == 64 and not f.sums_only, ("DFMA", "DMMA"), "f64 is multiplied"),
    Rule(
        lambda f: f.backend == "hip" and f.bits == 64 and not f.sums_only,
        ("v_fma", "v_mfma"),
        "f64 is multiplied",
    ),
    Rule(lambda f: f.boxes, ("UTMALDG",), "an operand is fetched as boxes"),
    Rule(lambda f: f.box_store, ("UTMASTG",), "the result is stored as boxes"),
    Rule(lambda f: f.box_behind, ("LDSM",), "what is read in the epilogue comes from shared memory"),
    Rule(
        lambda f: f.matrix and f.cuda and f.lane_bytes >= 4 and f.steps > 1 and f.stages > 1,
        ("LDGSTS",),
        "a gathered operand should be copied past the registers",
    ),
    Rule(
        lambda f: f.matrix and f.cuda and f.lane_bytes >= 16,
        ("LDGSTS.128", "LDG.128"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    # Triton 3.9 copies f32 past the registers of gfx950 in pieces of 4 bytes.
    Rule(
        lambda f: (
            f.matrix
            and f.backend == "hip"
            and f.lane_bytes >= 16
            and not (f.bits == 32 and "async_copy" in f.features)
        ),
        ("global_load.128", "buffer_load.128"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    Rule(
        lambda f: f.matrix and f.backend == "xpu" and f.lane_bytes >= 16,
        ("load.ugm.128", "load_block2d.ugm"),
        "the channels of a gathered operand lie in aligned runs of 16 bytes",
    ),
    Rule(lambda f: f.atomic and f.cuda, ("RED", "ATOMG"), "parts of a sum meet in memory"),
    Rule(
        lambda f: f.atomic and f.backend == "hip",
        ("global_atomic", "buffer_atomic"),
        "parts of a sum meet in memory",
    ),
)


def expected(schedule: Schedule, compute: Compute, target: Target, precision: str) -> tuple[Expected, ...]:
    """What the rules ask of one kernel."""
    known = facts(schedule, compute, target, precision)
    return tuple(Expected(rule.words, rule.reason) for rule in RULES if rule.holds(known))
