"""What starts the kernels of a plan, as one function that is written out: a call makes no list and no
other call of Python but for memory, addresses and the starts themselves.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transconv.backend_triton import Bind, KernelStart, torch_internals
from transconv.ir import defined

StarterAt = Callable[[tuple[int, ...]], Callable[..., None]]
"""From sizes to a function of tensors that starts a plan for them."""


class StartKind(NamedTuple):
    """Of a start what its text depends on. ``order``: the numbers of the kernel's arguments among the
    tensors; ``way``: how it is started; ``sized``: whether it takes the sizes; ``zero``: the number of the
    tensor that is cleared before."""

    order: tuple[int, ...]
    way: str
    sized: bool
    zero: int | None


def starter(numbers: Callable[..., tuple[Any, ...]], empty: Any, device: int, count: int, sizes: int,
            types: Sequence[Any], steps: Sequence[tuple[KernelStart | Bind, tuple[int, ...], int | None]],
            ) -> StarterAt:
    """From sizes to a function of ``count`` tensors that starts all steps: each of a kernel, or of a
    function that makes its start, with the numbers of its arguments and of what it clears. Workspaces of
    ``types`` are allocated by ``empty``; ``numbers`` as ``Plan.numbers``."""
    kinds, values, stream = list[StartKind](), list[Any](), None
    for begun, order, zero in steps:
        if not isinstance(begun, KernelStart):
            kinds.append(StartKind(order, "bind", False, zero))
            values.append(begun)
            continue
        stream = torch_internals.raw_stream
        way, kernel = "plain" if begun.encoder is None else "boxes", begun.kernel
        kinds.append(StartKind(order, way, begun.sizes > 0, zero))
        values += [begun.raw, kernel.function, kernel.packed_metadata, begun.early]
        if begun.encoder is not None:
            values += [begun.encoder.calls.get, begun.encoder]
    made = _written(count, sizes, len(types), tuple(kinds))
    return made(numbers, empty, stream, device, *types, *values)


@lru_cache(maxsize=256)
def _written(
    count: int, sizes: int, spaces: int, kinds: tuple[StartKind, ...]
) -> Callable[..., StarterAt]:
    """What makes the function of what is bound in it, in the order of ``starter``."""
    n, each = _listed("n", range(sizes)), range(len(kinds))
    bound = ["numbers", "empty", "stream", "device", *(f"t{at}" for at in range(spaces))]
    for at, kind in enumerate(kinds):
        bound += [f"{name}{at}" for name in _NAMES[kind.way]]
    rooms = f"({_listed('s', range(spaces))})" if spaces else "_"
    lines = ["def at(sizes):"]
    lines += [f"    {n}= sizes"] if sizes else []
    lines += [f"    {''.join(f'(g{at}, p{at}), ' for at in each)}{rooms}, = numbers({n})"]
    lines += [f"    b{at} = bind{at}(sizes, g{at}, p{at})" for at in each if kinds[at].way == "bind"]
    lines += [f"    def run({_listed('x', range(count))}):",
              *(f"        x{count + at} = empty(s{at}, (1,), t{at})" for at in range(spaces))]
    direct = sorted({x for kind in kinds if kind.way != "bind" for x in kind.order})
    if direct:
        lines += [f"        {_listed('a', direct)}= {''.join(f'x{x}.data_ptr(), ' for x in direct)}",
                  "        on = stream(device)"]
    for at, kind in enumerate(kinds):
        lines += [f"        {line}" for line in _start(at, kind, n, count + spaces)]
    lines += ["        return None"] if not kinds else []
    text = "\n    ".join([f"def made({', '.join(bound)}):", *lines, "    return run", "return at"])
    made: Callable[..., StarterAt] = defined(text, "made")
    return made


_NAMES = {"bind": ("bind",), "plain": ("raw", "f", "m", "e"),
          "boxes": ("raw", "f", "m", "e", "known", "encode")}


def _start(at: int, kind: StartKind, n: str, tensors: int) -> list[str]:
    """The lines of one step."""
    lines = [] if kind.zero is None else [f"x{kind.zero}.zero_()"]
    if kind.way == "bind":
        return [*lines, f"b{at}({_listed('x', range(tensors))})"]
    given = _listed("a", kind.order) + n * kind.sized
    if kind.way != "plain":
        lines.append(f"k{at} = ({given})")
        given = f"*(known{at}(k{at}) or encode{at}(k{at}, p{at}))"
    return [*lines, f"raw{at}(g{at}, 1, 1, on, f{at}, False, e{at}, None, None, m{at}, None, None, None, "
            f"{given})"]


def _listed(letter: str, numbers: Sequence[int]) -> str:
    return "".join(f"{letter}{at}, " for at in numbers)
