"""Names of a computation that its kernel's text uses for something else."""

from __future__ import annotations

import ast
import builtins

import pytest

import transconv

# Two sums of products, one of them on the matrix unit; the words in braces are called otherwise.
TEXT = """
compute {compute}
    tensor {tensor} f16 [{dim}=32, c=64, h=6]
    tensor W2 f16 [o=32, cc=64, kh=3]
    tensor {out} f32 [nn=32, oo=32, hh=6]
    axes   {axis}=32 o=32 oh=6 | {red}=64 kh=3
    read   {read} = {tensor}[{axis}, {red}, oh + kh - 1]
    read   b = W2[o, {red}, kh]
    let    {let} = tanh(sum({read}*b; {red} kh))
    store  {out}[{axis}, o, oh] = {let}*2
"""
PLAIN = {
    "compute": "named",
    "tensor": "X",
    "dim": "d",
    "out": "Y",
    "axis": "i",
    "red": "c",
    "read": "p",
    "let": "q",
}
WIDE = "i.oh:32 o:32 c:32 | mma | stages=2 warps=4"


def clashes(source: str) -> list[str]:
    """What a module's functions assign although it is a parameter, or call or look into although they
    assign it."""
    tree, found = ast.parse(source), []
    above = {
        a.asname or a.name
        for s in tree.body
        if isinstance(s, (ast.Import, ast.ImportFrom))
        for a in s.names
    } | {s.name for s in tree.body if isinstance(s, ast.FunctionDef)}
    for f in (s for s in tree.body if isinstance(s, ast.FunctionDef)):
        params = [a.arg for a in f.args.args]
        names = [n for n in ast.walk(f) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        calls = [
            n.func.id for n in ast.walk(f) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        found += [n for n in (*params, *bound) if n in above or n in calls]
        found += [n for n in bound if n in params] + [n for n in params if params.count(n) > 1]
        known = bound | {*params, *above, *dir(builtins)}
        found += [n.id for n in names if n.id not in known]
    return found


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("tensor", "oh"),
        ("tensor", "h"),
        ("tensor", "i_oh"),
        ("tensor", "h_m"),
        ("tensor", "m"),
        ("tensor", "q"),
        ("tensor", "range"),
        ("tensor", "tanh"),
        ("tensor", "gdc_wait"),
        ("out", "p"),
        ("out", "float"),
        ("axis", "tanh"),
        ("red", "range"),
        ("read", "tanh"),
        ("let", "gdc_wait"),
        ("let", "range"),
        ("dim", "range"),
        ("read", "X_m"),
        ("out", "X_oh_m"),
    ],
)
def test_names_of_a_text_differ(role: str, name: str) -> None:
    words = PLAIN | {role: name}
    schedule = WIDE.replace("i.", f"{words['axis']}.").replace(" c:", f" {words['red']}:")
    plan = transconv.compile(TEXT.format(**words), target="sm_90", schedule=schedule)
    assert not clashes(plan.source), plan.source


def test_a_tensor_named_like_a_coordinate_is_still_called_so() -> None:
    """The operand keeps the caller's name; only the parameter in the emitted text is renamed."""
    plan = transconv.compile(TEXT.format(**PLAIN | {"tensor": "h"}), target="sm_90", schedule=WIDE)
    assert "h" in plan.steps[0].params and "(h_, W2, Y)" in plan.source


def test_a_value_may_be_called_like_a_sum_that_has_no_name() -> None:
    """``sum_2`` is also the generated name of an unnamed sum."""
    assert transconv.compile(TEXT.format(**PLAIN | {"let": "sum_2"}), target="sm_90", schedule=WIDE).source
