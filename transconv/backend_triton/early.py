"""Overlapping launches (feature ``early``): CUDA's programmatic dependent launch.

A kernel may be made ready, its programs placed and its barriers laid out, while the one before it in the
stream ends. Every kernel begins by waiting until all before it have ended and what they wrote can be
seen. Nothing reaches memory before that, so it does not matter whose kernel came before, nor whether that
one knew of this.

A kernel that writes the parts of a sum lets the next one, which adds them up, be made ready at once. One
that copies does not: what multiplies the copies may fill whole multiprocessors while it waits, and the
copy still needs them.
"""

from __future__ import annotations

from transconv.ir import BoxStore, FuncCall, Kernel, Send, Store, Tensor, find

INSTRUCTIONS = "triton.language.extra.cuda"  # the module that has them
WAIT = "gdc_wait()  # until the kernels before this one have ended"
NEXT = "gdc_launch_dependents()  # the next one may be made ready meanwhile"


def first_lines(kernel: Kernel) -> tuple[str, ...]:
    """What the body of a kernel begins with."""
    written = [s.tensor for s in find(kernel, Store)] + [s.tensor for s in find(kernel, BoxStore)]
    written += [s.tensor for s in find(kernel, Send)]
    written += [a for s in find(kernel, FuncCall) for a in s.args if isinstance(a, Tensor)]
    return (WAIT, NEXT) if any(t.parts_of for t in written) else (WAIT,)


def imported(lines: tuple[str, ...]) -> list[str]:
    """The import of what the lines call."""
    names = ", ".join(sorted(line.partition("(")[0] for line in lines))
    return [f"from {INSTRUCTIONS} import {names}"] if lines else []


def begun(lines: tuple[str, ...]) -> list[str]:
    return [f"    {line}" for line in lines]
