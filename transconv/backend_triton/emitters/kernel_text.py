"""The source text of a kernel: Gluon if its warps have roles, else Triton (``tl``)."""

from __future__ import annotations

import re

from transconv.backend_triton.emitters import gluon, triton
from transconv.backend_triton.emitters.unique_names import distinct
from transconv.backend_triton.launch.programmatic_launch import first_lines
from transconv.ir import For, Kernel, Roles, find, walk


def is_explicit(kernel: Kernel) -> bool:
    """Whether a kernel states its own use of shared memory."""
    return bool(find(kernel, Roles))


def emit(kernel: Kernel, header: tuple[str, ...] = (), early: bool = False) -> str:
    """The text of a module with a JIT function named like the kernel; ``early``: see
    launch/programmatic_launch.py."""
    spell = gluon.emit if is_explicit(kernel) else triton.emit
    about = tuple(" ".join(line.splitlines()) for line in (*header, *merged(kernel.notes)))  # comments
    return spell(distinct(kernel), about, first_lines(kernel) if early else ())


def merged(notes: tuple[str, ...]) -> list[str]:
    """The notes, with those that differ in their numbers alone merged into one (unrolled columns)."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\d+", "0", note), []).append(note)
    return [first + (f" (and {len(rest)} more like it)" if rest else "")
            for first, *rest in alike.values()]


def grid_size(kernel: Kernel) -> int:
    """The number of programs that the kernel is launched with."""
    return next((n.programs or n.stop for n in walk(kernel) if isinstance(n, For) and n.kind == "grid"), 1)


def unspecialised(source: str) -> tuple[str, ...]:
    """The names of the sizes that the kernel of a text takes as arguments, in their order."""
    found = _SIZES.search(source)
    return tuple(re.findall(r"'(\w+)'", found[1])) if found else ()


_SIZES = re.compile(r"^@\w+\.jit\(do_not_specialize=\[([^]]*)\]\)$", re.MULTILINE)
