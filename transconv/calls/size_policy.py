"""The policy of sizes: which kernel answers a call whose size is one of several, one of its own or one for
any size; and the registries of plans for any size, by kinds of calls.

With ``transconv.config.sizes = "auto"`` the first size of a kind of call has a kernel of its own. Further
sizes are answered by kernels that take sizes as arguments. A size that comes often is given a kernel of
its own, too; both are then timed alternately in the program's own calls, and the faster one stays.
Compiling goes on beside the program; torch answers while there is neither kernel.

    choice = policy.choices(layer, kind).of(sizes)   what is known of one size
    choice.own                                       which of the two is to be asked for
    choice.over()                                    counts a call; whether it is to be decided anew
    SizeTrial(choice).alternating(own, other)        a function that runs one of two and times it

A kind is what calls have in common but for their sizes: a layer, or the form of a text. Its registry
(runtime/registry.py) is made once; a new size then costs a look-up, the check of requirements, and an
estimate for each kernel. Exact sizes are the case without arguments: kernels of their own answer what has
no registry, or sizes that none of its plans takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable
from typing import Any, Protocol, TypeVar

import torch

from transconv.calls.settings import settings
from transconv.runtime import COMPILING, NEVER, PlanRequest, Registry, is_capturing
from transconv.support import Cache, ComputeError, ProblemError, Unsupported, knobs

OFTEN = 20
"""Calls of one size until a kernel of its own is made for it; as many more for each size before it."""
ROUNDS = 6
"""Timed calls of each of two kernels, of which the first ``WARM`` do not count."""
WARM = 2
LEAD = 1.02
"""How much longer than the other a size's own kernel may take to be preferred: what events do not tell."""
LIMIT = 1024  # kinds of calls, and sizes of one; beyond it all are dropped


class SizeChoice:
    """What answers the calls of one size. ``own``: a kernel of its own, rather than one for any size;
    ``settled``: that stays so; ``calls``: of this size, answered by kernels for any size; ``route``: what
    runs its own kernel, once that is settled; ``among``: the choices of other sizes."""

    __slots__ = ("among", "calls", "own", "route", "settled")

    def __init__(self, own: bool, among: SizeChoices) -> None:
        self.own = self.settled = own
        self.among = among
        self.calls = 0
        self.route: Any = None

    def over(self) -> bool:
        """Count a call that a kernel for any size is about to answer; whether another may by now."""
        if self.own or self.settled:
            return True
        self.calls += 1
        if self.calls >= OFTEN * (1 + self.among.often):
            self.among.often += 1
            self.own = True
        return self.own

    def counted_with(self, waits: Callable[[], bool] | None) -> Callable[[], bool]:
        """``over``, or that another kernel is there for which a call waits."""
        return self.over if waits is None else lambda: waits() or self.over()

    def or_general(self, waits: Callable[[], bool]) -> Callable[[], bool]:
        """``waits``, or that a kernel for any size has come that stands in for the size's own."""
        among = self.among
        return waits if among.general else lambda: waits() or among.general

    def settle(self, own: bool) -> None:
        """End the choice."""
        self.own, self.settled = own, True

    @property
    def is_counting(self) -> bool:
        """Whether calls are counted, as a kernel for any size answers them for now."""
        return not (self.own or self.settled)


class SizeChoices:
    """The choices of one kind of call, by its sizes. ``often``: how many came often; ``prepared``: so far
    each size had a kernel of its own that was compiled already, as ``transconv prepare`` leaves them;
    ``general``: a kernel for any size answered."""

    __slots__ = ("_first", "_found", "general", "often", "prepared")

    def __init__(self, first: list[Hashable]) -> None:
        self.often, self.prepared, self.general = 0, True, False
        self._first = first  # the first size of the layer, if there was one
        self._found: dict[Hashable, SizeChoice] = {}

    def of(self, sizes: Hashable) -> SizeChoice:
        """The choice for sizes."""
        found = self._found.get(sizes)
        if found is None:
            if not self._first:
                self._first.append(sizes)
            if len(self._found) >= LIMIT:
                self._found.clear()
            found = self._found.setdefault(sizes, SizeChoice(sizes == self._first[0], self))
        return found


class SizePolicy:
    """What is known of the sizes of all kinds of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._firsts: dict[Hashable, list[Hashable]] = {}  # the first size of each layer
        self._choices: dict[Hashable, SizeChoices] = {}

    def choices(self, layer: Hashable, kind: Hashable) -> SizeChoices:
        """Those of a kind of call of a layer, such as a gradient: all kinds share the layer's first
        size."""
        key = layer, kind
        found = self._choices.get(key)
        if found is None:
            with self._lock:
                if len(self._choices) >= LIMIT:
                    self._choices.clear()
                    self._firsts.clear()
                found = self._choices.setdefault(key, SizeChoices(self._firsts.setdefault(layer, [])))
        return found

    def is_further(self, layer: Hashable, sizes: Hashable) -> bool:
        """Whether a layer was called at another size first."""
        first = self._firsts.get(layer, [])
        return len(first) > 0 and first[0] != sizes

    def forget(self) -> None:
        """Drop all choices."""
        with self._lock:
            self._choices.clear()
            self._firsts.clear()


policy = SizePolicy()
settings.on_change(policy.forget)


class Mark(Protocol):
    """A point in a stream: a CUDA event."""

    def record(self) -> None:
        """Take its place behind what was launched so far."""

    def query(self) -> bool:
        """Whether the GPU has come this far."""

    def elapsed_time(self, other: Any, /) -> float:
        """The milliseconds from here to another one."""


def _event() -> Mark:
    kind: Any = torch.cuda.Event
    made: Mark = kind(enable_timing=True)
    return made


class SizeTrial:
    """Times two ways to answer a choice's calls, alternately, and settles it. ``mark`` makes points in the
    stream (CUDA events). Nothing waits for them: the choice is settled by the call that finds them
    passed."""

    def __init__(self, choice: SizeChoice, mark: Callable[[], Mark] | None = None) -> None:
        self.choice, self.mark = choice, mark or _event
        self.timed: tuple[list[tuple[Mark, Mark]], ...] = ([], [])

    def over(self) -> bool:
        """Whether it is settled."""
        own, other = self.timed
        if (
            not self.choice.settled
            and len(own) >= ROUNDS <= len(other)
            and (own[-1][1].query() and other[-1][1].query())
        ):
            took = [min(a.elapsed_time(b) for a, b in each[WARM:]) for each in (own, other)]
            self.choice.settle(took[0] <= LEAD * took[1])
        return self.choice.settled

    def alternating(self, own: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
        """A function of the arguments of both that runs one of them; without another, its own."""
        if other is None:
            self.choice.settle(own=True)
            return own
        ways, timed = (own, other), self.timed

        def run(*given: Any) -> Any:
            at = len(timed[0]) > len(timed[1])
            if len(timed[at]) >= ROUNDS or is_capturing():  # events have no times in a graph
                return own(*given)
            begin, end = self.mark(), self.mark()
            begin.record()
            made = ways[at](*given)
            end.record()
            timed[at].append((begin, end))
            return made

        return run


Made = TypeVar("Made", bound=Registry[Any])

_registries: Cache[Hashable, Any] = Cache("registries", LIMIT)  # a registry, or why there is none


def registry_of(key: Hashable, made: Callable[[], Made]) -> Made:
    """The registry of a kind, made when it is first asked for. Raises Unsupported, with a reason, where
    there is none."""
    if knobs.schedule():
        raise Unsupported("sizes:refused", "TRANSCONV_SCHEDULE names a schedule, for given sizes")
    found = _registries.get(key)
    if found is None:
        try:
            found = made()
        except (ProblemError, ComputeError) as error:
            found = str(error)
        found = _registries.keep(key, found)
    if isinstance(found, str):
        raise Unsupported("sizes:refused", found)
    kept: Made = found
    return kept


def leaves_exact(error: Unsupported) -> bool:
    """Whether a kernel for exact sizes answers a call that those for any size refuse: not while they are
    compiled."""
    return error.reason not in (COMPILING, NEVER)


def complete(questions: Container[PlanRequest]) -> None:
    """Have the registries that asked nothing but these find all their plans, which are compiled."""
    for registry in list(_registries.values()):
        if not isinstance(registry, str) and all(q in questions for q in registry.questions):
            registry.complete()


def forget() -> None:
    """Drop the registries of all kinds."""
    _registries.forget()
