"""What a line on a terminal may hold."""

from __future__ import annotations


def one_line(text: str) -> str:
    """The text with what is no printable character escaped, and not longer than a screen."""
    told = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return told if len(told) <= 2000 else f"{told[:1500]} ... {told[-400:]}"
