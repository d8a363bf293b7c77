"""Requests for plans, and why one may have no kernel yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transconv.compute import Workload
from transconv.errors import Unsupported
from transconv.target import Target

COMPILING = "compiling"
"""The reason why torch computes a call while its kernel is being compiled."""
NEVER = "compile:never"
"""The reason why torch computes a call whose kernel is not compiled, with mode ``never``."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a plan. ``aligned``: its tensors begin at multiples of 16 bytes."""

    workload: Workload
    target: Target
    deterministic: bool = False
    aligned: bool = True

    @property
    def job(self) -> dict[str, Any]:
        """The request as a JSON object, for a compiling process."""
        w, t = self.workload, self.target
        counts = "sms", "l2_bytes", "bandwidth_gbs", "tflops", "l2_gbs"
        return {"front": type(w).__module__, "problem": w.text, "direction": w.direction,
                "behind": w.behind, "target": t.name, "features": sorted(t.features),
                "counts": {n: getattr(t, n) for n in counts},
                "deterministic": self.deterministic, "aligned": self.aligned}

    def __str__(self) -> str:
        return f"{self.workload.title} for {self.target}"


class Waiting(Unsupported):
    """A request whose kernels are not there yet. ``over``: whether it may be answered otherwise by now;
    while it says no, the same request has the same answer."""

    def __init__(self, message: str, over: Callable[[], bool]) -> None:
        super().__init__(COMPILING, message)
        self.over = over

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str]]:
        return Unsupported, (self.reason, self.message)
