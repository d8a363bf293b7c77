"""Calls that are known: from the types and sizes of the arguments to a function that starts the kernel.

The first call with such arguments looks at everything. Later ones compare types, shapes, strides and
devices, and whether arrays share memory, and start the compiled kernel for these sizes directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transconv.ir import defined
from transconv.kernel.group import Group

Known = Callable[[tuple[Any, ...]], bool]
"""Starts a kernel with the arguments of a call; False for a call that has to be looked at."""


def signature(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What the launch of a call depends on, beside addresses and floats; None for a call that is always
    looked at."""
    plain = _plain()
    found: list[Any] = []
    for a in args:
        kind = type(a)
        if kind in plain:
            found += (a.dtype, a.shape, a.stride(), a.device)
        elif kind is int or kind is bool:
            found += (kind, a)
        elif kind is Group:
            found.append(a)
        elif kind is float:
            found.append(kind)
        else:
            return None
    return tuple(found)


@lru_cache(maxsize=1)
def _plain() -> frozenset[type]:
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


def known(starters: Sequence[Callable[..., None] | None], arrays: Sequence[int], spans: Sequence[int],
          device: int) -> Known:
    """A function of the arguments of a call. ``starters``: what starts the kernel for arrays of which one
    is not aligned to 16 bytes, and for aligned ones; ``arrays``: the places of arrays among the arguments;
    ``spans``: their bytes."""
    import torch

    made: Known = _spelled(tuple(arrays))(starters, device, torch._C._cuda_getDevice, *spans)
    return made


@lru_cache(maxsize=256)
def _spelled(arrays: tuple[int, ...]) -> Any:
    """The text of such a function, in which each argument is written out."""
    rank = range(len(arrays))
    spans = "".join(f", s{i}" for i in rank)
    lines = [f"def made(starters, device, current{spans}):",
             "    far, near = starters",
             "    def run(args):",
             *(f"        t{i} = args[{int(at)}]" for i, at in enumerate(arrays)),
             *(f"        p{i} = t{i}.data_ptr()" for i in rank),
             "        if current() != device" + "".join(f" or t{i}.is_neg()" for i in rank) + ":",
             "            return False",
             *(f"        if p{i} < p{k} + s{k} and p{k} < p{i} + s{i}: return False"
               for i in rank for k in rank if i < k),
             f"        start = far if ({' | '.join(f'p{i}' for i in rank) or 0}) & 15 else near",
             "        if start is None:",
             "            return False",
             "        start(*args)",
             "        return True",
             "    return run"]
    return defined("\n".join(lines), "made")
