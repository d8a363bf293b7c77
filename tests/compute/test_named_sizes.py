"""A text whose sizes are names says the same, at any sizes, as the text that has these numbers: nothing of
the examples is left in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
import torch

from transconv.compute import Compute, execute, parse, parted, transposed
from transconv.errors import ComputeError
from transconv.ir import value_at
from transconv.runtime import build_compute
from transconv.target import TARGETS
from transconv.verify import any_size

PLACES = """compute places
    sizes  N=4 in 1..64, K=5 in 1..512, L=1 in 1..64
    tensor X f32 [N, K, L]
    tensor I i64 [N]
    tensor J i32 [N]
    tensor M f32 [N]
    axes   n=N | k=K l=L
    read   x = X[n, k, l]
    store  I[n] = argmax(x; k l)
    store  J[n] = argmin(x; l k)
    store  M[n] = max(x; k l)"""


def literal(text: str, sizes: Mapping[str, int]) -> str:
    """The text with numbers in the place of names, and the arithmetic on them done."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("sizes")]
    named = re.compile(rf"\b({'|'.join(sizes)})\b")

    def done(line: str) -> str:
        line = named.sub(lambda n: str(sizes[n[1]]), line)
        head, found, rest = line.partition("[") if "tensor" in line else ("", "", line)
        if found:
            dims, _, order = rest.partition("]")
            return f"{head}[{', '.join(str(eval(d)) for d in dims.split(','))}]{order}"
        return line

    return "\n".join(map(done, lines))


def tensors(compute: Compute, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        t.name: random.integers(-3, 4, t.shape).astype(float)
        for t in {r.view.tensor for r in compute.reads}
    }


def same_meaning(text: str, sizes: Mapping[str, int], seed: int = 0) -> None:
    """Of the names, bound, and of a text of numbers."""
    bound, made = parse(text).at(**sizes), parse(literal(text, sizes))
    assert [(x.name, x.size) for x in bound.axes] == [(x.name, x.size) for x in made.axes]
    given = tensors(made, seed)
    one, other = execute(bound, given), execute(made, given)
    for name, found in other.items():
        np.testing.assert_array_equal(one[name].value, found.value, f"{name} at {sizes}\n{text}")


def by_numpy(x: np.ndarray) -> dict[str, np.ndarray]:
    n, k, m = x.shape
    return {
        "I": x.reshape(n, k * m).argmax(1),
        "J": x.transpose(0, 2, 1).reshape(n, k * m).argmin(1),
        "M": x.max((1, 2)),
    }


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "sizes",
    [dict(N=4, K=5, L=1), dict(N=3, K=17, L=2), dict(N=1, K=1, L=9), dict(N=7, K=130, L=3)],
    ids=str,
)
def test_places_of_extremes_reach_the_last_element(sizes: dict[str, int]) -> None:
    same_meaning(PLACES, sizes)
    x = (
        np.random.default_rng(1)
        .permutation(sizes["N"] * sizes["K"] * sizes["L"])
        .reshape(*sizes.values())
        .astype(float)
    )
    want = by_numpy(x)
    for name, found in execute(parse(PLACES).at(**sizes), {"X": x}).items():
        np.testing.assert_array_equal(found.value, want[name])


@pytest.mark.every(2)
@pytest.mark.parametrize("axis", ["k", "l k"])
def test_a_kernel_finds_places_at_sizes_beyond_the_example(axis: str) -> None:
    text = f"""compute place
    sizes  N=4 in 1..64, K=5 in 1..512, L=2 in 1..64
    tensor X f32 [N, K, L]
    tensor I i64 [N{"" if "l" in axis else ", L"}]
    axes   n=N {"|" if "l" in axis else "l=L |"} k=K {"l=L" if "l" in axis else ""}
    read   x = X[n, k, l]
    store  I[n{"" if "l" in axis else ", l"}] = argmax(x; {axis})"""
    plan = build_compute(parse(text), TARGETS["interpreter"])
    for sizes in (dict(N=4, K=5, L=2), dict(N=3, K=17, L=3)):
        x = torch.randn(tuple(sizes.values()))
        want = x.transpose(1, 2).flatten(1).argmax(1) if "l" in axis else x.argmax(1)
        got = torch.full_like(want, -1)
        plan.launch(X=x, I=got)
        assert torch.equal(got, want)


@pytest.mark.every(2)
@pytest.mark.parametrize("part", range(4))
def test_drawn_texts_with_names_and_with_numbers(part: int) -> None:
    for seed in range(part, 40, 4):
        text = any_size.drawn_text(Random(seed))
        for sizes in any_size.drawn(parse(text), 4, seed):
            same_meaning(text, sizes, seed)


def test_the_example_is_in_no_step() -> None:
    """Texts that differ in their examples alone have the same steps, whatever these are."""
    for seed in range(30):
        text = any_size.drawn_text(Random(seed))
        compute = parse(text)
        for sizes in any_size.drawn(compute, 3, seed):
            other = re.sub(r"\b(\w+)=\d+ in ", lambda n, to=sizes: f"{n[1]}={to[n[1]]} in ", text)
            made = parse(other)
            assert made.named is not None and made.named.like == sizes
            assert str(made).splitlines()[2:] == str(compute).splitlines()[2:]
            assert [getattr(s, "value", None) for s in made.steps] == [
                getattr(s, "value", None) for s in compute.steps
            ]


def test_what_counts_elements_of_numbers_refuses_names() -> None:
    text = "compute t\n sizes N=8 in 1..64\n axes n=N\n read x = X[n]\n store Y[n] = 2*x"
    made = parse(text)
    with pytest.raises(ComputeError, match="sizes that are arguments"):
        transposed(made, "X", made.reads[0].view.tensor, made.writes[0].view.tensor)
    rows = parse(
        "compute t\n sizes N=8 in 1..64\n axes n=4 | k=N\n read x = X[n, k]\n store Y[n] = sum(x; k)"
    )
    with pytest.raises(ValueError, match="sizes that are arguments"):
        parted(rows, "k", 4)


def test_tensors_without_a_line_have_the_sizes_that_have_names() -> None:
    """Their shape at other sizes is that of the text with these numbers."""
    text = "compute plain\n sizes N=4 in 1..64\n axes n=N m=3\n read x = X[n, m]\n store Y[n, m] = x*2"
    for n in (1, 4, 9):
        at, plain = parse(text).at(N=n), parse(literal(text, {"N": n}))
        assert {t.name: t.shape for t in at.tensors} == {t.name: t.shape for t in plain.tensors}
        assert str(at) == str(plain)
    assert all(t.extents for t in parse(text).tensors)


SLICE = """compute slice
    sizes  N=4 in 1..64
    tensor X f32 [N, 6, 5] strides(90,1,18)
    tensor Y f32 [N, 6, 5] strides(40,5,1)
    axes   n=N c=6 i=5
    read   x = X[n, c, i]
    store  Y[n, c, i] = x + 1"""


def test_slices_of_any_number_of_samples() -> None:
    """Strides where the size of the longest alone is a name: each sample is a part of a longer row."""
    made = parse(SLICE)
    assert parse(str(made)) == made
    x, y = made.at(N=3).tensors
    assert (x.layout.strides(), y.layout.strides()) == ((90, 1, 18), (40, 5, 1))
    room = [value_at(t.room, {"N": 3}) for t in made.tensors]  # up to the last element, as a slice ends
    assert room == [x.layout.span, y.layout.span] == [2 * 90 + 5 + 4 * 18 + 1, 2 * 40 + 30]
    for sizes in ({"N": 1}, {"N": 7}):
        same_meaning(SLICE, sizes)


@pytest.mark.parametrize("strides", ["strides(90,1,18)", "strides(1,64,384)"])
def test_a_name_within_a_slice_is_refused(strides: str) -> None:
    text = SLICE.replace("[N, 6, 5] strides(90,1,18)", f"[6, N, 5] {strides}").replace("X[n, c", "X[c, n")
    with pytest.raises(ComputeError, match="where only the size of the longest is an argument"):
        parse(text)
