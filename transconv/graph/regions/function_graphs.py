"""Rewrites of graphs of torch's functions, as Dynamo writes them, before autograd divides these.

interpolate, nearest          each element several times, where sizes are known when a graph runs
interpolate, linear           one dim after another, where there is a gradient
instance_norm                 a group norm with a group for each feature
attention, wide heads         an operator of ours
attention, expanded mask      a mask that torch's own kernels of attention take
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from transconv.functional import attention

aten = torch.ops.aten
Tensor = torch.Tensor
NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
INTERPOLATE = tuple(inspect.signature(torch.nn.functional.interpolate).parameters)
ORDERS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def replace_node(
    node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Put another call, of the same value, in the place of a node."""
    graph = node.graph
    with graph.inserting_before(node):
        made = graph.call_function(target, args, dict(kwargs))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def repeated(gm: fx.GraphModule) -> None:
    """Write nearest upsampling by a power of 2 as what it is, each element several times, in a graph of
    torch's functions. Of sizes that are known when a graph runs torch makes arithmetic on tensors."""
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.interpolate and (times := _times(node)):
            replace_node(node, _repeated, (node.args[0], times))
    gm.recompile()


def interpolated(gm: fx.GraphModule) -> None:
    """Write linear upsampling that has a gradient as one dim after another, in a graph of torch's
    functions. Each element has the numbers of torch's decomposition. The gradient of that adds up 4 or 8
    weighted gradients of the large image, which are all in memory; of one dim after another it is a few
    sums of neighbours, in which weights are evaluated."""
    for node in gm.graph.nodes:
        if node.target is torch.nn.functional.interpolate and (lines := _lines(node)):
            made = node.meta["example_value"]
            order = next((f for f in ORDERS if made.is_contiguous(memory_format=f)), None)
            if order is not None:
                replace_node(node, _interpolated, (node.args[0], lines, order))
    gm.recompile()


def normalized(gm: fx.GraphModule) -> None:
    """Write instance norms without running statistics as group norms with a group for each feature, in a
    graph of torch's functions. torch computes them as batch norms of an image that has the features of all
    images, where a convolution has to look for each of its own."""
    for node in gm.graph.nodes:
        if node.target is not torch.nn.functional.instance_norm:
            continue
        given = dict(zip(NORM, node.args, strict=False)) | node.kwargs
        x = given["input"].meta["example_value"]
        if not x.is_floating_point() or 0 in x.shape:  # which torch decides
            continue
        if given.get("running_mean") is None and given.get("use_input_stats", True):
            replace_node(
                node,
                _normalized,
                (given["input"], given.get("weight"), given.get("bias"), given.get("eps", 1e-5)),
            )
    gm.recompile()


ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attended(gm: fx.GraphModule, invariant: bool = False) -> None:
    """Have heads that torch's fast kernels do not take be ours (``functional/attention.py``), in a graph
    of torch's functions, and masks whose rows are one element, expanded, lie with rows of their own.
    torch's kernels of attention take no others: it computes the scores in memory, in f32. Models that are
    traced hand over such masks where they have none otherwise. Dims outside of the rows stay expanded. A
    mask with a gradient stays as it is: of a leaf each element has its own, and torch's kernels take none.
    ``invariant``: attention is two products and a softmax, whose kernels add up alike in each batch."""
    for node in gm.graph.nodes:
        if node.target is not torch.nn.functional.scaled_dot_product_attention:
            continue
        if invariant:
            node.target = _products
            continue
        given = dict(zip(ATTENTION, node.args, strict=False)) | node.kwargs
        if _is_ours(given):
            query, key, value = (given[name] for name in ATTENTION[:3])
            factor = given.get("scale")
            if factor is None:
                factor = query.meta["example_value"].shape[-1] ** -0.5
            replace_node(node, attention.attention, (query, key, value, factor))
            continue
        mask = given.get("attn_mask")
        like = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
        if isinstance(like, Tensor) and like.dim() and like.stride(-1) != 1 and not like.requires_grad:
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(_with_rows, (mask,))
            made.meta["example_value"] = _with_rows(like)
            node.replace_input_with(mask, made)
    gm.recompile()


def _is_ours(given: Mapping[str, Any]) -> bool:
    """Whether the operator of wide heads computes a call of these arguments."""
    nodes = [x for x in map(given.get, ATTENTION[:3]) if isinstance(x, fx.Node)]
    seen = [x for x in (node.meta.get("example_value") for node in nodes) if isinstance(x, Tensor)]
    plain = not any(given.get(name) for name in ("dropout_p", "is_causal", "enable_gqa"))
    return (
        plain
        and given.get("attn_mask") is None
        and isinstance(given.get("scale"), float | None)
        and len(seen) == 3
        and not attention.why_not(*seen)
    )


def _products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as two products and a softmax, with the scores in memory. Of 16 bits, the scores and their
    softmax are of f32, and the weights of the values are rounded to 16 bits, as in torch's own kernels;
    f32 and dropout are as torch's reference writes them."""
    held = query.dtype
    if held not in (torch.float16, torch.bfloat16) or dropout_p:
        made: Tensor = aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return made
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query.float() @ key.float().mT
    if scores.requires_grad:  # so that products of gradients are of 16 bits, too
        hook: Any = scores.register_hook
        hook(lambda grad: grad.to(held).float())
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        return scores.softmax(-1).to(held) @ value
    masked = scores.masked_fill(~attn_mask, -inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    weights: Tensor = aten._safe_softmax.default(masked, -1)
    return weights.to(held) @ value


def _with_rows(mask: Tensor) -> Tensor:
    """The mask with its last dim innermost in memory."""
    held = mask
    for dim, step in enumerate(mask.stride()[:-1]):
        if step == 0:
            held = held.narrow(dim, 0, 1)
    return held.contiguous().expand(mask.shape)


def _times(node: fx.Node) -> tuple[int, ...]:
    """How often an upsampling takes each element along each dim; empty for one that is otherwise."""
    given = dict(zip(("input", "size", "scale_factor", "mode"), node.args, strict=False)) | node.kwargs
    like, scale = getattr(given["input"], "meta", {}).get("example_value"), given.get("scale_factor")
    if (
        not isinstance(like, torch.Tensor)
        or given.get("mode", "nearest") != "nearest"
        or not any(isinstance(n, torch.SymInt) for n in like.shape[2:])
    ):
        return ()
    scales = [*scale] if isinstance(scale, (list, tuple)) else [scale] * (like.dim() - 2)
    if given.get("size") is not None or any(s not in (1, 2, 4, 8) for s in scales):
        return ()
    return tuple(int(s) for s in scales if isinstance(s, (int, float)))


class Line(NamedTuple):
    """The positions of an upsampled dim: how many, how far one is from the next in the small image, and
    whether the first and the last positions are those of its ends."""

    size: int
    step: float
    ends: bool


def _lines(node: fx.Node) -> tuple[Line, ...]:
    """Those of the dims of a linear upsampling; empty for one that is otherwise, or of one dim."""
    given: dict[str, Any] = {**dict(zip(INTERPOLATE, node.args, strict=False)), **node.kwargs}
    like, made = (getattr(n, "meta", {}).get("example_value") for n in (given["input"], node))
    if (
        given.get("mode") not in ("bilinear", "trilinear")
        or given.get("antialias")
        or not isinstance(like, Tensor)
        or not isinstance(made, Tensor)
        or not like.is_floating_point()
        or not all(isinstance(n, int) for n in (*like.shape, *made.shape))
    ):
        return ()
    scale: Any = None if given.get("recompute_scale_factor") else given.get("scale_factor")
    sizes, ends = like.shape[2:], bool(given.get("align_corners"))
    scales: list[Any] = [*scale] if isinstance(scale, (list, tuple)) else [scale] * len(sizes)
    found = []
    for small, large, times in zip(sizes, made.shape[2:], scales, strict=True):
        whole = (small - 1) / (large - 1) if large > 1 else 0.0
        found.append(Line(large, whole if ends else 1 / times if times else small / large, ends))
    return tuple(found)


def _interpolated(x: Tensor, lines: Sequence[Line], order: torch.memory_format) -> Tensor:
    """The innermost dim first, in f32 or wider; ``order``: how the result lies."""
    y = x if x.dtype is torch.float64 else x.float()
    for dim in reversed(range(2, x.dim())):
        line, size = lines[dim - 2], x.shape[dim]
        i = torch.arange(line.size, device=x.device).to(y.dtype)
        at = (i * line.step if line.ends else (i + 0.5) * line.step - 0.5).clamp(min=0)
        low = at.long()
        one, other = (
            aten._unsafe_index(y, [None] * dim + [place]) for place in (low, (low + 1).clamp(max=size - 1))
        )
        weight = (at - low).clamp(0, 1).reshape(-1, *[1] * (x.dim() - 1 - dim))
        y = one + (other - one) * weight
    return y.to(x.dtype).contiguous(memory_format=order)


def _repeated(x: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    lead, sizes = list(x.shape[:2]), x.shape[2:]
    wide = x.reshape(lead + [e for n in sizes for e in (n, 1)])
    wide = wide.expand(lead + [e for n, k in zip(sizes, times, strict=True) for e in (n, k)])
    return wide.reshape(lead + [n * k for n, k in zip(sizes, times, strict=True)])


def _normalized(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """In the type of the image, as instance norms are under autocast, too; that of the weight may be
    wider."""
    wide = x if weight is None else x.to(weight.dtype)
    return torch.nn.functional.group_norm(wide, x.shape[1], weight, bias, eps).to(x.dtype)
