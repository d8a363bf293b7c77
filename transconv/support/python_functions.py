"""Functions of Python that are written out as text, where calls must take the host little time: what would
be a loop over tensors, or a look at a switch, is then a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def defined(text: str, name: str, known: Mapping[str, Any] | None = None) -> Any:
    """What a text of Python defines under a name. ``known``: what else it mentions, by name. The text is
    made of the package's own words and of numbers, never of what a user or a file says."""
    return executed(text, known or {})[name]


def executed(text: str, known: Mapping[str, Any], path: str = "<string>") -> dict[str, Any]:
    """All names of a text of Python after it ran, with the ``known`` ones. ``path``: where tracebacks say
    that it is. Who calls this knows where the text is from: it can do all that the program can."""
    scope = dict(known)
    exec(compile(text, path, "exec"), scope)
    return scope
