"""Every public name says what it is: functions, classes, their public methods, and constants."""

from __future__ import annotations

import functools
import inspect

import griffe
import pytest

from tests.docs.names import ROOMS, exported, ours, room, silent_class


@functools.cache
def read() -> griffe.Module:
    """The package as it is written, with what stands below its constants."""
    found = griffe.load("transconv", resolve_aliases=True)
    assert isinstance(found, griffe.Module)
    return found


def constant_says(module: str, name: str) -> bool:
    try:
        member = read()[f"{module}.{name}".partition(".")[2]]
        return (member.final_target if member.is_alias else member).docstring is not None
    except griffe.AliasResolutionError:  # several names of one assignment
        return False


@pytest.mark.parametrize("module", ROOMS)
def test_every_public_name_has_a_docstring(module: str) -> None:
    made = room(module)
    silent = []
    assert (made.__doc__ or "").strip()
    for name in exported(made):
        value = getattr(made, name)
        if name == "__version__" or inspect.ismodule(value):
            continue
        if inspect.isclass(value) and ours(value):
            silent += silent_class(value)
        elif inspect.isroutine(value) or (callable(value) and hasattr(value, "__wrapped__")):
            silent += [] if inspect.getdoc(value) else [name]
        elif module != "transconv" and not constant_says(module, name):
            silent.append(name)
    assert not silent, f"{module}: {' '.join(dict.fromkeys(silent))}"


class Silent:
    def method(self) -> None:
        pass

    @property
    def told(self) -> int:
        """One."""
        return 1


Silent.method.__module__ = "transconv.somewhere"


def test_a_name_without_one_is_found() -> None:
    assert [*silent_class(Silent)] == ["Silent", "Silent.method"]
