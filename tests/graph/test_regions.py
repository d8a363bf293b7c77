"""Operations without a translation are torch's, in their place and with a reason; nothing is moved
past side effects."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import transconv
from tests.graph.meant import by_meaning, compare, traced
from transconv.graph import KernelRow, TorchRow, backend, report, torch_compile
from transconv.graph.regions import region_calls

Tensor = torch.Tensor


@torch.library.custom_op("transconv_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """A custom operation, which has no row in the table."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("transconv_tests::bump", mutates_args=("x",))
def bump(x: Tensor) -> None:
    """An operation that writes to what it is handed."""
    x += 1


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend=backend, options={"rest": "eager"}, **options)


def reasons(run: Any) -> str:
    return "\n".join(
        r for g in report(run).graphs for row in g.rows if isinstance(row, TorchRow) for r in row.reasons
    )


def test_an_unknown_operation_is_torchs() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.relu(torch.ops.transconv_tests.doubled(x.sin()) + x)

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.randn(3, 4)], 1e-6)
    assert [type(r).__name__ for r in report(run).graphs[0].rows] == ["KernelRow", "TorchRow", "KernelRow"]
    assert "doubled: no row of the table has this operation" in reasons(run)
    assert "doubled" in str(report(run)) and "1 region of torch" in str(report(run))


def test_each_region_has_the_constants_that_it_reads() -> None:
    """A Python number that regions share is not passed as a tensor; a computed one is a tensor without
    dimensions."""

    def f(x: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=x.dtype)
        most = x.amax()
        y = torch.where(x > 0, x, zero) * most
        z = torch.ops.transconv_tests.doubled(torch.where(y > 1, y, zero)) * torch.full((4,), 3.0)
        return torch.where(z > 2, z, zero) + most + torch.arange(4)

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.randn(3, 4)], 1e-6)
    first, _, second = report(run).graphs[0].rows
    assert isinstance(first, KernelRow) and isinstance(second, KernelRow)
    assert first.text.count("tensor X") == 1 and second.text.count("tensor X") == 2  # doubled, and most


def test_a_copy_that_names_its_own_device() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x > 0).type_as(y) * y

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)], 1e-12)
    assert not reasons(run)


def draws_then_computes(f: Callable[[Tensor], Tensor]) -> None:
    """With one seed the results are torch's, of one region behind what torch draws."""
    run, x = compiled(f), torch.randn(3, 4)
    found = []
    for function in (f, run):
        torch.manual_seed(1)
        with by_meaning():
            found.append(function(x))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert [type(r).__name__ for r in report(run).graphs[0].rows] == ["TorchRow", "KernelRow"]


def test_random_numbers_do_not_divide_what_computes_none() -> None:
    """Masks are drawn in the graph's order, all in one region; what is behind each is one region, too."""

    def f(x: Tensor) -> Tensor:
        for chance in (0.3, 0.5, 0.9):
            x = x.sin() * torch.empty(3, 1).bernoulli_(chance)
        return x

    draws_then_computes(f)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paths_that_are_dropped(dtype: torch.dtype) -> None:
    """The mask is drawn as booleans and multiplied in the type of the path."""

    def f(x: Tensor) -> Tensor:
        kept = torch.empty(5, 1, dtype=x.dtype).bernoulli_(0.7).div_(0.7)
        return x.sin() * kept + x

    run, found = compiled(f), []
    for function in (f, run):
        x = torch.linspace(-2, 2, 35, dtype=dtype).reshape(5, 7).requires_grad_()
        torch.manual_seed(1)
        with by_meaning():
            made = function(x)
            made.sum().backward()
        found += [made.detach(), x.grad]
    near = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[:2], found[2:], rtol=near, atol=near)
    assert "bernoulli: torch draws random numbers" in reasons(run)


def test_results_of_another_type_than_the_graph_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Inductor's decomposition has another type than torch's operation, the latter computes."""

    def inductor(gm: torch.fx.GraphModule, like: list[Tensor]) -> Any:
        return lambda *given: [t.double() for t in gm.forward(*given)]

    monkeypatch.setattr(torch_compile.torch_internals, "inductor_compile", inductor, raising=False)
    x = torch.randn(3, 4)
    with by_meaning():
        made = torch.compile(lambda x: torch.digamma(x * 2) * 3, backend=backend)(x)
    torch.testing.assert_close(made, torch.digamma(x * 2) * 3)
    assert made.dtype == x.dtype and "of type torch.float64, expected torch.float32" in caplog.text


def test_a_mask_as_large_as_what_is_computed_does_not_wait_for_it() -> None:
    """Dropout in place draws into memory like that of its operand."""

    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5, inplace=True).cos()

    draws_then_computes(f)


def test_copies_into_new_memory() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        made = x.new_empty_strided((3, 4), (1, 3))
        return torch.ops.aten.copy(made, y) + x

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.randn(3, 4), torch.randn(4, dtype=torch.float64)], 1e-6)
    assert not reasons(run)


def test_inputs_that_change_and_results_that_share_memory() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x.cos()
        x.mul_(2)
        torch.ops.transconv_tests.bump(y)
        return z, x[:, 1:], z.t(), (x + y).sum(0), y.view(-1)

    run = compiled(f)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    others = x.clone(), y.clone()
    with by_meaning():
        got, want = run(x, y), f(*others)
    for a, b in zip((*got, x, y), (*want, *others), strict=True):
        assert torch.allclose(a, b, atol=1e-6) and a.stride() == b.stride()
    assert got[1].data_ptr() == x[:, 1:].data_ptr() and got[2]._base is not None


def test_random_numbers_are_those_of_torch() -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x.exp(), 0.5) * torch.rand(4)

    run, x = compiled(f), torch.randn(3, 4)
    with by_meaning():
        torch.manual_seed(3)
        got = run(x)
    torch.manual_seed(3)
    eager = torch.compile(f, backend="aot_eager")(x)  # torch's own graphs draw in this order
    assert torch.allclose(got, eager, atol=1e-6)


def test_control_flow_that_data_decide() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sum()
        return x.sin() if y > 0 else x.cos()

    run = compiled(f)
    with by_meaning():
        for x in (torch.ones(4), -torch.ones(4)):
            compare(f, run, [x], 1e-6)
    assert len(report(run).graphs) >= 2  # what is before it, and each way that was taken


def test_without_a_gpu_whole_graphs_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    transconv.config.cpu, transconv.config.fallback = "fallback", "warn"
    with pytest.warns(transconv.FallbackWarning, match="no kernel of ours runs on a CPU"):
        run = compiled(torch.sin)
        run(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.ones(4))
    assert "all of it is torch's" in str(report(run))


def test_regions_of_torch_are_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    asked: list[Any] = []

    def compile_(gm: Any, given: Any) -> Any:
        asked.append(given)
        return gm

    monkeypatch.setattr(torch._inductor, "compile", compile_)
    run = torch.compile(lambda x: torch.cumsum(x, 0).sin(), backend=backend)
    with by_meaning():
        assert torch.allclose(run(torch.ones(3)), torch.cumsum(torch.ones(3), 0).sin())
        run(torch.zeros(3))
    assert len(asked) == 1 and torch.equal(asked[0][0], torch.ones(3))


def test_a_region_without_a_kernel_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from transconv.errors import Unsupported

    def none(*_: Any) -> Any:
        raise Unsupported("schedule:refused", "no schedule is legal")

    monkeypatch.setattr(region_calls, "launch", none)
    transconv.config.fallback = "warn"
    x = torch.randn(3)
    run = traced(lambda x: (x.sin(),), [x])
    with pytest.warns(transconv.FallbackWarning, match="the kernel sin_map of a graph"):
        assert torch.equal(run(x)[0], x.sin())
    assert transconv.stats().fallback == {"schedule:refused": 1}
    transconv.config.fallback = "error"
    with pytest.raises(Unsupported):
        traced(lambda x: (x.cos(),), [x])(x)


def test_the_name_and_the_options() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert lookup_backend("transconv") is backend
    with pytest.raises(ValueError, match="expected"):
        backend(torch.fx.symbolic_trace(lambda x: x.sin()), [torch.ones(2)], options={"rest": "nobody"})
    with pytest.raises(TypeError, match="torch.compile or transconv.optimize returned"):
        report(3)


def test_nothing_of_a_graph_is_told_before_its_first_call() -> None:
    assert "no graph yet" in str(report(compiled(torch.sin)))


def test_calls_after_the_first_ask_for_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a setting changes, or a tensor is not aligned as those before it."""
    x = torch.randn(4, 8)
    run = traced(lambda x: (torch.softmax(x, 1) * 2,), [x])
    asked: list[object] = []
    real = region_calls.launch

    def counted(*given: Any) -> Any:
        asked.append(given)
        return real(*given)

    monkeypatch.setattr(region_calls, "launch", counted)
    for tensor, times in ((x, 1), (x, 1), (torch.randn(40)[1:33].view(4, 8), 2)):
        torch.testing.assert_close(run(tensor)[0], torch.softmax(tensor, 1) * 2)
        assert len(asked) == times
    transconv.config.fallback = "silent"
    run(x)
    assert len(asked) == 3


def test_what_is_made_of_no_tensor_goes_through_no_memory() -> None:
    """The indices of an upsampling behind a region of torch are counted where they are needed."""
    x = torch.randn(1, 2, 4, 4)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (F.interpolate(torch.cumsum(x + 1, 2) * 2, size=(6, 8)),)

    run = traced(f, [x])
    with by_meaning():
        compare(f, run, [x], 1e-5)
    (found,) = run.transconv.graphs
    assert [type(r).__name__ for r in found.rows] == ["KernelRow", "TorchRow", "KernelRow"]
    assert "2 x" not in found.rows[1].operations


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("held", "dtype"),
    [
        (3, torch.int64),
        (-2.5, torch.float32),
        (float("inf"), torch.float32),
        (0.1, torch.float64),
        (7, torch.int32),
    ],
)
def test_numbers_in_tensors_are_constants(held: float, dtype: torch.dtype) -> None:
    """A number that is assigned, or held in a tensor without dims, which torch takes from the CPU's memory
    whatever the device of the others, is read by no kernel."""

    def f(x: Tensor) -> Tensor:
        mask, n = x.new_zeros(8, 6), 0
        for rows in (slice(0, -4), slice(-4, -2), slice(-2, None)):
            for columns in (slice(0, -3), slice(-3, None)):
                mask[rows, columns] = n
                n += 1
        return x + mask * torch.tensor(held, dtype=dtype)

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.rand(8, 6) + 1], 1e-6)
    (row,) = report(run).graphs[0].rows
    assert isinstance(row, KernelRow)
    assert row.text.count("tensor X") == 1


def test_a_truth_in_a_tensor_and_a_number_that_is_handed_out_stay_as_they_are() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        number = torch.tensor(2.0)
        return torch.where(torch.tensor(True), x * number, x), number

    run = compiled(f)
    with by_meaning():
        compare(f, run, [torch.randn(3, 4)], 1e-6)
