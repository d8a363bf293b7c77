"""From what torch.compile returned to the calls of the backend that it made.

torch's compiler leaves them in code that is kept by code of Python: of a function, of what continues one
behind a graph break, of the ``forward`` of a class, or, for modules of torch, of one function for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from transconv.runtime import torch_internals

if TYPE_CHECKING:
    from transconv.graph.reporting import GraphReport


@dataclass(slots=True)
class Made:
    """The graphs of one call of the backend, as they come: the backward one at the first backward.
    ``owner``: the module for which it was called, in torch's words."""

    owner: str
    graphs: list[GraphReport] = field(default_factory=list)


def owner() -> str:
    """The module whose ``forward`` is being compiled, in torch's words; empty for a function, and where
    torch's compiler compiles nothing."""
    try:
        at: Any = torch_internals.InstructionTranslator.current_tx()
    except (AttributeError, AssertionError):
        return ""
    while getattr(at, "parent", None) is not None:
        at = at.parent
    return next((str(x) for x in at.f_locals.values() if isinstance(x, nn.Module)), "")


def found(compiled: Any) -> list[Made]:
    """The calls of the backend for what torch.compile returned. Code is common to modules of a class: of
    its calls those count that were made for modules like the ones here. TypeError for anything else."""
    model: Any = getattr(compiled, "_orig_mod", None)
    call: Any = getattr(compiled, "_compiled_call_impl", None)
    if hasattr(call, "optimization"):  # of ``optimize``: the function that it compiled, or eager's
        model, compiled = compiled, call.compiled
    left = [*_functions(compiled, model)]
    if not left:
        raise TypeError(f"expected what torch.compile returned, got {type(compiled).__name__}")
    calls: dict[int, Made] = {}
    like: set[int] = set()
    seen: set[Any] = set()
    while left:
        at, owners = left.pop(0)
        if at.__code__ in seen:
            continue
        seen.add(at.__code__)
        for entry in torch_internals.cache_entries(at.__code__):
            for name in entry.code.co_names:
                value: Any = _original(at.__globals__.get(name))
                if isinstance(made := getattr(value, "transconv", None), Made):
                    calls.setdefault(id(made), made)
                    like |= {id(made)} if not owners or made.owner in owners | {""} else set()
                elif name.startswith("__resume") and hasattr(value, "__code__"):
                    left.append((value, owners))
    return [made for at, made in calls.items() if at in like]


def _functions(compiled: Any, model: Any) -> Iterator[tuple[Callable[..., Any], set[str]]]:
    """Those whose code may have been compiled, and of which modules; a model's own before its parts'."""
    every = {*map(str, model.modules())} if isinstance(model, nn.Module) else set()
    if isinstance(model, nn.Module):
        forwards = dict.fromkeys(type(m).forward for m in model.modules())
        yield from ((f, every) for f in forwards if hasattr(f, "__code__"))
        compiled = getattr(compiled, "forward", compiled)
    elif not hasattr(compiled, "_torchdynamo_orig_callable"):
        return
    inner = _original(compiled)
    if isinstance(inner, nn.Module):
        inner, every = type(inner).forward, {str(inner)}
    inner = getattr(inner, "__func__", inner)
    if hasattr(inner, "__code__"):
        yield inner, {str(model)} if every else every


def _original(value: Any) -> Any:
    while hasattr(value, "_torchdynamo_orig_callable"):
        value = value._torchdynamo_orig_callable
    return value
