"""Whole numbers of kernels beside NumPy: all pairs of 8-bit numbers, the ends of wider types, numbers of
Python that a type does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transconv.ir import Memory, run
from transconv.kernel import Group, KernelError, KernelFunction
from transconv.kernel.trials.trial import loaded

Array = np.ndarray[Any, np.dtype[Any]]
TWO = (
    "x + y",
    "x - y",
    "x * y",
    "x // y",
    "x % y",
    "x << y",
    "x >> y",
    "x & y",
    "x | y",
    "x ^ y",
    "x < y",
    "x <= y",
    "x > y",
    "x >= y",
    "x == y",
    "x != y",
    "np.maximum(x, y)",
    "np.minimum(x, y)",
    "np.where(x > y, x - y, -x)",
    "np.clip(x, y, 5)",
    "np.clip(x, 3, y)",
    "(x > y) * x - y",
    "np.floor_divide(x, y)",
    "np.remainder(x, y)",
    "np.logical_xor(x > 3, y > 1)",
    "~(x > y)",
    "x.astype(np.int32) // y",
    "x.astype(np.int32) % y",
    "x.astype(np.int32) - y",
)
ONE = (
    "-x",
    "+x",
    "~x",
    "abs(x)",
    "np.sign(x)",
    "np.square(x)",
    "1 - x",
    "x + True",
    "np.fabs(x)",
    "np.isnan(x)",
    "x.astype(np.int8)",
    "x.astype(np.uint8)",
    "x.astype(np.int32).astype(np.uint8)",
    "-(x - 3)",
    "x - (-x)",
    "np.negative(x)",
    "np.invert(x)",
    "np.full_like(x, 3) - x",
    "np.where(x < x, x, -1).astype(np.uint8) + 1",
    "np.where(x < x, x, 100).astype(np.int8) - 5",
)
HELD = (
    "x + {}",
    "x - {}",
    "{} - x",
    "x * {}",
    "x // {}",
    "{} // x",
    "x % {}",
    "{} % x",
    "x << {}",
    "x >> {}",
    "{} << x",
    "{} >> x",
    "x & {}",
    "{} | x",
    "x ^ {}",
    "np.maximum(x, {})",
    "np.minimum({}, x)",
    "np.full_like(x, {})",
)
ANY = (
    "x < {}",
    "x <= {}",
    "x > {}",
    "x >= {}",
    "x == {}",
    "x != {}",
    "{} < x",
    "np.where(x > y, x, {})",
    "np.where(x > y, {}, x)",
)
NUMBERS = (
    -300,
    -129,
    -128,
    -127,
    -17,
    -3,
    -2,
    -1,
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    15,
    16,
    100,
    127,
    128,
    129,
    200,
    255,
    256,
    300,
    1000,
)
POWERS = ("x ** 0", "x ** 1", "x ** 2", "x ** 3", "x ** 9", "x ** 100")
TYPES = (np.int8, np.uint8)
PART = 40  # expressions of one kernel


def with_numbers(forms: Sequence[str], numbers: Sequence[int]) -> list[str]:
    return [f.format(f"({n})" if n < 0 else n) for n in numbers for f in forms]


def holds(dtype: Any, number: int) -> bool:
    return int(np.iinfo(dtype).min) <= number <= int(np.iinfo(dtype).max)


def clips(dtype: Any) -> list[str]:
    """``np.clip`` with limits that NumPy takes: one that no number is beyond is none."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    pairs = itertools.product((low - 300, -5, low, 3), (5, high, 300, 7000))
    return [f"np.clip(x, {a}, {b})" for a, b in pairs if a <= high and b >= low]


def texts(dtype: Any, numbers: Sequence[int]) -> list[str]:
    inside = [n for n in numbers if holds(dtype, n)]
    return [*TWO, *ONE, *POWERS, *clips(dtype), *with_numbers(HELD, inside), *with_numbers(ANY, numbers)]


def source(expressions: Sequence[str]) -> str:
    stores = (f"    group.store(O[{n}, i:], {e})\n" for n, e in enumerate(expressions))
    return (
        "import numpy as np\nfrom transconv.kernel import kernel\n"
        "@kernel\ndef drawn(group, X, Y, O):\n"
        "    i, = group.work_offset()\n"
        "    x = group.load(X[i:], shape=(group.shape[0], X.shape[1]))\n"
        "    y = group.load(Y[i:], shape=(group.shape[0], X.shape[1]))\n" + "".join(stores)
    )


def pairs(dtype: Any) -> tuple[Array, Array]:
    every = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, dtype=np.int64).astype(dtype)
    return np.repeat(every[:, None], len(every), 1), np.repeat(every[None], len(every), 0)


def answers(
    kernel: KernelFunction, x: Array, y: Array, count: int, ways: str
) -> Iterator[tuple[str, Array]]:
    """What engines say."""
    group = Group(len(x), 2 if "device" in ways else len(x))

    def out() -> Array:
        return np.full((count, *x.shape), 77, np.int64)

    def interpreted(stage: int) -> Array:
        made = out()
        low = kernel.lower(group, x, y, made, target="sm_90").stages[stage][1]
        given = {"X": x, "Y": y, "O": made}
        buffers = {t.name: given[t.name].copy().reshape(-1) for t in low.params}
        run(low.at(low.sizes.like) if low.sizes else low, Memory(buffers))
        return buffers["O"].reshape(made.shape)

    made = out()
    kernel.simulate(group, x, y, made)
    yield "simulator", made
    if "triton" in ways:
        made = out()
        kernel(group, x, y, made)
        yield "Triton's interpreter", made
    if "device" in ways:
        tensors = [torch.from_numpy(a).cuda() for a in (x, y, out())]
        kernel(group, *tensors)
        yield "GPU", tensors[2].cpu().numpy()
    if "ir" in ways:
        yield "as written", interpreted(0)
        yield "after all passes", interpreted(-1)


def answered(expressions: Sequence[str], x: Array, y: Array) -> list[str]:
    """Those that NumPy answers: some of its releases refuse -1 beside unsigned numbers in ``where``."""

    def can(e: str) -> bool:
        try:
            eval(e, {"np": np, "x": x, "y": y})
        except OverflowError:
            return False
        return True

    with np.errstate(all="ignore"):
        return [e for e in expressions if can(e)]


def wrong(expressions: Sequence[str], x: Array, y: Array, folder: Path, ways: str = "triton") -> list[str]:
    """Where engines differ from NumPy."""
    found: list[str] = []
    expressions = answered(expressions, x, y)
    assert expressions
    for at in range(0, len(expressions), PART):
        part = expressions[at : at + PART]
        with np.errstate(all="ignore"):
            wanted = [np.asarray(eval(e, {"np": np, "x": x, "y": y})).astype(np.int64) for e in part]
            kernel = loaded(source(part), folder)
            for way, got in answers(kernel, x, y, len(part), ways):
                for e, want, have in zip(part, wanted, got, strict=True):
                    bad = np.argwhere(have != want)
                    found += [
                        f"{way}: {e} of {x[tuple(b)]} {y[tuple(b)]} is {have[tuple(b)]}, in NumPy "
                        f"{want[tuple(b)]}; {len(bad)} differ"
                        for b in bad[:1]
                    ]
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", TYPES)
def test_all_pairs_of_8_bits(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not wrong(quick(dtype), *pairs(dtype), tmp_path)


def quick(dtype: Any) -> list[str]:
    """An expression of each kind."""
    every = [
        *TWO,
        *ONE,
        "x % 16",
        "x // 16",
        "x % 3",
        "x // 3",
        "x < 300",
        "x > -1",
        "x == 300",
        "np.clip(x, -5, 300)",
        "np.minimum(x, 5) * 100 // 3",
        "np.where(x > y, x, -1)",
        "np.where(x > y, np.full_like(x, 100), 99) * 3 // 2",
        "x ** 9",
        "x << 9",
        "x >> 9",
        "100 // x",
    ]
    every += [] if dtype is np.uint8 else ["x // -3", "x % -3", "x // -1", "x % -128", "-100 // x"]
    return every


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_all_pairs_of_8_bits_with_numbers(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, y = pairs(dtype)
    assert not wrong(texts(dtype, NUMBERS), x, y, tmp_path, "triton ir")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_ends_of_wider_types(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least number has no opposite: nothing divides by changing signs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    divided, every, x, y = at_the_ends(dtype)
    assert not wrong(divided, x, y, tmp_path, "triton ir")
    assert not wrong(every, x, y, tmp_path)


def at_the_ends(dtype: Any) -> tuple[list[str], list[str], Array, Array]:
    """Quotients, other expressions, and pairs of numbers near the ends and 0."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    held = np.array(
        [low, low + 1, low // 3, -17, -3, -2, -1, 0, 1, 2, 3, 16, high // 3, high - 1, high], dtype
    )
    x, y = np.repeat(held[:, None], len(held), 1), np.repeat(held[None], len(held), 0)
    forms = ("x // {}", "x % {}", "{} // x", "x + {}", "x * {}", "np.clip(x, -5, {})")
    numbers = (low, -(2**24), -3, -1, 0, 3, 16, high)
    divided = [
        "x // y",
        "x % y",
        "np.maximum(x, -5) % 16",
        "np.maximum(x, -5) // 16",
        *with_numbers(forms[:3], numbers),
    ]
    compared = (low, high, -3, 2**62) if dtype is np.int64 else (low - 1, high + 1, 2**40)
    every = [
        *TWO[:26],
        "-x",
        "abs(x)",
        "x ** 5",
        "x << 40",
        "x >> 40",
        *with_numbers(forms[3:], numbers),
        *with_numbers(ANY[:7], compared),
    ]
    return divided, every, x, y


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_that_a_type_does_not_hold_are_refused(dtype: Any, tmp_path: Path) -> None:
    """NumPy raises OverflowError."""
    x, y = pairs(dtype)
    for number in (1000, -129):
        for expression in with_numbers([*HELD, "np.clip(x, {0}, {0})", "x ** {}"], [number]):
            if "**" in expression and number < 0:
                continue
            with pytest.raises(OverflowError):
                eval(expression, {"np": np, "x": x, "y": y})
            kernel = loaded(source([expression]), tmp_path)
            out = np.zeros((1, *x.shape), np.int64)
            for call in (kernel.simulate, kernel.lower):
                with pytest.raises(KernelError, match=f"found {number} beside values of"):
                    call(Group(len(x), len(x)), x, y, out)


def test_numbers_at_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A position is compared as it is; in arithmetic a narrow type has to hold it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = np.arange(256, dtype=np.uint8)

    def made(line: str) -> KernelFunction:
        return loaded(
            "import numpy as np\nfrom transconv.kernel import kernel\n"
            "@kernel\ndef drawn(group, X, O, n):\n"
            "    i, = group.work_offset()\n    x = group.load(X[i:], shape=group.shape)\n"
            f"    group.store(O[i:], {line})\n",
            tmp_path,
        )

    for line, want in (
        ("x < i * 3", x < np.arange(256) // 64 * 64 * 3),
        ("x > i - 300", x > -1),
        ("x < n", x < 300),
    ):
        out, simulated = np.zeros(256, np.int32), np.zeros(256, np.int32)
        made(line)(Group(256, 64), x, out, 300)
        made(line).simulate(Group(256, 64), x, simulated, 300)
        np.testing.assert_array_equal(out, want, line)
        np.testing.assert_array_equal(simulated, want, line)
    out = np.zeros(256, np.int32)
    made("x - n")(Group(256, 64), x, out, 200)
    np.testing.assert_array_equal(out, x - 200)
    for line in ("x + n", "x + i * 3"):
        with pytest.raises(KernelError, match="beside values of uint8"):
            made(line)(Group(256, 64), x, out, 300)
        with pytest.raises(KernelError, match="beside values of uint8"):
            made(line).simulate(Group(256, 64), x, out, 300)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "line",
    [
        "x[...] = 300",
        "x = group.full(shape=(4,), dtype=np.uint8, fill_value=-1)",
        "x = np.full_like(x, 256)",
        "Y[0] = 256",
        "x = x.filled(-1)",
    ],
)
def test_numbers_that_are_stored(line: str, tmp_path: Path) -> None:
    kernel = loaded(
        "import numpy as np\nfrom transconv.kernel import kernel\n"
        "@kernel\ndef drawn(group, X, Y):\n"
        f"    x = group.load(X, shape=(4,))\n    {line}\n    group.store(Y, x)\n",
        tmp_path,
    )
    x, y = np.arange(4, dtype=np.uint8), np.zeros(4, np.uint8)
    for call in (kernel.simulate, kernel.lower):
        with pytest.raises(KernelError, match="beside values of uint8, which are 0 to 255"):
            call(Group(1, 1), x, y)


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_reductions(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of all kinds, also those of ends alone; small numbers are summed in 32 bits."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ops = ("max", "min", "argmax", "argmin", "sum", "prod", "any", "all")
    stores = "".join(f"    group.store(Y[{n}], x.{op}(axis=1))\n" for n, op in enumerate(ops))
    kernel = loaded(
        "import numpy as np\nfrom transconv.kernel import kernel\n"
        "@kernel\ndef drawn(group, X, Y):\n"
        f"    x = group.load(X, shape=(6, 16))\n{stores}",
        tmp_path,
    )
    ends = np.iinfo(dtype)
    x = np.random.default_rng(3).integers(ends.min, ends.max, (6, 11), dtype, True)
    x[0], x[1], x[2, 3], x[3, 4] = ends.min, ends.max, ends.max, ends.min
    for call in (kernel.simulate, kernel):
        out = np.zeros((len(ops), 6), np.int64)
        with np.errstate(all="ignore"):
            call(Group(1), x, out)
        for op, got in zip(ops, out, strict=True):
            want = getattr(x, op)(axis=1)
            if op in ("sum", "prod") and dtype is not np.int64:
                want = want.astype(np.int32)
            np.testing.assert_array_equal(got, want.astype(np.int64), op)
