"""Tables of trials and of quantised models."""

from __future__ import annotations

from bench.quantized_table import quantized_table, training_table
from bench.slide_table import slide_table


def test_shared_boxes_are_beside_the_best_without() -> None:
    def row(problem: str, words: str, us: str, verdict: str = "right") -> dict[str, str]:
        return {"problem": problem, "direction": "fwd", "schedule": words, "us": us, "verdict": verdict}

    table = slide_table([row("p", "stages=3", "20"), row("p", "stages=4", "16"), row("p", "slide=kh", "8"),
                         row("p", "slide=kh stages=2", "1", "wrong"), row("q", "slide=kh", "5"),
                         row("r", "stages=3", "10"), row("r", "slide=kh", "20")])
    lines = table.splitlines()[2:]
    assert lines[0] == "| `p` | fwd | 16 | 8 | 2.00 |"
    assert lines[1] == "| `r` | fwd | 10 | 20 | 0.50 |"
    assert lines[2].endswith("| 1.00 |") and len(lines) == 3  # q has nothing to compare with


def test_quantised_models() -> None:
    row = {"model": "m", "kind": "int8", "ms": "2", "bf16_ms": "3", "convolutions": "53", "left": "1",
           "other": "0", "elements": "9", "off": "1e-2"}
    assert "| m | int8 | 2 | 3 | 1.50 | 53 | 1 | 0 of 9 | 1e-2 |" in quantized_table([row])
    assert "| 1.50 | 53 | 1 | - |" in quantized_table([row | {"elements": "0"}])
    losses = [{"step": str(i), "fp8": f"{9 - i}", "bf16": f"{8 - i}"} for i in range(7)]
    assert "| fp8 | 9 | 8 | 7 | 5 | 4 | 3 |" in training_table(losses)
    assert training_table([]) == ""
