"""Random schedules that are legal for given computations on a target.

Nothing here knows what a word means: words and their values are those of the table of words, numbers
nearby, and texts seen among the heuristic's candidates; ``why_not`` is the filter. A word that joins
the table is drawn from then on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

from transconv.compute import Axis, Compute
from transconv.schedule import Block, Schedule, Scheduled, Word, k_steps, why_not
from transconv.schedule import words as all_words
from transconv.selection.proposals import heuristics
from transconv.target import Target
from transconv.verify.fuzz.trial import chance

NUMBERS = 4  # how many values of a range are tried, from the smallest on, if its row names none
MOST_TILE = 32 * 32 * 32  # elements of m x n x k: larger tiles take compilers long, one in LARGE is
LARGE = 16
BOXED = 8  # times as large where boxes are moved, which takes few instructions
MOST_STEPS, MOST_UNROLLED = 16, 1 << 17  # of a sum that is written out: steps, products
MOST_KERNELS = 2  # of one trial, counting stride phases and second stages of split sums
TRIES = 12


def is_small(schedule: Schedule) -> bool:
    """Whether the tile is small enough to compile quickly."""
    most = MOST_TILE * BOXED if "box" in (schedule.a, schedule.b) else MOST_TILE
    return volume(schedule) <= (most if schedule.unit == "mma" else MOST_TILE // 4)


def volume(schedule: Schedule) -> int:
    return prod(b.extent for b in schedule.blocks)


def kernels(schedule: Schedule, computes: Sequence[Compute]) -> int:
    """About how many kernels there will be: each costs as much to compile as another trial."""
    parts = schedule.split_k > 1 and schedule.reduce == "partials"
    return len(computes) * (1 + parts) + len([x for x in schedule.pack.split(".") if x])


def words(schedule: Schedule) -> dict[str, str]:
    """The words of a schedule, to count by; numbers only as default or not."""
    found = {"tile": "with a block" if schedule.blocks else "one by one"}
    for word in all_words():
        value = schedule.word(word.name)
        found[word.name] = str(value)
        if callable(word.draw) and isinstance(value, str):  # too many values to count by
            found[word.name] = "given" if value else "default"
    return found


def is_legal(schedule: Schedule, computes: Sequence[Compute], target: Target) -> bool:
    """Whether a schedule may be used for each of some computations (the phases of one result)."""
    for compute in computes:
        steps = k_steps(schedule, Scheduled(compute, schedule, target).grouped)
        split = min(schedule.split_k, max(1, steps)) if compute.phase else schedule.split_k
        if why_not(replace(schedule, split_k=split), compute, target) is not None:
            return False
        if schedule.unroll and (steps > MOST_STEPS or steps * volume(schedule) > MOST_UNROLLED):
            return False
    return True


def schedule(rng: Random, computes: Sequence[Compute], target: Target) -> Schedule | None:
    """A schedule, of the heuristic's at any rank or of blocks drawn at random, with words drawn at
    random. None when there is nothing to choose: no computation has a point or a term."""
    chosen = [a for a in computes if all(x.size for x in a.axes)]
    if not chosen:
        return None
    made = _random_blocks(rng, chosen, target) if chance(rng, 2) else None
    # To rank candidates takes as long as all the rest of a drawing.
    seen = heuristics.candidates(chosen[0], target) if made is None or chance(rng, 3) else []
    if made is None:
        most = MOST_KERNELS * (1 + 9 * chance(rng, 3))
        small = [
            c for c in seen if is_small(c) and kernels(c, chosen) <= most and is_legal(c, chosen, target)
        ]
        if not small or chance(rng, LARGE):
            small = [c for c in seen if is_legal(c, chosen, target)]
        if not small:
            return None
        made = _of_some_kind(rng, small)
        if chance(rng, 3):  # as the heuristic would have it
            return made
    return _with_words(rng, made, chosen, target, seen)


def _of_some_kind(rng: Random, found: Sequence[Schedule]) -> Schedule:
    """One of the schedules, every combination of words as likely as any other, however few have it."""
    spoken = [w.name for w in all_words() if isinstance(w.default, str) and w.name != "order"]
    kinds: dict[tuple[object, ...], list[Schedule]] = {}
    for c in found:
        kinds.setdefault(tuple(c.word(name) for name in spoken), []).append(c)
    return rng.choice(rng.choice(list(kinds.values())))


def _with_words(
    rng: Random, made: Schedule, computes: Sequence[Compute], target: Target, seen: Sequence[Schedule]
) -> Schedule:
    """Change some words, each if the schedule stays legal with it."""
    table = [w for w in all_words() if w.draw != ()]
    rng.shuffle(table)
    for word in table:
        if chance(rng, 3):
            continue
        value = _value(rng, word, made, computes[0], seen)
        for change in _changes(rng, made, word, value, computes[0], seen):
            other = made.with_words(**change)
            if (
                value != made.word(word.name)
                and is_legal(other, computes, target)
                and (kernels(other, computes) <= MOST_KERNELS or chance(rng, 3))
            ):
                made = other
                break
    return made


def _changes(
    rng: Random, made: Schedule, word: Word, value: object, compute: Compute, seen: Sequence[Schedule]
) -> Iterator[dict[str, Any]]:
    """A word alone, or several times with others that it depends on, and with smaller blocks."""
    if not word.together or value == word.default:
        yield {word.name: value}
        return
    others = [w for name in word.together for w in all_words() if w.name == name]
    for _ in range(TRIES):
        blocks = list(made.blocks)
        for _ in range(rng.randrange(3) if blocks else 0):
            at = rng.randrange(len(blocks))
            blocks[at] = replace(blocks[at], extent=max(1, blocks[at].extent // 2))
        yield {w.name: _value(rng, w, made, compute, seen) for w in others} | {
            word.name: value,
            "blocks": tuple(b for b in blocks if b.extent > 1),
        }


def _value(rng: Random, word: Word, made: Schedule, compute: Compute, seen: Iterable[Schedule]) -> object:
    if callable(word.draw):
        return word.draw(rng, made, compute)
    if word.draw is not None:
        return rng.choice(word.draw)
    if isinstance(word.values, tuple):
        return rng.choice(word.values)
    if isinstance(word.values, range):
        return rng.choice(word.values[:NUMBERS])
    # A word of free text says what it can be only through those who propose it.
    return rng.choice(sorted({str(c.word(word.name)) for c in seen} | {str(word.default)}))


def _random_blocks(rng: Random, computes: Sequence[Compute], target: Target) -> Schedule | None:
    """Any groups of neighbouring axes of one kind, with any extents that the rules let pass."""
    compute = computes[0]
    if compute.b is not None and "wgmma" in target.features and chance(rng, 3):
        for _ in range(TRIES):
            explicit = _explicit_blocks(rng, compute)
            if is_legal(explicit, computes, target):
                return explicit
    for _ in range(TRIES):
        unit = "fma" if compute.b is None or compute.acc.name == "f64" or chance(rng, 3) else "mma"
        blocks: list[Block] = []
        for kind in "BMNK":
            least = (
                1
                if unit == "fma" or kind == "B"
                else 16
                if kind != "K"
                else target.least_steps(*(f.var.type for f in compute.factors or ()))
            )
            most = 1 if unit == "mma" and kind == "B" else 64 if unit == "mma" else 16
            blocks += _blocks_of(rng, compute.axes_of(kind), least, most)
        made = Schedule(
            tuple(blocks), unit, warps=rng.choice((1, 2, 4, 4, 8)), stages=rng.choice((1, 2, 3, 4))
        )
        if is_small(made) and is_legal(made, computes, target):
            return made
    return None


def _explicit_blocks(rng: Random, compute: Compute) -> Schedule:
    """Blocks of an explicit kernel, whose left side is 64 at least. Chance alone rarely finds all of
    its words together."""
    left = rng.choice("MN")
    blocks: list[Block] = []
    for kind in "MNK":
        least = 64 if kind == left else 16
        blocks += _blocks_of(rng, compute.axes_of(kind), least, 64 if kind != "K" else 32)
    return Schedule(
        tuple(blocks),
        a="box",
        b="box",
        via="gluon",
        swap=int(left == "N"),
        warps=4,
        stages=rng.choice((2, 3, 4)),
    )


def _blocks_of(rng: Random, axes: tuple[Axis, ...], least: int, most: int) -> list[Block]:
    """Blocks over some axes of one kind with a tile of ``least`` to ``most`` positions."""
    if not axes:
        return []
    kept = [x for x in axes if x.size > 1 or chance(rng, 8)] or list(axes[-1:])
    wanted = least << rng.choice((0, 0, 0, 1, 2)) if least > 1 else 1 << rng.randrange(5)
    wanted = min(wanted, most)
    if wanted == 1 and chance(rng, 2):
        return []
    groups: list[list[Axis]] = [[]]
    for axis in kept:
        if groups[-1] and chance(rng, 2):
            groups.append([])
        groups[-1].append(axis)
    # The inner groups get blocks first; those that get none are handled one by one.
    made: list[Block] = []
    for group in reversed(groups):
        extent = (
            wanted
            if group is groups[0] or chance(rng, 2)
            else 1 << rng.randint(0, wanted.bit_length() - 1)
        )
        wanted //= extent
        if extent > 1 or chance(rng, 2):
            made.insert(0, Block(tuple(x.name for x in group), extent))
        if wanted == 1 and chance(rng, 2):
            break
    return made
