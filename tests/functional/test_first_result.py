"""The first result of a computation's kernels is held against its meaning at samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

import transconv.functional
from transconv.compute import execute, parse
from transconv.compute.sampled_points import LONGEST, examine
from transconv.errors import Unsupported
from transconv.functional.calls import compiled_launch, first_call_check, torch_operators
from transconv.functional.calls.route import FunctionCall
from transconv.runtime import check_records, compiler, plans

SOFTMAX = """compute softmax
    tensor X f16 [40, 30]
    tensor Y f16 [40, 30]
    axes   n=40 | k=30
    read   x = X[n, k]
    let    top = max(x; k)
    let    e = exp(x - top)
    let    total = sum(e; k)
    store  Y[n, k] = e / total
    store  T[n] = total"""
GATHER = """compute rows
    tensor I i64 [40]
    tensor X f32 [9, 5]
    tensor Y f32 [40, 5]
    axes   n=40 k=5
    read   i = I[n]
    read   x = X[i, k] else -1
    store  Y[n, k] = 2*x"""
ALL = "compute all\n axes | k=70\n read x = X[k]\n store Y[0] = sum(x*x; k)"
PRODUCT = """compute product
    axes m=20 n=24 | k=16
    read x = X[m, k]
    read w = W[n, k]
    let  s = sum(x*w; k)
    store Y[m, n] = gelu(s)"""
MEAN_OF_MAX = """compute two
    axes n=20 | k=30
    read x = X[n, k]
    let  m = max(x; k)
    store Y[0] = sum(m; n) / 20"""


def data(text: str) -> dict[str, torch.Tensor]:
    """What is read, drawn, and what the text means in the place of what is stored."""
    compute = parse(text)
    draw = torch.Generator().manual_seed(0)
    given: dict[str, torch.Tensor] = {}
    for t in compute.tensors:
        if t.dtype.kind == "int":
            given[t.name] = torch.randint(-1, 10, t.shape, generator=draw)
        else:
            dtype = {"f16": torch.float16, "f32": torch.float32}[t.dtype.name]
            given[t.name] = torch.randn(t.shape, generator=draw).to(dtype)
    stored = {w.view.tensor.name for w in compute.writes}
    wide = {
        n: (t.double() if t.is_floating_point() else t).numpy()
        for n, t in given.items()
        if n not in stored
    }
    for name, answer in execute(compute, wide).items():
        given[name] = torch.from_numpy(answer.value).to(given[name].dtype)
    return given


LOOKED_UP = """compute looked_up
    tensor I i64 [60]
    tensor G f16 [60, 5]
    tensor D f16 [9, 5]
    axes   n=60 k=5
    read   i = I[n]
    read   g = G[n, k]
    store  D[i, 4 - k] += g*2"""
TWICE = """compute twice
    axes   n=40 | k=3
    read   a = A[n, k]
    read   b = B[n]
    let    s = sum(a; k)
    tensor D f32 [20]
    store  D[n // 2] += s
    store  D[clamp(n - 4, 20)] where n > 3 += b"""


@pytest.mark.parametrize(
    "text", [SOFTMAX, GATHER, ALL, PRODUCT, MEAN_OF_MAX, LOOKED_UP, TWICE], ids=lambda t: t.split()[1]
)
def test_right_results_are_right_and_wrong_ones_are_seen(text: str) -> None:
    compute, tensors = parse(text), data(text)
    found = examine(compute, tensors)
    assert found.reason == "" and found.checked and found.varied
    for name in dict.fromkeys(w.view.tensor.name for w in compute.writes):
        wrong = dict(tensors)
        wrong[name] = tensors[name] * 1.01 + 0.01
        said = examine(compute, wrong)
        assert f"of {name} are wrong, the first at {said.wrong[0]}" in said.reason
        wrong[name] = torch.full_like(tensors[name], float("nan"))
        assert examine(compute, wrong).reason


def test_a_sum_that_lost_one_of_its_terms_is_seen() -> None:
    """Found with some seed of the sampled elements; terms are sampled where there are too many to
    compute all."""
    compute, tensors = parse(LOOKED_UP), data(LOOKED_UP)
    n = next(n for n in range(60) if 0 <= tensors["I"][n] < 9)
    at, term = int(tensors["I"][n]), 2 * tensors["G"][n, 2]
    tensors["D"] = tensors["D"].clone()
    tensors["D"][at, 2] -= term
    assert any(examine(compute, tensors, seed).wrong == ((at, 2),) for seed in range(12))
    assert examine(parse(LOOKED_UP.replace("60", str(LONGEST + 1))), {}).checked == 0


def test_tensors_are_read_as_they_lie() -> None:
    tensors = data(SOFTMAX)
    wide = torch.zeros(60, 50, dtype=torch.float16)
    wide[:30, 5:45] = tensors["X"].T
    tensors["X"] = wide[:30, 5:45].T
    assert not examine(parse(SOFTMAX), tensors).reason


def test_weak_data_and_long_rows() -> None:
    tensors = data(ALL)
    assert examine(parse(ALL), {**tensors, "X": torch.ones(70), "Y": torch.full((1,), 70.0)}).weak
    assert examine(parse(ALL.replace("70", str(LONGEST + 1))), {}).checked == 0


def test_what_passes_through_infinity_in_f32_is_not_judged() -> None:
    text = "compute far\n axes n=4\n read x = X[n]\n let e = exp(x)\n store Y[n] = e / (e + e)"
    given = {"X": torch.tensor([1.0, 99.0, 2.0, 3.0]), "Y": torch.tensor([0.5, float("nan"), 0.5, 0.5])}
    assert not examine(parse(text), given).reason


# -- launches --------------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in Triton's interpreter, and are checked there."""
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    for cache in (compiler.forget, check_records.forget, compiled_launch._launches.clear):
        cache()
    yield
    compiler.forget()
    check_records.forget()


def spoiled(monkeypatch: pytest.MonkeyPatch, wrong: int) -> list[str]:
    """Plans store right results, except that the first ``wrong`` different plans store 1.5 times as
    much. Returns the schedules that were launched."""
    seen: list[str] = []

    def run(self: plans.Plan, tensors: dict[str, torch.Tensor]) -> None:
        if str(self.schedule) not in seen:
            seen.append(str(self.schedule))
        given = {n: t.double().numpy() for n, t in tensors.items() if n not in self.workload.results}
        for name, answer in execute(parse(SOFTMAX), given).items():
            factor = 1.5 if seen.index(str(self.schedule)) < wrong else 1.0
            tensors[name].copy_(torch.from_numpy(answer.value * factor))

    monkeypatch.setattr(plans.Plan, "run", run)
    return seen


@pytest.mark.usefixtures("checked", "nothing_known")
def test_a_wrong_kernel_is_replaced_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph's operator, too: its kernels are checked when they first run."""
    tensors = data(SOFTMAX)
    seen = spoiled(monkeypatch, 1)
    y, _ = torch_operators.compute(SOFTMAX, [tensors["X"]])
    assert len(seen) == 2
    torch.testing.assert_close(y, tensors["Y"])
    launch = compiled_launch.launch(SOFTMAX, y.device, True, "now")
    assert launch.plan.rejected == 1 and str(launch.plan.schedule) == seen[1]


@pytest.mark.usefixtures("checked", "nothing_known")
def test_where_all_are_wrong_the_call_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = data(SOFTMAX)
    spoiled(monkeypatch, 99)
    with pytest.raises(Unsupported, match="give wrong results"):
        compiled_launch.launch(SOFTMAX, torch.device("cpu"), True, "now").start(
            [tensors["X"], torch.empty(40, 30, dtype=torch.float16), torch.empty(40)]
        )


@pytest.mark.usefixtures("checked", "nothing_known")
def test_large_tensors_are_not_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would compute as a whole is left to the samples."""
    compared: list[object] = []
    monkeypatch.setattr(first_call_check, "_compare", lambda route, got, want: compared.append(got))
    monkeypatch.setattr(first_call_check, "LARGE", 39)
    for size, times in ((8, 0), (7, 1)):
        x = torch.randn(size, 5)
        torch.testing.assert_close(transconv.functional.logsumexp(x, 1), x.logsumexp(1))
        assert len(compared) == times


@pytest.mark.usefixtures("checked", "nothing_known")
def test_further_sizes_are_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sizes are arguments, a mistake may be one of the third size alone."""
    compared: list[int] = []
    real = first_call_check._compare

    def noted(route: FunctionCall, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
        compared.append(got[0].shape[0])
        if compared[-1] == 6:
            got = [2 * t for t in got]
        real(route, got, want)

    monkeypatch.setattr(first_call_check, "_compare", noted)
    monkeypatch.setattr(transconv.config, "sizes", "any")
    for n in (3, 5, 6, 7, 9, 11, 100):
        x = torch.randn(n, 5)
        torch.testing.assert_close(transconv.functional.logsumexp(x, 1), x.logsumexp(1))
    assert compared == [3, 5, 6, 7, 9, 11, 100]
    found = transconv.stats()
    assert found.native["logsumexp any size"] == 6 and found.fallback == {"miscompiled": 1}


def test_torchs_products_may_cut_operands_to_tf32() -> None:
    """Where the precision of products allows it, both sides round to 10 bits, and not alike."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    cut = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b)]
    for math in ("tf32", "ieee"):
        text = PRODUCT.replace("compute product", f"compute product math={math}")
        route = SimpleNamespace(step=SimpleNamespace(text=text), name="matmul")
        if math == "tf32":
            first_call_check._compare(route, [a @ b], [cut[0] @ cut[1]])
        else:
            with pytest.raises(Unsupported, match="differs from torch's"):
                first_call_check._compare(route, [a @ b], [cut[0] @ cut[1]])
        with pytest.raises(Unsupported, match="differs from torch's"):
            first_call_check._compare(route, [a @ b], [a[:, 1:] @ b[1:]])


def test_small_numbers_tell_nothing_if_zeros_would_pass() -> None:
    """Gradients far below the allowed error: a kernel that stores zeros is looked at with other data."""
    given = data(PRODUCT)
    assert not examine(parse(PRODUCT), given).weak
    small = {n: t * 1e-5 for n, t in given.items()} | {"Y": given["Y"] * 0}
    found = examine(parse(PRODUCT), small)
    assert not found.reason and found.weak
