"""The grammar of trials: which statements a line may have, and the functions that they may call.

A line comes from a command or a file, and its statements are then executed as Python: the text is parsed
first, and only what computes with its own arrays passes. Names are the trial's own, words of the kernel
language, or nobody's; attributes are methods of tiles, groups and items; of NumPy there are functions of
elements, types and what is listed. There are no imports, texts, or names that begin with an underscore,
and so no way to anything else."""

from __future__ import annotations

import ast
import builtins
from functools import cache
from typing import Any

import numpy as np

from transconv.support import ProblemError

FUNCTIONS = {
    "mixed": """@kernel.func
def mixed(a, b):
    if a.dtype == b.dtype:
        return np.where(a > b, a - b, b)
    return np.maximum(a, b)""",
    "own": """@kernel.func(inline=False)
def own(a, b):
    return np.where(a > b, a * 0.5, b - 1.0)""",
    "scoped": """def scoped(x):
    pass


@kernel.func(scoped, scope=WorkGroup)
def scoped_of_group(group, x):
    return x + group.id()[0]


@kernel.func(scoped, scope=SubGroup)
def scoped_of_sub_group(sg, x):
    return x - sg.subgroup_id()


@kernel.func(scoped, scope=WorkItem)
def scoped_of_item(item, x):
    return x * 2.0 + item.local_id()[0]""",
}
IMPORTED = ("Group", "SubGroup", "WorkGroup", "WorkItem", "atomic_ref", "create_mapping", "kernel")
LONGEST = 1 << 16  # characters
PYTHON = ("abs", "all", "any", "bool", "float", "int", "len", "max", "min", "range", "round", "sum")
LANGUAGE = ("atomic_ref", "create_mapping", "group", "np")
SCOPES = ("subgroups", "workitems")
NUMPY = tuple(
    "all amax amin any arange argmax argmin array astype clip cumsum full max mean min ones prod sum "
    "transpose where zeros".split()
)
ATTRIBUTES = tuple(
    "T all any argmax argmin astype copy cumsum dot dtype empty filled full get_group_id global_id "
    "group_id id load local_id mask max mean min ndim ones prod reshape shape size std store subgroup_id "
    "sum transpose var vec vempty vfull vload vones vzeros work_offset work_shape zeros".split()
)
STATEMENTS = (ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Expr, ast.FunctionDef, ast.Return, ast.Pass)
EXPRESSIONS = (
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.Call,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Name,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.IfExp,
    ast.Lambda,
)
PARTS = (
    ast.expr_context,
    ast.boolop,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.keyword,
    ast.arguments,
    ast.arg,
)


def check(text: str) -> None:
    """Raise ProblemError, one sentence, unless a text is one function whose statements compute with its
    arguments. A name that nobody knows is an error when it runs: simpler programs lack the statement that
    made it."""
    if len(text) > LONGEST:
        raise ProblemError(f"a trial of {len(text)} characters; expected at most {LONGEST}")
    try:
        whole = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProblemError(f"the statements of a trial: {getattr(error, 'msg', error)}") from None
    if len(whole) != 1 or not isinstance(whole[0], ast.FunctionDef):
        raise ProblemError("the statements of a trial; expected those of one kernel")
    try:
        nodes = [n for statement in whole[0].body for n in ast.walk(statement)]
    except RecursionError:
        raise ProblemError("the statements of a trial are nested too deeply") from None
    own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    own |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    refused = {*dir(builtins), *IMPORTED, "drawn"} - {*FUNCTIONS, *PYTHON, *LANGUAGE}
    if taken := own & {*refused, *PYTHON, *LANGUAGE, *FUNCTIONS}:
        raise ProblemError(
            f"'{min(taken)}' in a trial of a kernel means something else; expected a name of its own"
        )
    for node in nodes:
        if reason := _why_not(node, refused):
            raise ProblemError(
                f"{reason} in a trial of a kernel; expected statements that compute with its arrays"
            )


def _why_not(node: ast.AST, refused: set[str]) -> str:
    """What is wrong with one node, or empty."""
    if isinstance(node, ast.Name):
        return f"the name '{node.id}'" if node.id in refused or node.id.startswith("_") else ""
    if isinstance(node, ast.Attribute):
        of_numpy = isinstance(node.value, ast.Name) and node.value.id == "np"
        allowed = _is_numpys(node.attr) if of_numpy else node.attr in (*ATTRIBUTES, *SCOPES)
        return "" if allowed else f"'{'np' if of_numpy else ''}.{node.attr}'"
    if isinstance(node, ast.Constant):
        return "" if type(node.value) in (int, float, bool, type(None)) else f"{node.value!r:.40}"
    if isinstance(node, ast.FunctionDef):
        return _why_no_body(node)
    if isinstance(node, (ast.arg, ast.arguments)):
        plain = not isinstance(node, ast.arg) or (node.annotation is None and not node.arg.startswith("_"))
        return "" if plain else f"the argument '{getattr(node, 'arg', '')}'"
    if isinstance(node, (*STATEMENTS, *EXPRESSIONS, *PARTS)):
        return ""
    return f"'{type(node).__name__.lower()}'"


def _why_no_body(node: ast.FunctionDef) -> str:
    """Whether a function is other than the body of items or of sub-groups."""
    decorated = node.decorator_list
    scope: Any = decorated[0] if len(decorated) == 1 else None
    if not (
        isinstance(scope, ast.Attribute)
        and scope.attr in SCOPES
        and isinstance(scope.value, ast.Name)
        and scope.value.id == "group"
    ):
        return f"the function '{node.name}', no body of items or sub-groups,"
    rest = node.args.defaults, node.args.kw_defaults, node.args.vararg, node.args.kwarg, node.returns
    return f"the arguments of '{node.name}'" if any(rest) or node.name.startswith("_") else ""


@cache
def _is_numpys(name: str) -> bool:
    """Whether NumPy has a function of elements, a type of elements, or a listed function of this name."""
    found = getattr(np, name, None) if not name.startswith("_") else None
    if isinstance(found, type):
        return issubclass(found, (np.number, np.bool_)) and found.__module__ == "numpy"
    return isinstance(found, np.ufunc) or name in NUMPY
