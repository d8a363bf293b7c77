"""The layout words of a problem's text: tags of src, wei and dst read into layouts, and printed.

One tag may apply to the three tensors: ``nhwc`` gives weights ``ohwi``, and in 1D means ``nwc``. Three are
written ``src:wei:dst``. Weights are (oc, ic/g, *k); if a problem has groups, a weight tag may also name
them (``goihw``, ``hwigo``, ``abxc``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from transconv.conv.problem.descriptor import SPATIAL
from transconv.errors import LayoutError
from transconv.ir import DType, Layout, LayoutBlock

Shape = tuple[int, ...]

# Plain orders for any number of axes, which have the 2D spelling.
_ANY_NDIMS = {"": "abx", "any": "abx", "nchw": "abx", "nhwc": "axb"}
_ACTIVATION_TO_WEIGHT = str.maketrans("nNcC", "oOiI")


def read_tags(texts: str | Sequence[str | Layout], dtypes: Sequence[DType], shapes: Sequence[Shape],
              groups: int = 0) -> list[Layout]:
    """Layouts of src, wei and dst. With ``groups`` above 0 a weight tag may name the group axis. Raises
    LayoutError."""
    if isinstance(texts, str):
        texts = texts.split(":")
        if len(texts) == 1:
            tag = _ANY_NDIMS.get(texts[0], texts[0])
            texts = [tag, for_weights(tag), tag]
    if len(texts) != 3:
        raise LayoutError(f"tag '{':'.join(map(str, texts))}' has {len(texts)} parts; "
                          "expected one tag, or three as src:wei:dst")
    found = []
    for text, dtype, shape, is_wei in zip(texts, dtypes, shapes, (False, True, False), strict=True):
        if isinstance(text, Layout):
            found.append(replace(text, dtype=dtype))
        else:
            found.append(_read(text, dtype, shape, groups if is_wei else 0, is_wei))
    return found


def for_weights(tag: str) -> str:
    """The tag of weights for a tag of activations: o for n and i for c. Alphabetical tags stay."""
    return tag.translate(_ACTIVATION_TO_WEIGHT) if "n" in tag.lower() else tag


def _read(tag: str, dtype: DType, shape: Shape, groups: int, is_wei: bool) -> Layout:
    tag = _ANY_NDIMS.get(tag, tag)
    spatial = SPATIAL[5 - len(shape):]
    if groups and _names_groups(tag, len(shape)):
        grouped = (groups, shape[0] // groups, *shape[1:])
        return _merge_groups(tag, Layout.parse(tag, dtype, grouped, "goi" + spatial))
    return Layout.parse(tag, dtype, shape, ("oi" if is_wei else "nc") + spatial)


def _names_groups(tag: str, ndims: int) -> bool:
    if "strides" in tag or "@" in tag:
        return False
    letters = {c for c in tag.lower() if c.isalpha()}
    if "g" in letters or "x" in letters:
        return "g" in letters or "c" in letters
    return "abcdef"[ndims] in letters and "a" in letters


def _merge_groups(tag: str, grouped: Layout) -> Layout:
    """(g, o, i, *k) as (g*o, i, *k): the output channel over all groups is g*ocg + o."""
    dims = [b.dim for b in grouped.blocks if b.dim < 2 and b.size > 1]
    if dims != sorted(dims):
        raise LayoutError(f"tag '{tag}' puts output channels outside of groups; "
                          "expected a tag with g before o")
    kept = [b for b in grouped.blocks if b.dim > 1 or b.size != 1]
    blocks = [LayoutBlock(max(0, b.dim - 1), b.size, b.stride) for b in kept]
    if all(b.dim for b in blocks):
        step = max((b.size * b.stride for b in blocks), default=1)
        blocks.insert(0, LayoutBlock(0, 1, step))
    return Layout(grouped.dtype, grouped.ndims - 1, tuple(_fuse(blocks)), grouped.offset)


def _fuse(blocks: list[LayoutBlock]) -> list[LayoutBlock]:
    """Merge adjacent blocks of dim 0 that together have one stride."""
    fused: list[LayoutBlock] = []
    for b in blocks:
        last = fused[-1] if fused else None
        if last and b.dim == last.dim == 0 and last.stride == b.size * b.stride:
            fused[-1] = LayoutBlock(0, last.size * b.size, b.stride)
        else:
            fused.append(b)
    return fused


def write_tags(layouts: Sequence[Layout], shapes: Sequence[Shape]) -> str:
    """The shortest text that ``read_tags`` reads back; empty if all three are dense in the order of their
    dims."""
    tags = [_write(layout, shape, is_wei) for layout, shape, is_wei
            in zip(layouts, shapes, (False, True, False), strict=True)]
    src, wei, dst = tags
    if src == dst and wei == for_weights(src) and not src[0].isdigit() and "(" not in src:
        return "" if src == "nc" + SPATIAL[5 - len(shapes[0]):] else src
    return ":".join(tags)


@lru_cache(maxsize=1024)  # the sizes that a layer's kernels are made for have one weight
def _write(layout: Layout, shape: Shape, is_wei: bool) -> str:
    letters = ("oi" if is_wei else "nc") + SPATIAL[5 - len(shape):]
    strides = layout.strides()
    candidates = [layout.tag(letters) or ""]
    if strides is not None and 0 <= layout.offset:
        offset = f"+{layout.offset}" if layout.offset else ""
        candidates.append(f"strides({','.join(map(str, strides))}){offset}")
    for text in filter(None, candidates):
        try:
            if Layout.parse(text, layout.dtype, shape, letters) is layout:
                return text
        except LayoutError:
            continue
    return layout.text(letters).replace(" ", ",")
