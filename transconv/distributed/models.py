"""Whole models over the ranks of a mesh: parallelize(model, mesh, {"h": 0, "w": 1})."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.func import functional_call
from torch.utils._pytree import tree_map

from transconv.calls import stats
from transconv.distributed import rules, sharded_modules
from transconv.distributed.placements import dealt, part
from transconv.torch_ops import modules

Tensor = torch.Tensor

# The dims of an image by their letters: the batch, and spatial axes counted from the last.
AXES = {"n": 0, "d": -3, "h": -2, "w": -1}
# Modules that compute each row from the same row of their inputs, or have rules of ours. The others get
# whole tensors: DTensor's rules for them gather in the best case.
ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
               nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Hardswish, nn.Hardsigmoid)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
ROWWISE = (*ELEMENTWISE, *PADS, nn.PReLU, nn.Identity, nn.GroupNorm, nn.UpsamplingNearest2d)


def parallelize(model: nn.Module, mesh: Any, plan: Mapping[str, int | str],
                whole: Sequence[str] = (), rows: Sequence[str | type[nn.Module]] = ()) -> nn.Module:
    """Shard the images of a model over the ranks of a mesh, in place.

    ``plan`` says which axis of images (n, d, h or w) each mesh dim, by number or name, deals over its
    ranks. Parameters become DTensors that every rank has; their gradients are summed over the mesh. Inputs
    are DTensors, or plain tensors that every rank has whole, of which it keeps its part; outputs are
    DTensors. Convolutions are transconv's and exchange the rows that they need. Modules without a rule for
    sharded rows get whole tensors, with a FallbackWarning that names them; their results are dealt again.
    ``whole``: names of modules that every rank computes whole, on plain tensors: attention, say, or what
    DTensor has no rules for. ``rows``: names or classes of modules that make each row of their result from
    the same rows of their inputs, such as a norm of each pixel's channels: a rank computes its own, on
    plain tensors. ValueError for a plan that the mesh does not have, names that the model lacks, or models
    that have parameters elsewhere, TypeError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    dims, known = _dims(mesh, plan), dict(model.named_modules())
    if lacking := [name for name in (*whole, *rows) if isinstance(name, str) and name not in known]:
        raise ValueError(f"the model has no module {', '.join(lacking)}")
    classes = tuple(kind for kind in rows if not isinstance(kind, str))
    by_row = [name for name, module in known.items()
              if (name in rows or isinstance(module, classes)) and not _within(name, whole)]
    by_row = [name for name in by_row if not _within(name, [other for other in by_row if other != name])]
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd) and not modules.is_ours(type(module)):
            if why := modules.why_not(module):
                raise ValueError(f"'{name}' cannot be sharded: {why}")
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            raise ValueError(f"'{name}' has parameters that are DTensors already; parallelize the model "
                             "before other plans")
    rules.serve_models()
    modules.convert_(model)
    distribute_module(model, mesh)
    for parameter in model.parameters():
        if parameter.requires_grad:
            after_gradient: Any = parameter.register_post_accumulate_grad_hook
            after_gradient(_sum_gradient)
    for name in whole:
        _compute_whole(model.get_submodule(name), mesh, dims)
    for name in by_row:
        module = model.get_submodule(name)
        module.forward = partial(sharded_modules.named, module, name, module.forward,
                                 partial(_dealt, mesh=mesh, dims=dims))
    for name, module in model.named_modules():
        if _within(name, (*whole, *by_row)):
            continue
        if forward := sharded_modules.forward_of(module):
            module.forward = partial(forward, module)
        elif type(module) in ELEMENTWISE:
            if getattr(module, "inplace", False):
                module.inplace = False  # autograd does not let a view of a DTensor change
            module.forward = partial(sharded_modules.elementwise, module, module.forward)
        elif not any(module.children()) and not _shards(module):
            kind = type(module).__name__
            stats.tell_once(f"parallelize:{kind}", f"transconv.distributed.parallelize: '{name}', a {kind}"
                            ", gets whole tensors on every rank: there is no rule for its sharded rows. "
                            "Name it in rows= if it makes each row from the same rows of its inputs")
            _gather(module, mesh, dims)
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (_dealt(args, mesh, dims), _dealt(kwargs, mesh, dims)),
        with_kwargs=True, prepend=True)
    return model


def _dims(mesh: Any, plan: Mapping[str, int | str]) -> dict[int, int]:
    """The dim of images, as in ``AXES``, that each mesh dim deals. Raises ValueError; TypeError for what
    is no mesh and no plan."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError("mesh: expected a DeviceMesh, as of torch.distributed.init_device_mesh, got "
                        f"{type(mesh).__name__}")
    if not isinstance(plan, Mapping):
        raise TypeError("plan: expected axes of images with the mesh dim of each, such as {'h': 0}, got "
                        f"{plan!r}")
    names = mesh.mesh_dim_names or ()
    found: dict[int, int] = {}
    for axis, at in plan.items():
        if axis not in AXES:
            raise ValueError(f"the plan shards '{axis}'; expected one of {', '.join(AXES)}")
        number = names.index(at) if at in names else at
        if not isinstance(number, int) or not 0 <= number < mesh.ndim:
            raise ValueError(f"the plan shards {axis} along mesh dim {at!r}; the mesh has "
                             f"{mesh.ndim} dims{', named ' + ', '.join(names) if names else ''}")
        if number in found:
            raise ValueError(f"the plan shards two axes along mesh dim {at!r}; expected one for each")
        found[number] = AXES[axis]
    return found


def _within(name: str, others: Sequence[str]) -> bool:
    """Whether a module is one of these, by name, or a part of one."""
    return any(name == own or name.startswith(f"{own}.") for own in others)


def _shards(module: nn.Module) -> bool:
    """Whether a module computes on sharded rows."""
    if isinstance(module, nn.Upsample):
        return module.mode in ("nearest", "nearest-exact")
    return isinstance(module, (nn.modules.conv._ConvNd, *ROWWISE))


def _places(tensor: Tensor, mesh: Any, dims: Mapping[int, int]) -> list[Placement]:
    """How an image lies over the mesh; an axis with fewer rows than ranks stays whole."""
    found: list[Placement] = [Replicate()] * mesh.ndim
    for at, dim in dims.items():
        if tensor.dim() >= (3 if dim in (0, -1) else 2 - dim) and tensor.shape[dim] >= mesh.size(at):
            found[at] = Shard(dim % tensor.dim())
    return found


def _dealt(given: Any, mesh: Any, dims: Mapping[int, int]) -> Any:
    """Arguments or results with their tensors as the plan has them."""
    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)
        places = _places(value, mesh, dims)
        return value if list(value.placements) == places else value.redistribute(mesh, places)

    return tree_map(one, given)


def _gather(module: nn.Module, mesh: Any, dims: Mapping[int, int]) -> None:
    """Let a module see whole tensors."""
    module.register_forward_pre_hook(
        lambda _module, args, kwargs: (_dealt(args, mesh, {}), _dealt(kwargs, mesh, {})), with_kwargs=True)
    module.register_forward_hook(lambda _module, _args, result: _dealt(result, mesh, dims))


def _compute_whole(module: nn.Module, mesh: Any, dims: Mapping[int, int]) -> None:
    """Let a module compute plain tensors, the same on every rank."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: _plain(p) for name, p in (*module.named_parameters(), *module.named_buffers())}
        args, kwargs = tree_map(_plain, (args, kwargs))
        module.forward = inner
        try:
            made = functional_call(module, own, args, kwargs)
        finally:
            module.forward = forward
        return _dealt(made, mesh, dims)

    module.forward = forward


def _plain(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    whole = all(p.is_replicate() for p in value.placements)
    return value.to_local() if whole else value.full_tensor()


def _sum_gradient(parameter: Tensor) -> None:
    """Once here, instead of at every use by an optimizer."""
    grad = parameter.grad
    if not (isinstance(grad, DTensor) and isinstance(parameter, DTensor)):
        return
    mesh, wanted = grad.device_mesh, parameter.placements
    pairs = list(zip(grad.placements, wanted, strict=True))
    if grad.placements == wanted:
        return
    with torch.no_grad():
        local: Any = part(grad, grad.placements)
        here = all(has == wants or (has == Partial() and wants.is_replicate()) for has, wants in pairs)
        if not here or not _is_dense(local):
            parameter.grad = grad.redistribute(placements=wanted)
            return
        for dim, (has, _) in enumerate(pairs):
            if has.is_partial():
                dist.all_reduce(local, group=mesh.get_group(dim))
        parameter.grad = dealt(local, mesh, wanted, grad.shape, grad.stride())


def _is_dense(t: Tensor) -> bool:
    """Whether a tensor fills its memory in an order that collectives take."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return t.is_contiguous() or (last is not None and t.is_contiguous(memory_format=last))
