"""Overlapping launches (feature ``early``): CUDA's programmatic dependent launch.

A kernel may be made ready, its programs placed and its barriers laid out, while the one before it in the
stream ends. Every kernel begins by waiting until all before it have ended and their writes are visible.
It touches no memory before that, so any kernel may come before it, with this feature or without.

A kernel that writes the parts of a sum, or the copy of an operand, lets the next one, which reads them, be
prepared. That happens when all of its own programs run: none of them is kept from a multiprocessor by
one that waits.
"""

from __future__ import annotations

from transconv.ir import BoxStore, FuncCall, Kernel, Send, Store, Tensor, find

INSTRUCTIONS = "triton.language.extra.cuda"  # the module of these functions
WAIT = "gdc_wait()  # until the kernels before this one have ended"
NEXT = "gdc_launch_dependents()  # the next one may be made ready meanwhile"


def first_lines(kernel: Kernel) -> tuple[str, ...]:
    """The first lines of a kernel's body."""
    written = [s.tensor for s in find(kernel, Store)] + [s.tensor for s in find(kernel, BoxStore)]
    written += [s.tensor for s in find(kernel, Send)]
    written += [a for s in find(kernel, FuncCall) for a in s.args if isinstance(a, Tensor)]
    return (WAIT, NEXT) if any(t.parts_of or t.copy_of for t in written) else (WAIT,)


def imported(lines: tuple[str, ...]) -> list[str]:
    """The import of the functions that the lines call."""
    names = ", ".join(sorted(line.partition("(")[0] for line in lines))
    return [f"from {INSTRUCTIONS} import {names}"] if lines else []


def begun(lines: tuple[str, ...]) -> list[str]:
    return [f"    {line}" for line in lines]
