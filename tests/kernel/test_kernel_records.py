"""Kernels on disk: another process reads a kernel whose function, and all that reading it depends on, is
as before, and makes it anew where anything differs. Modules that are loaded again play processes."""

# mypy: ignore-errors

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from transconv import runtime
from transconv.kernel import Group, decorator
from transconv.runtime import plan_cache

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
]

TEXT = '''"""A module with kernels."""

import math
from dataclasses import dataclass

import numpy as np

from transconv.kernel import Group, Scope, Tunable, create_mapping, kernel
import lent

@dataclass
class Sizes:
    scale: float = 2.0

SIZES, POWERS, T = Sizes(), (1.0, {"two": [2.0]}), Tunable("T", 4, (4, 8))
turned = create_mapping(lambda i: i * 1)

@kernel.func
def half(x):
    return x * 0.5

@kernel.func
def own(x):
    return half(x) + 1.0 - 1.0

@kernel.func(half, scope=Scope.WorkItem)
def half_of_items(item, x):
    return x * 0.5

def around(more):
    @kernel
    def computed(group, X, Y, b, c=0.0):
        i, = group.work_offset()
        x = group.load(X[i:], shape=group.shape, mapping=turned)
        x = own(x) * POWERS[1]["two"][0] * SIZES.scale + more * math.pi + lent.added(x) + T + c
        group.store(Y[i:], x * b)

        @group.subgroups
        def each(part):
            n = part.size()
            if n < 0:
                Y[0] = 0.0
        each()
    return computed

computed = around(1)

@kernel
def rows(group, X, Y):
    i, = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=(group.shape[0], X.shape[1])).sum(axis=1))
'''
LENT = '''"""What a kernel takes from another module."""

from transconv.kernel import kernel

@kernel.func
def added(x):
    return x - x
'''


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which knows texts by size and second
    return tmp_path


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were read and lowered."""
    real, names = decorator.lowered, []
    monkeypatch.setattr(
        decorator, "lowered", lambda source, *rest: names.append(source.name) or real(source, *rest)
    )
    return names


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = TEXT, lent: str = LENT):
    """The module, as another process has it."""
    for name, said in (("lent", lent), ("kernels_on_disk", text)):
        path = folder / f"{name}.py"
        path.write_text(said)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        import linecache

        linecache.checkcache(str(path))
        linecache.cache.pop(str(path), None)
        spec.loader.exec_module(module)
    return module


def result(module, n: int = 50, group: Group | None = None, dtype=torch.float32, of=None) -> torch.Tensor:
    x = torch.arange(n, dtype=dtype)
    y = torch.full((n,), -7, dtype=dtype)
    (of or module.computed)(group or Group(n, 16), x, y, 1.0)
    return y


def test_the_same_function_is_read_from_disk(
    cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        module = loaded(cache, monkeypatch)
        for n in (50, 70, 64):  # 64 has a divisor
            assert torch.allclose(result(module, n), torch.arange(n) * 2.0 + torch.pi + 4)
        for k in (24, 40):  # a size of a tile: the kernel needs to know it
            x, y = torch.rand(9, k), torch.zeros(9)
            module.rows(Group(9, 4), x, y)
            assert torch.allclose(y, x.sum(1))
    assert lowered == ["computed", "computed", "rows", "rows"]


EDITS = {
    "a number": ("SIZES, POWERS, T = Sizes()", "SIZES, POWERS, T = Sizes(3.0)"),
    "a default of a class": ("scale: float = 2.0", "scale: float = 3.0"),
    "inside of a tuple": ("[2.0]", "[4.0]"),
    "the closure": ("around(1)", "around(3)"),
    "a helper's helper": ("return x * 0.5\n\n@kernel.func\n", "return x * 0.25\n\n@kernel.func\n"),
    "a body for a scope": ("    return x * 0.5\n\ndef", "    return x * 0.25\n\ndef"),
    "a mapping": ("lambda i: i * 1", "lambda i: i * 2"),
    "a tunable number": ('"T", 4', '"T", 8'),
    "a default": ("c=0.0", "c=1.0"),
    "another module": ("", ""),
    "its own line": ("x * b)", "x * b * 2.0)"),
    "its place": ("def around", "\ndef around"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("what", EDITS)
def test_what_reading_depends_on(
    what: str, cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is not taken, and the result is that of a process without records."""
    result(loaded(cache, monkeypatch))
    old, new = EDITS[what]
    assert not old or TEXT.count(old) == 1
    lent = LENT.replace("x - x", "x - x + 1.0") if not old else LENT
    text = TEXT.replace(old, new) if old else TEXT
    got = result(loaded(cache, monkeypatch, text, lent))
    assert lowered == ["computed"] * 2
    monkeypatch.setenv("TRANSCONV_CACHE", str(cache / "other"))
    assert torch.equal(got, result(loaded(cache, monkeypatch, text, lent)))


def test_what_is_around_may_change(
    cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that nothing of the kernel uses, lines behind it, and functions of its own module."""
    result(loaded(cache, monkeypatch))
    text = TEXT.replace("import math", "import math; OTHER = object()") + "\nZ = 1\n"
    result(loaded(cache, monkeypatch, text))
    assert lowered == ["computed"]


def test_what_a_call_says(cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the group, types, strides, precision."""
    first = loaded(cache, monkeypatch)
    result(first)
    again = loaded(cache, monkeypatch)
    for group in (
        Group(50, 16, 8),
        Group(50, 32),
        Group(50, 16, warps_hint=2),
        Group(50, 16, stages_hint=2),
    ):
        result(again, group=group)
    result(again, dtype=torch.float64)
    result(again, of=type(again.computed)(again.computed.python, "tf32"))
    wide = torch.zeros(100)
    again.computed(Group(50, 16), wide[::2], torch.zeros(50), 1.0)
    assert len(lowered) == 8


def test_sizes_of_subgroups_have_kernels_of_their_own() -> None:
    from transconv.kernel import kernel

    @kernel
    def sizes(group, Y):
        @group.subgroups
        def each(part):
            Y[part.subgroup_id()] = part.size()

        each()

    for size in (8, 16, 32):
        got, want = np.zeros(8, np.int32), np.zeros(8, np.int32)
        sizes(Group(64, 64, size), got)
        sizes.simulate(Group(64, 64, size), want)
        np.testing.assert_array_equal(got, want)


def test_what_no_text_tells_is_not_kept(
    cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's objects, and intrinsics, which decide by any Python."""
    text = TEXT.replace("SIZES.scale", "SIZES.get()").replace(
        "    scale: float = 2.0", "    scale: float = 2.0\n    get = staticmethod(lambda: 2.0)"
    )
    for said in (text, TEXT + "\n@kernel.intrinsic(own)\ndef none(x):\n    return None\n"):
        module = loaded(cache, monkeypatch, said)
        try:
            result(module)
        except ValueError:  # the kernel may not be one at all
            pass
        assert next(plan_cache.DRAWER.items(), None) is None
    assert lowered


def test_a_packed_cache_has_them(cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result(loaded(cache, monkeypatch))
    packed = runtime.pack(cache / "kernels.zip")
    assert packed.plans == {"interpreter": 1}
    monkeypatch.setenv("TRANSCONV_CACHE", str(cache / "elsewhere"))
    runtime.unpack(cache / "kernels.zip")
    result(loaded(cache, monkeypatch))
    assert lowered == ["computed"]
    compared = runtime.compare()
    assert not compared.wrong and len(compared.left) == 1, "a kernel is lowered where it is called"


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("field", "value"),
    [("fixed", [99]), ("fixed", [0, 1]), ("plain", "x"), ("stored", ["a b"]), ("stored", None)],
)
def test_damaged_records_are_not_taken(
    field: str, value, cache: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result(loaded(cache, monkeypatch))
    for name, content in [*plan_cache.DRAWER.items()]:
        plan_cache.DRAWER.put(name, content | {"kernel": content["kernel"] | {field: value}})
    assert torch.allclose(result(loaded(cache, monkeypatch)), torch.arange(50) * 2.0 + torch.pi + 4)
    assert lowered == ["computed"] * 2


@pytest.mark.slow
def test_another_process(cache: Path) -> None:
    """With another order of sets."""
    (cache / "lent.py").write_text(LENT)
    (cache / "kernels_on_disk.py").write_text(
        TEXT
        + f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
from transconv.kernel import decorator
real = decorator.lowered
decorator.lowered = lambda *given: print("lowered") or real(*given)
computed(Group(50, 16), torch.arange(50.), torch.zeros(50), 1.0)
"""
    )
    said = [
        subprocess.run(
            [sys.executable, "kernels_on_disk.py"],
            cwd=cache,
            text=True,
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "12"
    ]
    assert said == ["lowered\n", ""]
