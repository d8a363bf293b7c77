"""The proving ground. In: a random generator, algorithms, a target. Out: a legal config for all.

Nothing here knows what a word means: the words are the fields of ``Config``, their values those of
``CHOICES``, of numbers nearby, and those seen among the heuristic's candidates; ``why_not`` is the
filter. A word that joins ``Config`` is drawn from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from math import prod
from random import Random
from typing import Any

from transconv import heuristics
from transconv.algorithm import Algorithm, Axis
from transconv.config import CHOICES, Block, Config
from transconv.counts import k_steps
from transconv.legality import why_not
from transconv.proving.draw import chance
from transconv.target import Target

# Numbers worth trying; a numeric word that is not listed is tried with NUMBERS.
NUMBERS = (0, 1, 2, 3)
VALUES: dict[str, tuple[int, ...]] = {
    "group_m": (1, 2, 3, 8), "split_k": (1, 1, 2, 3, 5), "programs": (0, 1, 2, 5, 132),
    "swap": (0, 1), "merge": (1, 2, 3, 4, 8, 16), "unroll": (0, 0, 1), "late": (0, 1),
    "stages": (1, 2, 3, 4), "warps": (1, 2, 4, 4, 8), "teams": (1, 2),
}
# Words that decide whether another is legal, and are drawn with it; so are smaller blocks.
COMPANIONS = {"teams": ("programs", "warps", "split_k"), "keep": ("programs", "split_k", "teams")}
DEFAULTS = Config()
SPOKEN = tuple(f.name for f in fields(Config) if isinstance(f.default, str) and f.name != "order")
MOST_TILE = 32 * 32 * 32  # elements of m x n x k: larger tiles take compilers long, one in LARGE is
LARGE = 16
BOXED = 8  # times as large where boxes are moved, which takes few instructions
MOST_STEPS, MOST_UNROLLED = 16, 1 << 17  # of a sum that is written out: steps, products
MOST_KERNELS = 2  # of one trial, counting stride phases and second stages of split sums
TRIES = 12


def is_small(config: Config) -> bool:
    """Whether the tile is one that compilers are quick with."""
    most = MOST_TILE * BOXED if "box" in (config.a, config.b) else MOST_TILE
    return volume(config) <= (most if config.unit == "mma" else MOST_TILE // 4)


def volume(config: Config) -> int:
    return prod(b.extent for b in config.blocks)


def kernels(config: Config, algorithms: Sequence[Algorithm]) -> int:
    """About how many kernels there will be: each costs as much to compile as another trial."""
    parts = config.split_k > 1 and config.reduce == "partials"
    return len(algorithms) * (1 + parts) + len([x for x in config.pack.split(".") if x])


def words(config: Config) -> dict[str, str]:
    """The words of a config, to count by; numbers only as default or not."""
    found = {"tile": "with a block" if config.blocks else "one by one"}
    for f in fields(Config):
        value = getattr(config, f.name)
        if f.name in ("order", "regs"):
            found[f.name] = "given" if value else "default"
        elif f.name != "blocks":
            found[f.name] = str(value)
    return found


def is_legal(config: Config, algorithms: Sequence[Algorithm], target: Target) -> bool:
    """Whether a config may be used for each of some algorithms (the phases of one result)."""
    for algorithm in algorithms:
        split = min(config.split_k, max(1, k_steps(config, algorithm))) if algorithm.phase else (
            config.split_k)
        if why_not(replace(config, split_k=split), algorithm, target) is not None:
            return False
        steps = k_steps(config, algorithm)
        if config.unroll and (steps > MOST_STEPS or steps * volume(config) > MOST_UNROLLED):
            return False
    return True


def config(rng: Random, algorithms: Sequence[Algorithm], target: Target) -> Config | None:
    """A config, of the heuristic's at any rank or of blocks drawn at random, with words drawn at
    random. None when there is nothing to choose: no algorithm has a point or a term."""
    chosen = [a for a in algorithms if all(x.size for x in a.axes)]
    if not chosen:
        return None
    made = _random_blocks(rng, chosen, target) if chance(rng, 2) else None
    # To rank candidates takes as long as all the rest of a drawing.
    seen = heuristics.candidates(chosen[0], target) if made is None or chance(rng, 3) else []
    if made is None:
        most = MOST_KERNELS * (1 + 9 * chance(rng, 3))
        small = [c for c in seen if is_small(c) and kernels(c, chosen) <= most
                 and is_legal(c, chosen, target)]
        if not small or chance(rng, LARGE):
            small = [c for c in seen if is_legal(c, chosen, target)]
        if not small:
            return None
        made = _of_some_kind(rng, small)
        if chance(rng, 3):  # as the heuristic would have it
            return made
    return _with_words(rng, made, chosen, target, seen)


def _of_some_kind(rng: Random, found: Sequence[Config]) -> Config:
    """One of the configs, every combination of words as likely as any other, however few have it."""
    kinds: dict[tuple[object, ...], list[Config]] = {}
    for c in found:
        kinds.setdefault(tuple(getattr(c, name) for name in SPOKEN), []).append(c)
    return rng.choice(rng.choice(list(kinds.values())))


def _with_words(rng: Random, made: Config, algorithms: Sequence[Algorithm], target: Target,
                seen: Sequence[Config]) -> Config:
    """Change some words, each if the config stays legal with it."""
    names = [f.name for f in fields(Config) if f.name != "blocks"]
    rng.shuffle(names)
    for name in names:
        if chance(rng, 3):
            continue
        value = _value(rng, name, made, algorithms[0], seen)
        for change in _changes(rng, made, name, value, algorithms[0], seen):
            other = replace(made, **change)
            if value != getattr(made, name) and is_legal(other, algorithms, target) and (
                    kernels(other, algorithms) <= MOST_KERNELS or chance(rng, 3)):
                made = other
                break
    return made


def _changes(rng: Random, made: Config, name: str, value: object, algorithm: Algorithm,
             seen: Sequence[Config]) -> Iterator[dict[str, Any]]:
    """A word alone, or several times with others that it depends on."""
    if name not in COMPANIONS or value == getattr(DEFAULTS, name):
        yield {name: value}
        return
    for _ in range(TRIES):
        blocks = list(made.blocks)
        for _ in range(rng.randrange(3) if blocks else 0):
            at = rng.randrange(len(blocks))
            blocks[at] = replace(blocks[at], extent=max(1, blocks[at].extent // 2))
        yield {n: _value(rng, n, made, algorithm, seen) for n in COMPANIONS[name]} | {
            name: value, "blocks": tuple(b for b in blocks if b.extent > 1)}


def _value(rng: Random, name: str, made: Config, algorithm: Algorithm,
           seen: Iterable[Config]) -> object:
    default = getattr(DEFAULTS, name)
    if name in CHOICES:
        return rng.choice(CHOICES[name])
    if name == "order":
        axes = [x.name for x in algorithm.axes_of("K")]
        return ".".join(rng.sample(axes, len(axes))) if chance(rng, 2) else ""
    if name == "regs":
        alone = [b.axes[0] for b in made.blocks if len(b.axes) == 1]
        return ".".join(rng.sample(alone, rng.randint(0, min(3, len(alone)))))
    if isinstance(default, int):
        return rng.choice(VALUES.get(name, NUMBERS))
    # A word of free text says what it can be only through those who propose it.
    return rng.choice(sorted({str(getattr(c, name)) for c in seen} | {str(default)}))


def _random_blocks(rng: Random, algorithms: Sequence[Algorithm], target: Target) -> Config | None:
    """Any groups of neighbouring axes of one kind, with any extents that the rules let pass."""
    alg = algorithms[0]
    if alg.b is not None and "wgmma" in target.features and chance(rng, 3):
        for _ in range(TRIES):
            explicit = _explicit_blocks(rng, alg)
            if is_legal(explicit, algorithms, target):
                return explicit
    for _ in range(TRIES):
        unit = "fma" if alg.b is None or alg.acc.name == "f64" or chance(rng, 3) else "mma"
        blocks: list[Block] = []
        for kind in "BMNK":
            least = 16 if unit == "mma" and kind != "B" else 1
            most = 1 if unit == "mma" and kind == "B" else 64 if unit == "mma" else 16
            blocks += _blocks_of(rng, alg.axes_of(kind), least, most)
        made = Config(tuple(blocks), unit, warps=rng.choice((1, 2, 4, 4, 8)),
                      stages=rng.choice((1, 2, 3, 4)))
        if is_small(made) and is_legal(made, algorithms, target):
            return made
    return None


def _explicit_blocks(rng: Random, alg: Algorithm) -> Config:
    """Blocks of an explicit kernel, whose left side is 64 at least. Chance alone rarely finds all of
    its words together."""
    left = rng.choice("MN")
    blocks: list[Block] = []
    for kind in "MNK":
        least = 64 if kind == left else 16
        blocks += _blocks_of(rng, alg.axes_of(kind), least, 64 if kind != "K" else 32)
    return Config(tuple(blocks), a="box", b="box", via="gluon", swap=int(left == "N"), warps=4,
                  stages=rng.choice((2, 3, 4)))


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
        extent = wanted if group is groups[0] or chance(rng, 2) else 1 << rng.randint(
            0, wanted.bit_length() - 1)
        wanted //= extent
        if extent > 1 or chance(rng, 2):
            made.insert(0, Block(tuple(x.name for x in group), extent))
        if wanted == 1 and chance(rng, 2):
            break
    return made
