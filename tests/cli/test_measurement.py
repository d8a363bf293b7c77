"""``doctor --measure``: what is measured, in which order, kept and continued; what is said without a GPU.
Kernels run in Triton's interpreter, at tiny sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transconv.__main__ import main
from transconv.cli import doctor, measurement
from transconv.cli.arguments.installation import Finding
from transconv.cli.measurement import (
    MeasuringSession,
    SharedMeasurement,
    listed,
    read_shared,
    without_paths,
)
from transconv.conv import DIRECTIONS
from transconv.runtime import timing
from transconv.target import TARGETS
from transconv.verify.network_blocks import BLOCKS

CPU = TARGETS["interpreter"]
GOOD = [Finding("self-test", "ok", "right")]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")


def shared(device: str, layer: str, us: float, block: str) -> SharedMeasurement:
    """The content of a file with one layer and one block, of 7 us."""
    about = {"device": device, "torch": "2.11.0", "triton": "3.6.0"}
    row = {"layer": layer, "layer_direction": "fwd", "us": us, "verdict": "right"}
    return SharedMeasurement(
        about,
        ceilings={"gemm_tflops": 250.0, "copy_tbs": 1.7, "launch_us": 2.0},
        layers=[row],
        graphs=[{"block": block, "us": 7.0, "verdict": "right"}],
    )


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    made = shared("NVIDIA_A100", "one", 3.0, "attention")
    made.left.append("the time was up")
    made.write(tmp_path / "a.json")
    assert read_shared(tmp_path / "a.json") == made
    assert json.loads((tmp_path / "a.json").read_text())["format"] == measurement.FORMAT
    for wrong in ("", "[]", '{"format": 0}', '{"format": 1, "about": {}, "layers": 3}'):
        (tmp_path / "b.json").write_text(wrong)
        with pytest.raises(ValueError, match="expected a file of transconv doctor --share"):
            read_shared(tmp_path / "b.json")


@on_cpu
def test_without_a_gpu_it_says_what_would_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "SECONDS", -1.0)
    assert main(["doctor", "--measure", "--seconds", "60", "--share", str(tmp_path / "out.json")]) == 0
    said = [x for x in capsys.readouterr().out.splitlines() if " measure " in x]
    assert len(said) == 1 and said[0].startswith("note measure   nothing is measured: no GPU")
    assert "12 blocks of networks, 141 directions of layers" in said[0] and "at most 60 s" in said[0]
    assert not (tmp_path / "out.json").exists()


def test_share_needs_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--share", str(tmp_path / "out.json")]) == 2
    assert "expected --measure --share FILE" in capsys.readouterr().err


def test_nothing_is_measured_where_results_are_wrong(tmp_path: Path) -> None:
    session = MeasuringSession(CPU, tmp_path / "out.json")
    (told,) = session.findings([Finding("self-test", "bad", "2 of 9 elements are wrong")])
    assert told.state == "bad" and "results are wrong" in told.found
    assert not (tmp_path / "out.json").exists()


def test_the_package_has_the_list_of_layers() -> None:
    found = listed()
    assert len(found) == 47 * len(DIRECTIONS) and len({job.key for job in found}) == len(found)
    assert {job.about["dtype"] for job in found} == {"bf16"}
    assert {job.about["layer_direction"] for job in found} == {*DIRECTIONS}


def test_reasons_have_no_folders() -> None:
    said = "OSError: [Errno 2] no file:\n  '/home/anna/.cache/x.so', C:\\Users\\anna\\y, 3/4 of it"
    assert without_paths(said) == "OSError: [Errno 2] no file: '(path)', (path) 3/4 of it"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_block_is_compared_with_f64_and_timed_beside_torch(name: str) -> None:
    torch.compiler.reset()
    found = measurement.measured_block(name, "cpu", timing.Clock("cpu", 1.0), small=True)
    assert found["verdict"] == "right" and found["kernels"] >= 1 and found["regions"] == 0
    assert 0 < found["off"] < 1e-6 and found["us"] > 0 and found["torch_us"] > 0


def test_a_wrong_block_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()

    def compiled(module: torch.nn.Module, backend: Any) -> Any:
        run = torch.compiler.disable(module)
        return lambda x: run(x) * 1.01

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("transconv.graph.report", lambda run: SimpleNamespace(graphs=()))
    found = measurement.measured_block("classifier", "cpu", timing.Clock("cpu", 1.0), small=True)
    assert found["verdict"] == "wrong" and "us" not in found


@pytest.mark.parametrize("name", list(BLOCKS))
def test_blocks_have_the_same_numbers_at_every_call(name: str) -> None:
    (one, x), (other, y) = (BLOCKS[name].built("cpu", torch.float32, small=True) for _ in "ab")
    before = torch.random.get_rng_state()
    assert torch.equal(x, y) and torch.equal(one(x), other(y)) and not one.training
    BLOCKS[name].built("cpu", torch.float32, small=True)
    assert torch.equal(before, torch.random.get_rng_state())


# -- the stages ------------------------------------------------------------------------------------


class Recorded:
    """In the place of the pool: answers each task at once, while there is time."""

    def __init__(self, groups: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []

    ranks = 1

    def add(self, task: Any) -> None:
        raise AssertionError("nothing follows")

    def run(self, tasks: Any, budget_s: float, grace_s: float = 0.0) -> Iterator[tuple[Any, Any]]:
        for task in tasks if budget_s > 0 else ():
            block = task.payload["block"]
            if block == "attention":
                yield task, {"error": "CompileError: /home/x/y.py says no", "trace": "..."}
            elif block:
                yield task, {"verdict": "right", "us": 3.0}
            else:
                yield task, {"gemm_tflops": 250.0, "copy_tbs": 1.7, "launch_us": 2.0}


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Sessions of two blocks and no layers, whose pool is ``Recorded``."""
    monkeypatch.setattr(measurement, "Pool", Recorded)
    monkeypatch.setattr(MeasuringSession, "session", lambda *_: ([], []))
    return partial(
        MeasuringSession, CPU, tmp_path / "out.json", jobs=list, blocks=("attention", "classifier")
    )


def test_a_file_is_continued(stages: Any, tmp_path: Path) -> None:
    late = stages(seconds=1.0)  # nothing begins
    told = {f.check: f for f in late.findings(GOOD)}
    assert told["graphs"].found == "0 of 2 right and timed"
    made = read_shared(tmp_path / "out.json")
    assert made.left == [
        "2 of 2 blocks are not measured: the time was up",
        "the rates of the machine are not measured",
    ]
    told = {f.check: f for f in stages().findings(GOOD)}
    assert told["ceilings"].found.startswith("a product of matrices at 250 TFLOP/s, a copy at 1.7 TB/s")
    assert told["graphs"].state == "note" and "1 failed or refused (attention)" in told["graphs"].found
    made = read_shared(tmp_path / "out.json")
    assert made.left == [] and made.checks == [{"check": "self-test", "state": "ok"}]
    assert made.graphs[0] == {
        "block": "attention",
        "verdict": "failed",
        "reason": "CompileError: (path) says no",
    }
    before = (tmp_path / "out.json").read_text()
    assert {f.check for f in stages(seconds=1.0).findings(GOOD)} == {*told}
    assert (tmp_path / "out.json").read_text() == before


def test_another_machine_has_a_file_of_its_own(stages: Any, tmp_path: Path) -> None:
    made = SharedMeasurement(stages().made.about | {"device": "NVIDIA_A100"})
    made.write(tmp_path / "out.json")
    with pytest.raises(ValueError, match="is of another device, NVIDIA_A100; expected a new file"):
        stages()


def test_what_was_measured_stays_where_it_is_stopped(
    stages: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(MeasuringSession, "session", stopped)
    with pytest.raises(KeyboardInterrupt):
        list(stages().findings(GOOD))
    assert read_shared(tmp_path / "out.json").ceilings["copy_tbs"] == 1.7


@pytest.mark.slow
def test_layers_are_checked_timed_and_tuned_by_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (tmp_path / "list.txt").write_text('mb1ic8ih6oc8oh6kh3ph1n"tiny"\n')
    jobs = partial(listed, str(tmp_path / "list.txt"), dtype="f32", prop="fwd")
    session = MeasuringSession(CPU, tmp_path / "out.json", 900, jobs, ("classifier",), small=True)
    told = {f.check: f for f in session.findings(GOOD)}
    assert told["graphs"].found == told["layers"].found == "1 of 1 right and timed"
    made = read_shared(tmp_path / "out.json")
    (row,) = made.layers
    assert row["layer"] == "tiny" and row["verdict"] == "right" and row["us"] > 0 and row["schedule"]
    assert made.ceilings["launch_us"] > 0 and made.left == []
    assert len((tmp_path / "out.trials.csv").read_text().splitlines()) == 1 + measurement.TRIALS
