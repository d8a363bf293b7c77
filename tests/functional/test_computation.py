"""transconv.computation: a text as a function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import transconv
from tests import programs
from transconv.errors import ComputeError, TensorError

TEXT = """compute rows
    axes   m=8 k=20
    read   x = X[m, k]
    read   w = W[k]
    let    s = sum(x*w; k)
    store  Y[m] = s
    store  Z[m, k] = x - s"""


@pytest.mark.parametrize("cpu", ["interpret", "fallback"])
def test_tensors_by_name_and_in_order(cpu: str) -> None:
    transconv.config.cpu = cpu
    rows = transconv.computation(TEXT)
    x, w = torch.randn(20, 8).T, torch.randn(20)
    for y, z in (rows(x, w), rows(W=w, X=x), rows(x, W=w)):
        torch.testing.assert_close(y, x @ w)
        torch.testing.assert_close(z, x - (x @ w)[:, None], check_stride=False)
    assert repr(rows) == "transconv.computation(rows: X, W -> Y, Z)"
    assert transconv.computation(rows.compute).compute == rows.compute


def test_what_does_not_fit_is_told_in_one_line() -> None:
    rows = transconv.computation(TEXT)
    x, w = torch.randn(8, 20), torch.randn(20)
    with pytest.raises(TensorError, match="rows: W: expected a tensor, got NoneType"):
        rows(x)
    with pytest.raises(TensorError, match=r"rows: X: expected torch.float32 of shape \(8, 20\), got"):
        rows(x.double(), w)
    with pytest.raises(TypeError, match="rows: X was given already"):
        rows(x, w, X=x)
    with pytest.raises(TypeError, match=r"rows reads 2 tensors \(X, W\), got 3"):
        rows(x, w, w)
    with pytest.raises(TypeError, match="rows: V is not read; expected X, W"):
        rows(x, V=w)
    with pytest.raises(ComputeError, match="line 1"):
        transconv.computation("nothing")


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: transconv.computation(TEXT)(x, w)[0],
        lambda x, w: transconv.functional.softmax(x, 1) * w,
    ],
    ids=["computation", "softmax"],
)
def test_arguments_in_a_graph_are_one_line(call: Callable[..., Any]) -> None:
    """Inductor writes them into comments of the kernels around."""
    graph = make_fx(call)(torch.randn(8, 20), torch.randn(20))
    assert any("transconv" in str(n.target) for n in graph.graph.nodes)
    assert all("\n" not in arg for n in graph.graph.nodes for arg in n.args if isinstance(arg, str))


@pytest.mark.slow
def test_graphs_hold_it_as_one_operator() -> None:
    """And its gradients as further ones."""
    rows = transconv.computation(TEXT)
    x, w, g = torch.randn(8, 20, requires_grad=True), torch.randn(20, requires_grad=True), torch.randn(8)
    compiled = torch.compile(lambda x, w: rows(x * 2, w)[0].sin(), fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w), (x * 2 @ w).sin()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, w), g) for y in (got, want)))


def test_a_text_that_reads_nothing_is_told_where_its_result_shall_be() -> None:
    """With a kernel, and by its meaning where none may take it."""
    count = transconv.computation("compute count\naxes m=6 n=7\nstore Y[m, n] = m*7 + n")
    want = torch.arange(42.0).reshape(6, 7)
    for cpu in ("interpret", "fallback"):
        transconv.config.cpu = cpu
        assert torch.equal(count(device="cpu"), want)
        assert torch.equal(torch.compile(lambda: count(device="cpu") * 2, backend="eager")(), want * 2)
    with pytest.raises(TensorError, match=r"expected device="):
        count()
    with pytest.raises(TypeError, match="reads no tensor"):
        count(want, device="cpu")


@pytest.mark.slow
def test_torchs_compiler_may_be_imported_after_convolutions_were_replaced() -> None:
    """Its import reaches torch.distributed.tensor, whose room imports this one meanwhile."""
    code = (
        "import sys, torch, transconv; transconv.enable('cpu'); "
        "assert 'torch._dynamo' not in sys.modules; import torch._dynamo; "
        "assert 'transconv.functional' in sys.modules"
    )
    programs.run(["-c", code], check=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_least_number_by_a_negative_one(dtype: torch.dtype) -> None:
    """It has no opposite, so that a division cannot change its sign."""
    low = torch.iinfo(dtype).min
    x = torch.tensor([low, low + 1, -17, -3, 0, 3, 7, torch.iinfo(dtype).max], dtype=dtype)
    name = "i32" if dtype is torch.int32 else "i64"
    divided = transconv.computation(f"""compute divided
        tensor X {name} [n=8]
        tensor Y {name} [n=8]
        tensor Z {name} [n=8]
        axes   n=8
        read   a = X[n]
        store  Y[n] = a // -3
        store  Z[n] = a % -3""")
    quotient, rest = divided(x)
    assert quotient.tolist() == [n // -3 for n in x.tolist()]
    assert rest.tolist() == [n % -3 for n in x.tolist()]
    assert sum(transconv.stats().native.values()) == 1 and not transconv.stats().fallback


def test_an_axis_of_one_position_needs_no_coordinate() -> None:
    """As torch's gradients of single positions have it."""
    text = """compute single
    tensor X f32 [3, 4]
    tensor Y f32 [3, 1, 1]
    axes   n=3 h=1 w=1 | k=4
    read   x = X[n, k]
    store  Y[n, 0, 0] = sum(x*2.0; k)
"""
    x = torch.arange(12.0).view(3, 4)
    assert transconv.computation(text)(x).view(3).tolist() == [12.0, 44.0, 76.0]
    assert transconv.stats().native == {"single": 1}


def check_reductions_of_bytes(device: str) -> None:
    """Tensors of 8 bits that a text declares: by a kernel, exact beside f64."""
    for name, dtype in (
        ("u8", torch.uint8),
        ("f8e4m3", torch.float8_e4m3fn),
        ("f8e5m2", torch.float8_e5m2),
    ):
        for k in (20, 33):
            lines = f"tensor X {name} [m=8, k={k}]", f"tensor M {name} [m=8]", "tensor S f32 [m=8]"
            text = [*lines, f"axes m=8 k={k}", "read x = X[m, k]", "store M[m] = max(x; k)"]
            rows = transconv.computation("\n ".join(["compute rows", *text, "store S[m] = sum(x*x; k)"]))
            x = torch.randint(-8 * dtype.is_floating_point, 9, (8, k), device=device).to(dtype)
            transconv.stats(reset=True)
            most, total = rows(x)
            assert transconv.stats().native_share == 1.0, str(transconv.stats())
            assert most.dtype is dtype and torch.equal(most.double(), x.double().amax(1))
            assert torch.equal(total.double(), (x.double() ** 2).sum(1))


def test_reductions_of_bytes() -> None:
    transconv.config.cpu = "interpret"
    check_reductions_of_bytes("cpu")


NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "n*16777217": lambda n: n * 16777217,
    "n*n + 16777217": lambda n: n * n + 16777217,
    "7*16777217": lambda n: torch.full_like(n, 7 * 16777217),
    "where(n > 1, 16777217, 3)": lambda n: torch.where(n > 1, 16777217, 3),
    "max(n, 16777217)": lambda n: n.clamp(min=16777217),
}


@pytest.mark.parametrize("text", NUMBERS)
def test_whole_numbers_of_places_have_a_name_or_none(text: str) -> None:
    """What is made of axes and numbers alone is exact, whether it is stored, named, or goes on."""
    transconv.config.cpu = "interpret"
    lines = [f"store  A[n] = {text}", f"let    v = {text}", "store  B[n] = v", "store  C[n] = v + x"]
    tensors = [f"    tensor {name} i64 [5]" for name in "XABC"]
    body = ["    axes   n=5", "    read   x = X[n]", *(f"    {line}" for line in lines)]
    x = torch.arange(5)
    want = NUMBERS[text](x)
    for found, right in zip(
        transconv.computation("\n".join(["compute whole", *tensors, *body]))(x),
        (want, want, want + x),
        strict=True,
    ):
        assert torch.equal(found, right)
