"""Computations of a text beside those of convolutions: what quantises inputs, and makes weights floats.

A kind of call is compiled once; its kernel starts without being asked again once a result of it was right.
What has no kernel is computed by torch, as far as ``transconv.config.fallback`` allows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import reduce
from operator import or_

import torch

from transconv.calls import stats
from transconv.calls.guard import ALIGNMENT
from transconv.calls.route_cache import PASSING
from transconv.calls.settings import settings
from transconv.compute import Alone, parse
from transconv.runtime import NEVER, Launch, PlanRequest
from transconv.support import Cache, Unsupported
from transconv.torch_ops.calls import lower_call

Tensor = torch.Tensor

LIMIT = 1024  # kinds of calls kept


def served(x: Tensor) -> bool:
    """Whether kernels compute on a tensor's device, and now: compilers see torch's operations."""
    return (x.is_cuda or settings.cpu == "interpret") and not torch.compiler.is_dynamo_compiling()


_kernels: Cache[Hashable, Launch | Unsupported] = Cache("helper kernels", LIMIT)


def begun(key: tuple[Hashable, ...], x: Tensor) -> Callable[..., None] | None:
    """What starts the kernel of ``computed`` on aligned tensors, the first like ``x``, on its device as
    the current one; None if it has not run there."""
    kernel = _kernels.get((*key, x.device, True))
    return kernel.begin if isinstance(kernel, Launch) else None


settings.on_change(_kernels.forget)


def computed(what: str, key: tuple[Hashable, ...], names: tuple[str, ...], tensors: tuple[Tensor, ...],
             text: Callable[[], str]) -> bool:
    """Compute the text on the tensors of these names, dense and with elements, in the text as they lie in
    memory; the last one is the result. ``key``: tells the text, whose tensors have one dimension. False
    where no kernel does, or none yet, and torch may compute ``what``: that is told as the policy says.
    Unsupported where it may not."""
    x = tensors[0]
    aligned = not reduce(or_, map(Tensor.data_ptr, tensors)) & ALIGNMENT
    key = (*key, x.device, aligned)
    try:
        kernel = _kernels[key] if key in _kernels else _made(key, names, x.device, aligned, text)
        if isinstance(kernel, Unsupported):
            raise kernel
        kernel.start(tensors)
        return True
    except Unsupported as error:
        if error.reason not in (*PASSING, NEVER):  # the next call may find it
            _kernels[key] = error.with_traceback(None)
        stats.announce(error.reason, error.message, what)
        return False


def _made(key: Hashable, names: tuple[str, ...], device: torch.device, aligned: bool,
          text: Callable[[], str]) -> Launch:
    request = PlanRequest(Alone(parse(text())), lower_call.target_of(device), False, aligned)
    made = Launch(request, device, settings.mode, names)
    _kernels.keep(key, made)
    return made
