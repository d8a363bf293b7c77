"""The choice. In: an algorithm of a problem, a target. Out: configs in the order to try, and why.

The heuristics propose and estimate; the database moves to the front what was measured: the config
tuned for this very problem, else the one tuned for the likest problem, clipped to this one's sizes.
A neighbour corrects the estimate by as much as the estimate was wrong at the neighbour: where the
config that won there was estimated to be 1.2 times as slow as the first, its like may be here too.
Where nothing was tuned for tensors that lie as these do, the config of the same problem with channels
innermost is tried over copies of them (``pack``). With ``TRANSCONV_CONFIG`` the user decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod

from transconv import heuristics, knobs
from transconv.algorithm import Algorithm, algorithms
from transconv.config import Config
from transconv.cost import estimate
from transconv.counts import k_steps, needed, tile
from transconv.database import nearest, store
from transconv.database.rows import Row, epilogue_kind, group, machine
from transconv.errors import ConfigError
from transconv.legality import why_not
from transconv.packing import why_not_copied
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

# A tuned config is not believed when it is estimated to take more times as long as the best estimate:
# one for this very problem, one for another. What neighbours are worth, with every problem of a log
# left out in turn, is told by `python -m bench trials` (docs/trials.md).
EXACT_FACTOR, NEAR_FACTOR = 4.0, 2.0
SLACK = 1.05  # two estimates that differ by less are equal
OTHER_ORDER = 0.5  # the distance to the same problem with another order in memory
MOST_UNROLLED, MOST_STAGES, MOST_WAVES = 64, 8, 8  # nothing beyond is worth compiling


@dataclass(frozen=True, slots=True)
class Choice:
    """A legal config. ``us``: its estimate; ``row``: where tuning found it (None: nowhere);
    ``away``: the distance from the row's problem to this one (0: the same)."""

    config: Config
    us: float
    row: Row | None = None
    away: float = 0.0

    @property
    def source(self) -> str:
        """``tuned``, ``near`` or ``estimate``."""
        return "estimate" if self.row is None else "near" if self.away else "tuned"

    @property
    def why(self) -> str:
        """Why it stands where it stands, in a sentence."""
        if self.row is None:
            return "the heuristics estimate it to be fast"
        measured = f"{self.row.us:.4g} us, the fastest of {self.row.tried} tried"
        if not self.away:
            return f"tuned for this problem on {self.row.machine}: {measured}"
        return (f"like the config tuned for {self.row.problem} {self.row.prop}"
                f"{' ' + self.row.epilogue if self.row.epilogue else ''} on {self.row.machine} "
                f"({measured}; distance {self.away:.2g})")


def ranked(algorithm: Algorithm, target: Target, problem: ConvProblem | None = None,
           prop: Prop | None = None) -> list[Choice]:
    """Legal configs, the most promising first. Without a problem (a second stage of a sum) the
    estimate alone ranks. Raises ConfigError when nothing is legal, or TRANSCONV_CONFIG is not."""
    proposed = heuristics.candidates(algorithm, target)
    choices = [Choice(c, estimate(c, algorithm, target)) for c in proposed]
    if problem is None or prop is None or algorithm.b is None:
        return choices
    if given := knobs.config():
        return [Choice(fitted(Config.parse(given), algorithm), 0.0)]
    first = _tuned(choices, algorithm, target, problem, prop)
    return [*first, *(c for c in choices if all(c.config != f.config for f in first))]


def default(algorithm: Algorithm, target: Target, problem: ConvProblem | None = None,
            prop: Prop | None = None) -> Config:
    """The config that is used when nobody says otherwise."""
    return ranked(algorithm, target, problem, prop)[0].config


def _tuned(choices: Sequence[Choice], algorithm: Algorithm, target: Target, problem: ConvProblem,
           prop: Prop) -> list[Choice]:
    """What the database puts before the best estimate, if anything."""
    rows = store.rows_of(group(problem, prop.value, machine(target)))
    for away, row, other in nearest.nearest(problem, epilogue_kind(algorithm.epilogue), rows):
        try:
            config = Config.parse(row.config)
        except ValueError:  # a ConfigError is one
            continue
        if away:
            made = of_neighbour(config, row, away, other, choices, algorithm, target, prop)
        else:
            config = fitted(config, algorithm)
            found = [config] if believable(config, algorithm, target) else []
            made = _cheap(found, EXACT_FACTOR, row, away, choices, algorithm, target)
        if made:
            return made
    return _over_copies(choices, algorithm, target, problem, prop)


def _over_copies(choices: Sequence[Choice], algorithm: Algorithm, target: Target,
                 problem: ConvProblem, prop: Prop) -> list[Choice]:
    """What was tuned for the same problem with channels innermost, over copies that lie so; the result
    too is a copy's, or is stored as it lies."""
    twin = problem.with_layout("axb")
    if twin == problem:
        return []
    apart = [letter for letter, view in (("a", algorithm.a), ("b", algorithm.b), ("c", algorithm.c))
             if view is not None and not why_not_copied(algorithm, letter)]
    packs = dict.fromkeys((".".join(apart), ".".join(x for x in apart if x != "c")))
    rows = store.rows_of(group(twin, prop.value, machine(target)))
    for away, row, other in nearest.nearest(twin, epilogue_kind(algorithm.epilogue), rows):
        if other != twin:
            continue
        try:
            config = fitted(Config.parse(row.config), algorithm)
        except ValueError:
            continue
        found = [replace(config, pack=pack, c=c) for pack in packs if pack
                 for c in dict.fromkeys((config.c, "gather"))]
        legal = [c for c in found if believable(c, algorithm, target)]
        if made := _cheap(legal, SLACK, row, away + OTHER_ORDER, choices, algorithm, target):
            return made
    return []


def of_neighbour(config: Config, row: Row, away: float, other: ConvProblem,
                 choices: Sequence[Choice], algorithm: Algorithm, target: Target,
                 prop: Prop) -> list[Choice]:
    """The best of the configs that are for this algorithm what the winner of another problem is for
    that, if the estimate does not speak against it louder than it did there."""
    found = relatives(config, choices, algorithm, target)
    factor = surprise(config, algorithm, target, other, prop) if found else 0.0
    return _cheap(found, min(NEAR_FACTOR, SLACK * factor), row, away, choices, algorithm, target)


def _cheap(found: Sequence[Config], factor: float, row: Row, away: float,
           choices: Sequence[Choice], algorithm: Algorithm, target: Target) -> list[Choice]:
    """Of some configs the one with the best estimate, if that is within a factor of the best."""
    made = [Choice(c, estimate(c, algorithm, target), row, away) for c in found]
    made = [c for c in made if c.us <= factor * choices[0].us]
    return sorted(made, key=lambda c: c.us)[:1]


def surprise(winner: Config, algorithm: Algorithm, target: Target, other: ConvProblem,
             prop: Prop) -> float:
    """How many times as long as the best estimate the winner of another problem was estimated to
    take there; 0 if it is no config for that problem."""
    there = next((a for a in algorithms(other, prop, algorithm.epilogue)
                  if a.name == algorithm.name), None)
    if there is None or any(x.size == 0 for x in there.axes):
        return 0.0
    winner = fitted(winner, there)
    try:
        first = heuristics.default(there, target)
    except ConfigError:
        return 0.0
    if not believable(winner, there, target):
        return 0.0
    return max(1.0, estimate(winner, there, target) / estimate(first, there, target))


def fitted(config: Config, algorithm: Algorithm) -> Config:
    """A config for all stride phases splits the sum of a short phase no further than it goes, and
    writes out no more taps than the phase has."""
    known = {x.name for x in algorithm.axes}
    if not algorithm.phase or not all(a in known for b in config.blocks for a in b.axes):
        return config
    blocks = tuple(replace(b, extent=min(b.extent, max(1, algorithm.size(b.axes[0]))))
                   if config.in_registers(b) else b for b in config.blocks)
    config = replace(config, blocks=blocks)
    return replace(config, split_k=min(config.split_k, max(1, k_steps(config, algorithm))))


def believable(config: Config, algorithm: Algorithm, target: Target) -> bool:
    """Legal, and with words that could come from tuning: whoever writes to a database must not be
    able to make us compile for minutes."""
    if why_not(config, algorithm, target) is not None:
        return False
    unrolled = k_steps(config, algorithm) if config.unroll else 0
    return (unrolled <= MOST_UNROLLED and 1 <= config.stages <= MOST_STAGES
            and 1 <= config.group_m <= 1024 and config.programs <= MOST_WAVES * target.sms
            and len(config.blocks) <= len(algorithm.axes))


def relatives(config: Config, choices: Sequence[Choice], algorithm: Algorithm,
              target: Target) -> list[Config]:
    """Configs for this algorithm that are what another problem's config is for that one: itself
    with its blocks clipped, and those of the choices with the same words and sizes of the tile."""
    known = {x.name for x in algorithm.axes}
    if not all(a in known for b in config.blocks for a in b.axes):
        return []
    sizes = [prod(algorithm.size(a) for a in b.axes) for b in config.blocks]
    blocks = tuple(replace(b, extent=min(b.extent, max(1, size) if config.in_registers(b) else
                                         _room(size, config.unit)))
                   for b, size in zip(config.blocks, sizes, strict=True))
    clipped = replace(config, blocks=blocks)
    if config.programs:
        dealt = config.via == "gluon" and config.reduce != "stream"
        clipped = replace(clipped, programs=needed(clipped, algorithm, target) if dealt else target.sms)
    family = _family(clipped, algorithm)
    found = [c.config for c in choices if _family(c.config, algorithm) == family]
    return [*found, *([clipped] if believable(clipped, algorithm, target) else [])]


def _room(size: int, unit: str) -> int:
    """The extent that holds so many positions: a power of two, not under what a unit takes."""
    least = 16 if unit == "mma" else 1
    return max(least, 1 << max(0, size - 1).bit_length())


def _family(config: Config, algorithm: Algorithm) -> tuple[object, ...]:
    """All words, and the extents of the tile; not how a kind's blocks share its extent."""
    words = tuple(getattr(config, f.name) for f in fields(config)
                  if f.name not in ("blocks", "split_k", "merge", "programs"))
    extents = (tile(config, algorithm, kind) for kind in "BMNK")
    return (*words, config.split_k > 1, config.merge > 1, config.programs > 0, *extents)
