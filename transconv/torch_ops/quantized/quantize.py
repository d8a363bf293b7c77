"""``quantize_``: the convolutions of a model with quantised weights, in place, for inference.

In the manner of torchao's function of that name, but for convolutions, and with weights in blocks of
floats for linear layers. Modules are exchanged for
those of quantized/quantized_modules.py; a subclass of torch's gets a class of both, as `convert_` makes
it. Batch norms in eval mode and modules of activations are folded into them:

    conv -> norm -> relu    a convolution with the norm in its weight, then relu, in one call

A module is folded where torch.fx traces the model, and finds that it is called once, with the result of
the convolution, which nothing else needs. An identity takes its place, and the model's own code goes on.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.nn.utils.parametrize import is_parametrized

from transconv.torch_ops import arguments, modules
from transconv.torch_ops.conversion import traced_graphs
from transconv.torch_ops.quantized import quantized_modules
from transconv.torch_ops.quantized.input_quantization import KINDS, QuantizationScheme, kind_named, ranged

Tensor = torch.Tensor
Calibration = Iterable[Any] | Callable[[torch.nn.Module], Any]


@dataclass(frozen=True)
class QuantizeReport:
    """What was quantised, how, and why other convolutions were left, by the modules' names. ``folded``:
    norms and activations that are parts of the convolutions before them now."""

    kind: str
    quantized: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        done, folded = len(self.quantized), len(self.folded)
        what = "layer" if kind_named(self.kind).of_floats else "convolution"
        head = f"{done} {what}{'s' * (done != 1)} quantised ({self.kind}), {len(self.left)} left"
        if folded:
            head += f", {folded} module{'s' * (folded > 1)} folded into them"
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.left.items())])


@dataclass(slots=True)
class _Seen:
    """What calibration saw of a module's inputs."""

    low: Tensor | None = None
    high: Tensor | None = None
    other_weight: bool = False

    def add(self, input: Tensor) -> None:
        if not input.numel():
            return
        low, high = input.detach().aminmax()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)


def quantize_(
    model: torch.nn.Module,
    kind: Any = "int8",
    calibration: Calibration | None = None,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    use_fast_accum: bool | None = None,
    fold: bool = True,
) -> QuantizeReport:
    """Quantise the torch.nn convolutions of ``model`` in place: ``"int8"``, ``"fp8"``,
    ``"int8_weight_only"``, ``"int4_weight_only"`` (see transconv.nn.QuantConv2d), or a configuration of
    torchao that means one; and with ``"mxfp8"``, ``"mxfp4"`` and ``"nvfp4"`` its linear layers, too, or
    with ``"mxfp8_mxfp8"``, ``"mxfp4_mxfp8"``, ``"mxfp4_mxfp4"`` and ``"nvfp4_nvfp4"``, where inputs become
    blocks as well.

    ``calibration``: batches, on which the model runs in eval mode to see the range of each convolution's
    inputs (a tuple holds the model's arguments, a dict those by name), or a function that runs the model
    it is given. Without it, each input has a scale of its own. ``filter_fn(module, name)`` may leave
    modules out. ``use_fast_accum``, of "fp8": whether sums stay in the matrix unit (see
    transconv.quantized.conv2d); by default what a configuration says, else False. ``fold``: batch norms of
    a model in eval mode go into the weights of the convolutions before them, and activations that are
    modules into their calls, where torch.fx can tell that nothing else needs what is between; identities
    take their places. Returns what was quantised and what was left, with reasons. ValueError for an
    unknown kind, a configuration that means none, or fast sums of another kind; TypeError for another
    calibration."""
    arguments.expect_module(model, "quantize_", filter_fn)
    how = kind_of(kind)
    if not (calibration is None or callable(calibration) or hasattr(calibration, "__iter__")):
        raise TypeError(
            "quantize_: calibration: expected batches, or a function that runs the model, got "
            f"{type(calibration).__name__}"
        )
    fast = _says_fast(kind) if use_fast_accum is None else use_fast_accum
    how.check_fast(fast)
    found, left = _candidates(model, filter_fn, how)
    seen: dict[str, _Seen] = {}
    if calibration is not None and how.input is not None:
        seen = _calibrated(model, found, calibration)
    done: list[str] = []
    folded: list[str] = []
    behind = chains(model, found) if fold else {}
    for name, module in found.items():
        why, quantities = _input_of(seen.get(name), how)
        weight: Any = module._parameters["weight"]
        why = why or how.why_not(weight, bool(getattr(module, "transposed", False)))
        if why:
            left[name] = why
            continue
        chain, real = behind.get(name, Chain()), weight.dtype
        if chain.norm:
            with_norm(module, model.get_submodule(chain.norm))
        _quantise(module, how, *quantities, fast, chain.word, real)
        replaced(model, chain)
        folded += chain.names
        done.append(name)
    return QuantizeReport(how.name, tuple(done), left, tuple(folded))


# -- torchao's configurations, recognised by the names of their classes ----------------------------

CONFIGS = {
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Int8StaticActivationInt8WeightConfig": "int8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
    "Float8StaticActivationFloat8WeightConfig": "fp8",
    "Int8WeightOnlyConfig": "int8_weight_only",
    "Int4WeightOnlyConfig": "int4_weight_only",
}


def kind_of(given: Any) -> QuantizationScheme:
    """A kind by its name, or that of a configuration. ValueError for one that means none."""
    if isinstance(given, str):
        return kind_named(given)
    name = type(given).__name__
    if name not in CONFIGS:
        raise ValueError(
            f"{name} means no quantised convolution; expected one of: {', '.join(KINDS)}, or "
            f"of torchao's {', '.join(CONFIGS)}"
        )
    size, meant = getattr(given, "group_size", None), KINDS[CONFIGS[name]]
    if size is not None and meant.group:
        return replace(meant, group=size)
    if size is not None:
        raise ValueError(f"{name}: group_size: expected None, a scale for each output channel, got {size}")
    return meant


def _says_fast(given: Any) -> bool:
    """Whether a configuration of 8-bit floats asks for fast sums (torchao's ``Float8MMConfig``)."""
    return bool(getattr(getattr(given, "mm_config", None), "use_fast_accum", False))


# -- which modules ---------------------------------------------------------------------------------


def _candidates(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    how: QuantizationScheme,
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    found: dict[str, torch.nn.Module] = {}
    left: dict[str, str] = {}
    kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.modules.conv._ConvNd,)
    if how.of_floats:
        kinds += (torch.nn.Linear,)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.TransformerEncoderLayer)]
    read = {id(part) for layer in layers for part in layer.children()}
    for name, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        why = (
            "torch.nn.TransformerEncoderLayer reads its weight" if id(module) in read else _why_not(module)
        )
        if not why and filter_fn is not None and not filter_fn(module, name):
            why = "filter_fn said no"
        if why:
            left[name] = why
        else:
            found[name] = module
    return found, left


def _why_not(module: Any) -> str:
    if type(module) in quantized_modules.OURS.values() or isinstance(module, quantized_modules.Quantised):
        return "it is quantised already"
    if is_parametrized(module):
        return "its parameters are computed (torch.nn.utils.parametrize)"
    weight = module._parameters.get("weight")
    if weight is None or isinstance(weight, torch.nn.UninitializedParameter):
        return "it has no weight yet"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if isinstance(module, torch.nn.Linear):  # what others read weights of, such as attention
        exact = type(module) is torch.nn.Linear
        return "" if exact else f"its class {type(module).__qualname__} is not torch.nn.Linear itself"
    if modules.is_ours(type(module)):
        return ""
    return modules.why_not(module)


# -- ranges ----------------------------------------------------------------------------------------


def _calibrated(
    model: torch.nn.Module, found: Mapping[str, torch.nn.Module], calibration: Calibration
) -> dict[str, _Seen]:
    seen = {name: _Seen() for name in found}
    training = {m: m.training for m in model.modules()}
    model.eval()
    undo = [_watch(module, seen[name]) for name, module in found.items()]
    try:
        with torch.no_grad():
            if callable(calibration):
                calibration(model)
            else:
                for batch in calibration:
                    _run(model, batch)
    finally:
        for end in undo:
            end()
        for module, was in training.items():
            module.training = was
    return seen


def _run(model: torch.nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _watch(module: Any, seen: _Seen) -> Callable[[], None]:
    """See the inputs of a module's convolution; returns the way back. Those of `_conv_forward` are what
    the forward of a subclass made of the module's."""
    if module.transposed:
        handle = module.register_forward_pre_hook(lambda _, given: seen.add(given[0]))
        remove: Callable[[], None] = handle.remove
        return remove
    inner, own = module._conv_forward, vars(module).get("_conv_forward")

    def watched(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.add(input)
        seen.other_weight |= weight is not module.weight
        made: Tensor = inner(input, weight, bias)
        return made

    module._conv_forward = watched

    def end() -> None:
        del module._conv_forward
        if own is not None:
            module._conv_forward = own

    return end


def _input_of(
    seen: _Seen | None, how: QuantizationScheme
) -> tuple[str, tuple[Tensor | None, Tensor | None]]:
    """Why a module is left, or the scale and the zero point of its inputs."""
    if seen is None:
        return "", (None, None)
    if seen.other_weight:
        return "its forward passes another weight than the module's", (None, None)
    if seen.low is None or seen.high is None:
        return "calibration did not call it", (None, None)
    if not bool(torch.isfinite(seen.low) & torch.isfinite(seen.high)):
        return "calibration saw inputs that are not finite", (None, None)
    return "", ranged(seen.low, seen.high, how)


def _quantise(
    module: Any,
    how: QuantizationScheme,
    scale: Tensor | None,
    zero: Tensor | None,
    fast: bool,
    activation: str,
    real: torch.dtype,
) -> None:
    modules.exchange(module, back=True)  # from a class of ours
    ours = quantized_modules.OURS
    module.__class__ = ours.get(type(module)) or modules.exchanged(type(module), ours)
    module.quantise(how, scale, zero, fast, activation, real)


log = logging.getLogger("transconv.quantize")


@dataclass(frozen=True, slots=True)
class Chain:
    """What follows a convolution: names of modules, and the word of the activation."""

    norm: str = ""
    activation: str = ""
    word: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the modules that are folded."""
        return tuple(filter(None, (self.norm, self.activation)))


def chains(model: torch.nn.Module, found: Mapping[str, torch.nn.Module]) -> dict[str, Chain]:
    """What follows each of some convolutions of a model, by their names; those that nothing follows, and
    all where the model is in training mode or cannot be traced, are left out."""
    if model.training or not found:
        return {}
    try:
        traced = traced_graphs.ChainTracer(
            lambda kind: kind in modules.CONVOLUTIONS or issubclass(kind, quantized_modules.Quantised)
        ).traced(model)
    except Exception as error:  # what a model's code raises on proxies is not known
        log.debug("nothing is folded: torch.fx cannot trace the model: %s", error)
        return {}
    return _found(model, traced, {id(m): name for name, m in found.items()})


def _found(model: torch.nn.Module, traced: fx.GraphModule, names: Mapping[int, str]) -> dict[str, Chain]:
    calls = Counter(
        id(traced.get_submodule(str(n.target))) for n in traced.graph.nodes if n.op == "call_module"
    )
    once = {key for key, count in calls.items() if count == 1}
    made: dict[str, Chain] = {}
    for node in traced.graph.nodes:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        conv = traced.get_submodule(str(node.target))
        if (
            id(conv) not in names
            or id(conv) not in once
            or type(conv) not in modules.CONVOLUTIONS
            or traced_graphs.is_hooked(conv)
        ):
            continue
        if (chain := _chain(traced, node, conv, once)).names:
            made[names[id(conv)]] = chain
    return made


def _chain(traced: fx.GraphModule, node: fx.Node, conv: Any, once: set[int]) -> Chain:
    norm = traced_graphs.norm_after(traced, node, conv)
    if norm is not None and id(traced.get_submodule(str(norm.target))) not in once:
        return Chain()
    last = node if norm is None else norm
    word, user = traced_graphs.activation_after(traced, last), traced_graphs.only_user(last)
    if not (
        word
        and user is not None
        and user.op == "call_module"
        and id(traced.get_submodule(str(user.target))) in once
    ):
        word = ""
    chain = [n for n in (node, norm, user if word else None) if n is not None]
    read: Any = node.args[0]
    if not traced_graphs.stays(traced, read, node, chain[-1], chain):
        return Chain()
    return Chain("" if norm is None else str(norm.target), str(user.target) if word and user else "", word)


def with_norm(conv: Any, norm: Any) -> None:
    """Fold a norm into the weight and bias of a convolution, in f32, in place."""
    bias = None if conv.bias is None else conv.bias.detach().float()
    made, added = traced_graphs.norm_folded(
        conv, conv.weight.detach().float(), bias, copy.deepcopy(norm).float()
    )
    conv._parameters["weight"] = made
    conv._parameters["bias"] = torch.nn.Parameter(added.detach(), requires_grad=False)


def replaced(model: torch.nn.Module, chain: Chain) -> None:
    """Put identities in the place of what was folded."""
    for name in chain.names:
        model.set_submodule(name, torch.nn.Identity())
