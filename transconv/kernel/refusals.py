"""Refusals of a kernel's Python source: the place, what was found, what is allowed, an example.

    demo.py:7: found a while loop; allowed: a for loop over range(...)
        while total < 10:
      for example: for k in range(0, n, 16):
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from transconv.support import KernelError, ScopeError


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A line of the user's file."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Refusal(Exception):
    """Why a piece of source cannot be compiled; whoever knows the place makes a KernelError of it."""

    error: type[KernelError] = KernelError

    def __init__(self, found: str, allowed: str = "", example: str = "") -> None:
        super().__init__(found)
        self.found, self.allowed, self.example = found, allowed, example

    def at(self, place: SourcePlace) -> KernelError:
        """The error for the user."""
        said = f"{place}: found {self.found}" + (f"; allowed: {self.allowed}" if self.allowed else "")
        lines = [said, f"    {place.text.strip()}"]
        if self.example:
            lines.append(f"  for example: {self.example}")
        return self.error("\n".join(lines))


class WrongScope(Refusal):
    """What is said in one scope and is for another one."""

    error = ScopeError


def spelled(at: ast.AST) -> str:
    """A piece of source as one short line."""
    text = ast.unparse(at).split("\n")[0]
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"
