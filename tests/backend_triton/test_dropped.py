"""A choice between 0 and a sum of the matrix unit: ptxas drops the products, unless an addition stands
between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transconv.backend_triton.miscompiles import drops
from transconv.backend_triton.offline_compilation import Resources, compile_offline
from transconv.compute import parse
from transconv.runtime import build_compute, job_of
from transconv.schedule.schedule import Schedule
from transconv.target.records import TARGETS

# The gradient of a ReLU in the epilogue of a product: all elements were 0 on an H100.
CHOSEN = parse("""compute chosen
    tensor X bf16 [4096, 512]
    tensor W bf16 [256, 512]
    tensor G boolean [4096, 256]
    tensor Y f32 [4096, 256]
    axes   m=4096 n=256 | k=512
    read   x = X[m, k]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    read   g = G[m, n]
    let    y = where(g, 0.0, s)
    store  Y[m, n] = y""")
SCHEDULE = "m:128 n:128 k:64 | mma | a=gather b=gather | swap=1 stages=3 warps=8"
SUM = ".f32.bf16.bf16 {%r1,%r2}, %rd4, %rd5, p, 1, 1, 0, 0;\n"
NOTHING = "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;\n"


def test_products_are_kept() -> None:
    chip = TARGETS["sm_90"]
    (step,) = build_compute(CHOSEN, chip, Schedule.parse(SCHEDULE)).steps
    job = job_of(step, chip, words=False)
    assert "tl.where(g, 0.0, s + 0.0)" in job.source
    right, wrong = compile_offline([job, replace(job, source=job.source.replace("s + 0.0", "s"))])
    assert isinstance(right, Resources) and isinstance(wrong, Resources)
    assert not right.flaw
    assert "dropped products" in wrong.flaw


@pytest.mark.parametrize(
    ("ptx", "sass", "wrong"),
    [
        ("selp.b32 \t%r7, 0, %r2, %p75;", NOTHING, True),
        ("selp.b32 \t%r7, %r1, 0, %p75;", NOTHING, True),
        ("and.b32 \t%r7, %r1, %r9;", NOTHING, True),
        (
            "selp.b32 \t%r7, 0, %r2, %p75;",
            "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;\n",
            False,
        ),
        ("selp.b32 \t%r7, 0, %r3, %p75;", NOTHING, False),
    ],
)
def test_texts(ptx: str, sass: str, wrong: bool) -> None:
    assert drops({"ptx": "wgmma.mma_async.sync.aligned.m64n8k16" + SUM + ptx, "sass": sass}) == wrong
    assert not drops({"ptx": ptx, "sass": sass})
