"""What may be an array of a kernel, and the element types of tiles."""

# mypy: ignore-errors

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.kernel.cases import Case, floats, out
from tests.kernel.test_engines import interpreted
from transconv.errors import KernelError
from transconv.ir import convert, f32
from transconv.kernel import Constant, Group, create_mapping, kernel
from transconv.kernel.simulator.arrays import SimulatedMemory
from transconv.kernel.simulator.races import Order
from transconv.kernel.source import dtype_of


@kernel
def doubled(group, X, Y):
    (i,) = group.work_offset()
    group.store(Y[i:], group.load(X[i:], shape=group.shape) * 2.0)


class Exchanged:
    """An array of another library: DLPack alone."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __dlpack__(self, **words):
        return self.held.__dlpack__(**words)

    def __dlpack_device__(self):
        return self.held.__dlpack_device__()


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy, lambda a: Exchanged(torch.from_numpy(a))])
def test_arrays_of_three_libraries(made) -> None:
    x, y = floats(11), out(11)
    doubled.simulate(Group(11, 4), made(x), made(y))
    np.testing.assert_array_equal(y, x * 2)
    if os.environ.get("TRITON_INTERPRET") == "1":
        y[:] = 0
        doubled(Group(11, 4), made(x), made(y))
        np.testing.assert_array_equal(y, x * 2)


def test_an_array_that_may_not_be_written() -> None:
    x = floats(4)
    x.flags.writeable = False
    with pytest.raises(KernelError, match=r"X is a read-only array; expected .* X\.copy\(\)"):
        doubled.lower(Group(4), x, out(4), target="sm_90")


@pytest.mark.parametrize(
    "name", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
)
def test_tiles_of_every_type(name: str) -> None:
    """``zeros ones full`` are of the type that is asked for, and active; ``empty`` writes nothing."""
    kind = dtype_of(name)

    @kernel
    def made(group, Y):
        group.store(Y[0], group.zeros(shape=(3,), dtype=kind))
        group.store(Y[1], group.ones(shape=(3,), dtype=kind))
        group.store(Y[2], group.vfull(shape=(3,), dtype=kind, fill_value=1))
        group.store(Y[3], group.empty(shape=(3,), dtype=kind))
        group.store(Y[4], group.full(shape=(5,), dtype=kind, fill_value=0))

    given = np.ones((5, 3), kind.numpy)
    wanted = convert(np.array([[0] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3]), kind)
    simulated = given.copy()
    made.simulate(Group(1), simulated)
    low = made.lower(Group(1), given, target="sm_90")
    assert low.kernel.params[0].dtype is kind
    case = Case(made, Group(1), (given,), None)
    for found in (simulated, interpreted(case, low.kernel)[0]):
        np.testing.assert_array_equal(found, wanted)


def test_a_kernel_for_each_value_of_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes compile nothing anew, values of constants do, and work without elements launches nothing."""

    @kernel
    def scaled(group, X, Y, n: Constant):
        (i,) = group.work_offset()
        group.store(Y[i:], group.load(X[i:], shape=group.shape) * n)

    from transconv.kernel.launch.arguments import tensors_of
    from transconv.target import TARGETS

    found = []
    for size, n in ((9, 2), (11, 2), (13, 3), (9, 3), (7, 5)):
        asked = scaled.asked((Group(size, 4), out(size), out(size), n), {})
        made, _ = scaled._launches.of(asked, tensors_of(asked.given), TARGETS["interpreter"])
        found.append(made)
    assert len({id(m) for m in found}) == 3 and found[0] is found[1] and found[2] is found[3]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert scaled(Group(0, 4), out(0), out(0), 2) is None


def test_mappings_of_no_elements_collide_nowhere() -> None:
    swapped = create_mapping(lambda i, j: (j, i))
    assert [swapped.collision(shape) for shape in ((0, 4), (4, 0), (3, 4))] == [""] * 3
    assert "are one element" in create_mapping(lambda i, j: (i,)).collision((3, 4))


def test_a_part_outside_of_an_array_has_no_elements() -> None:
    """In the simulator as in NumPy where a slice begins behind the end."""
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    whole = SimulatedMemory(Order(), "X", data, f32).whole()
    every = slice(None)
    for items, shape in (((7, every), (0,)), ((every, 9), (0,)), ((None, 5, slice(1, 3)), (1, 0))):
        assert whole[items].shape == shape and not whole[items].there
