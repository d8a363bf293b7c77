"""nnU-Net's own commands with our trainer: the losses are its own trainer's, validation is its own
inference, and what it leaves loads without transconv."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

import transconv
from tests.integrations import nnunet_dataset
from tests.integrations.nnunet_dataset import DATASET, PLANS, command
from transconv.graph import report

pytestmark = [pytest.mark.integrations, pytest.mark.slow]
STEPS = 3
# A trainer of few steps, in a folder of its own beside ours; it tells what computed them.
FEW = """
import os, pathlib, transconv
from transconv.integrations.nnunet import nnUNetTrainerTransconv

class nnUNetTrainerTransconvFew(nnUNetTrainerTransconv):
    def initialize(self):
        self.num_epochs = int(os.environ["EPOCHS"])
        self.num_iterations_per_epoch, self.num_val_iterations_per_epoch, self.save_every = 2, 1, 1
        super().initialize()

    def perform_actual_validation(self, *given, **named):
        super().perform_actual_validation(*given, **named)
        pathlib.Path(self.output_folder, "stats.txt").write_text(str(transconv.stats()))
"""
WITHOUT_US = "import sys; sys.modules['transconv'] = None; "
HIDDEN = (
    WITHOUT_US + "from importlib.util import spec_from_file_location as spec, module_from_spec as made; "
    "found = spec('operators', {operators!r}); module = made(found); found.loader.exec_module(module); "
    "module.define(); from nnunetv2.inference.predict_from_raw_data import predict_entry_point as run; "
    "sys.argv = ['nnUNetv2_predict', *{words!r}]; run()"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nnunet_dataset.prepared(tmp_path_factory.mktemp("nnunet"))


@pytest.fixture
def in_process(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in nnunet_dataset.environment(root).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("nnUNet_n_proc_DA", "0")  # batches in this process, so that draws repeat
    return root


def trainer(kind: Any) -> Any:
    """One as nnU-Net's command makes it, about to train."""
    from nnunetv2.run import run_training

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_training, "recursive_find_trainer_class_by_name", lambda name: kind)
        made = run_training.get_trainer_from_args(
            "1", "3d_fullres", 0, "", PLANS, device=torch.device("cpu")
        )
    made.num_iterations_per_epoch = made.num_val_iterations_per_epoch = made.num_epochs = 1
    made.on_train_start()
    made.on_epoch_start()
    made.on_train_epoch_start()
    return made


def losses(
    made: Any, around: AbstractContextManager[Any] | None = None, steps: int = STEPS
) -> list[float]:
    with around or nullcontext():
        return [float(made.train_step(next(made.dataloader_train))["loss"]) for _ in range(steps)]


def first_step(kind: Any, around: AbstractContextManager[Any] | None) -> tuple[float, torch.Tensor]:
    """The loss of a first step, and what it does to the weights."""
    made = trainer(kind)
    weights = getattr(made.network, "_orig_mod", made.network).parameters
    before = parameters_to_vector(weights()).detach().clone()
    (loss,) = losses(made, around, 1)
    return loss, parameters_to_vector(weights()).detach() - before


def test_their_commands_find_our_trainer(root: Path) -> None:
    """Training, validation, a second epoch after the first process has ended, and predictions: with our
    predictor, and where transconv cannot be imported."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from SimpleITK import GetArrayFromImage, ReadImage

    ours = subprocess.check_output(
        [sys.executable, "-m", "transconv.integrations.nnunet"], text=True
    ).strip()
    (root / "own").mkdir()
    (root / "own" / "few.py").write_text(FEW)
    both = os.pathsep.join((ours, str(root / "own")))
    name = ["-tr", "nnUNetTrainerTransconvFew", "-p", PLANS]
    train = ["nnUNetv2_train", "1", "3d_fullres", "0", *name, "-device", "cpu"]
    variables = {"nnUNet_extTrainer": both, "nnUNet_compile": "f", "nnUNet_n_proc_DA": "0"}
    command(root, *train, EPOCHS="1", **variables)
    told = command(root, *train, "--c", EPOCHS="2", **variables)
    assert "Epoch 1" in told and "Epoch 0" not in told.split("Using device")[-1]

    folder = root / "nnUNet_results" / DATASET / f"nnUNetTrainerTransconvFew__{PLANS}__3d_fullres"
    summary = json.loads((folder / "fold_0" / "validation" / "summary.json").read_text())
    assert 0.0 <= summary["foreground_mean"]["Dice"] <= 1.0
    stats = (folder / "fold_0" / "stats.txt").read_text()
    assert "native   bwd_w" in stats and "fallback" not in stats and "100.0% native" in stats

    held = torch.load(folder / "fold_0" / "checkpoint_final.pth", weights_only=False)
    assert held["trainer_name"] == "nnUNetTrainer" and held["current_epoch"] == 2
    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(folder), (0,))
    assert not any(type(m).__module__.startswith("transconv") for m in predictor.network.modules())

    images = root / "nnUNet_raw" / DATASET / "imagesTr"
    (root / "one").mkdir()
    (root / "one" / "ball_000_0000.nii.gz").symlink_to(images / "ball_000_0000.nii.gz")
    words = [*"-d 1 -c 3d_fullres -f 0 -device cpu -npp 1 -nps 1 --disable_tta".split(), *name]
    words += ["-i", str(root / "one")]
    operators = str(Path(__file__).with_name("torchvision_operators.py"))
    subprocess.run(
        [
            sys.executable,
            "-c",
            HIDDEN.format(operators=operators, words=[*words, "-o", str(root / "plain")]),
        ],
        env=nnunet_dataset.environment(root),
        check=True,
        capture_output=True,
        timeout=300,
    )
    command(root, "-predict", *words, "-o", str(root / "ours"), nnUNet_compile="t")
    made, want = (
        GetArrayFromImage(ReadImage(str(root / of / "ball_000.nii.gz"))) for of in ("ours", "plain")
    )
    assert (made != want).mean() < 0.01  # a voxel whose classes are all but equal


@pytest.mark.parametrize("compiled", [False, True], ids=["converted", "compiled"])
def test_losses_are_their_trainers(
    compiled: bool, in_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    from transconv.integrations.nnunet import nnUNetTrainerTransconv

    monkeypatch.setenv("nnUNet_compile", "t" if compiled else "f")
    theirs = trainer(nnUNetTrainer)
    want = losses(theirs)
    ours = trainer(nnUNetTrainerTransconv)
    transconv.stats(reset=True)
    made = losses(ours)
    np.testing.assert_allclose(made, want, rtol=1e-4, atol=1e-5)
    assert len(set(want)) == STEPS
    seen = transconv.stats()
    assert not seen.fallback and set(seen.native) == ({"graph"} if compiled else {"fwd", "bwd_d", "bwd_w"})
    if compiled:
        found = report(ours.network)
        assert {g.phase for g in found.graphs} == {"forward", "backward"}
        assert not [row for g in found.graphs for row in g.rows if row not in g.kernels], (
            "regions of torch"
        )

    # Deep supervision off, as in validation: one result instead of a list.
    for each in (theirs, ours):
        each.set_deep_supervision_enabled(False)
        each.network.eval()
    image = torch.randn(1, 1, 8, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(ours.network(image), theirs.network(image), rtol=1e-3, atol=1e-3)

    file = f"{ours.output_folder}/checkpoint_of_ours.pth"
    ours.save_checkpoint(file)
    theirs.load_checkpoint(file)
    for name, held in theirs.network.state_dict().items():
        torch.testing.assert_close(held, ours.plain_network().state_dict()[name], rtol=0, atol=0)


def test_losses_under_autocast(in_process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nnU-Net itself has no autocast on a CPU; on a GPU its training is under one."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    from transconv.integrations.nnunet import nnUNetTrainerTransconv

    monkeypatch.setenv("nnUNet_compile", "t")
    narrow = torch.autocast("cpu", torch.bfloat16)
    exact, theirs, ours = (
        first_step(kind, around)
        for kind, around in (
            (nnUNetTrainer, None),
            (nnUNetTrainer, narrow),
            (nnUNetTrainerTransconv, narrow),
        )
    )
    assert abs(ours[0] - exact[0]) <= 2 * abs(theirs[0] - exact[0]) + 1e-3
    assert 0 < (theirs[1] - exact[1]).norm() < exact[1].norm()
    assert (ours[1] - exact[1]).norm() <= 1.5 * (theirs[1] - exact[1]).norm()
    assert transconv.stats().native["graph"] and not transconv.stats().fallback


def test_a_trainer_of_ones_own(in_process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixin before another trainer of nnU-Net's: the checkpoint names that one."""
    from nnunetv2.training.nnUNetTrainer.variants.training_length.nnUNetTrainer_Xepochs import (
        nnUNetTrainer_5epochs,
    )

    from transconv.integrations.nnunet import Accelerated

    monkeypatch.setenv("nnUNet_compile", "f")
    made = trainer(type("Mine", (Accelerated, nnUNetTrainer_5epochs), {}))
    made.save_checkpoint(f"{made.output_folder}/named.pth")
    held = torch.load(f"{made.output_folder}/named.pth", weights_only=False)
    assert held["trainer_name"] == "nnUNetTrainer_5epochs"
