"""Text that is safe to print on one line of a terminal."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text with unprintable characters escaped, not longer than a screen."""
    told = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return told if len(told) <= 2000 else f"{told[:1500]} ... {told[-400:]}"
