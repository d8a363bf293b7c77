"""What tuning may choose of a kernel's launch, and what it has found: records in the user's cache.

Open is what neither the call nor the kernel says: tunable numbers, warps and stages without a hint. The
shape of a group is never changed behind the kernel's back; it is open where the kernel declares tunable
numbers as its sizes. A record holds for calls of one kind whose sizes have as many binary digits each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transconv import knobs
from transconv.disk_cache import Drawer, fields
from transconv.ir import For, find
from transconv.kernel.annotations import KernelCall, Tunable
from transconv.kernel.frontend.source import FunctionSource
from transconv.kernel.group import MOST_STAGES
from transconv.kernel.launch.arguments import Arguments
from transconv.kernel.launch.lowering import LoweredKernel
from transconv.target import Target, triton_version

SCHEMA = 1
DRAWER = Drawer("kernels", SCHEMA, longest=1 << 14)
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)


@dataclass(frozen=True, slots=True)
class LaunchWords:
    """What tuning chooses of a launch; None: the compiler decides."""

    warps: int | None = None
    stages: int | None = None
    numbers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        said = [("warps", self.warps), ("stages", self.stages), *self.numbers]
        return " ".join(f"{name}={value}" for name, value in said if value is not None) or "default"


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The fastest words of ``tried``, and microseconds of these and of the kernel without tuning."""

    words: LaunchWords = field(default_factory=LaunchWords)
    us: float = 0.0
    before_us: float = 0.0
    tried: int = 0

    def __str__(self) -> str:
        return f"{self.words}: {self.us:.4g} us, {self.before_us:.4g} us before, {self.tried} tried"


def key_of(
    source: FunctionSource, asked: KernelCall, arguments: Arguments, target: Target, precision: str
) -> str:
    """The name of a call's record."""
    group = asked.group
    numbers = tuple(n.value.bit_length() for n in arguments.numbers), tuple(
        n.bit_length() for n in group.work)
    hints = group.warps_hint, group.stages_hint, group.shape if not asked.declared else ()
    words = repr((SCHEMA, "".join(source.lines), arguments.key, numbers, hints, target.name, target.sms,
                  precision, triton_version().split(".")[:2]))
    return f"{source.name[:60]}-{hashlib.blake2b(words.encode(), digest_size=12).hexdigest()}"


def recorded(key: str, tunables: Mapping[str, Tunable]) -> TunedChoice | None:
    """What tuning has found for a call; None where there is nothing, or nothing that may be chosen."""
    content = None if knobs.tuned() == "0" else DRAWER.get(key)
    if content is None:
        return None
    try:
        numbers = tuple(sorted((str(n), fields.whole(v, -fields.LARGEST))
                               for n, v in content["numbers"].items()))
        warps, stages = (content[n] if content[n] is None else fields.whole(content[n])
                         for n in ("warps", "stages"))
        found = TunedChoice(
            LaunchWords(warps, stages, numbers),
            float(content["us"]),
            float(content["before_us"]),
            fields.whole(content["tried"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    fits = warps in (None, *WARPS) and stages in (None, *STAGES)
    return found if fits and all(n in tunables and v in tunables[n].values for n, v in numbers) else None


def record(key: str, found: TunedChoice) -> None:
    """Keep what tuning has found."""
    words = found.words
    DRAWER.put(key, {"warps": words.warps, "stages": words.stages, "numbers": dict(words.numbers),
                     "us": round(found.us, 3), "before_us": round(found.before_us, 3),
                     "tried": found.tried})


def with_words(asked: KernelCall, words: LaunchWords) -> KernelCall:
    """A call with words; what it hints itself stays."""
    group = asked.group
    if words.warps and group.warps_hint is None:
        group = replace(group, warps_hint=words.warps)
    if words.stages and group.stages_hint is None:
        group = replace(group, stages_hint=words.stages)
    return replace(asked, group=group)


def choices(asked: KernelCall, low: LoweredKernel, tunables: Mapping[str, Tunable],
            fixed: Mapping[str, int]) -> dict[str, tuple[Any, ...]]:
    """What may be tried of each word, the nearest to the compiler's own first."""
    found: dict[str, tuple[Any, ...]] = {
        n: t.values for n, t in tunables.items() if n not in fixed and len(t.values) > 1}
    if asked.group.warps_hint is None:
        digits = low.warps.bit_length()
        found["warps"] = tuple(sorted(WARPS, key=lambda w: (abs(w.bit_length() - digits), w)))
    loops = any(x.kind == "serial" for x in find(low.kernel, For))
    if asked.group.stages_hint is None and loops:
        found["stages"] = tuple(sorted((s for s in STAGES if s <= MOST_STAGES),
                                       key=lambda s: abs(s - low.num_stages)))
    return found
