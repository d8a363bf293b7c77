"""A step of a sharded model as a CUDA graph: kernels and messages of the whole step are started at once.

DTensors cost the host a millisecond for a convolution and its norm, at every call anew. A recorded step
costs one launch. The first calls run as they are, as kernels are built, results of new kernels looked at
and ranks asked whether they agree; then a call is recorded, on all ranks or on none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from transconv.calls import route_cache
from transconv.distributed.agreement import gathered, watch_group
from transconv.runtime import COMPILING

Tensor = torch.Tensor
EAGER = 2  # calls at least that run as they are
COLD = "capture:cold"  # the reason of torch's results for which there was no kernel at the recording
log = logging.getLogger("transconv.distributed")


class Captured:
    """What ``captured`` returns. ``why_not``: why no call is recorded; empty if one is or will be.
    ``is_recorded``: whether one is."""

    def __init__(self, step: Callable[..., Any], mesh: Any) -> None:
        self._step, self._mesh = step, mesh
        self._calls, self._graph = 0, None
        self._given: tuple[list[Any], Any] = ([], None)
        self._result: Any = None
        self._torchs = False
        self.why_not = _why_not(mesh)
        if self.why_not:
            log.warning("a sharded step runs without a CUDA graph: %s", self.why_not)
        else:
            stream: Any = torch.cuda.Stream
            self._stream = stream()
            self._beat = torch.zeros((), device=mesh.device_type)

    @property
    def is_recorded(self) -> bool:
        """Whether calls start a recorded step."""
        return self._graph is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step. ValueError if a recorded step is called with other arguments than the recorded ones,
        but for the tensors' values; RuntimeError on all ranks if a rank cannot record."""
        if self.why_not:
            return self._step(*args, **kwargs)
        if self._graph is None:
            self._calls += 1
            if self._calls <= EAGER or self._waits():
                return self._beside(args, kwargs)
            self._record(args, kwargs)
        else:
            self._take(args, kwargs)
        return self._replay()

    def close(self) -> None:
        """Drop the graph and its memory; the next calls begin anew. Before
        ``torch.distributed.destroy_process_group``: NCCL waits there until no graph has messages."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._calls, self._graph, self._given, self._result = 0, None, ([], None), None

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls that run as they are --------------------------------------------------------------

    def _beside(self, args: Any, kwargs: Any) -> Any:
        """On the stream that is recorded later: autograd ties the gradients of parameters to the stream
        that first asks for them."""
        before = _torchs(COMPILING)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            made = _detached(self._step(*args, **kwargs))
        torch.cuda.current_stream().wait_stream(self._stream)
        self._torchs = _torchs(COMPILING) > before
        return made

    def _waits(self) -> bool:
        """Whether in a rank's last call torch computed what processes still compile kernels for."""
        return any(waits for _, waits in gathered(self._mesh, self._torchs))

    # -- the recorded call -----------------------------------------------------------------------

    def _record(self, args: Any, kwargs: Any) -> None:
        leaves, form = tree_flatten((args, kwargs))
        kept = [_copy(leaf) for leaf in leaves]
        graph: Any = torch.cuda.CUDAGraph()
        gc.collect()
        error, before = "", _torchs(COLD)
        own: BaseException | None = None
        try:
            # Other threads look at events meanwhile: NCCL's, and the one that watches exchanges.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                again, named = tree_unflatten(kept, form)
                made = _detached(self._step(*again, **named))
        except Exception as why:  # all ranks are told
            error, own = _first(why), why
        self._tell(error, own, graph)
        if cold := _torchs(COLD) - before:
            log.warning("in a recorded step torch computes %d results of calls that were new to it", cold)
        self._given, self._result, self._graph = (kept, form), made, graph

    def _tell(self, error: str, own: BaseException | None, graph: Any) -> None:
        """Tell all ranks what this one could not record: RuntimeError on each if there is anything."""
        try:
            found = gathered(self._mesh, error)
        except RuntimeError as lost:  # a failed recording may have spoiled the communicator
            if own is None:
                raise
            found = [(dist.get_rank(), f"{error}; then {_first(lost)}")]
        told = [f"rank {rank}: {text}" for rank, text in found if text]
        if not told:
            return
        with suppress(RuntimeError):
            graph.reset()
        self.why_not = "; ".join(told)
        raise RuntimeError(
            f"a sharded step cannot be recorded as a CUDA graph: {self.why_not}. Recorded steps may not "
            "look at values (item(), print, a branch on a tensor) nor copy from the host; the next call "
            "runs as it is"
        ) from own

    def _take(self, args: Any, kwargs: Any) -> None:
        """Copy the arguments to where the graph reads them."""
        leaves, form = tree_flatten((args, kwargs))
        kept, recorded = self._given
        same = form == recorded and all(map(_is_like, leaves, kept))
        if not same:
            raise ValueError(
                f"a recorded step was called with {_said(leaves)}, recorded with "
                f"{_said(kept)}; transconv.distributed.captured makes one of each kind"
            )
        with torch.no_grad():
            for given, own in zip(leaves, kept, strict=True):
                if isinstance(own, Tensor) and given is not own:
                    _local(own).copy_(_local(given))

    def _replay(self) -> Any:
        assert self._graph is not None
        self._graph.replay()
        for dim in range(self._mesh.ndim):
            # No watchdog sees what a graph sends. It sees this, and ends the process in time.
            if self._mesh.size(dim) > 1:
                group = self._mesh.get_group(dim)
                dist.all_reduce(self._beat, group=group)
                others = sorted({*dist.get_process_group_ranks(group)} - {dist.get_rank()})
                watch_group(
                    group,
                    self._beat.device,
                    "end a recorded step with rank " + ", ".join(map(str, others)),
                )
        return self._result


def captured(step: Callable[..., Any], mesh: Any) -> Captured:
    """``step`` as a function that, from its third call on, is one launch of a CUDA graph on every rank.

    ``step`` is a model, or a function that does all of a step: gradients to None, forward, backward and
    optimizer. ``mesh``: the one that the model is sharded over; all its ranks call in the same order. Each
    call is one step. Tensors among the arguments are copied to where the graph reads them, whatever else
    they are must stay as it is: shapes, placements, mesh, numbers. Results are detached, and overwritten
    by the next call; so are the gradients that the step leaves in parameters. On CPUs, and where a group
    does not send by NCCL, each call runs as it is: ``why_not`` says why, and a line of the log."""
    return Captured(step, mesh)


def _why_not(mesh: Any) -> str:
    if mesh.device_type != "cuda":
        return f"a mesh of {mesh.device_type} devices has none"
    for dim in range(mesh.ndim):
        name = mesh.get_group(dim)._get_backend(torch.device("cuda")).name()
        if name != "nccl":
            return f"mesh dim {dim} sends by {name}, and only NCCL's messages can be recorded"
    return ""


def _first(error: BaseException) -> str:
    """What went wrong first, in a line: the end of a failed recording has an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _torchs(reason: str) -> int:
    """How many results torch computed so far for this reason."""
    found = route_cache.counted()
    return found.waiting if reason == COMPILING else found.fallback.get(reason, 0)


def _local(t: Any) -> Tensor:
    """What this rank has of a tensor, without a place in autograd."""
    own: Any = t.detach()
    local: Any = own.to_local() if isinstance(own, DTensor) else own
    ready: Tensor = local.wait() if hasattr(local, "wait") else local  # it may still be on its way
    return ready


def _detached(result: Any) -> Any:
    """Results without a place in autograd. What of them is on its way is waited for: a graph ends with
    all of its messages."""

    def one(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        _local(t)
        return t.detach()

    return tree_map(one, result)


def _copy(leaf: Any) -> Any:
    """A tensor with memory of its own, laid out as the given one."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _is_like(given: Any, own: Any) -> bool:
    """Whether an argument may take the place of a recorded one."""
    if not isinstance(own, Tensor):
        return type(given) is type(own) and bool(given == own)
    return isinstance(given, Tensor) and _about(given) == _about(own)


def _about(t: Any) -> tuple[Any, ...]:
    shared = (t.device_mesh, t.placements) if isinstance(t, DTensor) else ()
    return t.shape, t.dtype, t.device, _local(t).shape, t.requires_grad, *shared


def _said(leaves: list[Any]) -> str:
    found = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            text = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}"
            if isinstance(leaf, DTensor):
                text += f" {leaf.placements} over {leaf.device_mesh}"
            found.append(text)
        else:
            found.append(repr(leaf)[:60])
    return ", ".join(found) or "nothing"
