"""The start of a plan, written out: one function for all its kernels, with each argument in its place. A
call makes no list and no other call of Python but for memory, addresses and the starts themselves.

    def at(sizes):                                      of a copy, and of a kernel that reads it
        n0, n1, = sizes
        (g0, p0), (g1, p1), (s0, ), = numbers(n0, n1)
        def run(x0, x1, x2):
            x3 = empty(s0, (1,), t0)
            a0, a1, a2, a3, = x0.data_ptr(), x1.data_ptr(), x2.data_ptr(), x3.data_ptr(),
            on = stream(device)
            raw0(g0, 1, 1, on, f0, False, e0, None, None, m0, None, None, None, a0, a3, n0, n1)
            k1 = (a3, a1, a2, n0, n1, )
            raw1(g1, 1, 1, on, f1, False, e1, None, None, m1, None, None, None,
                 *(known1(k1) or encode1(k1, p1)))
        return run

What a kernel is given is of one of these kinds:

    a3      the address of a tensor, or of a workspace
    x3      a number that is passed itself (``Tensor.number``)
    n0      a size
    k1      addresses, numbers and sizes, of which descriptors of boxes are made and kept

A guarded start looks at its arguments first. It serves tensors at multiples of 16 bytes and others, for
which Triton compiles a text separately, and leaves to its caller those that share memory, negated views,
and calls while another device is the current one:

        def run(x0, x1, x2):                            of a group, and of two arrays
            a1, a2, = x1.data_ptr(), x2.data_ptr(),
            if current() != device or x1.is_neg() or x2.is_neg(): return False
            if a1 < a2 + r2 and a2 < a1 + r1: return False
            on = stream(device)
            if (a1 | a2) & 15:
                return False                            no such kernel is loaded
            raw0(g0, 1, 1, on, f0, False, e0, None, None, m0, None, None, None, a1, a2, n0, )
            return True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from transconv.backend_triton import KernelStart, torch_internals
from transconv.support import factory

StarterAt = Callable[[tuple[int, ...]], Callable[..., None]]
"""From sizes to a function of tensors that starts a plan for them."""
GuardedAt = Callable[[tuple[int, ...], tuple[int, ...]], Callable[..., bool]]
"""From sizes, and the bytes of tensors, to a function of arguments: whether it started a plan."""


class StepStart(NamedTuple):
    """A kernel of a plan, the numbers of its arguments among those of the start and its workspaces, and of
    the one that is cleared before."""

    kernel: KernelStart
    order: tuple[int, ...]
    zero: int | None = None


class StartWriter:
    """Writes a start of ``arguments`` for so many ``sizes``. ``numbers``: as ``Plan.numbers``; ``types``:
    of workspaces, which ``empty`` allocates; ``values``: the numbers of arguments that are passed
    themselves."""

    def __init__(
        self,
        numbers: Callable[..., tuple[Any, ...]],
        device: int,
        arguments: int,
        sizes: int = 0,
        types: Sequence[Any] = (),
        empty: Any = None,
        values: Sequence[int] = (),
    ) -> None:
        self.arguments, self.types, self.values = arguments, types, values
        self.sizes = _listed("n", range(sizes))
        self.known: dict[str, Any] = {  # what the text mentions
            "numbers": numbers,
            "empty": empty,
            "stream": None,
            "device": device,
            **{f"t{at}": kind for at, kind in enumerate(types)},
        }

    def starter(self, steps: Sequence[StepStart]) -> StarterAt:
        """From sizes to a function of tensors that starts all steps."""
        lines = [*self.prepared(steps, ()), *self.started(steps), *([] if steps else ["return None"])]
        made: StarterAt = self.made(len(steps), lines)
        return made

    def guarded(
        self, near: Sequence[StepStart] | None, far: Sequence[StepStart] | None, tensors: Sequence[int]
    ) -> GuardedAt:
        """``starter`` that looks at its arguments, of which ``tensors`` are. ``near``, ``far``: the steps
        for such that begin at multiples of 16 bytes, and for others; None where one is not loaded."""
        each = [*(near or ()), *(far or ())]
        bits = " | ".join(f"a{x}" for x in tensors) or "0"
        lines = [
            *self.guard(tensors),
            *self.prepared(each, tensors),
            f"if ({bits}) & 15:",
            *(f"    {line}" for line in self.variant(far, len(near or ()))),
            *self.variant(near, 0),
        ]
        made: GuardedAt = self.made(len(near or far or ()), lines, tensors)
        return made

    def made(self, count: int, body: Sequence[str], spans: Sequence[int] | None = None) -> Any:
        """The function of sizes, and of ``spans``, around the body of one that starts so many kernels."""
        grids = "".join(f"(g{at}, p{at}), " for at in range(count))
        rooms = f"({_listed('s', range(len(self.types)))})" if self.types else "_"
        given = "" if spans is None else ", spans"
        lines = [
            f"def made({', '.join(self.known)}):",
            f"def at(sizes{given}):",
            *([f"    {self.sizes}= sizes"] if self.sizes else []),
            *([f"    {_listed('r', spans)}= spans"] if spans else []),
            f"    {grids}{rooms}, = numbers({self.sizes})",
            f"    def run({_listed('x', range(self.arguments))}):",
            *(f"        {line}" for line in body),
            "    return run",
            "return at",
        ]
        return factory("\n    ".join(lines))(**self.known)

    def guard(self, tensors: Sequence[int]) -> Iterator[str]:
        """The conditions under which nothing is started."""
        self.known["current"] = torch_internals.current_device()
        if tensors:
            yield _addresses(tensors)
        negated = "".join(f" or x{x}.is_neg()" for x in tensors)
        yield f"if current() != device{negated}: return False"
        for x, y in combinations(tensors, 2):
            yield f"if a{x} < a{y} + r{y} and a{y} < a{x} + r{x}: return False"

    def prepared(self, steps: Sequence[StepStart], addressed: Iterable[int]) -> Iterator[str]:
        """Workspaces, addresses but for those that are there, and the stream."""
        for at in range(len(self.types)):
            yield f"x{self.arguments + at} = empty(s{at}, (1,), t{at})"
        direct = {x for step in steps if step.kernel.raw is not None for x in step.order}
        if rest := sorted(direct - {*addressed, *self.values}):
            yield _addresses(rest)
        if steps:
            self.known["stream"] = torch_internals.raw_stream
            yield "on = stream(device)"

    def variant(self, steps: Sequence[StepStart] | None, first: int) -> list[str]:
        """The end of a guarded start for tensors of an alignment."""
        return ["return False"] if steps is None else [*self.started(steps, first), "return True"]

    def started(self, steps: Sequence[StepStart], first: int = 0) -> Iterator[str]:
        """The lines of some kernels, whose numbers in the text begin with ``first``."""
        for place, (begun, order, zero) in enumerate(steps):
            at, kernel, sizes = first + place, begun.kernel, self.sizes * (begun.sizes > 0)
            if zero is not None:
                yield f"x{zero}.zero_()"
            if begun.raw is None:
                self.known[f"start{at}"] = begun
                yield f"start{at}(({sizes}), (g{place}, p{place}), ({_listed('x', order)}), on)"
                continue
            self.known |= {
                f"raw{at}": begun.raw,
                f"f{at}": kernel.function,
                f"m{at}": kernel.packed_metadata,
                f"e{at}": begun.early,
            }
            given = "".join(f"{'x' if x in self.values else 'a'}{x}, " for x in order) + sizes
            if begun.encoder is not None:
                self.known |= {f"known{at}": begun.encoder.calls.get, f"encode{at}": begun.encoder}
                yield f"k{at} = ({given})"
                given = f"*(known{at}(k{at}) or encode{at}(k{at}, p{place}))"
            yield (
                f"raw{at}(g{place}, 1, 1, on, f{at}, False, e{at}, None, None, m{at}, None, None, "
                f"None, {given})"
            )


def _addresses(numbers: Sequence[int]) -> str:
    return f"{_listed('a', numbers)}= {''.join(f'x{x}.data_ptr(), ' for x in numbers)}"


def _listed(letter: str, numbers: Iterable[int]) -> str:
    return "".join(f"{letter}{at}, " for at in numbers)
