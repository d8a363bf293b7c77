"""``prepare``: compiles the kernels of a model before its first call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from transconv.calls import route_cache, size_policy, stats
from transconv.runtime import PlanRequest, Prepared, begin_processes, collecting, cores
from transconv.runtime import prepare as compiled
from transconv.support import TransconvError
from transconv.torch_ops import arguments
from transconv.torch_ops.calls import lower_call
from transconv.torch_ops.conversion.aten_replacement import use

Tensor = torch.Tensor


def prepare(
    model: torch.nn.Module,
    *inputs: Any,
    sizes: Sequence[Sequence[int]] | None = None,
    backward: bool | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Prepared:
    """Compile all kernels that a model will need, in child processes, and wait for them.

    The model runs once on ``inputs``, and once for each of ``sizes``: as many numbers as the last dims of
    the first input that they take the place of, such as ``(512, 640)``. torch computes meanwhile, and
    buffers, gradients and random numbers stay as they were. Its convolutions, fused modules, functions of
    transconv and kernels written in Python are noted, torch's own convolutions too, and those of
    ``backward`` (default: where a parameter requires a gradient). ``workers``: processes (default: one for
    each core); ``progress``: a bar on standard error. Model and inputs have to be where they will run.

    The next call of each finds its kernel; in other processes too, while the caches last. On a GPU each
    kernel of a convolution also runs once on small integers while others are compiled: it is then loaded,
    and its first result checked. Raises what the model raises, ValueError for sizes that do not fit."""
    from tqdm import tqdm

    arguments.expect_module(model, "prepare")
    if backward is None:
        backward = any(p.requires_grad for p in model.parameters())
    runs = [inputs, *(_sized(inputs, size) for size in sizes or ())]
    workers = workers or cores()
    leaves = [t for t in _pytree.tree_leaves(list(runs)) if isinstance(t, Tensor)]
    devices = {t.device for t in leaves if t.is_cuda}
    for device in devices:  # which takes them as long as the model its run
        with suppress(TransconvError):  # its calls say why
            most = _layers(model) * (3 if backward else 1)
            begin_processes(lower_call.target_of(device), min(workers, most))
    route_cache.forget()  # adds up their calls; each route is decided anew
    with undisturbed(model), use(), stats.aside() as counted, collecting() as questions:
        for given in runs:
            _run(model, given, backward)
        route_cache.forget(registries=False)
        left = tuple(sorted(counted().fallback.items()))
    with tqdm(total=len(questions), unit="problem", disable=not (progress and questions)) as bar:

        def ended(question: PlanRequest, has_plan: bool) -> None:
            for device in devices if has_plan else ():
                lower_call.first_result(question, device)
            bar.update()

        report = compiled(questions.values(), workers, ended, left)
    if devices:
        size_policy.complete(questions)
    return report


def _layers(model: torch.nn.Module) -> int:
    """About how many layers have kernels of their own; at least 1."""
    return max(1, sum(is_lazy(p) or p.dim() > 2 for p in model.parameters()))


def _sized(inputs: Sequence[Any], size: Sequence[int]) -> tuple[Any, ...]:
    """The inputs, the first of another size."""
    first = inputs[0] if inputs else None
    if (
        not isinstance(first, Tensor)
        or not 0 < len(size) <= first.dim()
        or not all(type(n) is int and n > 0 for n in size)
    ):
        raise ValueError(f"sizes: {tuple(size)} is no size of the last dims of the first input")
    shape = (*first.shape[: first.dim() - len(size)], *size)
    made = torch.zeros(shape, dtype=first.dtype, device=first.device)
    for layout in (torch.channels_last, torch.channels_last_3d):
        if (
            first.dim() == (4 if layout is torch.channels_last else 5)
            and first.is_contiguous(memory_format=layout)
            and not first.is_contiguous()
        ):
            made = made.contiguous(memory_format=layout)
    return (made.requires_grad_(first.requires_grad), *inputs[1:])


def _run(model: torch.nn.Module, given: Sequence[Any], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        made = [t for t in _pytree.tree_leaves(model(*given)) if isinstance(t, Tensor) and t.requires_grad]
        of = [
            t
            for t in (*model.parameters(), *_pytree.tree_leaves(list(given)))
            if isinstance(t, Tensor) and t.requires_grad
        ]
        if backward and made and of:
            torch.autograd.grad(made, of, [torch.ones_like(t) for t in made], allow_unused=True)


STATE = (torch.Tensor, int, float, str)


@contextmanager
def undisturbed(model: torch.nn.Module, given: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Leaves buffers, numbers and tensors that are attributes of modules, random numbers and what a model
    was ``given`` as they were."""
    held = [(own, dict(own)) for m in model.modules() for own in (m._buffers, vars(m))]
    before = [(b, b.detach().clone()) for b in (*model.buffers(), *given)]
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    try:
        with torch.random.fork_rng(sorted(d for d in devices if d is not None)):
            yield
    finally:
        for own, was in held:  # a call may set them to others
            changed = {n: v for n, v in was.items() if own.get(n) is not v}
            own |= {n: v for n, v in changed.items() if v is None or isinstance(v, STATE)}
        with torch.no_grad():
            for tensor, old in before:
                # An expanded one cannot be written, nor was it; torch compares no sparse nor nested ones.
                dense = tensor.layout is torch.strided and not tensor.is_nested
                if not (dense and torch.equal(tensor, old)):
                    tensor.copy_(old)
