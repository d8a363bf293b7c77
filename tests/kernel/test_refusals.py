"""Wrong programs and the messages that they get, compared with wrong_programs.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import transconv
from tests.kernel import wrong_functions, wrong_programs, wrong_scopes
from transconv.errors import KernelError
from transconv.kernel import Group, KernelFunction, index_map, kernel, symbols

GOLDEN = Path(__file__).with_name("wrong_programs.txt")
X = np.zeros((8, 16), np.float32)


def message(function: KernelFunction) -> str:
    try:
        function.lower(Group((8, 16), (4, 8)), X, X.copy(), target="sm_90")
    except KernelError as error:
        return f"{error}\n"
    return f"{function.python.__name__} is not refused\n"


def test_every_message(request: pytest.FixtureRequest) -> None:
    """Each begins with the file and the line, and says what was found."""
    made = [
        message(f)
        for programs in (wrong_programs, wrong_scopes, wrong_functions)
        for f in vars(programs).values()
        if isinstance(f, KernelFunction)
    ]
    text = "\n".join(made)
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert len(made) >= 60 and "not refused" not in text
    files = ("wrong_programs.py:", "wrong_scopes.py:", "wrong_functions.py:")
    assert all(m.startswith(files) and ": found " in m for m in made)
    assert text == GOLDEN.read_text()


@kernel
def copied(group: Any, A: Any, B: Any) -> None:
    group.store(B, group.load(A))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: copied(X, X), "expected a Group first: copied(Group(work_shape=...), ...)"),
        (lambda: copied(Group(1), X), "expected copied(group, A, B)"),
        (lambda: copied(Group(1), X, C=X), "expected copied(group, A, B)"),
        (lambda: copied(Group(1), 1, 2), "without an array"),
        (lambda: copied(Group(1), X, "text"), "B is 'text' (str); expected a torch tensor"),
        (lambda: copied(Group(1), X, np.zeros((8, 16), np.complex64)), "elements of type complex64"),
        (
            lambda: copied(Group(1), X, np.broadcast_to(X[0], (8, 16))),
            "B is a read-only array; expected one that may be written, as B.copy()",
        ),
        (lambda: copied(Group(1), X, torch.zeros(8, 16).to_sparse()), "B is of layout torch.sparse_coo"),
        (lambda: copied(Group(1), X, torch.zeros(16).expand(8, 16)), "several of whose elements are one"),
        (lambda: Group((8, 16), 4), "group_shape_hint=(4,) has 1 dimensions; work_shape=(8, 16) has 2"),
        (lambda: Group(-1), "whole numbers from 0 on"),
        (lambda: Group(2.5), "work_shape=2.5; expected 1 to 6 whole numbers from 0 on"),
        (lambda: Group(4, "8"), "group_shape_hint='8'; expected 1 to 6 whole numbers from 1 on"),
        (lambda: symbols(["H", "W"]), "symbols(['H', 'W']); expected names such as 'H W'"),
        (lambda: index_map(3, lambda i: i), "expected sizes from 1 on, and a function"),
        (lambda: Group(4, subgroup_size_hint=3), "expected a power of two"),
        (lambda: kernel(precision="bf16")(copied.python), "expected one of ieee tf32 tf32x3"),
        (lambda: kernel(lambda group, A: A).lower(Group(1), X, target="sm_90"), "defined by def"),
    ],
)
def test_a_wrong_call(call: Any, said: str) -> None:
    with pytest.raises(KernelError) as caught:
        call()
    assert said in str(caught.value), caught.value


def test_arrays_of_the_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(KernelError, match="TRITON_INTERPRET=1"):
        copied(Group(1), X, X.copy())


def test_what_other_compilers_have_names_the_way_here() -> None:
    with pytest.raises(
        TypeError, match=r"copied\[\(1,\)\]: .*; expected copied\(Group\(work_shape=...\), A, B\)"
    ):
        copied[(1,)](X, X.copy())
    with pytest.raises(TypeError, match="from transconv.kernel import kernel"):
        transconv.kernel(copied.python)  # type: ignore[operator]


def test_arrays_that_share_memory_are_one() -> None:
    """A read behind a store is refused where another name has the same memory."""
    with pytest.raises(KernelError, match="which shares memory with B"):
        twice(Group(1), X.copy(), *[X.copy()] * 2)


@kernel
def twice(group: Any, A: Any, B: Any, C: Any) -> None:
    group.store(B, group.load(A))
    group.store(B, group.load(C))


def test_work_without_elements_launches_nothing() -> None:
    given = X.copy(), np.ones_like(X)
    copied(Group((0, 16)), *given)
    assert (given[1] == 1).all()


def starred(group: Any, X: Any, *Y: Any) -> None:
    pass


def named(group: Any, X: Any, **Y: Any) -> None:
    pass


def by_name(group: Any, X: Any, *, Y: Any) -> None:
    pass


def by_place(group: Any, X: Any, /, Y: Any) -> None:
    pass


def without() -> None:
    pass


@pytest.mark.parametrize("function", [starred, named, by_name, by_place, without])
def test_parameters_of_other_kinds(function: Any) -> None:
    with pytest.raises(KernelError, match="parameters with . or /|a kernel without parameters"):
        _ = kernel(function).source
