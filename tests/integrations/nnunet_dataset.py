"""A data set of tiny volumes, prepared by nnU-Net's own commands, and plans small enough to interpret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

SIZE, CASES = 8, 5  # no larger than a patch
DATASET, PLANS = "Dataset001_Balls", "nnUNetPlansTiny"
FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")


def write_images(raw: Path) -> None:
    """Bright balls in noise, and where they are."""
    import SimpleITK

    folder = raw / DATASET
    (folder / "imagesTr").mkdir(parents=True)
    (folder / "labelsTr").mkdir()
    rng = np.random.default_rng(0)
    for case in range(CASES):
        at = np.indices((SIZE,) * 3) - rng.integers(3, SIZE - 3, 3).reshape(3, 1, 1, 1)
        ball = (at**2).sum(0) <= 9
        image = rng.normal(ball * 3.0, 1.0).astype(np.float32)
        SimpleITK.WriteImage(
            SimpleITK.GetImageFromArray(image), folder / "imagesTr" / f"ball_{case:03}_0000.nii.gz"
        )
        SimpleITK.WriteImage(
            SimpleITK.GetImageFromArray(ball.astype(np.uint8)),
            folder / "labelsTr" / f"ball_{case:03}.nii.gz",
        )
    said = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "ball": 1},
        "numTraining": CASES,
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(said))


def environment(root: Path) -> dict[str, str]:
    """With nnU-Net's folders and few processes."""
    return {
        **os.environ,
        **{name: str(root / name) for name in FOLDERS},
        "nnUNet_def_n_proc": "1",
        "TRITON_INTERPRET": "1",
    }


def command(root: Path, *words: str, **variables: str) -> str:
    """What a console command prints; its failure is the test's."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.integrations.commands", *words],
        env=environment(root) | variables,
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def prepared(root: Path) -> Path:
    """nnU-Net's folders, with the data set planned and preprocessed by its own commands. Its plans ask for
    memory in gigabytes: copies of them have fewer features, as its pages say to change plans."""
    for name in FOLDERS:
        (root / name).mkdir()
    write_images(root / "nnUNet_raw")
    command(root, *"nnUNetv2_plan_and_preprocess -d 1 -c 3d_fullres -np 1 -npfp 1".split())
    folder = root / "nnUNet_preprocessed" / DATASET
    plans = json.loads((folder / "nnUNetPlans.json").read_text())
    plans["plans_name"] = PLANS
    tiny = plans["configurations"]["3d_fullres"]
    tiny["patch_size"], tiny["batch_size"] = [8, 8, 8], 2
    network = tiny["architecture"]["arch_kwargs"]
    stages = 3
    network["features_per_stage"] = [8, 8, 16]
    for name in ("kernel_sizes", "strides", "n_conv_per_stage"):
        network[name] = network[name][:stages]
    network["n_stages"], network["n_conv_per_stage"] = stages, [1] * stages
    network["strides"] = [[1, 1, 1], [2, 2, 2], [2, 2, 2]]
    network["kernel_sizes"] = [[3, 3, 3]] * stages
    network["n_conv_per_stage_decoder"] = [1] * (stages - 1)
    plans["configurations"] = {"3d_fullres": tiny}
    (folder / f"{PLANS}.json").write_text(json.dumps(plans))
    return root
