"""Fields of records, judged as they are read: types, ranges and names. Each function gives the value, or
raises ValueError with what was expected of it.

Python's bool is an int, and JSON's numbers have any size: neither passes for what it is not.
"""

from __future__ import annotations

import keyword
import unicodedata
from typing import Any

LARGEST = (1 << 63) - 1  # of what a kernel counts


def is_name(text: object) -> bool:
    """Whether it is a name that a generated text or a file may have: a word that Python reads as it is
    written, which is no path and no code."""
    return (isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)
            and unicodedata.is_normalized("NFKC", text))


def name(value: Any) -> str:
    """A name (``is_name``)."""
    if not is_name(value):
        raise ValueError(f"{value!r:.80}; expected a name")
    return str(value)


def text(value: Any, longest: int = 1 << 16) -> str:
    """A text of at most so many characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise ValueError(f"{value!r:.80}; expected a text of at most {longest} characters")
    return value


def whole(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """A whole number in a range."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.80}; expected a whole number in {least}..{most}")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError(f"{value!r:.80}; expected true or false")
    return value


def several(value: Any, most: int = 1 << 12) -> list[Any]:
    """A list of at most so many items."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{value!r:.80}; expected a list of at most {most} items")
    return value
