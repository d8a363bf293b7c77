"""Problems read a second time: benchdnn's descriptors and oneDNN's tags, from their grammar alone.

Nothing of the package is used, so that a mistake in its reading, which the oracle shares with the
kernels, is seen. Where elements lie is told by torch: the offsets are counted out in the order of the tag,
and dimensions are permuted back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Shape:
    """The numbers of a descriptor, spatial ones in the order d, h, w."""

    mb: int
    g: int
    ic: int
    oc: int
    i: tuple[int, ...]
    o: tuple[int, ...]
    k: tuple[int, ...]
    s: tuple[int, ...]
    p: tuple[int, ...]
    d: tuple[int, ...]  # 0 is dense

    @property
    def src(self) -> tuple[int, ...]:
        return self.mb, self.ic, *self.i

    @property
    def wei(self) -> tuple[int, ...]:
        return self.oc, self.ic // self.g, *self.k

    @property
    def dst(self) -> tuple[int, ...]:
        return self.mb, self.oc, *self.o


def shape_of(text: str) -> Shape:
    """Read a descriptor: w alone is 1D, h without w is square, d alone is a cube."""
    said = {key: int(number) for key, number in re.findall(r"([a-z]+)(\d+)", text.split('n"')[0])}
    last = next(x for x in "dhw" if f"i{x}" in said)
    names = "dhw"["dhw".index(last) :]
    axes = []
    for x in names:
        x = x if f"i{x}" in said else last
        i, k = said[f"i{x}"], said[f"k{x}"]
        s, d = said.get(f"s{x}", 1), said.get(f"d{x}", 0)
        span = k + (k - 1) * d
        if f"o{x}" not in said:
            p = said.get(f"p{x}", 0)
            o = (i + 2 * p - span) // s + 1
        else:
            o = said[f"o{x}"]
            p = said.get(f"p{x}", int(((o - 1) * s + span - i) / 2))
        axes.append((i, o, k, s, p, d))
    i_, o_, k_, s_, p_, d_ = zip(*axes, strict=True)
    return Shape(said.get("mb", 2), said.get("g", 1), said["ic"], said["oc"], i_, o_, k_, s_, p_, d_)


def offsets(tag: str, shape: tuple[int, ...], letters: str) -> torch.Tensor:
    """Where each element lies. ``letters``: the names of the dimensions, such as ``nchw``."""
    tag, _, start = tag.partition("+")
    if tag.startswith("strides("):
        strides = [int(n) for n in tag[8:-1].split(",")]
        return _along(shape, strides) + int(start or 0)
    if "@" in tag:
        found = {c: int(step) for _, c, step in re.findall(r"(\d+)([a-z])@(\d+)", tag)}
        assert len(found) == tag.count("@"), "one block for each dimension"
        return _along(shape, [found[c] for c in letters]) + int(start or 0)
    words = re.findall(r"(\d*)([A-Za-z])", _spelled(tag, letters))
    inner: dict[str, int] = {}
    for size, c in words:
        if size:
            inner[c.lower()] = inner.get(c.lower(), 1) * int(size)
    padded = [-(-n // inner.get(c, 1)) * inner.get(c, 1) for n, c in zip(shape, letters, strict=True)]
    extent = [
        int(size) if size else padded[letters.index(c.lower())] // inner.get(c.lower(), 1)
        for size, c in words
    ]
    counted = torch.arange(prod(extent)).reshape(extent)
    places = [[at for at, (_, c) in enumerate(words) if c.lower() == d] for d in letters]
    whole = counted.permute([at for own in places for at in own]).reshape(padded)
    return whole[tuple(slice(n) for n in shape)] + int(start or 0)


def weight_offsets(tag: str, p: Shape, grouped: bool) -> torch.Tensor:
    """Those of weights (oc, ic/g, *k), whose tag may name the groups."""
    spatial = "dhw"[3 - len(p.k) :]
    names = [c for c in tag.lower() if c.isalpha()]
    if (
        grouped
        and "strides" not in tag
        and "@" not in tag
        and ("g" in names or len(set(names) - {"x"}) + ("x" in names) * len(p.k) == len(p.k) + 3)
    ):
        split = offsets(tag, (p.g, p.oc // p.g, *p.wei[1:]), "goi" + spatial)
        return split.reshape(p.wei)
    return offsets(tag, p.wei, "oi" + spatial)


def all_offsets(tag: str, p: Shape, grouped: bool) -> dict[str, torch.Tensor]:
    """Those of src, wei and dst; one tag stands for the three, and then n is o and c is i of weights."""
    parts = tag.split(":")
    if len(parts) == 1:
        usual = {"nchw": "abx", "nhwc": "axb"}.get(tag, tag)
        renamed = usual.translate(str.maketrans("nNcC", "oOiI")) if "n" in usual.lower() else usual
        parts = [usual, renamed, usual]
    letters = "nc" + "dhw"[3 - len(p.i) :]
    return {
        "src": offsets(parts[0], p.src, letters),
        "wei": weight_offsets(parts[1], p, grouped),
        "dst": offsets(parts[2], p.dst, letters),
    }


def _along(shape: tuple[int, ...], strides: list[int]) -> torch.Tensor:
    grid = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return sum((g * s for g, s in zip(grid, strides, strict=True)), torch.zeros(shape, dtype=torch.int64))


def _spelled(tag: str, letters: str) -> str:
    """A tag in the letters of the dimensions: a, b, ... are the first, the second, x all the others."""
    tag = {"nchw": "abx", "nhwc": "axb"}.get(tag, tag)
    alphabet = "abcde"[: len(letters)] if len(letters) < 6 else "abcdef"
    if "x" not in tag and set(tag.lower()) & set("noghw") - set(alphabet):
        return tag
    first = 3 if "c" in tag.lower() and "x" in tag else 2
    made = ""
    for c in tag:
        if c == "x":
            made += letters[first:]
        elif c.lower() in alphabet:
            named = letters[alphabet.index(c.lower())]
            made += named.upper() if c.isupper() else named
        else:
            made += c
    return made
