"""Shared memory for what warps exchange of statistics: schedules that lack it are refused."""

from __future__ import annotations

import pytest

from transconv.compute import parse
from transconv.schedule import Schedule, why_not
from transconv.target import Target

TEXT = """compute pixels
    tensor X bf16 [60, 104, 384]
    tensor W bf16 [384, 384]
    tensor R bf16 [60, 104, 384]
    axes   h=60 w=104 o=384 | c=384
    read   x = X[h, w, c]
    read   y = W[o, c]
    let    s = sum(x*y; c)
    store  Y[h, w, o] = bf16(s)
    store  Z[h, w] sum= s*s
"""
READ = TEXT.replace(
    "    store  Y[h, w, o] = bf16(s)", "    read   r = R[h, w, o]\n    store  Y[h, w, o] = bf16(s + r)"
)


@pytest.mark.parametrize(
    ("text", "schedule", "stages"),
    [
        # Two consumers, each with a value of its 4 warps for 128 pixels: 4096 bytes more.
        (
            TEXT.replace("    tensor R bf16 [60, 104, 384]\n", ""),
            "h:16 w:8 o:128 c:64 | mma | a=box b=box c=box "
            "swap=1 programs=130 consumers=2 warps=4 via=gluon",
            5,
        ),
        (READ, "h:32 w:8 o:128 c:32 | mma | a=box b=box c=box swap=1 programs=132 warps=8", 6),
    ],
)
def test_too_many_stages(text: str, schedule: str, stages: int) -> None:
    """Of one stage more ptxas would say what the GPU does not have."""
    compute, sm90 = parse(text), Target.parse("sm_90")
    said = why_not(Schedule.parse(f"{schedule} stages={stages}"), compute, sm90)
    assert said is not None and "bytes of shared memory" in said
    assert why_not(Schedule.parse(f"{schedule} stages={stages - 1}"), compute, sm90) is None
    plain = parse("\n".join(line for line in text.splitlines() if "Z[" not in line))
    assert why_not(Schedule.parse(f"{schedule} stages={stages}"), plain, sm90) is None
