"""Patches of images with their columns innermost: the tiles that are proposed for a GPU, at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from transconv.conv import ConvProblem, Prop, build, computes
from transconv.selection.proposals import heuristics
from transconv.support import knobs
from transconv.target import TARGETS

SIZES = {  # image, features, filters, window, stride, padding
    "14": (30, 2, 5, 14, 14, 0),
    "4": (23, 3, 6, 4, 4, 0),
    "8": (17, 5, 3, 8, 9, 2),
}


@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("name", "prop"),
    [(n, prop) for n in SIZES for prop in Prop if (n, prop) != ("8", Prop.BWD_D)],  # has a kernel a phase
)
def test_tiles_in_the_order_of_memory_are_torchs(name: str, prop: Prop) -> None:
    """Whole numbers of few bits, so that all sums are exact."""
    i, ic, oc, k, s, pad = SIZES[name]
    o = (i + 2 * pad - k) // s + 1
    problem = ConvProblem.parse(f"mb3ic{ic}ih{i}oc{oc}oh{o}kh{k}sh{s}ph{pad} dt=f16")
    torch.manual_seed(0)
    shapes = {"src": (3, ic, i, i), "wei": (oc, ic, k, k), "dst": (3, oc, o, o)}
    given = {n: torch.randint(-2, 3, shape).half() for n, shape in shapes.items()}
    src, wei, dst = (given[n].double() for n in ("src", "wei", "dst"))
    want = {
        Prop.FWD: lambda: torch.nn.functional.conv2d(src, wei, stride=s, padding=pad),
        Prop.BWD_D: lambda: conv2d_input(src.shape, wei, dst, stride=s, padding=pad),
        Prop.BWD_W: lambda: conv2d_weight(src, wei.shape, dst, stride=s, padding=pad),
    }[prop]()
    letter = "r" if prop is Prop.BWD_D else "k"
    found = heuristics.candidates(computes(problem, prop)[0], TARGETS["sm_90"], 400)
    patches = [c for c in found if any(b.axes[-2:] == (f"{letter}h", f"{letter}w") for b in c.blocks)]
    assert len(patches) > 2
    for schedule in patches[:: max(1, len(patches) // 2)]:
        given[prop.result] = torch.full(shapes[prop.result], float("nan")).half()
        build(problem, prop, TARGETS["interpreter"], schedule).launch(**given)
        assert torch.equal(given[prop.result].double(), want), schedule
