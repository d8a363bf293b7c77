"""Text forms of layouts, as (dimension, size, stride) triples: layout.py wraps them.

    4n2c7h7w32n32c          sizes and dims from outermost to innermost, gapless; ``+128``: offset
    8n@4096 64c@64          the same with the stride of each block (commas may replace the spaces)
    strides(4096,64,8,1)    one stride per dim of the given shape, ``+128``: offset
    nhwc  hwio  acdb        gapless, in this order
    axb                     the same, x stands for all dims that are not named
    nChw16c  NChw32n32c     a capital is a dim that is split: its inner blocks follow in order
    N(C/4)HW4               NChw-style spelling of nChw4c
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transconv.errors import LayoutError
from transconv.ir.rules.names import why_not_text

Triple = tuple[int, int, int]  # dimension, size, stride in elements
Parsed = tuple[int, list[Triple], int]  # number of dims, blocks, offset

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ACTIVATION = "ncdhw"
_WEIGHT = "goidhw"

_SIZED = re.compile(r"(?:\d+[a-z])+")
_EXPLICIT = re.compile(r"\d+[a-z]@-?\d+(?:[ ,]+\d+[a-z]@-?\d+)*")
_STRIDES = re.compile(r"strides\((-?\d+(?:,-?\d+)*)\)")
_TAG = re.compile(r"([A-Za-z]+)((?:\d+[a-z])*)")
_DIVIDED = re.compile(r"([A-Z]*)\(?([A-Z])/(\d+)\)?([A-Z]*?)(\d+)")
_OFFSET = re.compile(r"(.*?[^@\s])\s*([+-]\d+)")
_FORMS = ("a form such as nhwc, nChw16c, aBcd16b, axb, N(C/4)HW4, 4n2c7h7w32n32c, 8a@64 8b@8, "
          "or strides(64,8,1)")


def layout_text(blocks: Sequence[Triple], packed: bool, offset: int, letters: str) -> str:
    """Print blocks; strides are shown unless ``packed`` says that they follow from the sizes."""
    if packed:
        text = "".join(f"{size}{letters[dim]}" for dim, size, _ in blocks)
    else:
        text = " ".join(f"{size}{letters[dim]}@{stride}" for dim, size, stride in blocks)
    return (text or "scalar") + (f"{offset:+d}" if offset else "")


def layout_tag(blocks: Sequence[Triple], ndims: int, letters: str) -> str | None:
    """The tag of packed blocks, or None unless the outermost blocks of all dims come first."""
    outer, inner = blocks[:ndims], blocks[ndims:]
    if sorted(dim for dim, _, _ in outer) != list(range(ndims)):
        return None
    split = {dim for dim, _, _ in inner}
    names = [letters[dim].upper() if dim in split else letters[dim] for dim, _, _ in outer]
    return "".join(names) + "".join(f"{size}{letters[dim]}" for dim, size, _ in inner)


def parse_blocks(text: str, shape: Sequence[int] | None, letters: str | None) -> Parsed:
    """Read any of the forms. Raises LayoutError, with a message of one line."""
    if not text.isascii():
        raise LayoutError(f"layout '{text}': {why_not_text(text)}")
    body, offset = text.strip(), 0
    if found := _OFFSET.fullmatch(body):
        body, offset = found.group(1), int(found.group(2))
    if found := _STRIDES.fullmatch(body):
        ndims, blocks = _from_strides(text, [int(s) for s in found.group(1).split(",")], shape)
    elif body == "scalar":
        ndims, blocks = 0, []
    elif _SIZED.fullmatch(body) or _EXPLICIT.fullmatch(body):
        ndims, blocks = _from_sizes(text, body, letters)
    else:
        ndims, blocks = _from_tag(text, _undivided(text, body), shape, letters)
    if shape is not None:
        _check_covers(text, blocks, ndims, shape)
    return ndims, blocks, offset


def _from_strides(text: str, strides: list[int],
                  shape: Sequence[int] | None) -> tuple[int, list[Triple]]:
    shape = _need_shape(text, shape)
    if len(strides) != len(shape):
        raise LayoutError(f"layout '{text}' has {len(strides)} strides; "
                          f"expected {len(shape)}, for shape {tuple(shape)}")
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d))
    return len(shape), [(d, int(shape[d]), strides[d]) for d in order]


def _from_sizes(text: str, body: str, letters: str | None) -> tuple[int, list[Triple]]:
    items = re.findall(r"(\d+)([a-z])(?:@(-?\d+))?", body)
    letters = letters or _guess(text, {letter for _, letter, _ in items})
    dims = [_dim(text, letter, letters) for _, letter, _ in items]
    missing = set(range(len(letters))) - set(dims)
    if missing:
        raise LayoutError(f"layout '{text}' has no block of "
                          f"{' '.join(letters[d] for d in sorted(missing))}; expected every dim of "
                          f"{letters}")
    sizes = [int(size) for size, _, _ in items]
    strides = [int(stride) for _, _, stride in items] if "@" in body else _packed(sizes)
    return len(letters), list(zip(dims, sizes, strides, strict=True))


def _undivided(text: str, body: str) -> str:
    """``N(C/4)HW4`` as ``nChw4c``; any other form unchanged."""
    found = _DIVIDED.fullmatch(body)
    if found is None:
        return body
    before, dim, size, after, inner = found.groups()
    if size != inner:
        raise LayoutError(f"layout '{text}' divides {dim} by {size} but ends in {inner}; "
                          f"expected both to be the size of one block")
    return f"{before.lower()}{dim}{after.lower()}{size}{dim.lower()}"


def _from_tag(text: str, body: str, shape: Sequence[int] | None,
              letters: str | None) -> tuple[int, list[Triple]]:
    found = _TAG.fullmatch(body)
    if found is None:
        raise LayoutError(f"layout '{text}' is unreadable; expected {_FORMS}")
    shape = _need_shape(text, shape)
    letters = _letters_of_tag(text, body, letters, len(shape))
    outer = _expand(text, found.group(1), letters)
    dims = [_dim(text, name.lower(), letters) for name in outer]
    if sorted(dims) != list(range(len(shape))):
        raise LayoutError(f"layout '{text}' names the dims {' '.join(outer)}; "
                          f"expected each of {' '.join(letters[:len(shape)])} once")
    inner = [(_dim(text, letter, letters), int(size))
             for size, letter in re.findall(r"(\d+)([a-z])", found.group(2))]
    capitals = {d for d, name in zip(dims, outer, strict=True) if name.isupper()}
    split = {d for d, _ in inner}
    for d in capitals ^ split:
        wanted = f"{letters[d]} with no block" if d in capitals else f"{letters[d].upper()}"
        raise LayoutError(f"layout '{text}' splits {letters[d]} in one place only; "
                          f"expected {wanted}, because capitals are dims that have inner blocks")
    if any(size < 1 for _, size in inner):
        raise LayoutError(f"layout '{text}' has a block of size 0; expected at least 1")
    return len(shape), _split(dims, inner, shape)


def _split(dims: list[int], inner: list[tuple[int, int]], shape: Sequence[int]) -> list[Triple]:
    per_dim = [1] * len(shape)
    for d, size in inner:
        per_dim[d] *= size
    order = [(d, -(-int(shape[d]) // per_dim[d])) for d in dims] + inner
    strides = _packed([size for _, size in order])
    return [(d, size, stride) for (d, size), stride in zip(order, strides, strict=True)]


def _letters_of_tag(text: str, body: str, letters: str | None, ndims: int) -> str:
    """The dimension letters of a tag: a, b, c ... if it uses those, else ``letters``, else a guess."""
    used = {c for c in body.lower() if c.isalpha()}
    alphabet = LETTERS[:ndims]
    if "x" in used or used == set(alphabet):
        return alphabet
    return letters or _guess(text, used)


def _guess(text: str, used: set[str]) -> str:
    for known in (LETTERS[:len(used)], _ACTIVATION, _WEIGHT):
        names = "".join(c for c in known if c in used)
        if len(names) == len(used) and (known[0] in names or "o" in names):
            return names
    raise LayoutError(f"layout '{text}' mixes the dims {' '.join(sorted(used))}; "
                      f"expected letters of abcdef, of {_ACTIVATION}, or of {_WEIGHT}")


def _expand(text: str, outer: str, letters: str) -> list[str]:
    """Replace the meta-letter x by all dims that the tag does not name, in order."""
    if outer.count("x") > 1:
        raise LayoutError(f"layout '{text}' has x twice; expected it once, for all unnamed dims")
    named = set(outer.lower())
    rest = "".join(c for c in letters if c not in named)
    return list(outer.replace("x", rest) if "x" in outer else outer)


def _dim(text: str, letter: str, letters: str) -> int:
    at = letters.find(letter)
    if at < 0:
        raise LayoutError(f"layout '{text}' has an unknown dim '{letter}'; "
                          f"expected one of {' '.join(letters)}")
    return at


def _packed(sizes: Iterable[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for size in reversed(list(sizes)):
        strides.append(step)
        step *= max(1, size)
    return strides[::-1]


def _need_shape(text: str, shape: Sequence[int] | None) -> Sequence[int]:
    if shape is None:
        raise LayoutError(f"layout '{text}' has no sizes; expected a shape beside it, "
                          "or a form such as 4n2c7h7w32n32c")
    return shape


def _check_covers(text: str, blocks: list[Triple], ndims: int, shape: Sequence[int]) -> None:
    if ndims != len(shape):
        raise LayoutError(f"layout '{text}' has {ndims} dims; expected {len(shape)}, "
                          f"for shape {tuple(shape)}")
    extents = [1] * ndims
    for d, size, _ in blocks:
        extents[d] *= size
    if any(extent < size for extent, size in zip(extents, shape, strict=True)):
        raise LayoutError(f"layout '{text}' holds {tuple(extents)} elements; "
                          f"expected at least the shape {tuple(shape)}")
