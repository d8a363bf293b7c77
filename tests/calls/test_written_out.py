"""Functions that are written out as text: each generator, for none, one and many of what it lists."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transconv import ir
from transconv.backend_triton import KernelStart
from transconv.calls.guard import NO_DUALS, CallGuard, StartableKernel
from transconv.functional.calls.call_forms import SymbolicTrace
from transconv.functional.calls.route import entry, gradients, launching
from transconv.graph.regions import region_calls
from transconv.runtime import torch_internals
from transconv.runtime.plans import StartWriter, StepStart
from transconv.torch_ops.quantized import quantized_functional

COUNTS = (0, 1, 3)
LIKE = CallGuard(lambda *x: True, (NO_DUALS,), True, None)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: device, raising=False)


def every(*of: Any) -> list[tuple[Any, ...]]:
    return [*itertools.product(*of)]


@pytest.mark.parametrize(("many", "sizes"), every(COUNTS, (1, 2, 3)))
def test_expressions_of_sizes(many: int, sizes: int) -> None:
    names = [f"N{i}" for i in range(sizes)]
    made = ir.values_of([ir.Var(names[i % sizes]) * (i + 2) + 1 for i in range(many)], names)
    assert made(*range(3, 3 + sizes)) == tuple((3 + i % sizes) * (i + 2) + 1 for i in range(many))


KERNEL = SimpleNamespace(function="f", packed_metadata="m", run=lambda *given: None)


@pytest.mark.parametrize(
    ("many", "floats", "numbers", "boxes"), every(COUNTS, COUNTS, COUNTS, (False, True))
)
def test_starts_of_kernels(many: int, floats: int, numbers: int, boxes: bool) -> None:
    """The arguments are the addresses, numbers as they are among them, and the sizes, in both kinds of
    starts."""
    given: list[Any] = [*(torch.zeros(4) for _ in range(many)), *map(float, range(floats))]
    seen: list[tuple[Any, ...]] = []
    encoder: Any = type("E", (), {"calls": {}, "__call__": lambda self, at, places: (*at, places)})()
    begun = KernelStart(
        lambda *found: seen.append(found), KERNEL, sizes=numbers, encoder=encoder if boxes else None
    )
    order = tuple(range(many + floats))[::-1]
    writer = StartWriter(
        lambda *n: ((7, "places"), ()), 0, len(given), numbers, values=range(many, many + floats)
    )
    writer.starter([StepStart(begun, order)])(tuple(range(numbers)))(*given)
    wanted = [given[i] if i >= many else given[i].data_ptr() for i in order]
    (found,) = seen
    assert found[0] == 7 and [*found[13:]] == [*wanted, *range(numbers), *["places"] * boxes]


@pytest.mark.parametrize(("tensors", "sizes", "spaces", "steps"), every((0, 2), (0, 2), (0, 1), (0, 1, 2)))
def test_plans_of_any_size(tensors: int, sizes: int, spaces: int, steps: int) -> None:
    seen: list[tuple[Any, ...]] = []

    class ByTriton(KernelStart):
        def __call__(self, given: Any, at: Any, x: Any, stream: Any) -> None:
            seen.append((given, *at, len(x)))

    def numbers(*given: int) -> tuple[Any, ...]:
        assert given == tuple(range(sizes))
        return (*((i, i + 1) for i in range(steps)), tuple((8,) for _ in range(spaces)))

    order = tuple(range(tensors + spaces))
    writer = StartWriter(
        numbers,
        0,
        tensors,
        sizes,
        [torch.float32] * spaces,
        lambda shape, strides, kind: torch.zeros(shape),
    )
    made = writer.starter([StepStart(ByTriton(None, KERNEL, sizes=sizes), order)] * steps)
    made(tuple(range(sizes)))(*[torch.zeros(2)] * tensors)
    assert seen == [(tuple(range(sizes)), i, i + 1, tensors + spaces) for i in range(steps)]


@pytest.mark.parametrize("many", COUNTS)
def test_traced_functions_of_numbers(many: int) -> None:
    trace = SymbolicTrace()
    given = trace.numbers("n", range(2, 2 + many))
    made = trace.function({"n": many}, tuple(n * 3 for n in given))
    assert made(tuple(range(2, 2 + many))) == tuple(3 * n for n in range(2, 2 + many))


@pytest.mark.parametrize(("operands", "results", "saved"), every(COUNTS, (1, 2), (None, 0, 1, 2)))
def test_launches(operands: int, results: int, saved: int | None) -> None:
    names = [f"x{i}" for i in range(operands)]
    made = [f"y{i}" for i in range(results)]
    begun = StartableKernel(
        lambda *given: seen.append(len(given)),
        tuple(names),
        tuple(made),
        [((2,), (1,), torch.float32)] * len(made),
    )
    seen: list[int] = []
    kept = None if saved is None else [*names, *made][:saved]
    run = launching(lambda shape, strides, kind: torch.zeros(shape), names, begun, made, kept)

    class Context:
        to_save: Any = None

    context = [Context()] if saved is not None else []
    found = run(*context, *[torch.ones(2)] * operands)
    assert seen == [operands + results] and (results == 1) is isinstance(found, torch.Tensor)
    assert not context or len(context[0].to_save) == len(kept or ())


@pytest.mark.parametrize(
    ("tensors", "numbers", "results", "grads", "finish"),
    every((1, 2, 4), COUNTS, (1, 2), (None, True), (False, True)),
)
def test_entries_of_calls(
    tensors: int, numbers: int, results: int, grads: bool | None, finish: bool
) -> None:
    class Route:
        calls = 0

    given = (torch.zeros(64), *[torch.zeros(64)] * (tensors - 2), *[None] * (tensors > 1))
    there = [t is not None for t in given]
    route = Route()
    run = entry(
        route,
        lambda *x: [t + 1 for t in x][:1] * results if results > 1 else x[0] + 1,
        lambda *x: "others",
        LIKE,
        there,
        [int] * numbers,
        grads,
        (lambda t, n, found: found[0]) if finish else None,
        results,
    )
    found = run(None, given, tuple(range(numbers)))
    assert torch.equal(found, torch.ones(64)) and route.calls == 1
    assert not numbers or run(None, given, (True,) * numbers) == "others"


@pytest.mark.parametrize(("tensors", "launches"), every((1, 2), (0, 1, 2)))
def test_gradients(tensors: int, launches: int) -> None:
    class Route:
        calls_back = 0

    saved = [f"s{i}" for i in range(tensors)]
    begun = [
        StartableKernel(
            lambda *given: given[-1].fill_(3.0), ("G",), (f"r{i}",), (((2,), (1,), torch.float32),)
        )
        for i in range(launches)
    ]
    made = gradients(
        Route(),
        lambda shape, strides, kind: torch.zeros(shape),
        LIKE,
        saved,
        begun,
        [f"r{i}" for i in range(launches)],
    )
    with torch.no_grad():
        found = made(*[torch.zeros(64)] * (tensors + 1))
    assert found is not None and [float(t.sum()) for t in found] == [6.0] * launches


@pytest.mark.parametrize("many", COUNTS)
def test_regions_of_no_launch(many: int) -> None:
    pieces = [object() for _ in range(many)]
    writer = region_calls.RegionWriter(pieces, [], [(p, None) for p in pieces], torch.empty_strided)  # type: ignore[arg-type]
    made = writer.run()
    given = [torch.full((1,), float(i)) for i in range(many)]
    assert [float(t) for t in made([*given])] == [float(i) for i in range(many)]


@pytest.mark.parametrize(
    ("quantities", "biased", "starts", "real"), every(COUNTS, (False, True), (False, True), (False, True))
)
def test_entries_of_quantised_calls(
    quantities: int, biased: bool, starts: bool, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with some quantities that are tensors, and some that are not."""
    words = {f"q{i}": torch.zeros(64) if i % 2 == 0 else i for i in range(quantities)}
    seen: list[Any] = []

    def run(*given: Any) -> str:
        seen.append(given)
        return "run"

    read = [*(n for n, v in words.items() if isinstance(v, torch.Tensor)), *["bias"] * biased]
    route = SimpleNamespace(
        forward=run,
        start=run if starts else None,
        epilogue=SimpleNamespace(picks=(*((n, None) for n in read), ("a number", 7.0))),
    )
    monkeypatch.setattr(quantized_functional.torch_internals, "quickest", lambda: lambda *memory: "made")
    x, bias = torch.zeros(64), torch.zeros(64) if biased else None
    begun = quantized_functional.Real(x, lambda *given: seen.append(len(given))) if real else None
    call: Any = quantized_functional.entry(
        LIKE,
        lambda *x: "others",
        "f",
        (1, 0, 0, 1, 1),
        x,
        biased,  # type: ignore[arg-type]
        words,
        route,
        begun,
    )  # type: ignore[arg-type]
    assert call("f", x, x, bias, 1, 0, 0, 1, 1, words) == "run"
    *started, given = seen
    assert started == [2] * real and given[0] is ("made" if real else x) and given[1] is x
    tensors = [t for t in (*words.values(), bias) if isinstance(t, torch.Tensor)]
    assert [*map(id, given[2:])] == [*map(id, [*tensors, given[-1]] if starts else [bias, words])]
    assert call("f", x, x, bias, 2, 0, 0, 1, 1, words) == "others"
    assert call("f", x, x, bias, 1, 0, 0, 1, 1, {**words, "more": 1}) == "others"


@pytest.mark.parametrize(("many", "floats", "numbers"), every(COUNTS, COUNTS, COUNTS))
def test_guarded_starts(many: int, floats: int, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call's group, which no kernel takes, arrays and numbers, whose places are not those of the
    kernel's arguments."""
    monkeypatch.setattr(torch_internals, "current_device", lambda: lambda: 0)
    seen: list[tuple[Any, ...]] = []
    begun = KernelStart(lambda *found: seen.append(found[13:]), KERNEL, sizes=numbers)
    given: list[Any] = [None, *map(float, range(floats)), *(torch.zeros(64) for _ in range(many))]
    arrays = range(1 + floats, len(given))
    writer = StartWriter(lambda *n: ((7, ()), ()), 0, len(given), numbers, values=range(1, 1 + floats))
    made = writer.guarded([StepStart(begun, (*arrays, *range(1, 1 + floats)))], None, arrays)
    assert made(tuple(range(numbers)), (256,) * many)(*given) is True
    assert seen == [(*(given[i].data_ptr() for i in arrays), *range(floats), *range(numbers))]
