"""The source text of a kernel: Gluon if its warps have roles, else Triton (``tl``).

In: a kernel. Out: its text, in which names differ from each other and from what the text calls.

A computation may give a tensor the name of a coordinate (``w``), or an axis that of a function in the
text (``range``). The IR keeps them apart; the text would confuse them. A name that is taken gets an
underscore; variables keep their names before tensors. Launches pass tensors by position, so renaming
parameters changes nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from transconv import ir
from transconv.backend_triton.emitters import gluon, triton
from transconv.backend_triton.emitters.gluon import LOOKED_UP, PIECES
from transconv.backend_triton.emitters.triton import box_name
from transconv.backend_triton.launch.bound_start import first_lines


def is_explicit(kernel: ir.Kernel) -> bool:
    """Whether a kernel states its own use of shared memory."""
    return bool(ir.find(kernel, ir.Roles))


def emit(kernel: ir.Kernel, header: tuple[str, ...] = (), early: bool = False) -> str:
    """The text of a module with a JIT function named like the kernel; ``early``: see
    launch/bound_start.py."""
    spell = gluon.emit if is_explicit(kernel) else triton.emit
    about = tuple(" ".join(line.splitlines()) for line in (*header, *merged(kernel.notes)))  # comments
    return spell(distinct(kernel), about, first_lines(kernel) if early else ())


def merged(notes: tuple[str, ...]) -> list[str]:
    """The notes, with those that differ in their numbers alone merged into one (unrolled columns)."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\d+", "0", note), []).append(note)
    return [
        first + (f" (and {len(rest)} more like it)" if rest else "") for first, *rest in alike.values()
    ]


def grid_size(kernel: ir.Kernel) -> int:
    """The number of programs that the kernel is launched with."""
    return next(
        (n.programs or n.stop for n in ir.walk(kernel) if isinstance(n, ir.For) and n.kind == "grid"), 1
    )


def unspecialised(source: str) -> tuple[str, ...]:
    """The names of the sizes that the kernel of a text takes as arguments, in their order."""
    found = _SIZES.search(source)
    return tuple(re.findall(r"'(\w+)'", found[1])) if found else ()


_SIZES = re.compile(r"^@\w+\.jit\(do_not_specialize=\[([^]]*)\]\)$", re.MULTILINE)


WRITTEN = (
    *(c.helper for c in ir.CALLS.values()),
    *(r.helper for r in ir.REDUCERS.values()),
    *(t.rounding.helper for t in ir.DTYPES.values() if t.rounding is not None),
)
USED = frozenset(
    {
        "tl",
        "gl",
        "gluon",
        "hopper",
        "mbarrier",
        "tma",
        "triton",
        "sums",
        "float",
        "range",
        "gdc_wait",
        "gdc_launch_dependents",
        *LOOKED_UP,
        *(name for text in WRITTEN for name in re.findall(r"def (\w+)", text)),
    }
)
"""The functions that a module's text calls or defines."""


def function_name(name: str) -> str:
    """The name of a kernel's function: longer where modules call or define another one of that name."""
    while name in USED:
        name += "_"
    return name


def distinct(kernel: ir.Kernel) -> ir.Kernel:
    """The kernel with clashing names replaced.

    x(w): w = ow + 1; load(w + w)   ->   x(w_): w = ow + 1; load(w_ + w)
    """
    taken = USED | {kernel.name, *(r.name for r in ir.find(kernel, ir.Role))}
    given = kernel.sizes.names if kernel.sizes else ()  # arguments, which keep their names
    taken |= {*given}
    inside: list[ir.Var | ir.Lane] = [*ir.find(kernel, ir.Var), *ir.find(kernel, ir.Lane)]
    called: dict[str, list[ir.Var | ir.Lane]] = {}
    for v in (v for v in inside if v.name not in given):
        called.setdefault(v.name, []).append(v)
    held = set(called)
    made: dict[Any, str] = {}
    for name in sorted(held & taken):
        other = name
        while other in taken | held:
            other += "_"
        made |= dict.fromkeys(called[name], other)
        held.add(other)
    taken |= held | ir.LAUNCH
    rings: list[ir.SmemRing | ir.Barrier] = [*ir.find(kernel, ir.SmemRing), *ir.find(kernel, ir.Barrier)]
    for x in (*rings, *kernel.params):
        other = x.name
        while {other, box_name(other), f"{other}_{PIECES}"} & taken:
            other += "_"
        taken |= {other, box_name(other), f"{other}_{PIECES}"}
        made |= {x: other} if other != x.name else {}
    return _Renamed(made).mutate(kernel) if made else kernel


class _Renamed(ir.ExprMutator):
    def __init__(self, made: dict[Any, str]) -> None:
        super().__init__()
        self.made = made

    def named(self, x: Any) -> Any:
        return replace(x, name=self.made[x]) if x in self.made else x

    def mutate_Tensor(self, at: Any) -> Any:
        return self.named(at)

    mutate_Var = mutate_Lane = mutate_SmemRing = mutate_Barrier = named
