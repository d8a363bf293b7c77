"""diffusers: a pipeline whose autoencoder, U-Net and convolutions run by kernels of transconv.

    from transconv.integrations.diffusers import accelerate
    accelerated = accelerate(pipe)
    image = pipe("a bridge").images[0]
    accelerated.undo()

The pipeline and its models stay what they are: classes, state dicts, LoRA, tiling, slicing and offloading.
Encoders and decoders of autoencoders and U-Nets become compiled graphs; elsewhere, as in a transformer's
patches, the convolutions are exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from transconv.graph.graph_report import Report, report
from transconv.integrations.compiled_forward import compile_forward, compiled_forward, restore_forward
from transconv.torch_ops.modules import ConversionReport, convert_, revert_

# What stands in models whose weights come to the device layer by layer: their graphs would break there.
OFFLOADING = ("_hf_hook", "_diffusers_hook")


@dataclass(frozen=True)
class AcceleratedPipeline:
    """What ``accelerate`` did. ``compiled``: modules whose calls are graphs, by name; ``converted``: for
    each model the convolutions that were exchanged; ``left``: why parts were not compiled."""

    models: dict[str, nn.Module]
    compiled: dict[str, nn.Module]
    converted: dict[str, ConversionReport]
    left: dict[str, str]

    def undo(self) -> None:
        """Give all models back to torch, also parts that came later, such as adapters."""
        for module in self.compiled.values():
            restore_forward(module)
        for model in self.models.values():
            revert_(model)

    def report(self) -> dict[str, Report]:
        """What became of the graphs of each compiled module that was called."""
        found = {name: compiled_forward(module) for name, module in self.compiled.items()}
        return {name: report(f.compiled) for name, f in found.items() if f and f.compiled}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        yield "transconv.integrations.diffusers: " + (
            ", ".join(self.models) or "no model with convolutions"
        )
        if self.compiled:
            yield f"  compiled: {', '.join(self.compiled)}"
        yield from (f"  {name}: {len(made.converted)} converted" for name, made in self.converted.items())
        for name, why in self.left.items():
            yield f"  not compiled: {name}: {why}"


def accelerate(
    pipe: Any, *, compiled: bool = True, rest: str = "inductor", verbose: bool = True
) -> AcceleratedPipeline:
    """Let the models of a pipeline, or one model of diffusers, compute by transconv, in place.
    ``compiled``: False exchanges convolutions alone, with no graphs; ``rest``: who computes what in graphs
    has no kernel. Call it again after a model was exchanged; TypeError for what has no models of
    diffusers."""
    models = {name: model for name, model in models_of(pipe).items() if has_convolutions(model)}
    graphs: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, model in models.items():
        for part, module in parts(name, model) if compiled else ():
            if any(hasattr(m, mark) for m in [*module.modules()][1:] for mark in OFFLOADING):
                left[part] = "its layers are offloaded one by one"
            elif compile_forward(module, rest) or compiled_forward(module):
                graphs[part] = module
            else:
                left[part] = "it has a forward of its own"
    # A graph translates torch's own operators, and compares its first results with theirs.
    own = {id(m) for module in graphs.values() for m in module.modules()}
    converted = {n: convert_(model, lambda m, _: id(m) not in own) for n, model in models.items()}
    made = AcceleratedPipeline(models, graphs, converted, left)
    if verbose:
        print(made)
    return made


def models_of(pipe: Any) -> dict[str, nn.Module]:
    """The models of diffusers that a pipeline holds, by their names there."""
    if isinstance(pipe, ModelMixin):
        return {type(pipe).__name__: pipe}
    components = getattr(pipe, "components", None)
    if not isinstance(components, dict):
        raise TypeError(
            f"accelerate: expected a pipeline or a model of diffusers, got {type(pipe).__name__}"
        )
    return {name: model for name, model in components.items() if isinstance(model, ModelMixin)}


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules())


def parts(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that become graphs, those whose time is in convolutions: the two halves of an
    autoencoder, which calls them for each tile or frame, and whole U-Nets, controls among them."""
    if hasattr(model, "decode"):
        halves = ((half, getattr(model, half, None)) for half in ("encoder", "decoder"))
        yield from ((f"{name}.{half}", module) for half, module in halves if isinstance(module, nn.Module))
    elif hasattr(model, "down_blocks"):
        yield name, model
