"""Rows of ``CALLS`` for words of four bytes: bytes of up to four numbers as a word, and the products of
two words added to a sum, which NVIDIA's chips compute at once (``dp4a``); and for the floats of a code,
an integer that memory holds in a byte or half of one.

A thread that holds four neighbouring elements of each number transposes them, four words by four: eight
permutations of bytes. So the helpers ask for four elements of 8 bits at a time (``pack=4``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from transconv.ir.dtype import DType, i8, u8

Array = np.ndarray[Any, np.dtype[Any]]

BYTES = {n: f"bytes_of_{n}" for n in (1, 2, 3, 4)}
"""The rows that make a word of so many numbers, the first one lowest; what is left of it is 0."""

SHIFTED = {n: f"bytes_from_{n}" for n in (1, 2, 3)}
"""The rows that take a word from so many bytes on, of two words that follow one another."""

_LETTERS = "abcd"
_BYTES = '''
@{{jit}}
def bytes_of_{n}({params}):
    """{what}, the first one lowest."""
    return {{tl}}.inline_asm_elementwise(
        "{{{{ .reg .b32 z, p, q, r, s; mov.b32 z, 0; {asm}}}}}",
        "=&r,=&r,=&r,=&r,{r}", [{params}], dtype={{tl}}.int32, is_pure=True, pack=4)
'''
_PRODUCTS = '''
@{{jit}}
def products_of_{left}_{right}(a, b, sum):
    """The products of the bytes of a and b, of {left} and {right}, added to sum."""
    return {{tl}}.inline_asm_elementwise("dp4a.{x}32.{y}32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sum],
                                       dtype={{tl}}.int32, is_pure=True, pack=1)
'''
_SHIFTED = '''
@{{jit}}
def bytes_from_{n}(a, b):
    """Four bytes of a and of b behind it, from place {n} on."""
    return {{tl}}.inline_asm_elementwise("prmt.b32 $0, $1, $2, {places};", "=r,r,r", [a, b],
                                       dtype={{tl}}.int32, is_pure=True, pack=1)
'''


def bytes_helper(n: int) -> str:
    """The source of the function that makes a word of ``n`` numbers."""
    a, b, c, d = (f"${4 + i}" if i < n else "z" for i in range(4))
    if n == 1:
        asm = [f"${i}, {a}, z, 0x444{i}" for i in range(4)]
    else:
        asm = [f"p, {a}, {b}, 0x5140", f"q, {a}, {b}, 0x7362"]
        asm += [f"r, {c}, {d}, 0x5140", f"s, {c}, {d}, 0x7362"] if n > 2 else ["r, z, z, 0", "s, z, z, 0"]
        asm += ["$0, p, r, 0x5410", "$1, p, r, 0x7632", "$2, q, s, 0x5410", "$3, q, s, 0x7632"]
    return _BYTES.format(
        n=n,
        params=", ".join(_LETTERS[:n]),
        r=",".join("r" * n),
        what=f"The bytes of {n} numbers as a word" if n > 1 else "A byte as a word",
        asm="".join(f"prmt.b32 {x}; " for x in asm),
    )


def products_helper(left: DType, right: DType) -> str:
    """The source of the function that adds the products of two words to a sum."""
    x, y = ("s" if t is i8 else "u" for t in (left, right))
    return _PRODUCTS.format(left=left, right=right, x=x, y=y)


def bytes_in_numpy(*numbers: Array) -> Array:
    """The word of some numbers of 8 bits."""
    parts = np.broadcast_arrays(*(x.astype(np.uint8).astype(np.uint32) for x in numbers))
    word = sum(np.left_shift(x, np.uint32(8 * i)) for i, x in enumerate(parts))
    return np.asarray(word, np.uint32).view(np.int32)


def shifted_helper(n: int) -> str:
    """The source of the function that takes a word from ``n`` bytes on."""
    return _SHIFTED.format(n=n, places=f"0x{n + 3}{n + 2}{n + 1}{n}")


def shifted_in_numpy(n: int) -> Any:
    """The meaning of ``shifted_helper``."""

    def meaning(a: Array, b: Array) -> Array:
        low, high = (np.asarray(x, np.int32).view(np.uint32) for x in np.broadcast_arrays(a, b))
        word = low >> np.uint32(8 * n) | high << np.uint32(32 - 8 * n)
        return word.astype(np.uint32).view(np.int32)

    return meaning


def products_in_numpy(left: DType, right: DType) -> Any:
    """The meaning of ``products_helper``, of which sums wrap around."""

    def meaning(a: Array, b: Array, total: Array) -> Array:
        def each(word: Array, t: DType) -> list[Array]:
            words = np.asarray(word, np.int32).view(np.uint32)
            found = [(words >> np.uint32(8 * i)).astype(np.uint8) for i in range(4)]
            return [x.view(np.int8 if t is i8 else np.uint8).astype(np.int64) for x in found]

        pairs = zip(each(a, left), each(b, right), strict=True)
        wide = sum((x * y for x, y in pairs), np.asarray(total, np.int64))
        return np.asarray(wide).astype(np.int32)

    return meaning


PRODUCTS = {(x, y): f"products_of_{x}_{y}" for x in (i8, u8) for y in (i8, u8)}
"""The rows that add the products of two words to a sum, by the types of their bytes."""

# The bits of f32 of a code: exponents of f4e2m1 begin at 1, those of f32 at 127, and a code has its point
# 22 bits lower. Subnormal codes are 0 and 1.
F4E2M1 = '''
@{jit}
def f4e2m1(code):
    """The float of 4 bits with this code: 0, 0.5, 1, 1.5, 2, 3, 4 and 6; of 8 and more their negatives."""
    size = code & 7
    bits = {tl}.where(size > 1, (size << 22) + 1056964608, size * 1056964608)
    return (bits | (code & 8) << 28).to({tl}.float32, bitcast=True)
'''
F8E8M0 = '''
@{jit}
def f8e8m0(code):
    """2**(code - 127), NaN for 255."""
    bits = {tl}.where(code == 0, 4194304, {tl}.where(code == 255, 2143289344, code << 23))
    return bits.to({tl}.float32, bitcast=True)
'''
EXPONENT = '''
@{jit}
def exponent(x):
    """That of a float of 32 bits as it is held: 127 of 1, 0 below normal numbers, 255 beyond them."""
    return (x.to({tl}.int32, bitcast=True) >> 23) & 255
'''
_F4E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def f4e2m1_in_numpy(code: Array) -> Array:
    """The floats of 4 bits with these codes."""
    return np.asarray(np.concatenate([_F4E2M1, -_F4E2M1])[np.asarray(code, np.int64) & 15])


def f8e8m0_in_numpy(code: Array) -> Array:
    """The powers of two with these codes."""
    code = np.asarray(code, np.int64)
    return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127)).astype(np.float32)


def exponent_in_numpy(x: Array) -> Array:
    """The exponents of floats of 32 bits as they are held."""
    return np.asarray((np.asarray(x, np.float32).view(np.int32) >> 23) & 255)


def in_blocks(elements: Array, held: str, scale: Array, scales: str, axis: int) -> Array:
    """Elements, two of ``f4e2m1`` in a byte, times the scales of equal blocks of them along an axis."""
    if held == "f4e2m1":
        codes = np.asarray(elements, np.uint8)
        halves = np.stack([codes & 15, codes >> 4], axis + 1)
        elements = f4e2m1_in_numpy(
            halves.reshape([n * (1 + (i == axis)) for i, n in enumerate(codes.shape)])
        )
    powers = f8e8m0_in_numpy(scale) if scales == "f8e8m0" else scale
    size = elements.shape[axis] // powers.shape[axis]
    return np.asarray(elements * np.repeat(powers, size, axis), np.float32)


CODES = {"f4e2m1": (f4e2m1_in_numpy, F4E2M1), "f8e8m0": (f8e8m0_in_numpy, F8E8M0)}
"""The rows that make f32 of a code, by the float's name: the meaning and the source."""
