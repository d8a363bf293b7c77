"""What coordinates say: pads of every kind, gathers, concatenations; which masks are left of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from transconv.compute import COORDINATES, Compute, execute, parse, why_not_lowered
from transconv.compute.evaluation import outside
from transconv.errors import ComputeError, ScheduleError, TensorError
from transconv.ir import all_of, conjuncts
from transconv.passes.lowering import gridwise, naive
from transconv.runtime import build_compute
from transconv.schedule import Schedule, why_not
from transconv.target import TARGETS
from transconv.verify.computation import ComputationCase, after_every_pass
from transconv.verify.fuzz.compute_trial import ComputeTrial

SM90 = TARGETS["sm_90"]
PADS = {"clamp": "edge", "reflect": "reflect", "symmetric": "symmetric", "wrap": "wrap"}


def pad(way: str, n: int, m: int, by: int) -> Compute:
    at = f"i - {by}" if by else "i"
    return parse(
        f"compute pad\n tensor X f32 [{n}]\n axes i={m}\n read x = X[{way}({at}, {n})]\nstore Y[i] = x"
    )


def kernels(compute: Compute, schedule: str | None = None) -> str:
    """The body of its kernel, which stores what the steps mean after every pass."""
    assert parse(str(compute)) == compute
    plan = build_compute(compute, SM90, Schedule.parse(schedule) if schedule else None)
    assert [f"{stage}: {j.problem}" for stage, j in after_every_pass(compute, plan) if j.problem] == []
    return plan.source.partition("@triton.jit")[2]


def in_triton(compute: Compute) -> None:
    plan = build_compute(compute, TARGETS["interpreter"])
    for data in ("exact", "float"):
        assert ComputationCase(compute, data).launched(plan, "cpu").problem == ""


@pytest.mark.every(3)
@pytest.mark.parametrize("way", PADS)
@pytest.mark.parametrize(("n", "before", "after"), [(8, 2, 2), (8, 0, 3), (3, 8, 10), (1, 2, 3)])
def test_pads_are_numpys_and_leave_no_mask(way: str, n: int, before: int, after: int) -> None:
    made = pad(way, n, n + before + after, before)
    x = np.arange(1.0, n + 1)
    want = np.pad(x, (before, after), mode=PADS[way])  # type: ignore[call-overload]
    np.testing.assert_array_equal(execute(made, {"X": x})["Y"].value, want)
    assert "mask=" not in kernels(made, "| fma")
    tiled = kernels(made, "i:8 | fma")
    assert tiled.count("mask=") == (0 if (n + before + after) % 8 == 0 else 2)
    assert "X_0 <" not in tiled and "<= X_0" not in tiled


def test_pads_of_torch() -> None:
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    for way, mode in (("clamp", "replicate"), ("reflect", "reflect"), ("wrap", "circular")):
        made = parse(
            f"compute pad\n tensor X f64 [2, 3, 6, 5]\n axes n=2 c=3 h=9 w=9\n"
            f"read x = X[n, c, {way}(h - 1, 6), {way}(w - 2, 5)]\n store Y[n, c, h, w] = x"
        )
        want = torch.nn.functional.pad(x, (2, 2, 1, 2), mode=mode)
        assert np.array_equal(execute(made, {"X": x.numpy()})["Y"].value, want.numpy())
        assert kernels(made, "h:4 w:8 | fma").count("mask=") == 2  # of the ends of the tile
    in_triton(made)


def test_what_is_near_is_not_divided() -> None:
    """A reflection by less than a period needs no remainder, one on a single side no maximum."""
    both = kernels(pad("reflect", 8, 12, 2), "i:4 | fma")
    assert "%" not in both and "maximum" in both
    right = kernels(pad("reflect", 8, 10, 0), "i:2 | fma")
    assert "maximum" not in right and "minimum" in right
    inside = kernels(pad("reflect", 16, 10, 0), "i:2 | fma")
    assert "minimum" not in inside


def test_division_rounds_down_in_the_text() -> None:
    """Triton's division rounds negative numbers up, so no negative number is divided."""
    made = parse(
        "compute down\n tensor X f32 [12]\n axes i=20\n"
        "read x = X[(i - 7) // 3 + 3]\n read y = X[(i - 9) % 7]\n store Y[i] = x - y"
    )
    source = kernels(made, "i:8 | fma")
    assert "i - 7" not in source and "(i + 2) // 3" in source
    in_triton(made)


@pytest.mark.parametrize(
    ("coords", "want"),
    [
        ("h // 2, w // 2", lambda x: x.repeat(2, 0).repeat(2, 1)),
        ("5 - h // 2, w // 2", lambda x: x[::-1].repeat(2, 0).repeat(2, 1)),
        ("h // 2, 3", lambda x: x[:, 3:4].repeat(2, 0).repeat(8, 1)),
        (
            "(h*8 + w) // 4 % 6, w % 4",
            lambda x: x.reshape(-1, 4)[(np.arange(96) // 4) % 6][np.arange(96), np.arange(96) % 4].reshape(
                12, 8
            ),
        ),
    ],
)
def test_views(coords: str, want: object) -> None:
    x = np.arange(24.0).reshape(6, 4)
    made = parse(
        f"compute view\n tensor X f32 [6, 4]\n axes h=12 w=8\n read x = X[{coords}]\nstore Y[h, w] = x"
    )
    np.testing.assert_array_equal(execute(made, {"X": x})["Y"].value, want(x))  # type: ignore[operator]
    assert "mask=" not in kernels(made, "h:4 w:8 | fma")


def test_pixel_shuffle_is_a_read_and_a_store() -> None:
    x = torch.randn(2, 12, 3, 5)
    want = torch.pixel_shuffle(x, 2).numpy()
    read = parse(
        "compute shuffle\n tensor X f32 [2, 12, 3, 5]\n axes b=2 c=3 h=6 w=10\n"
        "read x = X[b, c*4 + h % 2*2 + w % 2, h // 2, w // 2]\n store Y[b, c, h, w] = x"
    )
    store = parse(
        "compute shuffle\n axes b=2 c=12 h=3 w=5\n read x = X[b, c, h, w]\n"
        "store Y[b, c // 4, h*2 + c // 2 % 2, w*2 + c % 2] = x"
    )
    for made in (read, store):
        assert np.array_equal(execute(made, {"X": x.numpy()})["Y"].value, want)
        kernels(made)
        in_triton(made)


# -- gathers ---------------------------------------------------------------------------------------

EMBEDDING = """compute embedding
    tensor I {type} [4, 9]
    tensor T f16 [11, 20]
    tensor Y f16 [4, 9, 20]
    axes   b=4 s=9 k=20
    read   i = I[b, s]
    read   t = T[{i}, k]{fill}
    store  Y[b, s, k] = t"""


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize(
    ("i", "fill"),
    [
        ("i", ""),
        ("i", " else 3"),
        ("from_end(i, 11)", ""),
        ("clamp(i, 11)", ""),
        ("i", " where i >= 2 else -1"),
    ],
)
def test_embeddings(dtype: str, i: str, fill: str) -> None:
    made = parse(EMBEDDING.format(type=dtype, i=i, fill=fill))
    for schedule in (None, "s:4 k:8 | fma", "b.s:16 k:16 | fma"):
        source = kernels(made, schedule)
        assert ("X_0" in source or "T_0 < 11" in source) == (i != "clamp(i, 11)")
    in_triton(made)


def test_an_index_beyond_the_end_reads_the_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that 32 bits do not hold, and none is taken for another."""
    monkeypatch.delenv("TRANSCONV_VERIFY", raising=False)
    made = parse(
        "compute p\n tensor I i64 [6]\n tensor X f32 [4]\n axes n=6\n read i = I[n]\n"
        "read x = X[i] else 7\n read y = X[from_end(i, 4)]\n store Y[n] = x\n store Z[n] = y"
    )
    given = {"I": np.array([0, 3, 4, -1, 1 << 32, -(1 << 62)]), "X": np.arange(1.0, 5.0)}
    got = execute(made, given)
    assert list(got["Y"].value) == [1, 4, 7, 7, 7, 7] and list(got["Z"].value) == [1, 4, 0, 4, 0, 0]
    plan = build_compute(made, TARGETS["interpreter"])
    y, z = torch.zeros(6), torch.zeros(6)
    plan.launch(I=torch.from_numpy(given["I"]), X=torch.arange(1.0, 5.0), Y=y, Z=z)
    assert y.tolist() == [1, 4, 7, 7, 7, 7] and z.tolist() == [1, 4, 0, 4, 0, 0]


def test_an_index_beyond_the_end_is_told_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's words; a condition says which indices are not meant."""
    made = parse(
        "compute p\n tensor I i64 [3]\n tensor X f32 [5, 4]\n axes n=3 m=5\n read i = I[n]\n"
        "read x = X[m, i] where i != 9\n store Y[n, m] = x"
    )
    plan, x, y = build_compute(made, TARGETS["interpreter"]), torch.ones(5, 4), torch.zeros(3, 5)
    monkeypatch.setenv("TRANSCONV_VERIFY", "1")
    plan.launch(I=torch.tensor([0, 9, 3]), X=x, Y=y)
    assert y[:, 0].tolist() == [1, 0, 1]
    for wrong in (4, -1):
        with pytest.raises(TensorError) as ours:
            plan.launch(I=torch.tensor([0, wrong, 3]), X=x, Y=y)
        assert f"X: index {wrong} is out of bounds for dimension 1 with size 4" == str(ours.value)


def test_a_condition_that_repeats_the_bounds_says_what_is_meant() -> None:
    """It is part of the text, in the gradient's too."""
    for where, left in (("0 <= i", [4]), ("0 <= i and i < 4", [])):
        made = parse(
            f"compute p\n tensor I i64 [3]\n tensor X f32 [4]\n axes n=3\n read i = I[n]\n"
            f"read x = X[i] where {where}\n store Y[n] = x"
        )
        assert parse(str(made)) == made
        told = [outside(made, {"I": np.array([0, wrong, 3])}) for wrong in (-1, 4)]
        assert [f"X: index {i} is out of bounds for dimension 0 with size 4" for i in left] == [
            t for t in told if t
        ]
    diagonal = parse(
        "compute p\n tensor X f32 [4, 4]\n axes n=4\n read x = X[n - 1, n - 1]\nstore Y[n] = x"
    )  # both dimensions have the same bounds
    assert "where" not in str(diagonal) and parse(str(diagonal)) == diagonal


def test_whole_numbers_are_compared_exactly() -> None:
    """The gradient of a gather, without adding in place; no index is another one rounded to f32."""
    made = parse(
        "compute back\n tensor I i64 [9]\n tensor D f32 [9, 8]\n axes v=11 k=8 n=9\n"
        "read i = I[n]\n read d = D[n, k]\n store T[v, k] = sum(where(i == v, d, 0); n)\n"
        "store U[v, k] = 1"
    )
    source = kernels(made, "v:4 k:8 n:4 | fma")
    assert ".to(tl.int64)" in source and "i.to(tl.float32)" not in source
    i = np.array([0, 3, 3, 10, 11, -1, 1 << 32, (1 << 32) + 3, 5])
    d, want = np.random.default_rng(0).standard_normal((9, 8)), np.zeros((11, 8))
    np.add.at(want, i[[0, 1, 2, 3, 8]], d[[0, 1, 2, 3, 8]])
    np.testing.assert_allclose(execute(made, {"I": i, "D": d})["T"].value, want)
    plan, t = build_compute(made, TARGETS["interpreter"]), torch.zeros(11, 8)
    plan.launch(I=torch.from_numpy(i), D=torch.from_numpy(d).float(), T=t, U=torch.zeros(11, 8))
    np.testing.assert_allclose(t.numpy(), want, rtol=1e-6)


@pytest.mark.slow
def test_gathered_rows_are_multiplied() -> None:
    made = parse("""compute rows
    tensor I i32 [40]
    tensor J i64 [33]
    tensor X f16 [11, 60]
    tensor W f16 [24, 33]
    tensor B f32 [15]
    axes   m=40 n=24 k=33
    read   i = I[m]
    read   j = J[k]
    read   x = X[i, j]
    read   w = W[n, k]
    let    s = sum(x*w; k)
    read   l = I[m]
    read   b = B[l]
    store  Y[m, n] = s + b""")
    assert made.kinds == {"m": "M", "n": "N", "k": "K"}
    source = kernels(made, "m:16 n:16 k:16 | mma")
    assert "tl.dot(x, w" in source and source.count("tl.load(I") == 1
    assert source.index("tl.load(I") < source.index("for step") < source.index("tl.load(J")
    for schedule in ("m:16 n:16 k:16 | mma | split_k=3 swap=1", "m:8 n:8 k:8 | fma | late=1", None):
        kernels(made, schedule)
    in_triton(made)


def test_a_bag_of_embeddings() -> None:
    made = parse(
        "compute bag\n tensor I i64 [9, 5]\n tensor T f32 [11, 20]\n axes n=9 k=20 l=5\n"
        "read i = I[n, l]\n read t = T[i, k]\n store Y[n, k] = sum(t; l)"
    )
    draw = np.random.default_rng(0)
    i, t = draw.integers(0, 11, (9, 5)), draw.standard_normal((11, 20))
    want = torch.nn.functional.embedding_bag(torch.from_numpy(i), torch.from_numpy(t), mode="sum").numpy()
    np.testing.assert_allclose(execute(made, {"I": i, "T": t})["Y"].value, want, rtol=1e-12)
    kernels(made, "n:8 k:16 l:4 | fma")
    in_triton(made)


# -- concatenations --------------------------------------------------------------------------------

CONCAT = """compute concat
    tensor A {type} [2, 5, 6, 3]
    tensor B {type} [2, 3, 6, 6]
    tensor Y {type} [2, 8, 6, 6]
    axes   n=2 c=8 h=6 w=6
    read   a = A[n, c, 5 - h, w // 2]
    read   b = B[n, c - 5, h, reflect(w - 1, 6)]
    let    x = where(c < 5, a, b)
    store  Y[n, c, h, w] = x"""


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_concatenations_move_bits(dtype: str) -> None:
    made = parse(CONCAT.format(type=dtype))
    assert ".to(" not in kernels(made, "n.c:16 h.w:16 | fma")
    in_triton(made)
    tensors = ComputationCase(made, "float").tensors("cpu")
    tensors["A"][0, 0], tensors["B"][0, 0] = -0.0, float("nan")
    build_compute(made, TARGETS["interpreter"]).launch(**tensors)
    y = tensors["Y"].float()
    assert torch.signbit(y[0, 0]).all() and y[0, 5].isnan().all()


PRODUCT = """compute product
    tensor A {type} [40, 21]
    tensor B {type} [40, 9]
    tensor C {type} [40, 7]
    tensor W {type} [24, 37]
    axes   m=40 n=24 k=37
    read   a = A[m, k]
    read   b = B[m, k - 21]
    read   c = C[m, 36 - k]
    let    x = where(k < 21, a, where(k < 30, b, c))
    read   w = W[n, k]
    store  Y[m, n] = sum(x*w; k)"""


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize(
    "schedule",
    ["m:16 n:16 k:16 | mma", "m:16 n:16 k:16 | mma | swap=1 split_k=2", "m:16 n:8 k:8 | fma", None],
)
def test_a_concatenation_is_a_factor(dtype: str, schedule: str | None) -> None:
    made = parse(PRODUCT.format(type=dtype))
    assert made.factors is not None and made.kinds == {"m": "M", "n": "N", "k": "K"}
    source = kernels(made, schedule)
    if schedule and "mma" in schedule:
        near = "x_near" if dtype == "f32" else "x"
        assert f"tl.dot({near}, w" in source or f", {near}.T" in source or f"{near}," in source
    if dtype == "f16":
        in_triton(made)


# -- axes as values --------------------------------------------------------------------------------


def test_axes_are_values() -> None:
    made = parse(
        "compute causal\n axes q=9 k=12\n read s = S[q, k]\n let p = q*2 + k\n"
        "read z = Z[p // 2]\n store P[q, k] = where(k <= q, s, -inf)\n"
        "store O[q, k] = s*p + f32(k) + z"
    )
    s, z = np.random.default_rng(0).standard_normal((9, 12)), np.arange(14.0)
    got = execute(made, {"S": s, "Z": z})
    np.testing.assert_array_equal(got["P"].value, np.where(np.tri(9, 12, dtype=bool), s, -np.inf))
    q, k = np.indices((9, 12))
    np.testing.assert_allclose(got["O"].value, s * (q * 2 + k) + k + z[(q * 2 + k) // 2])
    assert "mask=(k" not in kernels(made, "q:4 k:16 | fma")
    in_triton(made)


def test_a_choice_by_a_wide_number_stays_a_float() -> None:
    made = parse(
        "compute wide\n tensor A f16 [8]\n tensor B f16 [8]\n tensor Y f16 [8]\n axes n=8\n"
        "read a = A[n]\n read b = B[n]\n let x = where(n*3000000000 < 7000000000, a, b)\n"
        "store Y[n] = x"
    )
    assert "x.to(" not in kernels(made, "n:8 | fma") and "a.to(" not in kernels(made)
    in_triton(made)


# -- stores ----------------------------------------------------------------------------------------


def test_stores_through_views() -> None:
    made = parse(
        "compute p\n axes n=6 m=8\n read x = X[n, m]\n store Y[m // 4, 5 - n, m % 4] = x\n"
        "store Z[n*16 + m*2] = x\n store Z[n*16 + m*2 + 1] = -x"
    )
    kernels(made, "n:4 m:8 | fma")
    in_triton(made)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ("store Y[n // 2, m] = x", "several points are stored in one place of Y"),
        ("store Y[n + m] = x", "several points are stored in one place of Y"),
        ("store Y[n, m] = x\n store Y[n, m + 1] = x", "several points are stored in one place of Y"),
        ("store X[n, m] = x", "X is read and stored"),
        (
            "read i = I[n]\n store Y[i, m] = x",
            "places in Y are told by the values of i, which may be equal",
        ),
    ],
)
def test_points_that_share_a_place_are_refused(steps: str, reason: str) -> None:
    made = parse(
        f"compute p\n tensor I i64 [6]\n tensor Y f32 [{'14' if '+ m]' in steps else '6, 9'}]\n"
        f"axes n=6 m=8\n read x = X[n, m]\n {steps}"
    )
    with pytest.raises(ScheduleError, match=reason):
        build_compute(made, SM90)


@pytest.mark.parametrize(
    ("coords", "apart"),
    [
        ("m // 16384, m // 128 % 128, m % 128", True),
        ("m % 512, m // 512", True),
        ("m // 512 % 131072, m % 512", True),
        ("m // 512 % 65536, m % 512", False),
        ("m // 512, m % 256", False),
        ("m // 512, m // 2 % 256", False),
        ("m // 16384, m // 4096 % 4 * 32 + m // 16 % 32, m // 512 % 8 * 16 + m % 16", True),
        ("m // 16384, m // 4096 % 4 * 31 + m // 16 % 32, m // 512 % 8 * 16 + m % 16", False),
        ("m // 256, m % 128 + m // 128 % 2", False),
    ],
)
def test_digits_of_an_axis_tell_its_position(coords: str, apart: bool) -> None:
    """Of so many points that none is looked at alone."""
    shape = ", ".join(["262144"] * (coords.count(",") + 1))
    made = parse(
        f"compute p\n tensor X f32 [67108864]\n tensor Y f32 [{shape}]\n axes m=67108864\n"
        f"read x = X[m]\n store Y[{coords}] = x"
    )
    assert (why_not_lowered(made) is None) is apart


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("read x = X[k / 2]", "expected whole numbers"),
        ("read i = F[k]\n read x = X[i]", "coordinate f32(i) is f32; expected whole numbers"),
        ("read i = I[k]\n read x = U[i]", "the size of U along i is not known; expected a line such as"),
        ("read x = X[k % m]", "divides by m; expected a number above 0"),
        ("read x = X[reflect(k)]", "reflect(...) of 1 values is unknown"),
    ],
)
def test_coordinates_are_whole_numbers(lines: str, said: str) -> None:
    with pytest.raises(ComputeError) as error:
        parse(
            f"compute p\n tensor X f32 [4]\n tensor I i64 [8]\n axes m=3 k=8\n{lines}\n store Y[m, k] = x"
        )
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("m:16 n:16 k:16 | mma | a=box", "a=box: x is chosen from several tensors"),
        ("m:16 n:16 k:16 | mma | pack=a", "pack=a: x is chosen from several tensors"),
    ],
)
def test_a_choice_is_no_box(schedule: str, reason: str) -> None:
    assert reason in str(why_not(Schedule.parse(schedule), parse(PRODUCT.format(type="f16")), SM90))


def test_a_gather_is_no_box() -> None:
    made = parse(
        "compute p\n tensor I i64 [64]\n tensor X f16 [64, 64]\n tensor W f16 [64, 64]\n"
        "axes m=64 n=64 k=64\n read i = I[m]\n read x = X[i, k]\n read w = W[n, k]\n"
        "store Y[m, n] = sum(x*w; k)"
    )
    reason = why_not(Schedule.parse("m:64 n:64 k:64 | mma | a=box b=box"), made, SM90)
    assert "a=box: places in X are told by the values of i" in str(reason)


def test_rows_of_coordinates_say_what_they_are() -> None:
    assert {*PADS, "from_end", "abs"} == set(COORDINATES)
    assert all(row.says for row in COORDINATES.values())


# -- planted bugs ----------------------------------------------------------------------------------


def found(text: str, schedule: str) -> str:
    """What is wrong with the kernels of a text, in a line."""
    return ComputeTrial(text, "sm_90", schedule).problem()


def test_a_lost_mask_of_a_gather_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text, schedule = EMBEDDING.format(type="i64", i="i", fill=""), "s:4 k:8 | fma"
    assert found(text, schedule) == ""
    kept = gridwise.Guard.guarded
    monkeypatch.setattr(
        gridwise.Guard,
        "guarded",
        lambda self, offset, mask, inside=frozenset(): all_of(
            [p for p in conjuncts(kept(self, offset, mask, inside)) if "11" not in str(p)]
        ),
    )
    assert "addresses-are-inside" in found(text, schedule)


def test_an_index_that_is_read_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "compute bag\n tensor I i64 [9, 5]\n tensor T f32 [11, 8]\n axes n=9 k=8 l=5\n"
        "read i = I[n, l]\n read t = T[i, k]\n store Y[n, k] = sum(t; l)"
    )
    assert found(text, "n:8 | fma") == ""
    early = naive._outside
    monkeypatch.setattr(naive, "_outside", lambda loops, k_vars, indices: early(loops, set(), indices))
    assert "l is not bound" in found(text, "n:8 | fma")


@pytest.mark.parametrize("name", ["clamp", "reflect", "symmetric", "wrap"])
def test_a_wrong_row_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding by one element more, which NumPy does not define this way, needs a mask."""
    row = COORDINATES[name]
    monkeypatch.setitem(COORDINATES, name, replace(row, expression=lambda i, n: row.expression(i, n) + 1))
    with pytest.raises(AssertionError):
        test_pads_are_numpys_and_leave_no_mask(name, 8, 2, 2)
