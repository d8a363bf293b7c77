"""Mutants of the functions that make keys and texts: a part is left out, and the tests that should
fail are run.

``make mutants`` (nightly) plants every mutant of every subject, one at a time, in a process of its own,
and lists those that no test killed. A part is an element of a tuple, list or set, one operand of ``and``
or ``or``, one field of an f-string, or a named argument. What may be left out without harm is FREE.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


@dataclass(frozen=True)
class Subject:
    """A function, dotted for a method, and the tests that should fail when it leaves something out."""

    module: str
    function: str
    tests: tuple[str, ...]

    @property
    def found(self) -> FunctionType:
        at: Any = importlib.import_module(self.module)
        for name in self.function.split("."):
            at = at.__dict__[name] if isinstance(at, type) else getattr(at, name)
        at = at.fget if isinstance(at, property) else at
        at = at.__func__ if isinstance(at, (staticmethod, classmethod)) else at
        assert isinstance(at, FunctionType)
        return at


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/runtime/test_keys.py::test_{name}" for name in names)


CALLS = _keys("tensors", "switches", "numbers_and_what_is_wanted")
SUBJECTS = (
    Subject("transconv.torch_ops.calls.layer_keys", "forward_key", CALLS),
    Subject(
        "transconv.torch_ops.calls.select_impl",
        "backward_routes",
        (
            *CALLS,
            "tests/torch_ops/test_ready.py::test_gradients_that_wait_are_asked_for_once",
            "tests/torch_ops/test_known_layers.py::test_a_first_call_does_little",
            "tests/torch_ops/test_known_layers.py::test_entries_serve_all_sizes_under_autocast",
        ),
    ),
    Subject("transconv.torch_ops.calls.layer_keys", "call_key", CALLS),
    Subject("transconv.torch_ops.calls.call_attributes", "request", _keys("requests")),
    Subject("transconv.calls.guard", "CallGuard.tests", _keys("entries")),
    Subject("transconv.calls.guard", "deterministic", _keys("entries")),
    Subject(
        "transconv.torch_ops.calls.call_entries",
        "switches",
        _keys("entries_ask_for_the_switches_that_kernels_obey"),
    ),
    Subject("transconv.runtime.check_records", "digest", _keys("kernels_and_verdicts")),
    Subject("transconv.runtime.check_records", "variant", _keys("kernels_and_verdicts")),
    Subject(
        "transconv.runtime.steps",
        "kernel_name",
        _keys("kernels_and_verdicts", "kernels_that_workloads_share"),
    ),
    Subject(
        "transconv.selection.candidates", "_key", _keys("shortlists", "shortlists_where_rows_were_tuned")
    ),
    Subject("transconv.support.records", "Drawer.path", _keys("records")),
    Subject("transconv.support.records", "_checksum", _keys("records")),
    Subject("transconv.schedule.schedule", "Schedule._text", ("tests/schedule/test_words.py",)),
)
FREE = {
    **dict.fromkeys(
        (
            "digest without digest_size=16",
            "_key without digest_size=16",
            "_checksum without digest_size=16",
            "kernel_name without digest_size=4",
        ),
        "a longer digest tells as much apart",
    ),
    "call_key without kind": "no word is both an activation and a text, and other keys have none there",
    **dict.fromkeys(
        ("backward_routes without route_cache.routes.get(key)", "request without _known(key)"),
        "what is kept is found by the next operand, too",
    ),
    "_key without workload.named(compute.name)": "the workload's text and direction tell its name, too",
    **dict.fromkeys(
        ("_key without workload.text", "_key without workload.direction"),
        "the computation has views, sizes and a name",
    ),
    "_checksum without separators=(',', ':')": "blanks change every sum alike",
    **dict.fromkeys(
        (
            f"kernel_name without {part}"
            for part in (
                "{compute.name}",
                "{stem}",
                "{shape[:MAX_NAME - len(f'{stem}__{digest}')]}",
                "{workload.prefix}",
                "{x.name}",
                "{(x.size if x.extent is None else '')}",
                "c.isalnum()",
                "c == '_'",
            )
        ),
        "for people: the digest has it all",
    ),
    "kernel_name without {digest}": "of the two, that in the length of the name",
}


# -- what a mutant leaves out -----------------------------------------------------------------------


def _parts(tree: ast.AST) -> Iterator[tuple[ast.AST, list[Any], int]]:
    """Nodes with a list of parts, and a place in it that can go."""
    for at in ast.walk(tree):
        if isinstance(at, (ast.Tuple, ast.List, ast.Set)) and isinstance(
            getattr(at, "ctx", ast.Load()), ast.Load
        ):
            yield from ((at, at.elts, i) for i in range(len(at.elts)))
        elif isinstance(at, ast.BoolOp):
            yield from ((at, at.values, i) for i in range(len(at.values)))
        elif isinstance(at, ast.JoinedStr):
            yield from (
                (at, at.values, i) for i, v in enumerate(at.values) if isinstance(v, ast.FormattedValue)
            )
        elif isinstance(at, ast.Call):
            yield from ((at, at.keywords, i) for i, k in enumerate(at.keywords) if k.arg)


def _definition(function: FunctionType) -> ast.FunctionDef:
    lines, first = inspect.getsourcelines(function)
    made = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(made, ast.FunctionDef)
    ast.increment_lineno(made, first - 1)
    made.decorator_list, made.returns = [], None
    for argument in (*made.args.args, *made.args.kwonlyargs):
        argument.annotation = None
    return made


def mutants(function: FunctionType) -> list[tuple[str, CodeType]]:
    """What is left out, with the line, and the code without it."""
    made = []
    for number in range(len(list(_parts(_definition(function))))):
        definition = _definition(function)
        holder, where, place = list(_parts(definition))[number]
        gone = where.pop(place)
        if len(where) == 1 and isinstance(holder, ast.BoolOp):
            where *= 2  # of one operand alone there is no `and`
        line = getattr(gone, "lineno", function.__code__.co_firstlineno)
        future = ast.parse("from __future__ import annotations").body
        module = ast.fix_missing_locations(ast.Module([*future, definition], []))
        whole = compile(module, function.__code__.co_filename, "exec")
        code = next(
            c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == function.__name__
        )
        made.append((f"{function.__qualname__}:{line} without {ast.unparse(gone)}", code))
    return made


# -- running tests ----------------------------------------------------------------------------------


def killed(function: FunctionType, code: CodeType, tests: Sequence[str]) -> bool:
    """Whether a test fails with this code, in a child of this process. One that hangs is killed, too."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        function.__code__ = code
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        os._exit(int(_tested(tests)))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != 0


def _tested(tests: Sequence[str]) -> int:
    import pytest

    with contextlib.suppress(ImportError):
        return int(pytest.main(["-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *tests]))
    return 2


def survivors(subject: Subject) -> list[str]:
    """The mutants of a function that no test killed. Its tests have to pass without any."""
    function = subject.found
    assert not killed(function, function.__code__, subject.tests), "its tests fail without a mutant"
    return [
        name
        for name, code in mutants(function)
        if _named(name) not in FREE and not killed(function, code, subject.tests)
    ]


def _named(mutant: str) -> str:
    """Without the number of its line."""
    return re.sub(r":\d+ ", " ", mutant)


def main() -> int:
    os.chdir(ROOT)
    left = 0
    for subject in SUBJECTS:
        found, made = survivors(subject), len(mutants(subject.found))
        left += len(found)
        print(f"{subject.module}.{subject.function}: {made} mutants, {len(found)} survive", flush=True)
        print("".join(f"    {name}\n" for name in found), end="", flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
