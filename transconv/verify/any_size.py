"""Sizes to check a kernel with that takes sizes as arguments; first those at the edges of its
requirements.

In: a computation with sizes that are arguments. Out: sizes that meet its requirements, small enough for an
interpreter, and some that do not; and whether a convolution's kernels for any size are right at some.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod

from transconv.compute import Compute
from transconv.conv import CompiledDirection, ConvProblem, ConvWorkload, Prop
from transconv.errors import ComputeError, Unsupported
from transconv.ir import Sizes, text_of
from transconv.runtime import plan
from transconv.target import Target
from transconv.verify.case import ProblemCase
from transconv.verify.judgement import answered_by, told_answers

SMALL = 1 << 14  # points of a computation that is interpreted
LONGEST = 70  # of a drawn size
TRIES = 2000


def asked(compute: Compute, text: str | None) -> list[dict[str, int]]:
    """The sizes of a command line's words (``N=8,H=17``; the others are the examples); without words the
    examples and the edges. Raises ComputeError."""
    assert compute.named is not None
    if not text:
        return [compute.named.like, *edges(compute)]
    found = dict(compute.named.like)
    for word in text.split(","):
        told = re.fullmatch(r"\s*(\w+)=(\d+)\s*", word)
        if told is None or told[1] not in found:
            raise ComputeError(f"sizes '{text}'; expected some of {' '.join(found)}, such as "
                               f"{compute.named.names[0]}=8")
        found[told[1]] = int(told[2])
    if reason := compute.named.why_not(found):
        raise ComputeError(f"{compute.name}: {reason}; it requires {compute.named}")
    return [found]


def edges(compute: Compute, most: int = 4) -> list[dict[str, int]]:
    """Sizes at the ends of their ranges: all at their least, then each at its largest with the others
    at their least. Largest values are limited to what an interpreter can run."""
    named = compute.named
    assert named is not None
    low = {s.name: _near(named, s.name, s.least, 1) for s in named.each}
    found = [low]
    for s in named.each:
        high = min(s.most, max(s.least, LONGEST))
        found.append(low | {s.name: _near(named, s.name, high, -1)})
    legal = [f for f in found if not named.why_not(f) and _points(compute, f) <= SMALL]
    return list({tuple(f.items()): f for f in legal}.values())[:most]


def drawn(compute: Compute, count: int, seed: int = 0) -> list[dict[str, int]]:
    """Sizes that meet the requirements, the edges first."""
    named = compute.named
    assert named is not None
    rng = random.Random(seed)
    found = edges(compute, count)
    for _ in range(TRIES):
        if len(found) >= count:
            break
        tried = {s.name: rng.randint(s.least, min(s.most, max(s.least, LONGEST))) for s in named.each}
        if not named.why_not(tried) and tried not in found and _points(compute, tried) <= SMALL:
            found.append(tried)
    return found[:count]


def outside(named: Sizes) -> Iterator[dict[str, int]]:
    """Sizes that break one requirement each: beyond the ends of the ranges, and each condition."""
    for s in named.each:
        yield named.like | {s.name: s.least - 1}
        yield named.like | {s.name: s.most + 1}
    values = [range(s.least, min(s.most, s.least + 8) + 1) for s in named.each]
    for condition in named.where:
        for tried in product(*values):
            sizes = dict(zip(named.names, tried, strict=True))
            if named.why_not(sizes).startswith(text_of(condition)):
                yield sizes
                break


def beside_torch(problem: ConvProblem, names: frozenset[str], target: Target, text: str | None = None,
                 props: Iterable[Prop] = Prop) -> Iterator[tuple[str, bool]]:
    """Lines about kernels for any size beside answers that know no text of a computation, and whether they
    are right. ``text``: a command line's sizes."""
    yield f"beside {told_answers(answered_by(problem))}", True
    for prop in props:
        workload = ConvWorkload(problem, prop, open=names)
        try:
            made = plan(workload, target, None, False, CompiledDirection, keeps=False)
        except Unsupported as refused:
            yield f"  not run  {prop}: {refused}", True
            continue
        needs = made.required.sizes if made.required else None
        for sizes in asked(workload.computations[0], text):
            if needs is None or needs.why_not(sizes):
                continue
            i = tuple(sizes.get(f"I{n.upper()}", problem.i[x]) for x, n in enumerate(problem.spatial))
            o = tuple(_out(problem, x, n) for x, n in enumerate(i))
            case = ProblemCase(problem.at(sizes.get("MB", problem.mb), i, o), prop)
            found = case.judge(made.at({n: sizes[n] for n in needs.names}), "exact")
            said = " ".join(f"{n}={v}" for n, v in sizes.items())
            yield (f"  {'right' if found.right else 'WRONG'}  {prop}  {said}  {found.reason}".rstrip(),
                   found.right)


def _out(p: ConvProblem, x: int, i: int) -> int:
    """The size of dst along a dimension if that of src is ``i``. Padding is that of the call, as much in
    front as behind, where the example's is less behind because positions are left over."""
    same = 0 <= p.pad_lo[x] - p.pad_hi[x] < p.stride[x]
    around = p.pad_lo[x] + (p.pad_lo[x] if same else p.pad_hi[x])
    return (i + around - (p.k[x] - 1) * p.dilation[x] - 1) // p.stride[x] + 1


def _near(named: Sizes, name: str, start: int, step: int) -> int:
    """The first size from ``start`` on, in one direction, with which the other examples meet all
    requirements."""
    tried: Mapping[str, int] = named.like
    return next((n for n in range(start, start + step * 4096, step)
                 if n >= 1 and not named.why_not({**tried, name: n})), start)


def _points(compute: Compute, sizes: Mapping[str, int]) -> int:
    return prod(x.size for x in compute.at(**sizes).axes) // max(
        1, max(x.size for x in compute.axes_of("K")) if compute.axes_of("K") else 1)
