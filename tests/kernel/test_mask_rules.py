"""The rules of masking (docs/kernel_masks.md) beside numpy.ma: each row of the tables is evaluated there
and in kernels, over tiles larger than the arrays they are loaded from, ragged ones and empty arrays."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transconv.ir import Memory, run
from transconv.kernel import Group, KernelFunction

CANARY = -77.0

# Expressions that mean the same in numpy.ma. x and z: tiles of one shape, loaded from two arrays.
ALIKE = (
    "x",
    "-x",
    "x + z",
    "x * 2.0 - z",
    "x / z",
    "abs(x)",
    "np.exp(x)",
    "np.maximum(x, z)",
    "x[:1] + z",
    "x[:, :1] * z",
    "x[:, None] - z[None]",
    "x.T",
    "np.where(x.mask, 1.0, 0.0)",
    "np.where((x + z).mask, 1.0, 0.0)",
    "x.sum(axis=0)",
    "x.sum(axis=1)",
    "x.sum(axis=1, keepdims=True) + z",
    "x.max(axis=0)",
    "x.max(axis=1)",
    "np.min(x, axis=1)",
    "x.prod(axis=0)",
    "x.mean(axis=1)",
    "(x < -4.0).any(axis=1)",
    "(x < -4.0).all(axis=0)",
    "np.dot(x, z.T)",
    "np.dot(x.T, z)",
    "x.max(keepdims=True)",
    "(x + z).sum(axis=0, keepdims=True)",
    "np.minimum(x, z)",
    "x**2",
    "np.sqrt(-x)",
    "x.T + z.T",
    "np.clip(x, -5.0, -2.0)",
    "x[0] - z",
    "x.min(axis=0) + z",
    "x.mean(axis=0)",
    "x.prod(axis=1)",
    "(x + z).max(axis=1)",
    "x.sum(axis=(0, 1), keepdims=True)",
    "(x[:, None] * z[None]).sum(axis=(0, 2))",
    "np.where(x.max(axis=1, keepdims=True).mask, 1.0, 0.0)",
    "x.copy()",
)
# Assignments that mean the same there; the value of t behind them counts.
WRITTEN = (
    ("t = group.empty(shape=SHAPE, dtype=np.float32)", "t[0] = 5.0"),
    ("t = group.empty(shape=SHAPE, dtype=np.float32)", "t[:, 0] = 5.0"),
    ("t = group.ones(shape=SHAPE, dtype=np.float32)", "t[0] = 5.0"),
    ("t = group.load(X, shape=SHAPE)", "t[:] = 5.0"),
    ("t = group.zeros(shape=SHAPE, dtype=np.float32)",),
    ("t = group.full(shape=SHAPE, dtype=np.float32, fill_value=3.0)", "t = t + x"),
    ("t = group.empty(shape=SHAPE, dtype=np.float32)", "t[0] = 5.0", "t[:, 0] = 2.0", "t = t * 2.0"),
    ("t = x + 0.0", "t = t.max(axis=1, keepdims=True) + z"),
)
# Where kernels differ: functions are active by their operands alone, and no element becomes inactive.
OTHER = (
    (
        "np.where(x < -4.0, x, z)",
        lambda x, z: np.ma.array(np.where(x.data < -4.0, x.data, z.data), mask=x.mask | z.mask),
    ),
    ("np.log(x - x)", lambda x, z: np.ma.array(np.where(x.mask, 0, -np.inf), mask=x.mask)),
    (
        "np.where(x.argmax(axis=1, keepdims=True) >= 0, 1.0, 0.0)",
        lambda x, z: np.ma.array(np.ones((len(x), 1)), mask=x.mask.all(axis=1, keepdims=True)),
    ),
    (
        "x.argmin(axis=0)",
        lambda x, z: np.ma.array(np.where(x.mask, np.inf, x.data).argmin(axis=0), mask=x.mask.all(axis=0)),
    ),
    ("written(x, z)", lambda x, z: np.ma.array(np.where(z.mask, x.data, z.data), mask=x.mask & z.mask)),
)


def source() -> str:
    """A kernel of all rows: each stores its value to an array of its own."""
    lines = ["from transconv.kernel import kernel", "import numpy as np", "", "@kernel"]
    names = [f"Y{n}" for n in range(len(ALIKE) + len(WRITTEN) + len(OTHER))]
    lines += [
        f"def rules(group, X, Z, ROWS, COLS, {', '.join(names)}):",
        "    SHAPE = (ROWS, COLS)",
        "    x, z = group.load(X, shape=SHAPE), group.load(Z, shape=SHAPE)",
    ]
    stored = iter(names)
    for text in ALIKE:
        text = text.replace("x[:1]", "x[0][None]").replace("x[:, :1]", "x[:, 0][:, None]")
        value = f"np.where({text}, 1.0, 0.0)" if ".a" in text else text
        lines.append(f"    group.store({next(stored)}, {value})")
    for statements in WRITTEN:
        lines += [f"    {s}" for s in statements] + [f"    group.store({next(stored)}, t)"]
    for text, _ in OTHER:
        if text.startswith("written"):
            lines += ["    t = x.copy()", "    t[:] = z"]
        lines.append(f"    group.store({next(stored)}, {'t' if text.startswith('written') else text})")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> KernelFunction:
    return loaded(Path(tmp_path_factory.mktemp("masks")) / "mask_rules.py")


def loaded(path: Path) -> KernelFunction:
    """The kernel of all rows, written to a file."""
    path.write_text(source(), "utf-8")
    spec = importlib.util.spec_from_file_location("mask_rules", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: KernelFunction = module.rules
    return made


def tile(array: Any, shape: tuple[int, int]) -> Any:
    """What ``group.load`` makes of an array, in numpy.ma."""
    made = np.ma.array(np.zeros(shape, np.float32), mask=np.ones(shape, bool))
    rows, cols = (min(n, m) for n, m in zip(shape, array.shape, strict=True))
    made[:rows, :cols] = array[:rows, :cols]
    return made


def expected(x: Any, z: Any, array: Any) -> list[Any]:
    """The value of each row in numpy.ma."""
    shape = x.shape

    def full(shape: Any, dtype: Any, fill_value: float = 0.0) -> Any:
        return np.ma.array(np.full(shape, fill_value, dtype), mask=np.zeros(shape, bool))

    group = SimpleNamespace(
        empty=lambda shape, dtype: np.ma.array(np.zeros(shape, dtype), mask=np.ones(shape, bool)),
        zeros=full,
        full=full,
        ones=lambda shape, dtype: full(shape, dtype, 1.0),
        load=tile,
    )
    found = [eval(text, {"np": np.ma, "x": x, "z": z}) for text in ALIKE]
    for statements in WRITTEN:
        names = {"np": np, "x": x, "z": z, "group": group, "SHAPE": shape, "X": array}
        exec("\n".join(statements), names)
        found.append(names["t"])
    return found + [meaning(x, z) for _, meaning in OTHER]


def arguments(seed: int) -> tuple[Any, ...]:
    """Two arrays of negative numbers, and the shape of the tiles."""
    draw = np.random.default_rng(seed)
    rows, cols = (int(n) for n in draw.integers(1, 10, 2))
    sizes = [
        [int(draw.choice([0, n - 1, n, n + 3, draw.integers(0, n + 1)])) for n in (rows, cols)]
        for _ in "xz"
    ]
    x, z = (draw.uniform(-9, -1, size).astype(np.float32) for size in sizes)
    return x, z, rows, cols


def check(given: tuple[Any, ...], run: Any) -> None:
    x, z, rows, cols = given
    with np.errstate(all="ignore"):
        wanted = [np.ma.atleast_1d(w) for w in expected(tile(x, (rows, cols)), tile(z, (rows, cols)), x)]
    outs = [np.full(w.shape, CANARY, np.float32) for w in wanted]
    run(x, z, rows, cols, *outs)
    texts = [*ALIKE, *("; ".join(s) for s in WRITTEN), *(t for t, _ in OTHER)]
    for text, want, got in zip(texts, wanted, outs, strict=True):
        filled = np.where(np.ma.getmaskarray(want), CANARY, np.ma.getdata(want)).astype(np.float32)
        np.testing.assert_allclose(
            got, filled, 2e-5, err_msg=f"{text} of {x.shape}, {z.shape} in {rows, cols}"
        )


SEEDS = (*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 24)))


@pytest.mark.parametrize("seed", range(12))
def test_in_the_simulator(rules: KernelFunction, seed: int) -> None:
    given = arguments(seed)
    check(given, lambda *args: rules.simulate(Group(1), *args))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("seed", SEEDS)
def test_in_tritons_interpreter(rules: KernelFunction, seed: int) -> None:
    given = arguments(seed)
    check(given, lambda *args: rules(Group(1), *args))


@pytest.mark.parametrize("seed", SEEDS)
def test_in_the_interpreter_of_the_ir(rules: KernelFunction, seed: int) -> None:
    def run_it(*args: Any) -> None:
        kernel = rules.lower(Group(1), *args, target="sm_90").kernel
        given = dict(zip(rules.source.parameters[1:], args, strict=True))
        buffers = {t.name: given[t.name].reshape(-1) for t in kernel.params}
        with np.errstate(all="ignore"):
            run(kernel.at(kernel.sizes.like) if kernel.sizes else kernel, Memory(buffers))
        for name, buffer in buffers.items():
            given[name].reshape(-1)[:] = buffer

    check(arguments(seed), run_it)
