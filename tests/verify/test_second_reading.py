"""Descriptors and tags are read alike by the package and by an independent reader."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.verify.second_reading import Shape, all_offsets, offsets, shape_of
from transconv.conv import descriptor
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.verify.data import Guarded
from transconv.verify.fuzz import conv_problems

ANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
TAGS = (
    "abx",
    "axb",
    "nchw",
    "nhwc",
    "nChw8c",
    "aBx16b",
    "ABx8a4b",
    "abx:xba:axb",
    "bax:abx:xab",
    "nhwc:hwio:nchw",
    "nChw8c:OIhw8i4o:nChw4c",
    "abx:strides(1000,27,9,1):axb",
)
GROUPED = ("nhwc:ghwoi:nhwc", "nchw:gOIhw4i4o:nhwc", "abx:acxb:abx")


def first(p: ConvProblem) -> Shape:
    """What the package reads."""
    return Shape(
        p.mb, p.g, p.ic, p.oc, p.i, p.o, p.k, p.stride, p.pad_lo, tuple(n - 1 for n in p.dilation)
    )


def places(p: ConvProblem, name: str) -> torch.Tensor:
    """Where the package puts the elements, read as the checks read them."""
    layout = p.specs[name].layout
    return Guarded(torch.arange(max(1, layout.span)), layout, p.shapes[name], 0).view


def agree(text: str) -> None:
    p, (shape, *words) = ConvProblem.parse(text), text.split()
    second = shape_of(shape)
    assert first(p) == second
    said = dict(word.split("=", 1) for word in words)
    for name, want in all_offsets(said.get("tag", "nchw"), second, "g" in shape.split("ic")[0]).items():
        assert torch.equal(places(p, name), want), (text, name)


@st.composite
def texts(draws: Any) -> str:
    """A descriptor that leaves out what follows from the rest, or says it, in any order."""
    ndims = draws(st.integers(1, 3))
    given_axes = "dhw"[3 - ndims :][: 1 if draws(st.booleans()) else 3]
    words = [f"mb{draws(st.integers(1, 5))}"] if draws(st.booleans()) else []
    g = draws(st.sampled_from((0, 0, 1, 2, 3)))
    words += [f"g{g}"] if g else []
    words += [f"{c}{max(1, g) * draws(st.integers(1, 9))}" for c in ("ic", "oc")]
    for x in given_axes:
        k, s, d, p = (draws(st.integers(*r)) for r in ((1, 4), (1, 3), (0, 2), (0, 3)))
        span = k + (k - 1) * d
        i = draws(st.integers(max(1, span - 2 * p), span + 9))
        words += [f"i{x}{i}", f"k{x}{k}"]
        words += [f"s{x}{s}"] if s > 1 or draws(st.booleans()) else []
        words += [f"d{x}{d}"] if d or draws(st.booleans()) else []
        match draws(st.sampled_from(("pad", "pad", "neither", "both", "output"))):
            case "pad":
                words.append(f"p{x}{p}")
            case "neither" if i < span:
                words.append(f"p{x}{p}")
            case "both":
                words += [f"p{x}{p}", f"o{x}{draws(st.integers(1, 9))}"]
            case "output":
                least = max(1, -(-(i - span) // s) + 1)  # no image is left unused on both sides
                words.append(f"o{x}{draws(st.integers(least, least + 4))}")
    draws(st.randoms(use_true_random=False)).shuffle(words)
    return "_".join(words) if draws(st.booleans()) else "".join(words)


@ANY
@given(texts())
def test_descriptors(text: str) -> None:
    assert first(ConvProblem.parse(text)) == shape_of(text)


@ANY
@given(st.integers(0, 10**6))
def test_drawn_problems(seed: int) -> None:
    """With their layouts; one block of a dimension is what the second reading knows of ``4n@1``."""
    text = str(conv_problems.drawn(Random(seed), Prop.FWD))
    if "@" not in text:
        agree(text)


@pytest.mark.parametrize("tag", TAGS + GROUPED)
def test_tags(tag: str) -> None:
    agree(f"{'g2' * (tag in GROUPED)}mb3ic10ih5iw4oc16oh5ow4kh3kw3ph1 tag={tag}")


@pytest.mark.parametrize(
    ("tag", "memory"),
    [("abx", torch.contiguous_format), ("axb", torch.channels_last), ("axb", torch.channels_last_3d)],
)
def test_the_second_reading_is_torchs(tag: str, memory: torch.memory_format) -> None:
    shape = (3, 5, 4, 2, 6)[: 5 if memory is torch.channels_last_3d else 4]
    like = torch.empty(shape).to(memory_format=memory)
    want = torch.arange(like.numel()).as_strided(shape, like.stride())
    assert torch.equal(offsets(tag, shape, "nc" + "dhw"[5 - len(shape) :]), want)
    p = ConvProblem.make(3, 5, 4, shape[2:], (1,) * (len(shape) - 2)).with_layout(tag)
    assert torch.equal(places(p, "src"), want) and p.src.layout.strides() == like.stride()


@settings(ANY, max_examples=25)
@given(texts())
def test_outputs_are_torchs(text: str) -> None:
    """Where padding is the same on both sides and nothing is cut off."""
    p = ConvProblem.parse(text)
    if p.pad_lo != p.pad_hi:
        return
    function = [torch.conv1d, torch.conv2d, torch.conv3d][p.ndims - 1]
    src, wei = (torch.empty(p.shapes[name], device="meta") for name in ("src", "wei"))
    made = function(src, wei, None, p.stride, p.pad_lo, p.dilation, p.g)
    assert made.shape == p.shapes["dst"]


# What a mistake in each table and default would look like: the text that shows it.
BUGS = {
    "o and i of weights are swapped": (
        descriptor,
        "_ACTIVATION_TO_WEIGHT",
        str.maketrans("nNcC", "iIoO"),
        "ic4ih5oc6oh5kh1 tag=nhcw",
    ),
    "channels last is channels first": (
        descriptor,
        "_ANY_NDIMS",
        {"nhwc": "abx"},
        "ic4ih5oc6kh3 tag=nhwc",
    ),
    "dilation 1 is dense": (
        descriptor._Axis,
        "reach",
        property(lambda a: (a.k - 1) * a.d + 1),
        "ic4ih9oc6kh3dh1",
    ),
    "all padding is in front": (
        descriptor,
        "default_pad",
        lambda i, o, k, stride, dilation: max(0, (o - 1) * stride - i + (k - 1) * dilation + 1),
        "ic4ih9oc6oh9kh3",
    ),
    "one image": (descriptor, "DEFAULT_MB", 1, "ic4ih9oc6kh3"),
}


@pytest.mark.parametrize("what", BUGS)
def test_a_bug_in_the_first_reading(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, spoiled, text = BUGS[what]
    agree(text)
    monkeypatch.setattr(owner, name, spoiled)
    with pytest.raises(AssertionError):
        agree(text)
