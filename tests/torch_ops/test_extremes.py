"""Epilogues of every operation at extreme values, beside torch."""

from __future__ import annotations

import pytest

import transconv
from tests import extremes


@pytest.mark.slow
def test_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transconv.config, "cpu", "interpret")
    monkeypatch.setattr(transconv.config, "fallback", "error")
    assert extremes.of_epilogues("cpu") == []
