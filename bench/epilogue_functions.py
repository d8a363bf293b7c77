"""The time of functions in the epilogue of a product of 96 features, and how far their results are off: a
row each in ``epilogue_functions.csv``. ``plain`` has none; ``large`` is the sine of integers beyond 2**16,
which take the slow way; beside them eager torch with as many kernels. Less than a minute."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import torch
from triton.testing import do_bench

import transconv
from bench.environment import VERSIONS, expect_gpu, versions

Tensor = torch.Tensor
POSITIONS, FEATURES = 1 << 18, 96
COLUMNS = ("function", "us", "torch_us", "off", "off_torch", *VERSIONS)
TEXT = """compute {name}
    tensor x f16 [m={m}, ic={n}]
    tensor w f16 [oc={n}, ic={n}]
    tensor a f32 [oc={n}]
    tensor y f16 [m={m}, oc={n}]
    axes   m={m} oc={n} | ic={n}
    read   u = x[m, ic]
    read   v = w[oc, ic]
    let    s = sum(u*v; ic)
    read   al = a[oc]
    let    z = {value}
    store  y[m, oc] = z"""
Function = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[str, Function]] = {
    "plain": ("s*al", lambda s, a: s * a),
    "snake": ("s + sin(s*al)*sin(s*al)/al", lambda s, a: s + torch.sin(s * a) ** 2 / a),
    "large": ("sin(s*al)", lambda s, a: torch.sin(s * a)),
    "gelu": ("gelu(s*al)", lambda s, a: torch.nn.functional.gelu(s * a)),
    "silu": ("silu(s*al)", lambda s, a: torch.nn.functional.silu(s * a)),
    "tanh": ("tanh(s*al)", lambda s, a: torch.tanh(s * a)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """It has none of its own."""


def main(options: argparse.Namespace) -> int:
    """Measure on the GPU; 1 if a result is farther off than two units of f16, where those of numbers that
    are no numbers are missing as well. Raises ValueError where there is no GPU."""
    expect_gpu("epilogue-functions")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    good = True
    with (out / "epilogue_functions.csv").open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        lines.writeheader()
        for name in CASES:
            row = measured(name)
            print(" ".join(map(str, row.values())), flush=True)
            lines.writerow(row)
            good = good and float(row["off"]) <= 2
    return 0 if good else 1


def measured(name: str) -> dict[str, object]:
    """The row of a case."""
    value, function = CASES[name]
    run = transconv.computation(TEXT.format(name=f"behind_{name}", m=POSITIONS, n=FEATURES, value=value))
    x, w, a = operands(name == "large", POSITIONS, "cuda")

    def eager() -> Tensor:
        return function((x @ w.t()).float(), a).half()

    right = function(x.double() @ w.double().t(), a.double())
    us, torch_us = (1e3 * do_bench(f) for f in (lambda: run(x, w, a), eager))
    return {
        "function": name,
        "us": round(us, 2),
        "torch_us": round(torch_us, 2),
        "off": off(run(x, w, a), right),
        "off_torch": off(eager(), right),
        **versions(),
    }


def operands(large: bool, positions: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and a, with a NaN and an infinite number; ``large``: whole ones, whose products are exact."""
    torch.manual_seed(1)
    x, w = (torch.randn(n, FEATURES, device=device) for n in (positions, FEATURES))
    a = torch.rand(FEATURES, device=device) + 0.5
    if large:
        x, w, a = x.round(), w.round() * 10, torch.full_like(a, 4099.0)
    x[5, 7], x[6, 7] = float("nan"), float("inf")
    return x.half(), (w / 10).half(), a


def off(got: Tensor, right: Tensor) -> float:
    """The largest error in units of f16, of numbers of 1 at least; infinite where a number is missing, or
    one is where there is none."""
    known = right.isfinite()
    if not torch.equal(known, got.isfinite()):
        return float("inf")
    unit = right.abs().clamp(min=1.0) * 2.0**-10
    return round(float(((got.double() - right).abs() / unit)[known].max()), 3)
