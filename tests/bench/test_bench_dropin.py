"""Whole models, host overhead, and the runner of the GPU tests, in small on a CPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import transconv
from bench import dropin, models, network_kernels, networks, run_tables
from bench.__main__ import main
from bench.network_measures import covered
from transconv.torch_ops.calls import lower_call

# Millions of parameters, as published.
PUBLISHED = {"resnet50": 25.557, "mobilenetv3": 5.483, "convnext_t": 28.589, "unet2d": 31.0}


def test_kernels_that_overlap_count_once() -> None:
    assert covered([]) == 0
    assert covered([(5, 6), (1, 3), (0, 2), (1.5, 2.5), (6, 7)]) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in models.build(name).parameters())
    assert count / 1e6 == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", models.NAMES)
def test_small_models_train(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, small=True)
    x, y = models.inputs(name, small=True)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    assert loss.isfinite()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0
        for n, p in model.named_parameters()
        if not n.endswith("bias")
    )


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match="expected one of: resnet50"):
        models.build("resnet51")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


NETWORK = "networks --small --device cpu --models unet2d --precisions ieee --layouts".split()


@pytest.mark.slow
def test_networks(tmp_path: Path) -> None:
    assert main([*NETWORK, "nhwc", "--out", str(tmp_path), "--processes", "1"]) == 0
    found = rows(tmp_path / "networks.csv")
    assert [r["what"] for r in found] == list(networks.EAGER)
    assert not any(r["error"] for r in found)
    errors = [r for r in found if r["unit"] == "rel. RMSE"]
    assert all(0 < float(r["torch"]) < 1e-5 for r in errors)
    # On a CPU both sides are torch's kernels, so they must agree.
    assert all(float(r["ratio"]) == pytest.approx(1.0) for r in errors)
    assert "device:cpu=" in found[0]["fallback"]


def test_kernels_are_collected_before_anything_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a training step and an inference, and what a graph asks for instead."""
    monkeypatch.setattr(transconv.config, "cpu", "interpret")
    monkeypatch.setattr(network_kernels, "prepare", lambda: None)  # switches of the whole process
    monkeypatch.setattr(network_kernels.Setting, "arrange", lambda self: None)
    transconv.config.fallback = "silent"
    found = network_kernels.collect("convnext_t", "bf16", "nhwc", "cpu", True, str(tmp_path / "lock"))[
        "kernels"
    ]
    assert {prop.value for _, prop, *_ in found} == {"fwd", "bwd_d", "bwd_w"}
    assert {(epilogue, bias) for _, prop, epilogue, _, _, bias in found if prop.value == "fwd"} == {
        ("bias", torch.bfloat16),
        ("bias", torch.float32),
        ("", None),
    }
    made = []
    monkeypatch.setattr(lower_call, "planned", lambda *how: made.append(how))
    network_kernels.plan_all(found, "cpu")
    wanted = [(problem, prop, torch.device("cpu"), *how) for problem, prop, *how in found]
    assert made == wanted


def test_no_row_is_left_out_when_there_is_no_time(tmp_path: Path) -> None:
    assert main([*NETWORK, "nchw", "--out", str(tmp_path), "--time-budget", "0"]) == 1
    found = rows(tmp_path / "networks.csv")
    assert [r["what"] for r in found] == list(networks.EAGER)
    assert all(r["error"] == "out of budget" for r in found)


def test_overhead(tmp_path: Path) -> None:
    words = "overhead --device cpu --calls 3 --bursts 2 --match".split()
    assert main([*words, "conv2d 1x1", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path / "overhead.csv")
    assert [(r["mode"], r["side"]) for r in found] == [
        (mode, side) for mode in ("no grad", "grad", "forward+backward") for side in ("torch", "transconv")
    ]
    assert all(float(r["median_us"]) >= float(r["best_us"]) > 0 for r in found)


def test_the_parts_of_a_call(tmp_path: Path) -> None:
    words = "overhead --device cpu --calls 1 --bursts 1 --match parts".split()
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "a whole call" in {r["side"] for r in rows(tmp_path / "overhead.csv")}


TESTS = """
import os
import time

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_dies(): os._exit(9)
def test_loses_the_gpu(): raise RuntimeError("CUDA error: an illegal memory access")
def test_hangs(): time.sleep(60)
def test_counts(request):
    request.node.user_properties.append(("cases", {"passed": 3, "fallback": {"shape:empty": 1}}))
def test_skips():
    import pytest
    pytest.skip("why not")
"""


@pytest.mark.slow
def test_dropin_survives_what_tests_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS, encoding="utf-8")
    words = ["dropin", str(file), "--out", str(tmp_path / "out")]
    assert main([*words, *"-n 1 --limit 8 --time-budget 100".split()]) == 1
    found = json.loads((tmp_path / "out" / "dropin.json").read_text())
    assert (found["collected"], found["run"]) == (7, 7)
    assert found["total"]["tests passed"] == 2 and found["total"]["tests skipped"] == 1
    failed = {name.split("::")[1]: " ".join(texts) for name, texts in found["failures"].items()}
    assert set(failed) == {"test_fails", "test_dies", "test_loses_the_gpu", "test_hangs"}
    assert failed["test_hangs"] == "timeout" and "ended with 9" in failed["test_dies"]
    assert found["total"]["passed"] == 3 and found["fallback"] == {"shape:empty": 1}
    assert "7 of 7 tests were run" in capsys.readouterr().out


def test_groups() -> None:
    assert dropin.group_of("tests/gpu/test_x.py::test_y[a-b[0]]") == "gpu/test_x.py::test_y"


SAMPLES = """
import os
import pytest

@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_all_samples(name, dtype, record_property):
    if name == "prod" and "b" in dtype:
        os._exit(9)
    record_property("cases", {"passed": 5, "gradients": 3, "fell_back": 2, "failed": 0, "failures": [],
                              "fallback": {"shape:empty": 1, "norm:order": 1}})
"""


@pytest.mark.slow
def test_counts_of_samples_become_a_table(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(SAMPLES, encoding="utf-8")
    words = ["samples", str(file), "--out", str(tmp_path), "-n", "1", "--time-budget", "60"]
    assert main([*words, "-k", "sum"]) == 0
    assert main(words) == 1  # with what has no row yet
    found = rows(tmp_path / "samples.csv")
    assert [(r["function"], r["dtype"], r["samples"], r["verdict"]) for r in found] == [
        ("sum", "float32", "7", "right"),
        ("sum", "bfloat16", "7", "right"),
        ("prod", "float32", "7", "right"),
        ("prod", "bfloat16", "", "failed"),
    ]
    assert found[3]["error"] == "the process ended with 9" and found[0]["device"]
    shown = run_tables.samples_table(found).splitlines()
    both = "bfloat16 float32"
    assert shown[-1] == f"| all functions | {both} | 21 | 15 | 9 | 6 | norm:order 3, shape:empty 3 | 1 |"
    assert shown[-2].startswith(f"| sum | {both} | 14 | 10 | 6 | 4 |")
