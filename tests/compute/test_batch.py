"""Computations with the number of samples as a name: which axis it is, and one form for all batches."""

from __future__ import annotations

import pytest

from transconv.compute import (
    BATCH,
    Compute,
    batch_axis,
    in_bands,
    of_any_batch,
    parse,
    samples,
    why_not_any_size,
    with_reference,
    with_samples,
)
from transconv.compute.batch import adds_alike, examples, fewest, reference
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.support import Unsupported

LINEAR = """compute linear
    tensor X f32 [{n}, 64]
    tensor W f32 [32, 64]
    tensor Y f32 [{n}, 32]
    axes   m={n} n=32 | k=64
    read   x = X[m, k]
    read   w = W[n, k]
    store  Y[m, n] = sum(x*w; k)
"""
GRADIENT = """compute gradient
    tensor G f32 [{n}, 32]
    tensor X f32 [{n}, 64]
    axes   n=32 k=64 | m={n}
    read   g = G[m, n]
    read   x = X[m, k]
    store  W[n, k] = sum(g*x; m)
"""
SCALED = """compute scaled
    tensor X f32 [{n}, 64]
    tensor W f32 [32, 64]
    tensor S f32 [32]
    tensor B f32 [32, 1]
    tensor Y f32 [{n}, 32]
    axes   m={n} n=32 | k=64
    read   x = X[m, k]
    read   w = W[n, k]
    let    acc = sum(x*w; k)
    read   s = S[n]
    read   b = B[n, 0]
    store  Y[m, n] = acc*s + b
"""
HALVES = """compute halves
    tensor X f32 [{two}, 8]
    axes   n={n} half=2 k=8
    read   x = X[n*2 + half, k]
    store  Y[n, half, k] = x
"""


def test_the_number_of_samples_is_a_name() -> None:
    form = of_any_batch(parse(LINEAR.format(n=5)))
    assert str(form).splitlines()[:5] == [
        "compute linear",
        "    sizes  BATCH=4096 in 1..33553408",
        "    tensor X f32 [X_0=BATCH, X_1=64]",
        "    tensor W f32 [W_0=32, W_1=64]",
        "    tensor Y f32 [Y_0=BATCH, Y_1=32]",
    ]
    assert of_any_batch(form) is form


@pytest.mark.parametrize("text", [LINEAR, GRADIENT, HALVES, SCALED])
def test_all_batches_have_one_form(text: str) -> None:
    made = {n: parse(text.format(n=n, two=2 * n)) for n in (1, 2, 5, 32, 64)}
    assert len({of_any_batch(c) for c in made.values()}) == 1
    for n, compute in made.items():
        assert samples(compute) == {BATCH: n}
        assert str(with_samples(made[5], n)) == str(compute)


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        (LINEAR.format(n=32), "m"),
        (GRADIENT.format(n=32), "m"),
        (HALVES.format(n=3, two=6), "n"),
        (SCALED.format(n=5), "m"),
    ],
)
def test_samples_lie_along_the_first_dims(text: str, axis: str) -> None:
    """Also where a weight has as many rows as there are samples, and where more tensors have as many
    elements as the weight has rows."""
    compute = parse(text)
    found = batch_axis(compute)
    assert found == axis or (
        found is not None and compute.size(found) == compute.size(axis) and axis == "n"
    )


def test_of_equals_the_first_tensor_tells() -> None:
    made = parse("compute s\n axes c=8 | n=4\n read x = X[n, c]\n store Y[c] = sum(x; n)")
    assert batch_axis(made) == "n"


def test_nothing_has_samples() -> None:
    made = parse("compute c\n axes a=1\n store Y[0] = 3.0")
    assert batch_axis(made) is None and of_any_batch(made) is made and samples(made) == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "compute gaps\n tensor X f32 [4, 8] strides(16,1)\n axes n=4 k=8\n read x = X[n, k]\n"
            " store Y[n, k] = x",
            "X has gaps between its elements; expected a dense tensor",
        ),
        (
            "compute beside\n tensor X f32 [11, 8]\n tensor Z f32 [4, 8]\n axes n=4 k=8\n"
            " read x = X[n*2 + 3, k]\n read z = Z[n, k]\n store Y[n, k] = x + z",
            "dim 0 of X holds something else beside samples",
        ),
    ],
)
def test_what_has_no_form_is_refused(text: str, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        of_any_batch(parse(text))


def test_what_samples_look_up_in_is_shared() -> None:
    """Rows of a table keep their number, also if there are as many samples; a coordinate with the sample
    itself does not."""
    text = "compute t\n tensor R i64 [4]\n tensor S f32 [{rows}, 8]\n axes n=4 k=8\n read r = R[n]\n"
    stored = " read x = S[{at}, k]\n store Y[n, k] = x"
    for rows in (4, 6):
        form = of_any_batch(parse(text.format(rows=rows) + stored.format(at="r")))
        extents = {t.name: [str(e) for e in t.bounds] for t in form.tensors}
        assert (extents["R"], extents["S"]) == ([BATCH], [str(rows), "8"])
        assert why_not_any_size(form) is None
    with pytest.raises(Unsupported, match="dim 0 of S holds something else"):
        of_any_batch(parse(text.format(rows=6) + stored.format(at="r + n")))


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (("tensor R i64 [N]", "tensor T f32 [M, 8]", "read r = R[n]", "read x = T[r, k]"), "T"),
        (("tensor R i64 [8]", "tensor T f32 [N, 8]", "read r = R[k]", "read x = T[n, k]"), "Y"),
    ],
)
def test_places_along_sizes_that_are_arguments_are_not_told(lines: tuple[str, ...], wrong: str) -> None:
    """Nor are those of results, which no reader's mask would save."""
    stored = "store Y[n, r] = x" if wrong == "Y" else "store Y[n, k] = x"
    *tensors, first, second = lines
    text = ["sizes N=4 in 1..9, M=6 in 1..9", *tensors, "tensor Y f32 [N, 8]", "axes n=N k=8"]
    made = parse("compute t\n " + "\n ".join([*text, first, second, stored]))
    assert f"places in {wrong} are told by the values" in str(why_not_any_size(made))


def test_references_follow_from_one_sample() -> None:
    assert [reference(n) for n in (1, 256, 1 << 10, 1 << 14, 1 << 30)] == [4096, 4096, 1024, 64, 8]


def test_numbers_stay_those_of_a_call() -> None:
    """A mean over samples divides by their number, which is no size of the text."""
    text = "compute mean\n axes k=8 | n={n}\n read x = X[n, k]\n store Y[k] = sum(x; n) / {n}"
    four, five = (of_any_batch(Compute.parse(text.format(n=n))) for n in (4, 5))
    assert four != five


def test_few_samples_have_another_example_than_many() -> None:
    form = of_any_batch(parse(LINEAR.format(n=5)))
    assert in_bands(form) == (1, 64, 4096, 16384)
    told = {}
    for n in (1, 7, 8, 511, 512, 8191, 8192):
        named = with_reference(form, BATCH, n).named
        told[n] = named and named.like[BATCH]
    assert told == {1: 1, 7: 1, 8: 64, 511: 64, 512: 4096, 8191: 4096, 8192: 16384}
    assert with_samples(form, 16384) == with_reference(form, BATCH, 16384)


def test_examples_are_a_few_numbers_that_follow_from_one_sample() -> None:
    product = [parse(LINEAR.format(n=5))]
    assert examples(200704, product) == (1, 8, 32, 128)
    assert examples(25088, product) == (1, 32, 128)
    assert examples(1536, product) == (1, 32, 512, 2048)  # pooled images: dozens share a plan
    assert examples(8192, product) == (1, 16, 128, 512)
    assert examples(1 << 28, product) == (1, 8)  # more have no offsets of 32 bits
    assert fewest((1, 8, 32, 128)) == [1, 3, 16, 64] and fewest(()) == []


SUM = "compute s\n axes m={n} | k=64\n read x = X[m, k]\n store Y[m] = sum(x; k)"


def test_sums_without_a_matrix_unit_have_one_example() -> None:
    """The tile decides how lanes are added. Depthwise products, and windows of one or two features, do not
    use the unit; the former add one term after another, where their products are not rounded."""
    assert len(in_bands(of_any_batch(parse(SUM.format(n=5))))) == 1
    depthwise = "g64mb8ic64ih28oc64oh28kh3ph1 tag=nhwc"
    for text, counts in (
        (f"{depthwise} dt=bf16", (3, 3, 1)),
        (f"{depthwise} dt=f32", (1, 1, 1)),
        ("mb8ic1ih28oc2oh28kh3ph1 dt=f16", (1, 1)),
    ):
        for prop, count in zip(Prop, counts, strict=False):
            form = ConvWorkload(ConvProblem.parse(text), prop).of_any_batch()[0]
            assert len(in_bands(form.computations[0])) == count


BEHIND = """compute behind
    tensor X f16 [8, 64]
    tensor W f16 [32, 64]
    tensor S f32 [32]
    tensor B f32 [32]
    tensor R f16 [8, 32]
    axes   m=8 n=32 | k=64
    read   x = X[m, k]
    read   w = W[n, k]
    let    acc = sum(f32(x)*f32(w); k)
    read   s = S[n]
    read   b = B[n]
    read   r = R[m, n]
    store  Y[m, n] = f16({value})
"""


@pytest.mark.parametrize(
    ("value", "alike"),
    [
        ("acc", True),
        ("acc + b", True),
        ("acc*s + b", True),  # where the sum lies, in all tiles
        ("(acc - b)*s", True),
        ("acc*s + f32(r)", False),  # the residual lies elsewhere in some tiles: rounded once or twice
        ("acc + f32(r)", True),
        ("acc + s*b", False),
        ("acc*s - f32(r)*b", False),
    ],
)
def test_products_that_are_added_may_be_rounded_otherwise(value: str, alike: bool) -> None:
    assert adds_alike(parse(BEHIND.format(value=value))) == alike


def test_samples_beyond_the_addresses_of_32_bits() -> None:
    """Of large samples one kernel takes few, and the example is among them."""
    large = """compute large
    tensor X bf16 [n={n}, c=256, p=1048576]
    tensor Y bf16 [n={n}, c=256, p=1048576]
    axes   n={n} c=256 p=1048576
    read   x = X[n, c, p]
    store  Y[n, c, p] = x * 2"""
    form = of_any_batch(parse(large.format(n=4)))
    assert form.named is not None and str(form.named.each[0]) == "BATCH=7 in 1..7"
    assert str(form.at(BATCH=7)) == str(parse(large.format(n=7)))
    with pytest.raises(Unsupported, match="8 samples of 268435456 elements; one kernel takes at most 7"):
        of_any_batch(parse(large.format(n=8)))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("gradient", ["x", "w"])
def test_samples_of_a_layer_of_one_output(gradient: str, outputs: int) -> None:
    """Its weight and one gradient alone have rows of several elements; the other tensor decides."""
    text = f"""
    compute gradient math=ieee
    tensor G f32 [m=8, n={outputs}]
    tensor W f32 [n={outputs}, k=10]
    tensor dX f32 [m=8, k=10]
    axes m=8 k=10 | n={outputs}
    read g = G[m, n]
    read w = W[n, k]
    let y = sum(g*w; n)
    store dX[m, k] = y
    """
    if gradient == "w":
        text = f"""
        compute gradient math=ieee
        tensor G f32 [m=8, n={outputs}]
        tensor X f32 [m=8, k=10]
        tensor dW f32 [n={outputs}, k=10]
        axes n={outputs} k=10 | m=8
        read g = G[m, n]
        read x = X[m, k]
        let y = sum(g*x; m)
        store dW[n, k] = y
        """
    assert batch_axis(parse(text)) == "m"
