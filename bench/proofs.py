"""``python -m bench proofs``: whether the addresses of drawn kernels are proved, and planted strays found.

A trial is drawn from a seed and a number: a convolution of one size or of any, a computation as text, or
a program of the kernel API, with a chip and a legal schedule. All accesses of its kernels are proved
(``transconv/passes/footprints.py``), and a row says by which rules. In some of them strays are planted,
one at a time: an access one row further, a mask without one of its conditions, a comparison that is off by
one, a loop that is one iteration longer. At points of loops and lanes, where they can be counted, it is
seen whether the stray leaves its tensor, at some sizes if these are arguments:

===========  ==========================================================================
``found``    it does, and the proof says so
``missed``   it does, and the proof says that it does not: the proof is wrong
``harmless`` it does not, and the proof says so
``inside``   it does not, and there is no proof
``unseen``   there is no proof, and too many points to count
===========  ==========================================================================

A repeated run continues after the rows of the file.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from bench.environment import versions
from transconv import ir
from transconv.cli.arguments import ranges
from transconv.conv import CompiledDirection, ConvWorkload, Epilogue
from transconv.conv.relation import every, spelled
from transconv.errors import TransconvError
from transconv.kernel.trials import KERNELS
from transconv.kernel.trials.trial import KernelTrial, loaded
from transconv.passes.footprints import Footprint, footprints, is_within
from transconv.runtime import build
from transconv.selection.proposals import heuristics
from transconv.simplify import range_at_points
from transconv.support import AddressError, knobs
from transconv.tuning.table import CsvTable
from transconv.verify.fuzz import compute_trial, conv_trial, legal_schedules
from transconv.verify.fuzz.trial import chance

RULES = ("ranges", "digits", "linear", "points", "box", "never", "cases")
VERDICTS = ("found", "missed", "harmless", "inside", "unseen")
COLUMNS = (
    "kind", "seed", "number", "status", "kernels", "sized", "accesses", *RULES, "examples", "nothing",
    "strays", *VERDICTS, "seconds", "commit", "line", "reason",
)  # fmt: skip
KEY = ("kind", "seed", "number")
NAME = "proofs.csv"
TRIES = 40  # drawings until one can have sizes as arguments
EACH, STRAYS = 4, 3  # in every fourth trial so many strays are planted
SIZES = 4  # at which a kernel for any size is counted


def arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--n", type=ranges.at_least(1), default=500, help="trials of each kind (default: 500)")
    to.add_argument("--seed", type=ranges.at_least(0), default=1, help="their seed (default: 1)")
    to.add_argument("--time-budget", type=ranges.seconds, default=float("inf"), metavar="SECONDS")
    to.add_argument("--kinds", default=" ".join(KINDS), help="some of: %(default)s")


def main(options: argparse.Namespace) -> int:
    """Add a row for each trial that has none; 1 if an access is not proved or a stray is missed."""
    table = CsvTable(Path(options.out) / NAME, COLUMNS, KEY)
    ends, commit = time.monotonic() + options.time_budget, versions()["commit"]
    for number in range(options.n):
        for kind in options.kinds.split():
            row = {"kind": kind, "seed": options.seed, "number": number}
            if not table.has(row) and time.monotonic() < ends:
                table.add({**row, "commit": commit, **tried(kind, options.seed, number)})
    for line in summary(table.rows):
        print(line)
    return int(any(r["status"] == "unproved" or r["missed"] not in ("", "0") for r in table.rows))


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The sums of each kind, and what is not proved by the reasons' beginnings."""
    for kind in dict.fromkeys(r["kind"] for r in rows):
        some = [r for r in rows if r["kind"] == kind]
        sums = {c: sum(int(r[c] or 0) for r in some) for c in COLUMNS[4:-4]}
        said = ", ".join(f"{n} {word}" for word, n in Counter(r["status"] for r in some).most_common())
        yield f"{kind}: {len(some)} trials, {said}"
        yield "    " + ", ".join(f"{n} {c}" for c, n in sums.items() if n)
    for reason, n in Counter(r["reason"][:100] for r in rows if r["status"] == "refused").most_common(8):
        yield f"{n} times refused: {reason}"
    for r in rows:
        if r["status"] == "unproved" or r["missed"] not in ("", "0"):
            yield f"{r['kind']} {r['seed']} {r['number']}: {r['reason'][:300]}"


def tried(kind: str, seed: int, number: int) -> dict[str, Any]:
    """What is proved of a trial's kernels; a refusal that is about addresses is no proof."""
    started, line = time.perf_counter(), ""
    try:
        line, kernels = KINDS[kind](seed, number)
        found = proved(kernels)
        if number % EACH == 0:
            found |= strays(kernels, Random(f"strays {kind} {seed} {number}"))
    except TransconvError as error:
        status = "unproved" if isinstance(error, AddressError) else "refused"
        found = {"status": status, "reason": f"{type(error).__name__}: {error}"}
    repeat = {} if found["status"] == "proved" and not found.get("missed") else {"line": line}
    return found | repeat | {"seconds": round(time.perf_counter() - started, 2)}


def proved(kernels: list[ir.Kernel]) -> dict[str, Any]:
    """The accesses of kernels by the rules that prove them. ``examples``: of those that no rule proves for
    all sizes, which are proved for the examples."""
    counts: Counter[str] = Counter()
    why = ""
    for kernel in kernels:
        like = footprints(kernel.at(kernel.sizes.like)) if kernel.sizes else ()
        for i, access in enumerate(footprints(kernel)):
            rule = access.proof[0] or ("examples" if like and like[i].proof[0] else "nothing")
            counts[rule] += 1
            why = why or access.why_not
    return {
        **counts,
        "status": "unproved" if why else "proved",
        "kernels": len(kernels),
        "sized": sum(k.sizes is not None for k in kernels),
        "accesses": counts.total(),
        "reason": why,
    }


# -- planted strays ----------------------------------------------------------------------------------


class _Planted(ir.Mutator):
    """One node of a kernel replaced by another, wherever it is."""

    def __init__(self, old: ir.Node, new: ir.Node) -> None:
        self.old, self.new = old, new

    def mutate(self, node: Any) -> Any:
        return self.new if node is self.old else super().mutate(node)


def planted(kernel: ir.Kernel, rng: Random) -> ir.Kernel | None:
    """The kernel with one stray; None where it has none of the drawn kind."""
    accesses = [n for n in ir.find(kernel.body, (ir.Load, ir.Store)) if n.tensor.layout.blocks]
    kind = rng.choice(("row", "mask", "edge", "loop"))
    old: Any = None
    if kind == "row" and accesses:
        old = rng.choice(accesses)
        step = rng.choice([b.stride or 1 for b in old.tensor.layout.blocks]) * rng.choice((1, -1))
        new: Any = replace(old, offset=old.offset + step)
    elif kind == "mask" and (some := [a for a in accesses if a.mask is not ir.TRUE]):
        old = rng.choice(some)
        parts = ir.conjuncts(old.mask)
        gone = rng.randrange(len(parts))
        new = replace(old, mask=ir.all_of(parts[:gone] + parts[gone + 1 :]))
    elif kind == "edge":
        compared = [n for n in ir.find(kernel.body, ir.Lt) if n.a.dtype.kind == "index"]
        if compared:
            old = rng.choice(compared)
            new = ir.Lt(old.a, old.b + 1)
    elif kind == "loop" and (loops := ir.find(kernel.body, ir.For)):
        old = rng.choice(loops)
        new = replace(old, stop=old.stop + 1, until=None if old.until is None else old.until + 1)
    return None if old is None else _Planted(old, new).rebuilt(kernel)


def strays(kernels: list[ir.Kernel], rng: Random) -> dict[str, int]:
    """How many planted strays there are of each verdict."""
    counts: Counter[str] = Counter()
    for _ in range(STRAYS if kernels else 0):
        kernel = rng.choice(kernels)
        made = planted(kernel, rng)
        if made is not None:
            counts[verdict(kernel, made, rng)] += 1
    return {"strays": counts.total(), **counts}


def verdict(kernel: ir.Kernel, stray: ir.Kernel, rng: Random) -> str:
    """Whether the accesses that a stray has changed leave their tensors, and whether the proof says so."""
    pairs = [*zip(footprints(kernel), footprints(stray), strict=True)]
    changed = [i for i, (a, b) in enumerate(pairs) if (a.offset, a.mask) != (b.offset, b.mask)]
    changed = changed or [i for i, (a, b) in enumerate(pairs) if a.facts is not b.facts]
    sure = all(pairs[i][1].proof[0] for i in changed)
    seen: list[bool | None] = []
    for made in at_sizes(stray, rng):
        seen.append(counted(made, changed))
        if seen[-1]:
            return "missed" if sure else "found"
    if None in seen:
        return "unseen"
    return "harmless" if sure else "inside"


def at_sizes(kernel: ir.Kernel, rng: Random) -> Iterator[ir.Kernel]:
    """The kernel at some sizes that its requirements allow; as it is, if it takes none."""
    if kernel.sizes is None:
        yield kernel
        return
    yield kernel.at(kernel.sizes.like)
    ends = [(s.name, s.least, min(s.most, s.least + 8)) for s in kernel.sizes.each]
    small = ({name: rng.randint(low, high) for name, low, high in ends} for _ in range(TRIES))
    yield from map(kernel.at, islice((s for s in small if not kernel.sizes.why_not(s)), SIZES))


def counted(kernel: ir.Kernel, some: list[int]) -> bool | None:
    """Whether some of the accesses leave their tensors at a point; None if points are too many."""
    known = footprints(kernel)
    seen = [None if known[i].boxed else _leaves(known[i]) for i in some]
    return True if any(seen) else None if None in seen else False


def _leaves(access: Footprint) -> bool | None:
    reached = range_at_points(access.offset, ir.conjuncts(access.mask), access.facts)
    if reached is None:
        return None
    return reached.low <= reached.high and not is_within(reached, access.room)


# -- what is drawn -----------------------------------------------------------------------------------


def _convolution(seed: int, number: int) -> tuple[str, list[ir.Kernel]]:
    trial = conv_trial.draw_trial(seed, number)
    _switched(trial.switches)
    return str(trial), [s.kernel for s in trial.case("numpy").plan(trial.schedule).steps]


def _any_size(seed: int, number: int) -> tuple[str, list[ir.Kernel]]:
    """A convolution with some of its sizes open, the first of some drawings that one kernel can be for."""
    rng = Random(f"any size {seed} {number}")
    for _ in range(TRIES):
        trial = conv_trial.draw_trial(f"any {seed} {number}", rng.randrange(1 << 30))
        _switched(trial.switches)
        names = every(trial.problem)
        if chance(rng, 3):
            names = frozenset(rng.sample(sorted(names), rng.randint(1, len(names))))
        problem = trial.problem.with_layout(rng.choice(("nchw", "nhwc")))
        try:
            work = ConvWorkload(problem, trial.prop, Epilogue.parse(trial.epilogue), names)
            work.refuse()
            computes = [c for c in work.computations if not work.prepares(c)]
            schedule = legal_schedules.schedule(rng, computes, trial.chip)
        except TransconvError:
            continue
        made = build(work, trial.chip, schedule, heuristics.default, False, CompiledDirection)
        words = shlex.join([spelled(problem, names), *work.options, "--schedule", str(schedule)])
        return f"{words} {trial.epilogue}", [s.kernel for s in made.steps]
    return "", []


def _computation(seed: int, number: int) -> tuple[str, list[ir.Kernel]]:
    trial = compute_trial.draw_trial(seed, number)
    _switched(())
    return str(trial), [s.kernel for s in trial.plan().steps]


def _program(seed: int, number: int) -> tuple[str, list[ir.Kernel]]:
    trial = KERNELS.drawn(seed, number, "sm_90")
    assert isinstance(trial, KernelTrial)
    _switched(())
    with tempfile.TemporaryDirectory() as folder:
        function = loaded(trial.kernel(), Path(folder))
        made = function.lower(trial.launch, *trial.made().values(), target="sm_90")
    return str(trial), [made.kernel]


def _switched(switches: tuple[tuple[str, bool], ...]) -> None:
    knobs.adopt({knobs.passes.name: ",".join(f"{'+' if on else '-'}{n}" for n, on in switches)})


KINDS: dict[str, Callable[[int, int], tuple[str, list[ir.Kernel]]]] = {
    "convolution": _convolution,
    "any-size": _any_size,
    "computation": _computation,
    "program": _program,
}
