"""``python -m bench`` and the recipes that call it: what is wrong with a command is one line."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from bench.__main__ import main, understood
from bench.trials import target_of
from transconv.__main__ import parser
from transconv.target.records import TARGETS
from transconv.tuning.session import log_path

ROOT = Path(__file__).parents[2]
LIST = str(ROOT / "bench/problems/vgg16.txt")


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    try:
        code = main(words)
    except SystemExit as left:
        code = left.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("time none", "no such file: none; expected a benchdnn batch file"),
        ("check none", "no such file: none; expected a benchdnn batch file"),
        ("time LIST --match nothing", "none of 9 layers is selected"),
        ("time LIST --shards 0", "'0' is no whole number from 1"),
        ("time LIST --shard 3 --shards 2", "--shard=3 of --shards=2"),
        ("invariance --models nope", "'nope' is none of vae_block, "),
        ("time LIST --props up", "'up' is none of fwd, bwd_d, bwd_w"),
        ("time LIST --baselines cudnn", "'cudnn' is none of"),
        ("time LIST --epilogue rely", "epilogue 'rely' has 'rely'"),
        ("time LIST --mb -3", "'-3' is no whole number from 0"),
        ("check LIST --sample 0", "'0' is no whole number from 1"),
        ("check LIST --modes bits", "'bits' is none of exact, float"),
        ("networks --models alexnet", "'alexnet' is none of resnet50"),
        ("networks --layouts ncwh", "'ncwh' is none of"),
        ("overhead --calls 0", "'0' is no whole number from 1"),
        ("overhead --match nothing", "expected a part of conv2d 1x1"),
        ("issues --small --only nothing", "no case has this in its name; expected some of pytorch#75747"),
        ("dropin -n 0", "'0' is no whole number from 1"),
        ("report CSV", "is no table of `python -m bench`: it has the columns a b"),
        ("trials CSV", "is no log of tune: it has no column direction, problem, schedule, us"),
        ("schedules CSV", "there is no column problem; expected problem, direction, behind, schedule"),
        ("trials SLOW", "the logs have no time of a kernel that was right"),
    ],
)
def test_wrong_commands_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, message: str
) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "slow.csv").write_text("problem,prop,config,us,verdict\nic8ih5oc8oh3kh3,fwd,,,timeout\n")
    names = {"LIST": LIST, "CSV": str(tmp_path / "a.csv"), "SLOW": str(tmp_path / "slow.csv")}
    assert message in refused(capsys, [names.get(w, w) for w in words.split()] + ["--out", str(tmp_path)])


def test_logs_are_judged_as_of_the_chip_that_made_them() -> None:
    def bandwidth(device: str, machine: str = "sm_90x132") -> float:
        return target_of([{"device": device, "machine": machine}]).bandwidth_gbs

    assert bandwidth("NVIDIA H200") == bandwidth("NVIDIA_H200", "") == 4800
    assert bandwidth("NVIDIA H100 80GB HBM3") == TARGETS["sm_90"].bandwidth_gbs < 4800
    assert bandwidth("NVIDIA B200", "sm_100x148") == TARGETS["sm_100"].bandwidth_gbs
    with pytest.raises(ValueError, match="the logs are of sm_100, sm_90; expected those of one chip"):
        target_of([{"machine": "sm_90x132"}, {"machine": "sm_100x148"}])


def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "cuda: torch finds no GPU" in refused(capsys, ["overhead", "--device", "cuda"])


@pytest.mark.parametrize("gpu", ["", "nvidia-smi"])
def test_what_measure_runs_is_understood_and_goes_into_one_folder(tmp_path: Path, gpu: str) -> None:
    out = tmp_path / "mine"
    done = subprocess.run(
        [
            "make",
            "-n",
            "measure",
            "PYTHON=python",
            f"GPU={gpu}",
            "GPU_NAME=mine",
            f"OUT={tmp_path}",
            f"LISTS=vgg16 {LIST}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )
    assert ("--mb 1" in done.stdout) == (not gpu)
    lines = [shlex.split(x) for x in done.stdout.replace("\\\n", " ").splitlines()]
    assert len(lines) == 15
    for words in lines:
        assert words[:2] == ["python", "-m"] and any(w.startswith(str(out)) for w in words)
        if words[2] == "bench":
            _, options = understood(words[3:])
            if words[3] in ("time", "check", "ablation"):
                assert options.lists == ["bench/problems/vgg16.txt", LIST]
        else:
            options = parser().parse_args(words[3:])
        if words[3] == "tune":
            log = str(log_path(Path(options.db)))
    assert any(words[3:5] == ["trials", log] for words in lines)
    assert any("--interpreter" in words for words in lines) == (not gpu)
