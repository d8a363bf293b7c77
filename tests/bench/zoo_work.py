"""Stands in for what compiles and times a model: rows at once."""

from __future__ import annotations

from typing import Any


def work(
    step: str,
    model: str,
    device: str,
    images: int,
    sides: tuple[str, ...],
    share: tuple[int, int],
    phase: str,
    kernels: bool,
) -> dict[str, Any]:
    """As ``bench.zoo_measures.work``."""
    assert share[0] < share[1] == 2
    if model == "alexnet":
        raise ValueError("planted")
    if step == "prepare":
        return {
            "verdict": "right",
            "transconv_rmse": 0.01,
            "eager_rmse": 0.02,
            "ours": 3,
            "regions": 0,
            "transconv_compile_s": 1.0,
            "note": "",
        }
    return {"fatal": True, **{f"{s}_ms": 2.0 if s == "inductor" else 1.0 for s in sides}}
