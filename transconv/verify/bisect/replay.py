"""The kernels of a computation after every pass, as bisection runs them in NumPy.

A stage after which the kernel breaks a rule of the IR, or a pass that fails, counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from transconv.compute import Compute
from transconv.ir import Kernel, VerifyError, rewrite, select, verify
from transconv.ir import expr as ex
from transconv.passes import NAIVE, Context, levels, passes, running
from transconv.passes.lowering import naive
from transconv.schedule import Schedule, Scheduled
from transconv.target import Target
from transconv.verify.bisect.rewrite_rules import rule_of


@dataclass(slots=True)
class Stages:
    """One launch: the kernel after ``naive`` and every pass, up to the one that failed, if any.
    ``compute`` is what is compiled, over merged groups and over copies."""

    compute: Compute
    schedule: Schedule
    context: Context
    kernels: list[tuple[str, Kernel]] = field(default_factory=list)
    failed: str = ""  # the stage that raised
    reason: str = ""

    @staticmethod
    def of(compute: Compute, schedule: Schedule, target: Target, precision: str,
           switches: Mapping[str, bool]) -> Stages:
        context = Context(Scheduled(compute, schedule, target), precision)
        main, runs = context.compute, running(switches)
        made = Stages(main, schedule, context)
        made.extend(NAIVE.name, lambda: naive.naive(main, f"conv_{main.name}"))
        for step in passes():
            if made.failed:
                break
            kernel = made.kernels[-1][1]
            made.extend(step.name, lambda s=step, k=kernel:  # type: ignore[misc]
                        s.run(k, context) if runs[s.name] else k)
        return made

    def extend(self, stage: str, make: Callable[[], Kernel]) -> None:
        """Make the next kernel, and hold it against the rules of the IR."""
        try:
            kernel = make()
            verify(kernel, levels()[stage], stage)
        except VerifyError as error:
            self.failed, self.reason = stage, f"the kernel breaks a rule of the IR: {error}"
        except Exception as error:  # whatever a pass may raise
            self.failed, self.reason = stage, f"the pass failed: {type(error).__name__}: {error}"
        else:
            self.kernels.append((stage, kernel))

    def kernel(self, stage: int) -> Kernel:
        return self.kernels[stage][1]

    def rule_of(self, stage: int, seed: int) -> str:
        """The rule of the simplifier that makes a stage wrong, in words; empty if none does."""
        made_by = next((p for p in passes() if p.name == NAMES[stage]), None)
        if made_by is None:
            return ""
        return rule_of(lambda: made_by.run(self.kernel(stage - 1), self.context), seed)

    def seen(self, stage: int) -> Kernel:
        """The kernel as the interpreter is to run it."""
        return as_targets_divide(self.kernel(stage)) if stage >= FINAL else self.kernel(stage)


NAMES = (NAIVE.name, *(p.name for p in passes()))
GRIDWISE, BLOCKWISE = NAMES.index("gridwise"), NAMES.index("blockwise")
NARROW = NAMES.index("narrow")
FINAL = NAMES.index("final")  # from here on divisions may round as the target's do


def parts_begin(launches: Iterable[Stages]) -> int:
    """The first stage in which the parts of statistics, or those of a split sum, exist."""
    return GRIDWISE if any(launch.compute.statistics for launch in launches) else BLOCKWISE


def as_targets_divide(kernel: Kernel) -> Kernel:
    """The kernel with integer divisions that round towards zero, spelled with the IR's own, which
    round down. What is left of a quotient has the sign of the numerator."""
    def towards_zero(e: ex.Expr) -> ex.Expr:
        if not isinstance(e, (ex.FloorDiv, ex.Mod)) or not e.dtype.is_integer:
            return e
        rest = ex.Mod(e.a, e.b)
        up = ex.Ne(rest, ex.Const(0)) & ex.Ne(ex.Lt(e.a, ex.Const(0)), ex.Lt(e.b, ex.Const(0)))
        return select(up, rest - e.b if isinstance(e, ex.Mod) else e + 1, e)

    return rewrite(kernel, towards_zero)
