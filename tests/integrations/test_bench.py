"""``python -m bench integrations``: its models are built by their packages, small, and measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.__main__
from bench import integration_measures, integrations
from bench.integration_models import SUBJECTS


@pytest.mark.integrations
@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_small_model_runs(name: str) -> None:
    row = integration_measures.Run(SUBJECTS[name], "eager", "cpu", True).prepared()
    assert row["first_s"] > 0
    assert row["loss"] > 0 if SUBJECTS[name].trains else row["rmse"] < 1e-5


@pytest.mark.integrations
@pytest.mark.slow
def test_both_sides_of_a_training() -> None:
    eager, ours = (
        integration_measures.Run(SUBJECTS["nnunet_train"], side, "cpu", True).prepared()
        for side in ("eager", "transconv")
    )
    assert ours["loss"] == pytest.approx(eager["loss"], rel=1e-4)
    assert ours["ours"] and not ours["regions"]


def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["integrations", "--out", str(tmp_path), "--device", "cpu"]
    assert bench.__main__.main(words) == 0
    told = capsys.readouterr().out
    assert {s.package for s in SUBJECTS.values()} >= {"diffusers", "monai"}
    assert "not measured: diffusers is not installed" in told
    assert not (tmp_path / "integrations.csv").exists()
    assert integrations.COLUMNS[:2] == ("model", "side")
