"""Errors: what a person reads, and what survives a process border."""

from __future__ import annotations

import pickle
import shlex

import pytest

from transconv.errors import StageError, TransconvError, Unsupported
from transconv.support import errors


def test_every_error_is_caught_by_the_root_and_is_drawn() -> None:
    tree = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(set(tree)) == 11
    assert errors.__doc__ is not None
    for error in tree:
        assert issubclass(error, TransconvError)
        assert error.__name__ in errors.__doc__


def test_unsupported_has_a_reason_for_programs() -> None:
    error = Unsupported("dtype:complex64")
    assert isinstance(error, NotImplementedError)
    assert error.reason == "dtype:complex64"
    assert str(error) == "unsupported: dtype:complex64"
    assert str(Unsupported("a:b", "no b here")) == "no b here (a:b)"


def test_stage_error_says_who_what_where_and_how_to_repeat() -> None:
    error = StageError(
        "lanewise",
        "lane oh has no extent",
        problem="ic3ih8oc4oh6kh3 dt=f16",
        options=("--prop", "fwd"),
        schedule="oh:8 oc:128 | mma",
    )
    assert str(error).splitlines() == [
        "StageError in stage 'lanewise': lane oh has no extent",
        "  problem  ic3ih8oc4oh6kh3 dt=f16 --prop fwd",
        "  schedule oh:8 oc:128 | mma",
        f"  repeat   {error.repeat}",
    ]
    assert shlex.split(error.repeat) == [
        "transconv",
        "show",
        "ic3ih8oc4oh6kh3 dt=f16",
        "--prop",
        "fwd",
        "--schedule",
        "oh:8 oc:128 | mma",
        "--stage",
        "lanewise",
    ]
    assert str(StageError("emit", "no")) == "StageError in stage 'emit': no"


@pytest.mark.parametrize(
    "error",
    [
        Unsupported("a:b", "words"),
        StageError("emit", "no", problem="p", options=("--o", "d"), schedule="c"),
        errors.ProblemError("x"),
    ],
)
def test_errors_survive_pickling(error: TransconvError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
