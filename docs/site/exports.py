"""What a room exports, for the reference: an import under its own name, ``from .a import f as f``, is the
export, which Griffe otherwise reads from lists of names alone."""

from __future__ import annotations

import ast
from typing import Any

from griffe import Extension, Module, ObjectNode


class Exports(Extension):
    """The names that a module exports; of one with a list of names, that list."""

    def on_module_members(self, *, node: ast.AST | ObjectNode, mod: Module, **_: Any) -> None:
        if mod.exports is None and isinstance(node, ast.Module):
            imports = [at for at in node.body if isinstance(at, ast.ImportFrom)]
            again = [a.name for at in imports for a in at.names if a.asname == a.name]
            own = [name for name, found in mod.members.items() if found.is_public and not found.is_alias]
            mod.exports = [*again, *own] if again else None
