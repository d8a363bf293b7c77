"""Joins the sources of several kernels in one module: imports once, distinct names for distinct texts."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The parts of a generated text: the comments above it, its imports, and its definitions by name."""

    comments: tuple[str, ...]
    imports: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]  # (name, lines), in order


def split(source: str) -> GeneratedText:
    """Take a generated module apart."""
    lines = source.splitlines()
    tree = ast.parse(source)
    imports: list[str] = []
    parts: list[tuple[str, str]] = []
    first = lines.index("") if "" in lines else 0
    comments = tuple(line for line in lines[:first] if line.startswith("#"))
    end = len(comments)
    for at in tree.body:
        assert at.end_lineno is not None
        if isinstance(at, (ast.Import, ast.ImportFrom)):
            imports.append("\n".join(lines[at.lineno - 1:at.end_lineno]))
        else:
            parts.append((_given(at), "\n".join(lines[end:at.end_lineno]).strip("\n")))
        end = at.end_lineno
    return GeneratedText(comments, tuple(imports), tuple(parts))


def _given(at: ast.stmt) -> str:
    """The name that a statement of a module defines."""
    if isinstance(at, ast.FunctionDef):
        return at.name
    assert isinstance(at, ast.Assign) and isinstance(at.targets[0], ast.Name), ast.dump(at)
    return at.targets[0].id


def joined(sources: Sequence[str]) -> tuple[list[str], list[tuple[tuple[str, ...], str]]]:
    """The common imports, and the comments and definitions of each. A repeated definition is left out; one
    of the same name with another text gets a number."""
    imports: dict[str, None] = {}
    known: dict[str, str] = {}
    made = []
    for text in map(split, sources):
        imports |= dict.fromkeys(text.imports)
        renamed = _renamed(text.parts, known)
        kept = []
        for name, lines in text.parts:
            new, lines = renamed.get(name, name), with_names(lines, renamed)
            if new not in known:
                kept.append(lines)
            known[new] = lines
        made.append((text.comments, "\n\n\n".join(kept)))
    return list(imports), made


def _renamed(parts: tuple[tuple[str, str], ...], known: dict[str, str]) -> dict[str, str]:
    """New names for definitions that exist with another text, or that call a renamed one."""
    renamed: dict[str, str] = {}
    while True:
        clash = [name for name, lines in parts if name not in renamed and name in known
                 and known[name] != with_names(lines, renamed)]
        if not clash:
            return renamed
        for name in clash:
            renamed[name] = next(f"{name}_{n}" for n in range(2, len(known) + 3)
                                 if f"{name}_{n}" not in known)


def with_names(lines: str, renamed: dict[str, str]) -> str:
    """The text with some names replaced where they are names, not parts of words or comments."""
    if not renamed:
        return lines
    rows = lines.split("\n")
    found = [t for t in tokenize.generate_tokens(io.StringIO(lines + "\n").readline)
             if t.type == tokenize.NAME and t.string in renamed]
    for token in reversed(found):
        row, column = token.start
        text = rows[row - 1]
        rows[row - 1] = text[:column] + renamed[token.string] + text[column + len(token.string):]
    return "\n".join(rows)
