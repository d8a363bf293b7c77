"""Functions that a user spells in Triton, as rows of ``ir.CALLS``: the passes, the verifier and the
interpreter treat them as those that the compiler knows.

A row is named after its function and its types, with a digest where another row has that name. Its meaning
in NumPy is the Python body of the function, by which both are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transconv.ir import CALLS, Callee, DType, Fault

Array = np.ndarray[Any, np.dtype[Any]]
Meaning = Callable[..., Array]

ASM = '''@{jit}
def {name}({params}):
    return {tl}.inline_asm_elementwise({text}, {constraints}, [{params}],
                                       dtype={tl}.{gives}, is_pure=True, pack={pack})
'''
TEXT = '''@{jit}
def {name}({params}):
{body}
'''
SYMBOL = '''@{tl}.core.extern
def {name}({params}, _semantic=None):
    return {tl}.core.extern_elementwise(
        "", "", [{params}], {{({of},): ("{symbol}", {tl}.core.dtype("{gives}"))}}, is_pure=True,
        _semantic=_semantic)
'''
LETTERS = {64: "l", 32: "r", 16: "h", 8: "r", 1: "r"}
FLOATS = {64: "d", 32: "f", 16: "h"}


def row(stem: str, template: str, types: Sequence[DType], result: DType, meaning: Meaning | None,
        needs: tuple[str, ...] = (), **words: Any) -> str:
    """The name of the row of a function that a template spells; the row is added if it is new."""
    params = ", ".join(f"x{i}" for i in range(len(types)))
    name = "_".join([stem, *dict.fromkeys(t.name for t in types)])
    known = CALLS.get(name)
    filled = _filled(template, name=name, params=params, **words)
    if known is not None and (known.helper, known.takes, known.result) != (filled, tuple(types), result):
        name += "_" + hashlib.blake2b(filled.encode(), digest_size=4).hexdigest()
        filled = _filled(template, name=name, params=params, **words)
    CALLS[name] = Callee(len(types), meaning or _without(stem), name, name, filled, result=result,
                         takes=tuple(types), needs=needs)
    return name


def _filled(template: str, **words: Any) -> str:
    """The template with all but ``{jit}`` and ``{tl}`` filled in; braces of the words stay braces."""
    made = template
    for key, value in words.items():
        text = str(value).replace("{", "{{").replace("}", "}}").replace("{{tl}}", "{tl}")
        made = made.replace(f"{{{key}}}", text)
    return made


def letter(dtype: DType) -> str:
    """The letter of a type in the constraints of inline assembly."""
    return (FLOATS if dtype.kind == "float" else LETTERS).get(dtype.bits, "r")


def _without(stem: str) -> Meaning:
    def meaning(*values: Array) -> Array:
        raise Fault(f"{stem} has no body in Python that could be computed")
    return meaning
