"""Tables of trials and of quantised models."""

from __future__ import annotations

from bench.quantized_table import quantized_table, training_table
from bench.slide_table import slide_table


def test_shared_boxes_are_beside_the_best_without() -> None:
    def row(problem: str, words: str, us: str, verdict: str = "right") -> dict[str, str]:
        return {"problem": problem, "direction": "fwd", "schedule": words, "us": us, "verdict": verdict}

    table = slide_table(
        [
            row("p", "stages=3", "20"),
            row("p", "stages=4", "16"),
            row("p", "slide=kh", "8"),
            row("p", "slide=kh stages=2", "1", "wrong"),
            row("q", "slide=kh", "5"),
            row("r", "stages=3", "10"),
            row("r", "slide=kh", "20"),
        ]
    )
    lines = table.splitlines()[2:]
    assert lines[0] == "| `p` | fwd | 16 | 8 | 2.00 |"
    assert lines[1] == "| `r` | fwd | 10 | 20 | 0.50 |"
    assert lines[2].endswith("| 1.00 |") and len(lines) == 3  # q has nothing to compare with


def test_quantised_models() -> None:
    row = {
        "model": "m",
        "kind": "int8",
        "setting": "folded",
        "ms": "2",
        "convolutions": "53",
        "left": "1",
        "kernels": "",
        "regions": "",
        "other": "0",
        "elements": "9",
        "off": "1e-2",
    }
    bf16 = [row | {"kind": "torch", "setting": "eager", "ms": "3"}, row | {"kind": "bf16", "ms": "1"}]
    found = quantized_table([*bf16, row]).splitlines()
    assert len(found) == 4 and found[2].startswith("| m | bf16 | folded | 1 | 3.00 | 1.00 | - |")
    assert found[3] == "| m | int8 | folded | 2 | 1.50 | 0.50 | - | 1 | 0 of 9 | 1e-2 |"
    compiled = row | {"setting": "compiled", "kernels": "57", "regions": "1", "elements": "0"}
    assert "| compiled | 2 | - | - | 57 + 1 | 1 | - |" in quantized_table([*bf16, compiled])
    old = {k: v for k, v in row.items() if k not in ("setting", "kernels", "regions")} | {"bf16_ms": "3"}
    assert "| m | int8 | eager | 2 | 1.50 | - | - | 1 | 0 of 9 |" in quantized_table([old])
    losses = [{"step": str(i), "fp8": f"{9 - i}", "bf16": f"{8 - i}"} for i in range(7)]
    assert "| fp8 | 9 | 8 | 7 | 5 | 4 | 3 |" in training_table(losses)
    assert training_table([]) == ""
