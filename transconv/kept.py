"""Beside the plans. Copies of weights in another order that outlive a call, by their version.

A weight that does not change is copied once: the copy hangs on the tensor, weakly, and is used as
long as the tensor lies at the same address, has the same version, and is read on the same stream. No
copy is kept where a change could go unseen or the copy could be used too early: of inference tensors
(they count no versions), while a CUDA graph is captured (it would replay the old weights), and while
gradients are recorded (the weights are about to change).

``Compiled.launch_keeping`` takes the store. The public functions do not hand one over yet: each of
their calls copies packed weights anew.

What the version does not count is a write through ``tensor.data`` or by foreign kernels. Who does
that calls ``forget``.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transconv.ir import Tensor

Copies = dict[Tensor, Any]  # by their form

_kept: dict[int, tuple[weakref.ref[Any], tuple[int, int, int], Copies]] = {}  # by id of the tensor
_lock = threading.Lock()


def copies_of(weight: Any) -> Copies | None:
    """The store for copies of a torch tensor as it is now, for ``Compiled.launch_keeping``; None
    where nothing may be kept. Of an older version, what was kept is dropped."""
    import torch

    if weight.is_inference() or torch.is_grad_enabled():
        return None
    stream = 0
    if weight.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(weight.device).cuda_stream
    state = (weight.data_ptr(), weight._version, stream)
    found = _kept.get(id(weight))
    if found is not None and found[0]() is weight and found[1] == state:
        return found[2]
    made: Copies = {}
    with _lock:
        _kept[id(weight)] = (weakref.ref(weight, _Gone(id(weight))), state, made)
    return made


class _Gone:
    """Drops what was kept of a tensor when it goes, unless its id has a new owner already."""

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, gone: weakref.ref[Any]) -> None:
        found = _kept.get(self.key)
        if found is not None and found[0] is gone:
            _kept.pop(self.key, None)


def forget() -> None:
    """Drop all copies: the next call of each layer makes its own."""
    with _lock:
        _kept.clear()
