"""Names whose tile an operand changes, slices that begin before an array, indices from the end, and
mappings that look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transconv.ir import Memory, run
from transconv.kernel import Group, KernelError, KernelFunction
from transconv.kernel.trials.trial import loaded

Array = np.ndarray[Any, np.dtype[Any]]
X = np.arange(8, dtype=np.float32) + 10
HEAD = """import numpy as np
from transconv.kernel import Builder, create_mapping, kernel
def gemm(a, b, acc):
    pass
@kernel.intrinsic(gemm)
def gemm_anywhere(a, b, acc):
    return lambda builder, a, b, acc: builder.create(Builder.dot)(a, b, acc)
@kernel
def drawn(group, X, Y):
    i, = group.work_offset()
"""


def made(text: str, folder: Path) -> KernelFunction:
    return loaded(HEAD + "".join(f"    {line}\n" for line in text.split("\n")), folder)


def results(kernel: KernelFunction) -> list[Array]:
    """Of the simulator, Triton's interpreter, and the IR's as written and after all passes."""
    found = [np.full(8, -77, np.float32) for _ in range(2)]
    kernel.simulate(Group(8, 4), X.copy(), found[0])
    kernel(Group(8, 4), X.copy(), found[1])
    low = kernel.lower(Group(8, 4), X.copy(), X.copy(), target="sm_90")
    for at in (0, -1):
        last = low.stages[at][1]
        buffers = {"X": X.copy(), "Y": np.full(8, -77, np.float32)}
        run(last.at(last.sizes.like) if last.sizes else last, Memory(buffers))
        found.append(buffers["Y"])
    return found


LOAD = (
    "x = group.load(X[i:], shape=group.shape)\nacc = group.zeros(shape=group.shape)\n"
    "for k in range(i + 2):\n    "
)
EACH = "@group.workitems\ndef each(item):\n    k, = item.global_id()\n    "
TIMES = np.repeat([2, 6], 4)
SAME = (
    (LOAD + "acc = np.add(acc, x, out=acc)\ngroup.store(Y[i:], acc)", X * TIMES),
    (LOAD + "acc = x + np.add(acc, x, out=acc) - x\ngroup.store(Y[i:], acc)", X * TIMES),
    (LOAD + "acc = np.maximum(acc, np.add(acc, x, out=acc))\ngroup.store(Y[i:], acc)", X * TIMES),
    (
        "a = group.full(shape=(4, 2), fill_value=2)\nacc = group.zeros(shape=(4, 3))\n"
        "for k in range(i + 2):\n"
        "    acc = gemm(a, group.full(shape=(2, 3), fill_value=1), acc)\ngroup.store(Y[i:], acc[:, 0])",
        4.0 * TIMES,
    ),
    (
        "x = group.load(X[i:], shape=group.shape)\ny = x + np.add(x, x, out=x)\ngroup.store(Y[i:], y)",
        X * 4,
    ),
    (
        "x = group.load(X[i:], shape=group.shape)\np = (x, 1)\nx[0] = 3.0\ngroup.store(Y[i:], p[0])",
        np.where(np.arange(8) % 4, X, 3),
    ),
    ("group.store(Y[i:], group.load(X[i - 1:], shape=group.shape, fill=5))", np.append(5, X[:7])),
    (
        "group.store(Y[i:], group.load(X[2:][i - 3:], shape=group.shape, fill=-1.5))",
        [-1.5] * 3 + [*X[2:7]],
    ),
    (
        "group.store(Y[i:], group.load(X[i - 3::2], shape=group.shape, fill=-1))",
        [-1, -1, *X[1:4:2], *X[1::2]],
    ),
    ("group.store(Y[i:], group.load(X[i + 1:-2], shape=group.shape, fill=0))", [*X[1:5], X[5], 0, 0, 0]),
    ("group.store(Y[i:], group.load(X[i:max(i - 2, 0)], shape=group.shape))", [-77] * 8),
    ("if i > 0:\n    group.store(Y[i:], group.load(X[i - 1:], shape=group.shape))", [-77] * 4 + [*X[3:7]]),
    ("group.store(Y[i:], group.load(X[-1:], shape=group.shape))", [17, -77, -77, -77] * 2),
    ("group.store(Y[i:], X[-(i + np.arange(4))])", np.append(10, X[:0:-1])),
    ("group.store(Y[i:], X[i - 1 + np.arange(4)])", np.roll(X, 1)),
    ("group.store(Y[i:], X[i - 9 + np.arange(4)])", [-77, *X[:7]]),
    (
        EACH + "if k > 0:\n        Y[k] = group.vload(X[k - 1:], shape=(2,)).sum()\neach()",
        np.append([-77], X[:-1] + X[1:]),
    ),
    (EACH + "Y[k] = X[-k]\neach()", np.append(10, X[:0:-1])),
    (EACH + "Y[-k] = X[k]\neach()", np.append(10, X[:0:-1])),
)


@pytest.mark.every(2)
@pytest.mark.parametrize(("text", "want"), SAME)
def test_what_engines_say(text: str, want: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for got in results(made(text, tmp_path)):
        np.testing.assert_array_equal(got, np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "group.store(Y[i:], group.load(X[i - 1:], shape=group.shape))",
            "a slice whose start may be below 0",
        ),
        (
            "group.store(Y[i:], group.load(X[-i:], shape=group.shape))",
            "a slice whose start may be below 0",
        ),
        (
            "group.store(Y[i - 1:], group.load(X[i:], shape=group.shape))",
            "a slice whose start may be below 0",
        ),
        (
            "group.store(Y[i:], group.load(X[:i - 2], shape=group.shape))",
            "a slice whose end may be below 0",
        ),
        ("group.store(Y[i:], group.load(X[i:], shape=group.shape, fill=X))", "a number that Python knows"),
        (
            LOAD + "acc = acc * 2 + np.add(acc, x, out=acc)\ngroup.store(Y[i:], acc)",
            "another operand changes",
        ),
        (
            LOAD + "b = np.add(acc, x, out=acc)\n    acc[0] = 5.0\n    x = b\ngroup.store(Y[i:], acc)",
            "which is b too",
        ),
    ],
)
def test_what_is_refused(text: str, said: str, tmp_path: Path) -> None:
    kernel = made(text, tmp_path)
    with pytest.raises(KernelError, match=said) as error:
        kernel.lower(Group(8, 4), X, X.copy(), target="sm_90")
    assert f"{kernel.python.__name__}" and ".py:" in str(error.value)


PLACES = (
    "k",
    "7 - k",
    "k % 3",
    "k + k.ndim",
    "k.shape[0] - 1 - k",
    "k.T",
    "k[0]",
    "k[:, None][:, 0] + 1",
    "k.max() - k",
    "k.sum() - k",
    "np.maximum(k, k[2])",
    "np.where(k > 2, k, 0)",
)


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [3, 4])
def test_a_mapping_is_a_function_of_a_tile_of_indices(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of the result counts in how often it is added what each place says."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    loads = "".join(
        f"y = y + {2 * n + 1} * group.load(X, shape=({size},), mapping=create_mapping(lambda k: {f}))\n"
        for n, f in enumerate(PLACES)
    )
    k = np.arange(size)
    want = sum((2 * n + 1) * X[eval(f, {"np": np, "k": k})] for n, f in enumerate(PLACES)) * np.ones(size)
    kernel = made(f"y = group.zeros(shape=({size},))\n{loads}group.store(Y[i:], y)", tmp_path)
    for got in results(kernel):
        np.testing.assert_array_equal(got, np.tile([*want, -77][:4], 2).astype(np.float32))


@pytest.mark.slow
def test_a_mapping_of_two_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a tile of the whole shape, as of ``np.indices``."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = made(
        "y = group.load(X, shape=(2, 3), mapping=create_mapping(\n"
        "    lambda k, n: 2*k + n.max() - n + n.ndim - k.shape[1] + n.shape[0]))\n"
        "group.store(Y[i:], y.sum(axis=0))",
        tmp_path,
    )
    k, n = np.indices((2, 3))
    want = X[2 * k + n.max() - n + n.ndim - k.shape[1] + n.shape[0]].sum(0)
    for got in results(kernel):
        np.testing.assert_array_equal(got, [*want, -77, *want, -77])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("(i + np.arange(4)) * 0.5 > 2.0", True),
        ("i * 0.5 > 2.0", True),
        ("x > 2.0", True),
        ("i + np.arange(4) > 2", False),
        ("i > 2", False),
    ],
)
def test_what_is_computed_in_floats_keeps_its_name(value: str, named: bool, tmp_path: Path) -> None:
    """Positions stay as they are, so that facts about them apply."""
    kernel = made(
        f"x = group.load(X[i:], shape=group.shape)\nfar = {value}\n"
        "group.store(Y[i:], np.where(far, x, -x))",
        tmp_path,
    )
    text = str(kernel.lower(Group(8, 4), X, X.copy(), target="sm_90").stages[0][1])
    assert ("let far = " in text) is named, text
