"""docs/integrations.md: each recipe runs, as it stands there, with the real package and small models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from tests.integrations import diffusers_pipelines
from transconv.torch_ops.modules import is_ours

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
RECIPES = dict(
    re.findall(r"^<!-- recipe: ([\w-]+) -->\n```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
)
Names = dict[str, Any]


def test_recipes_are_short() -> None:
    assert {*RECIPES} == {name.removeprefix("test_").replace("_", "-") for name in CASES}
    for text in RECIPES.values():
        compile(text, "docs/integrations.md", "exec")
        assert len(text.splitlines()) <= 5
    assert TEXT.count("```python") == len(RECIPES)


def run(name: str, **names: Any) -> Names:
    """The names after a recipe. Kernels of ours, and none of torch's, computed."""
    text = RECIPES[name]
    with torch.random.fork_rng():
        exec(
            compile(text, "docs/integrations.md", "exec"),
            space := {"torch": torch, "transconv": transconv, **names},
        )
    seen = transconv.stats()
    assert sum(seen.native.values()) and not seen.fallback, seen
    return space


def case(test: Callable[..., None]) -> Callable[..., None]:
    CASES[test.__name__] = test
    return pytest.mark.integrations(pytest.mark.slow(test))


CASES: dict[str, Callable[..., None]] = {}
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).sin().reshape(2, 3, 32, 32)


def convolutions(model: torch.nn.Module) -> list[bool]:
    """Which convolutions of a model are ours."""
    kinds = [type(m) for m in model.modules() if isinstance(m, torch.nn.modules.conv._ConvNd)]
    assert kinds
    return [*map(is_ours, kinds)]


@case
def test_diffusers(tmp_path: Path) -> None:
    pipe = diffusers_pipelines.image_pipeline(tmp_path)
    space = run("diffusers", pipe=pipe)
    assert space["images"].shape == (1, 3, 16, 16)


@case
def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which it writes
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=2)
    model = ResNetForImageClassification(config)
    before = [p.detach().clone() for p in model.parameters()]
    data = [{"pixel_values": image[:, ::2, ::2], "labels": n} for n, image in enumerate(IMAGES)]
    options = {"use_cpu": True, "per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True}
    space = run(
        "transformers",
        Trainer=Trainer,
        TrainingArguments=TrainingArguments,
        model=model,
        data=data,
        options=options,
    )
    assert transconv.stats().native["graph"]
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
    assert not any("_orig_mod" in key for key in space["trainer"].model.state_dict())


@case
def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    made = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name: made("test_resnet"))
    space = run("timm", timm=timm, images=IMAGES)
    torch.testing.assert_close(space["scores"], space["model"](IMAGES).detach(), rtol=1e-3, atol=1e-3)


@case
def test_timm_ema() -> None:
    import timm

    model = timm.create_model("test_resnet")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    space = run("timm-ema", timm=timm, model=model, images=IMAGES, loss=torch.sum, optimizer=optimizer)
    averaged = space["ema"].module
    assert all(convolutions(averaged)) and [*averaged.state_dict()] == [*model.state_dict()]
    assert any((a != b).any() for a, b in zip(averaged.parameters(), model.parameters(), strict=True))


@case
def test_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of a block; its own runs in minutes here."""
    import torchvision
    from torchvision.models.resnet import BasicBlock

    class Small(torch.nn.Sequential):
        def __init__(self) -> None:
            super().__init__(torch.nn.Conv2d(3, 4, 3, 2, 1), BasicBlock(4, 4), torch.nn.Flatten())

    model = Small()
    monkeypatch.setattr(torchvision.models, "resnet18", lambda: model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model[1].conv1.weight.detach().clone()
    run(
        "torchvision",
        torchvision=torchvision,
        images=IMAGES,
        loss=lambda y: y.square().mean(),
        optimizer=optimizer,
    )
    assert (model[1].conv1.weight != before).any() and transconv.stats().native["graph"]


@case
def test_segmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    import segmentation_models_pytorch as smp

    made = smp.Unet
    small = {"decoder_channels": (8, 8, 8, 8, 4)}
    monkeypatch.setattr(smp, "Unet", lambda name, **named: made("tu-test_resnet", **named, **small))
    space = run("segmentation", segmentation_models_pytorch=smp, images=IMAGES)
    torch.testing.assert_close(space["masks"], space["model"](IMAGES).detach(), rtol=1e-3, atol=1e-3)


@case
def test_monai() -> None:
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(4, 8), strides=(2,)).eval()
    volume = torch.randn(1, 1, 12, 8, 8)
    space = run("monai", SlidingWindowInferer=SlidingWindowInferer, model=model, volume=volume)
    with torch.no_grad():
        torch.testing.assert_close(space["masks"], space["inferer"](volume, model), rtol=1e-3, atol=1e-3)


@case
def test_monai_windows() -> None:
    """The volume is more than a batch of windows, which overlap."""
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import UNet

    model = UNet(3, 1, 2, channels=(4, 8), strides=(2,)).eval()
    volume = torch.randn(1, 1, 16, 8, 8)
    space = run("monai-windows", SlidingWindowInferer=SlidingWindowInferer, model=model, volume=volume)
    with torch.no_grad():
        want = space["inferer"](volume, model)
        torch.testing.assert_close(space["fast"](volume), want, rtol=1e-3, atol=1e-3)
    (graph,) = [g for g in transconv.graph.report(space["fast"]).graphs if g.phase == "inference"]
    assert len(graph.kernels) == len(graph.rows), "regions of torch"


@case
def test_lightning(tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
            )

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            made: torch.Tensor = self.net(batch).square().mean()
            return made

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    before = module.net[0].weight.detach().clone()
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    data = torch.utils.data.DataLoader(IMAGES[:, :, ::4, ::4], batch_size=2)  # type: ignore[arg-type]
    space = run("lightning", lightning=lightning, module=module, data=data, options=options)
    assert transconv.stats().native["graph"] and (module.net[0].weight != before).any()
    space["trainer"].save_checkpoint(tmp_path / "held.ckpt")
    held = torch.load(tmp_path / "held.ckpt", weights_only=False)["state_dict"]
    assert [*held] == [*Module().state_dict()]


@pytest.fixture
def yolo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A detector of few features, which keeps its files to itself."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    from ultralytics import YOLO
    from ultralytics.utils import ROOT as THEIRS
    from ultralytics.utils import SETTINGS

    monkeypatch.setattr(SETTINGS, "file", str(tmp_path / "settings.json"), raising=False)
    text = (THEIRS / "cfg" / "models" / "v8" / "yolov8.yaml").read_text()
    text = re.sub(r"^  n: .*", "  n: [0.33, 0.0625, 128]", text, flags=re.MULTILINE)
    (tmp_path / "yolov8n-tiny.yaml").write_text(text.replace("nc: 80", "nc: 2"))
    return YOLO("yolov8n-tiny.yaml")


def picture() -> Any:
    return (IMAGES[0].permute(1, 2, 0) * 127 + 128).byte().numpy()


@case
def test_ultralytics(yolo: Any) -> None:
    assert run("ultralytics", yolo=yolo, image=picture())["found"][0].boxes.shape[1] == 6
    assert transconv.stats().native["fwd"] and all(convolutions(yolo.model))


@case
def test_ultralytics_export(yolo: Any) -> None:
    transconv.convert_(yolo.model)
    x = IMAGES[:1]
    with torch.no_grad():
        want = yolo.model.eval()(x)[0]
        made = torch.jit.load(run("ultralytics-export", yolo=yolo)["file"])(x)
    torch.testing.assert_close(
        made if isinstance(made, torch.Tensor) else made[0], want, rtol=1e-2, atol=1e-2
    )
    assert not any(convolutions(yolo.model))


@case
def test_ultralytics_train(yolo: Any, tmp_path: Path) -> None:
    """A step, and the checkpoint, which has the averaged copy of the model."""
    from PIL import Image

    for kind in ("images", "labels"):
        (tmp_path / "set" / kind).mkdir(parents=True)
    for n in range(2):
        Image.fromarray(picture()).save(tmp_path / "set" / "images" / f"{n}.png")
        (tmp_path / "set" / "labels" / f"{n}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    data = tmp_path / "set.yaml"
    data.write_text(f"path: {tmp_path / 'set'}\ntrain: images\nval: images\nnames: [one, other]\n")
    options = {"batch": 2, "workers": 0, "device": "cpu", "amp": False, "val": False, "plots": False}
    run(
        "ultralytics-train",
        yolo=yolo,
        data=str(data),
        options={**options, "project": str(tmp_path / "runs")},
    )
    assert transconv.stats().native["bwd_w"]
    (file,) = tmp_path.rglob("last.pt")
    held = torch.load(file, weights_only=False)
    assert not any(convolutions(held["ema"] or held["model"]))  # the averaged copy, which is torch's
