"""nnU-Net v2 (2.8 and later): a trainer that its command line finds, and predictions.

    export nnUNet_extTrainer="$(python -m transconv.integrations.nnunet)"
    nnUNetv2_train 1 3d_fullres 0 -tr nnUNetTrainerTransconv
    python -m transconv.integrations.nnunet predict -i images -o found -d 1 -c 3d_fullres -tr ...

The variable is nnU-Net's own, with folders of trainers. ``nnUNet_compile`` means what it means there: the
network is a compiled graph, or with "f" its convolutions alone are transconv's. A checkpoint names the
trainer that nnU-Net brings itself, so that it loads where transconv is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nnunetv2.inference import predict_from_raw_data
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.paths import nnUNet_extTrainer
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from transconv.calls.settings import settings
from transconv.graph.optimization import put_features_last
from transconv.graph.torch_compile import backend
from transconv.torch_ops.modules import convert_

TRAINERS = Path(__file__).with_name("nnunet_trainers")


def asks_to_compile() -> bool:
    """Whether nnU-Net compiles networks on a GPU, as ``nnUNet_compile`` says."""
    return bool(nnUNetTrainer._do_i_compile(SimpleNamespace(device=torch.device("cuda"))))


def accelerated(network: nn.Module, compiled: bool) -> Any:
    """A network whose convolutions are transconv's: one whose calls are compiled graphs, or the network
    itself, its modules converted. One that torch.compile made already is compiled anew."""
    plain: nn.Module = getattr(network, "_orig_mod", network)
    if not compiled:
        convert_(plain)
        return plain
    if next(plain.parameters()).device.type != "cpu":
        put_features_last(plain)
    return torch.compile(plain, backend=backend)


class Accelerated(nnUNetTrainer):  # type: ignore[misc]
    """A trainer of nnU-Net whose network runs by kernels of transconv. It stands before another trainer:
    ``class MyTrainer(Accelerated, nnUNetTrainer_5epochs)``."""

    network: Any

    def initialize(self) -> None:
        """As the trainer does it; then the network is exchanged, within DistributedDataParallel too."""
        super().initialize()
        compiled = self._do_i_compile()
        if isinstance(self.network, DistributedDataParallel):
            self.network.module = accelerated(self.network.module, compiled)
        else:
            self.network = accelerated(self.network, compiled)
        how = "compiled by transconv" if compiled else "its convolutions are transconv's"
        self.print_to_log_file(f"transconv: {type(self.plain_network()).__name__}: {how}")

    def plain_network(self) -> nn.Module:
        """The network without what torch.compile and DistributedDataParallel put around it."""
        network = getattr(self.network, "module", self.network)
        found: nn.Module = getattr(network, "_orig_mod", network)
        return found

    def _do_i_compile(self) -> bool:
        """nnU-Net never compiles on a CPU; there Triton's interpreter runs graphs if it is asked to."""
        interpreted = self.device.type == "cpu" and settings.cpu == "interpret"
        return asks_to_compile() if interpreted else bool(super()._do_i_compile())

    def save_checkpoint(self, filename: str) -> None:
        """As the trainer does it, with the name of the next trainer that is not transconv's."""
        super().save_checkpoint(filename)
        if self.local_rank == 0 and not self.disable_checkpointing:
            plain = next(
                c for c in type(self).__mro__ if not issubclass(c, Accelerated) and c is not object
            )
            rename_trainer(filename, plain.__name__)


class nnUNetTrainerTransconv(Accelerated):
    """nnU-Net's default trainer, by kernels of transconv."""


class AcceleratedPredictor(nnUNetPredictor):  # type: ignore[misc]
    """nnU-Net's predictor, by kernels of transconv."""

    network: Any

    def initialize_from_trained_model_folder(self, *given: Any, **named: Any) -> None:
        super().initialize_from_trained_model_folder(*given, **named)
        self.network = accelerated(self.network, asks_to_compile())


def rename_trainer(checkpoint: str, name: str) -> None:
    """Write another trainer's name into a checkpoint; the file is whole at any time."""
    held = torch.load(checkpoint, map_location="cpu", weights_only=False)
    held["trainer_name"] = name
    torch.save(held, f"{checkpoint}.part")
    os.replace(f"{checkpoint}.part", checkpoint)


def main(words: Sequence[str]) -> None:
    """Prints the value for ``nnUNet_extTrainer``; with ``predict`` in front, nnUNetv2_predict."""
    if words[:1] == ["predict"]:
        sys.argv = ["nnUNetv2_predict", *words[1:]]
        predict_from_raw_data.nnUNetPredictor = AcceleratedPredictor
        predict_from_raw_data.predict_entry_point()
        return
    held = nnUNet_extTrainer.get().split(os.pathsep) if nnUNet_extTrainer.is_set() else []
    print(os.pathsep.join(dict.fromkeys([*filter(None, held), str(TRAINERS)])))


if __name__ == "__main__":
    main(sys.argv[1:])
