"""Whole models over the ranks of a mesh: parallelize(model, mesh, {"h": 0, "w": 1}).

``check`` compares a step of a sharded model with the same step of one process: which tensors differ,
where. Every rank computes the whole step twice, in the model's type and in f64, and its part of the
sharded one. So it is for sizes that fit one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    distribute_tensor,
)
from torch.func import functional_call
from torch.nn.utils.parametrize import ParametrizationList
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
ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardsigmoid,
)
DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.RNNBase,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
ROWWISE = (*ELEMENTWISE, *PADS, nn.Identity, nn.GroupNorm, nn.UpsamplingNearest2d)


def parallelize(
    model: nn.Module,
    mesh: Any,
    plan: Mapping[str, int | str],
    whole: Sequence[str] = (),
    rows: Sequence[str | type[nn.Module]] = (),
) -> nn.Module:
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
    that have parameters elsewhere, TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    dims, known = _dims(mesh, plan), dict(model.named_modules())
    if lacking := [name for name in (*whole, *rows) if isinstance(name, str) and name not in known]:
        raise ValueError(f"the model has no module {', '.join(lacking)}")
    classes: tuple[type, ...] = (nn.PReLU, *(kind for kind in rows if not isinstance(kind, str)))
    by_row = [
        name
        for name, module in known.items()
        if (name in rows or isinstance(module, classes)) and not _within(name, whole)
    ]
    by_row = [name for name in by_row if not _within(name, [other for other in by_row if other != name])]
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd) and not modules.is_ours(type(module)):
            if why := modules.why_not(module):
                raise ValueError(f"'{name}' cannot be sharded: {why}")
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            raise ValueError(
                f"'{name}' has parameters that are DTensors already; parallelize the model "
                "before other plans"
            )
    rules.serve_models()
    modules.convert_(model)
    distribute_module(model, mesh)
    for parameter in model.parameters():
        if parameter.requires_grad:
            after_gradient: Any = parameter.register_post_accumulate_grad_hook
            after_gradient(_sum_gradient)
    for name in whole:
        _compute_whole(model.get_submodule(name), mesh, dims)
    of_weights = [name for name, m in model.named_modules() if isinstance(m, ParametrizationList)]
    for name in of_weights:  # parametrized weights are no images, and are whole
        _compute_whole(model.get_submodule(name), mesh, {})
    for name in by_row:
        module = model.get_submodule(name)
        module.forward = partial(
            sharded_modules.named, module, name, module.forward, partial(_dealt, mesh=mesh, dims=dims)
        )
    for name, module in model.named_modules():
        if _within(name, (*whole, *by_row, *of_weights)):
            continue
        if forward := sharded_modules.forward_of(module):
            module.forward = partial(forward, module)
        elif type(module) in ELEMENTWISE:
            if getattr(module, "inplace", False):
                module.inplace = False  # autograd does not let a view of a DTensor change
            module.forward = partial(sharded_modules.elementwise, module, module.forward)
        elif not any(module.children()) and not _shards(module):
            kind = type(module).__name__
            stats.tell_once(
                f"parallelize:{kind}",
                f"transconv.distributed.parallelize: '{name}', a {kind}"
                ", gets whole tensors on every rank: there is no rule for its sharded rows. "
                "Name it in rows= if it makes each row from the same rows of its inputs",
            )
            if type(module).__module__.startswith("torch.nn.") and not isinstance(module, DRAWING):
                _compute_whole(module, mesh, dims)
            else:  # ranks draw one mask by DTensor's rules
                _gather(module, mesh, dims)
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (_dealt(args, mesh, dims), _dealt(kwargs, mesh, dims)),
        with_kwargs=True,
        prepend=True,
    )
    return model


def _dims(mesh: Any, plan: Mapping[str, int | str]) -> dict[int, int]:
    """The dim of images, as in ``AXES``, that each mesh dim deals. Raises ValueError; TypeError for what
    is no mesh and no plan."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "mesh: expected a DeviceMesh, as of torch.distributed.init_device_mesh, got "
            f"{type(mesh).__name__}"
        )
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"plan: expected axes of images with the mesh dim of each, such as {{'h': 0}}, got {plan!r}"
        )
    names = mesh.mesh_dim_names or ()
    found: dict[int, int] = {}
    for axis, at in plan.items():
        if axis not in AXES:
            raise ValueError(f"the plan shards '{axis}'; expected one of {', '.join(AXES)}")
        number = names.index(at) if at in names else at
        if not isinstance(number, int) or not 0 <= number < mesh.ndim:
            raise ValueError(
                f"the plan shards {axis} along mesh dim {at!r}; the mesh has "
                f"{mesh.ndim} dims{', named ' + ', '.join(names) if names else ''}"
            )
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
        lambda _module, args, kwargs: (_dealt(args, mesh, {}), _dealt(kwargs, mesh, {})), with_kwargs=True
    )
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


TIMES = 4.0  # what a sharded step may be off, in what one process is off


@dataclass(frozen=True)
class Difference:
    """One tensor: the largest error of each rank's part, and what is allowed, both absolute."""

    tensor: str
    errors: tuple[float, ...]
    allowed: float

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose part is wrong."""
        return tuple(r for r, error in enumerate(self.errors) if not error <= self.allowed)


@dataclass(frozen=True)
class Certificate:
    """The result and all gradients of a step; the same on every rank."""

    exact: bool
    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return not any(d.ranks for d in self.differences)

    def __str__(self) -> str:
        wide = max(len(d.tensor) for d in self.differences)
        lines = [f"{'tensor':{wide}}  largest error  allowed    wrong on"]
        for d in self.differences:
            where = f"rank {', '.join(map(str, d.ranks))}" if d.ranks else "-"
            lines.append(f"{d.tensor:{wide}}  {max(d.errors):13.3g}  {d.allowed:9.3g}  {where}")
        wrong = sum(bool(d.ranks) for d in self.differences)
        how = "bit by bit" if self.exact else "within the error of one process"
        said = (
            f"{wrong} of {len(self.differences)} tensors are wrong"
            if wrong
            else (f"{len(self.differences)} tensors equal those of one process, {how}")
        )
        return "\n".join([*lines, said])


def verify(
    model: nn.Module,
    mesh: Any,
    plan: Mapping[str, int | str],
    *inputs: Tensor,
    exact: bool = False,
    whole: Sequence[str] = (),
    rows: Sequence[str | type[nn.Module]] = (),
) -> Certificate:
    """Compare a step of ``model``, sharded as by ``parallelize`` with these words, with one process: its
    result, the gradients of its parameters and of inputs that are floats. All ranks of the mesh call it
    with the same model and inputs, which stay as they are; the result is one tensor. ``exact``: parameters
    and inputs become small integers, whose sums are exact in any order, and every bit counts; modules that
    divide or take roots differ then. Otherwise a part may be off by 4 times what one process is off from
    f64. Raises what ``parallelize`` raises."""
    model = copy.deepcopy(model)
    given = [t.detach().clone() for t in inputs]
    if exact:
        with torch.no_grad():
            for at, t in enumerate((*model.parameters(), *given)):
                t.copy_(_integers(t, at))
    wide = [t.double() if t.is_floating_point() else t for t in given]
    true = _step(copy.deepcopy(model).double(), wide)
    alone = _step(copy.deepcopy(model), given)
    parts = _step(
        parallelize(copy.deepcopy(model), mesh, plan, whole, rows),
        [DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim) for t in given],
    )
    found = []
    for name, want in true.items():
        one = alone[name]
        allowed = 0.0 if exact else TIMES * max(_off(one, want), _rounding(one) * _largest(want))
        part = parts.get(name)
        error = (
            torch.inf if part is None else _off(part.to_local(), _same_part(one if exact else want, part))
        )
        found.append(Difference(name, _of_all_ranks(error, mesh), allowed))
    return Certificate(exact, tuple(found))


def _step(model: nn.Module, inputs: list[Any]) -> dict[str, Any]:
    """The result and the gradients, by name. The gradient of the result is of small integers."""
    given = [t.requires_grad_() if t.is_floating_point() else t for t in (t.detach() for t in inputs)]
    result = model(*given)
    grad = _integers(torch.empty(result.shape, dtype=result.dtype, device=result.device), -1)
    result.backward(
        distribute_tensor(grad, result.device_mesh, result.placements)
        if isinstance(result, DTensor)
        else grad
    )
    named = [
        ("result", result.detach()),
        *((f"gradient of input {at}", t.grad) for at, t in enumerate(given)),
        *((f"gradient of {name}", p.grad) for name, p in model.named_parameters()),
    ]
    return {name: t for name, t in named if t is not None}


def _integers(like: Tensor, seed: int) -> Tensor:
    """Integers from -2 to 2 in the shape, type and place of a tensor, the same on every rank."""
    made = torch.randint(-2, 3, like.shape, generator=torch.Generator().manual_seed(seed + 1))
    return made.to(like)


def _same_part(whole: Tensor, part: DTensor) -> Tensor:
    """What this rank has of a tensor that every rank has whole, without a message."""
    places = [Replicate()] * part.device_mesh.ndim
    spread: Any = DTensor.from_local(whole, part.device_mesh, places)
    local: Tensor = spread.redistribute(part.device_mesh, part.placements).to_local()
    return local


def _off(made: Tensor, want: Tensor) -> float:
    """The largest absolute difference; inf for other shapes, and where one is not a number alone."""
    if made.shape != want.shape:
        return torch.inf
    apart = (made.double() - want.double()).abs()
    apart = torch.where(made.isnan() & want.isnan(), torch.zeros_like(apart), apart)
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


def _rounding(t: Tensor) -> float:
    return torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _of_all_ranks(error: float, mesh: Any) -> tuple[float, ...]:
    """What each rank of the process group found; 0 for those that the mesh does not have."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=mesh.device_type)
    found[dist.get_rank()] = min(error, torch.finfo(torch.float64).max)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return tuple(found.tolist())
