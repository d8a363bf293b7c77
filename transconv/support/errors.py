"""All exceptions that transconv raises on purpose.

TransconvError                     anything below
+-- ProblemError   (ValueError)    an impossible problem, or an invalid text of one
+-- ComputeError   (ValueError)    an invalid text of a computation
+-- KernelError    (ValueError)    an invalid text of a kernel
|   +-- ScopeError                 what work-groups, sub-groups or work-items cannot do
+-- ScheduleError  (ValueError)    a schedule that is illegal for a problem, or an invalid text of one
|   +-- AddressError               its kernel could read or write outside of a tensor
+-- LayoutError    (ValueError)    an impossible layout, or an invalid text of one
+-- TensorError    (ValueError)    a tensor that does not match a plan
+-- Unsupported    (NotImplementedError)  a request that transconv cannot compute, with a ``reason``
+-- StageError     (RuntimeError)  a pipeline stage failed; has the command that repeats it
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence


class TransconvError(Exception):
    """Base class: ``except TransconvError`` catches everything that transconv raises on purpose."""


class ProblemError(TransconvError, ValueError):
    """An impossible or unreadable problem; one line: what is wrong, where, what is expected."""


class ComputeError(TransconvError, ValueError):
    """An invalid text of a computation; the message names the line and what was expected."""


class KernelError(TransconvError, ValueError):
    """An invalid text of a kernel; the message has the line and what was expected."""


class ScopeError(KernelError):
    """A kernel says in one scope, such as that of work-items, what is for another one."""


class ScheduleError(TransconvError, ValueError):
    """An unreadable schedule, or one that is illegal for a problem; the message says why."""


class AddressError(ScheduleError):
    """A legal schedule whose kernel has an access that is not proved to be inside of its tensor. Calls do
    without it; ``check`` and ``fuzz`` report a failure."""


ConfigError = ScheduleError  # its name before 0.1; for one release


class LayoutError(TransconvError, ValueError):
    """An impossible or unreadable layout; one line: what is wrong, where, what is expected."""


class TensorError(TransconvError, ValueError):
    """A tensor that does not fit a plan; one line: which, what was expected, what was given."""


class Unsupported(TransconvError, NotImplementedError):
    """A request that transconv cannot compute. ``reason`` is machine-readable, ``topic:detail``, such as
    ``dtype:complex64``; the message is for people and defaults to the reason."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{message} ({reason})" if message else f"unsupported: {reason}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, str]]:
        return type(self), (self.reason, self.message)


class StageError(TransconvError, RuntimeError):
    """A stage of the pipeline failed. The message names the stage and the reason, what was being
    compiled, and a command that repeats it:

        StageError in stage 'lanewise': lane oh has no extent
          problem  PROBLEM OPTIONS
          schedule oh:8 ow:16 oc:128 ic:64 | mma
          repeat   transconv show PROBLEM OPTIONS --schedule SCHEDULE --stage lanewise

    ``problem`` and ``schedule`` are kept as texts; an empty one is left out of the message and of the
    command. ``options``: the words of the command line that name the problem, beside its text."""

    def __init__(
        self,
        stage: str,
        reason: str,
        *,
        problem: object = "",
        schedule: object = "",
        options: Sequence[str] = (),
    ) -> None:
        self.stage = stage
        self.reason = reason
        self.problem = str(problem)
        self.options = tuple(options)
        self.schedule = str(schedule)
        super().__init__(self._message())

    @property
    def repeat(self) -> str:
        """A shell command that runs the pipeline up to the failing stage again."""
        words = ["transconv", "show", self.problem, *self.options]
        if self.schedule:
            words += ["--schedule", self.schedule]
        return shlex.join([*words, "--stage", self.stage])

    def _message(self) -> str:
        lines = [f"{type(self).__name__} in stage '{self.stage}': {self.reason}"]
        if self.problem:
            lines.append(f"  problem  {' '.join((self.problem, *self.options))}")
        if self.schedule:
            lines.append(f"  schedule {self.schedule}")
        if self.problem:
            lines.append(f"  repeat   {self.repeat}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _stage_error, (self.stage, self.reason, self.problem, self.schedule, self.options)


def _stage_error(
    stage: str, reason: str, problem: str, schedule: str, options: tuple[str, ...]
) -> StageError:
    # Errors cross process borders (compiles run in child processes), where keywords get lost.
    return StageError(stage, reason, problem=problem, schedule=schedule, options=options)


def nearest(word: str, known: Iterable[str], other: Mapping[str, str] | None = None) -> str:
    """``"; did you mean f32?"``: the name that is meant, by ``other`` names of it or by its letters; empty
    where none is near."""
    other = other or {}
    near = difflib.get_close_matches(word.lower(), [*other, *known], 1, 0.7)
    return f"; did you mean {other.get(near[0], near[0])}?" if near else ""


def one_line(text: str) -> str:
    """The text with unprintable characters escaped, so that it is safe to print on one line of a terminal,
    and not longer than a screen."""
    told = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return told if len(told) <= 2000 else f"{told[:1500]} ... {told[-400:]}"
