"""What is known while a kernel is drawn: its lines, and its values with their shapes and kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from transconv.verify.draw.conv_problems import chance


@dataclass
class TrialPage:
    """``values``: names with a shape, ``RC``, ``R1`` or ``1C``, and a kind: ``f`` a float that engines may
    round otherwise, ``e`` an exact one, ``h`` an exact one of 16 bits, ``i`` an integer, ``n`` one of
    the narrow type, ``b`` a boolean.
    ``rows``, ``cols``: the sizes of a tile; ``empty``: whether arrays may have no elements."""

    rng: Random
    rows: int
    cols: int
    empty: bool = False
    values: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    deep: int = 0

    def say(self, text: str) -> None:
        """Append a statement."""
        self.lines.append(f"{'>' * self.deep} {text}".lstrip())

    def new(self, text: str, kind: str) -> str:
        """A name for a value."""
        name = f"v{len(self.values)}"
        self.say(f"{name} = {text}")
        self.values[name] = kind
        return name

    def pick(self, kinds: str = "fei", shape: str = "") -> str:
        """The name of a value of one of some kinds; the latest are likelier."""
        found = [n for n, k in self.values.items() if k[2] in kinds and k.startswith(shape)]
        return found[-1] if chance(self.rng, 3) else self.rng.choice(found)

    def kind(self, name: str) -> str:
        """The kind of a value, a letter."""
        return self.values[name][2]

    def shape(self, *names: str) -> str:
        """The shape of values that are combined."""
        rows = "R" if any(self.values[n][0] == "R" for n in names) else "1"
        return rows + ("C" if any(self.values[n][1] == "C" for n in names) else "1")

    @property
    def small(self) -> bool:
        """Whether tiles of three dimensions stay small."""
        return self.rows <= 9 and self.cols <= 9
