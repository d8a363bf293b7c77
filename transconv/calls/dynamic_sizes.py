"""Sizes as arguments of kernels: the registries of plans that answer calls of one kind at any size.

A kind is what calls have in common but for their sizes: a layer, or the form of a text. Its registry
(runtime/registry.py) is made once; a new size then costs a look-up, the check of requirements, and an
estimate for each kernel. Exact sizes are the case without arguments: kernels of their own answer what has
no registry, or sizes that none of its plans takes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Hashable
from typing import Any, TypeVar

from transconv.runtime import COMPILING, NEVER, PlanRequest, Registry
from transconv.support import ComputeError, ProblemError, Unsupported, knobs

LIMIT = 1024  # kinds kept; beyond it all are dropped
Made = TypeVar("Made", bound=Registry[Any])

_registries: dict[Hashable, Any] = {}  # a registry, or why there is none
_lock = threading.Lock()


def registry_of(key: Hashable, made: Callable[[], Made]) -> Made:
    """The registry of a kind, made when it is first asked for. Raises Unsupported, with a reason, where
    there is none."""
    if knobs.schedule():
        raise Unsupported("sizes:refused", "TRANSCONV_SCHEDULE names a schedule, for given sizes")
    found = _registries.get(key)
    if found is None:
        try:
            found = made()
        except (ProblemError, ComputeError) as error:
            found = str(error)
        with _lock:
            if len(_registries) >= LIMIT:
                _registries.clear()
            found = _registries.setdefault(key, found)
    if isinstance(found, str):
        raise Unsupported("sizes:refused", found)
    kept: Made = found
    return kept


def leaves_exact(error: Unsupported) -> bool:
    """Whether a kernel for exact sizes answers a call that those for any size refuse: not while they are
    compiled."""
    return error.reason not in (COMPILING, NEVER)


def complete(questions: Container[PlanRequest]) -> None:
    """Have the registries that asked nothing but these find all their plans, which are compiled."""
    for registry in list(_registries.values()):
        if not isinstance(registry, str) and all(q in questions for q in registry.questions):
            registry.complete()


def forget() -> None:
    """Drop the registries of all kinds."""
    with _lock:
        _registries.clear()
