"""Element-wise operations at extreme values: every row of the tables of operations, at every pair of
special values of a type, beside torch: in texts (``of_texts``), compiled graphs (``of_graphs``) and behind
a convolution (``of_epilogues``), and those of kernels in Python beside NumPy (``of_kernels``). Each gives
the list of what differs; none is expected. What differs by intent has a row in ``MEANT`` and is said in
docs/computations.md.
"""

from __future__ import annotations

import ast
import itertools
import warnings
from collections.abc import Iterator, Sequence
from math import inf, nan, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

import transconv
from transconv.compute import OPS, Op, parse
from transconv.compute.analysis.pointwise import CONDITIONS
from transconv.compute.expressions import BINARY, COMPARE
from transconv.graph import backend
from transconv.graph.lowerings.table import ROWS
from transconv.ir import DTYPES
from transconv.kernel import Group
from transconv.kernel.functions import FUNCTIONS
from transconv.kernel.trials.trial import loaded

Tensor = torch.Tensor
TYPES = {f"torch.{t.torch}": t for t in DTYPES.values() if t.torch and t.within is None}
OF_TEXTS = [getattr(torch, t.torch) for t in TYPES.values() if t.kind != "bool"]
FLOATS = (
    *(0.0, 1.0, 0.5, 1.5, 2.5, 2.0, 3.0, 7.0, 20.5, 89.0, 104.0, 128.0, 150.0, 1e-20, 1e20, 0.1, 1 / 3),
    *(inf, 1e38, 65504.0, 70000.0, 448.0, 16777217.0, 2.0**31, 256.0, 129.5, 746.0, 1e-39, 1e-44),
)
WHOLE = (
    *(0, 1, 2, 3, 5, 7, 127, 128, 255, 256, 46341, 31, 32, 63, 64),
    *(2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63),
)
NUMBERS = (
    *(0.0, -0.0, 1.0, 2.0, 3.0, -1.0, -3.0, 0.5, -0.5, 2.5, -1.5, 1.5, 0.1, 2.7, -1 / 3, 9.0, -9.0, 8.5),
    *(10.0, 101.0, 1e-8, 300.0, 16777216.0, 1e300, -1e300, inf, -inf, nan, 2, -3, 0, 2**31),
)
LEAST = float(np.finfo(np.float32).smallest_normal)
NEAR = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

UNSIGNED_ZEROS = {  # of which torch's own kernels, and chips, make either zero
    *("relu", "relu6", "clamp", "clamp_min", "hardtanh", "max", "min", "maximum", "minimum", "elu"),
    *("gelu", "gelu_tanh", "hardswish", "sign", "sgn", "add", "sub", "softplus", "leaky_relu"),
}


def values(dtype: torch.dtype) -> Tensor:
    """Numbers of a type of all sizes and both signs, its ends, and the neighbours of 1."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        known = [n for m in WHOLE for n in (m, -m) if low <= n <= high]
        return torch.tensor(list(dict.fromkeys([*known, low, high])), dtype=dtype)
    ends = torch.finfo(dtype)
    own = (ends.max, ends.smallest_normal, ends.smallest_normal * 0.75, 1 + ends.eps, 1 - ends.eps / 2)
    held = torch.tensor([n for m in (*FLOATS, *own) for n in (m, -m)], dtype=torch.float64).to(dtype)
    if dtype is torch.bfloat16:  # Triton's interpreter reads none below its normal numbers
        held = held[(held == 0) | (held.abs() >= ends.smallest_normal)]
    return torch.cat([held, torch.tensor([nan], dtype=dtype)])


def operands(types: Sequence[torch.dtype], device: str) -> tuple[Tensor, ...]:
    """Every pair of the values of the last two types; a condition before them."""
    found = [values(t) for t in types[-2:]]
    if len(found) == 2:
        count = [len(x) for x in found]
        found = [found[0].repeat_interleave(count[1]), found[1].repeat(count[0])]
    if len(types) == 3:
        found.insert(0, torch.arange(len(found[0])) % 3 == 0)
    return tuple(x.to(device) for x in found)


def wrong(
    name: str, got: Tensor, want: Tensor, given: Sequence[Tensor], near: float, said: str
) -> Iterator[str]:
    """The places where results differ, as one line."""
    if got.dtype is not want.dtype:
        yield f"{said}: {got.dtype} instead of {want.dtype}"
        return
    if want.dtype.is_floating_point:
        ends, a, b = torch.finfo(want.dtype), got.double(), want.double()
        close = (a - b).abs() <= near * b.abs() + 4 * ends.smallest_normal
        same = (a == b) | (a.isnan() & b.isnan()) | (close & a.isfinite() & b.isfinite())
        if name not in UNSIGNED_ZEROS:
            same &= (torch.signbit(a) == torch.signbit(b)) | (b != 0) | (a != 0)
        for _, meant in MEANT.get(name, ()):
            same |= meant(got, want, *given)
    else:
        same = got == want
    if not bool(same.all()):
        at = (~same).nonzero().flatten().tolist()
        of = ", ".join(str(x[at[0]].item()) for x in given)
        yield f"{said} of {of}: {got[at[0]].item()} instead of {want[at[0]].item()} ({len(at)} places)"


def _beyond(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    """On a GPU torch's sixth has the digits of f32."""
    ours = (got.double() - want.double()).abs() <= 1e-7 * want.double().abs()
    return (x.double() * 6 > torch.finfo(want.dtype).max) | (ours & (x.device.type != "cpu"))


def _tail(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    return (x < -1) & (x > -inf) & ((got.double() - want.double()).abs() <= 1e-6 * x.double().abs())


def _ends(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    """torch's vectors of some processors overflow: the largest number is infinite, infinity NaN."""
    return (got.double() == x.double()) & (x.double() > 1e38) & (want.isinf() | want.isnan())


def _tail_slope(got: Tensor, want: Tensor, g: Tensor, x: Tensor) -> Tensor:
    mixed = g.dtype is not x.dtype  # on some processors torch computes in the type of x
    g, x = g.double(), x.double()
    slope = torch.erfc(-x / 2**0.5) / 2 + x * torch.exp(-x * x / 2) / (2 * pi) ** 0.5
    exact, near = g * slope, torch.finfo(got.dtype).smallest_normal
    share = 1e-5 if got.dtype.itemsize > 2 else torch.finfo(got.dtype).eps
    got = got.double()
    return ((x < -1) | mixed) & ((got == exact) | ((got - exact).abs() <= share * exact.abs() + near))


def _far(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    exact = x.double() * x.double().sigmoid()
    least = x.double().abs() * torch.finfo(torch.float32).smallest_normal  # of exp(x), on chips
    share = max(1e-4, torch.finfo(got.dtype).eps)
    near = (got.double() - exact).abs() <= share * exact.abs() + least * (x.device.type != "cpu")
    return ((want == 0) | (x.device.type != "cpu")) & near & (x < -80)


def _root(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    return (((x == -inf) & got.isnan()) | (x == 0)) & (x.dtype.itemsize == 2) & (x.device.type == "cpu")


def _small(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    near = (got.double() / x.double() - 1.1284).abs() < 0.01
    return (want == 0) & (x.double().abs() < 1e-8) & near


def _subnormal(got: Tensor, want: Tensor, x: Tensor, *_: Tensor) -> Tensor:
    return (x.double().abs() < torch.finfo(torch.float32).smallest_normal) & (x.device.type != "cpu")


def _largest(got: Tensor, want: Tensor, *_: Tensor) -> Tensor:
    """Digits of a large logarithm times the exponent are digits of the power."""
    most = torch.finfo(want.dtype).max
    a, b = (x.double().clamp(-most, most) for x in (got, want))
    return (got.isinf() | want.isinf()) & (a / b > 0.999)


MEANT: dict[str, list[tuple[str, Any]]] = {
    "hardswish": [("torch's x*6 overflows", _beyond)],
    "gelu": [
        ("torch loses the digits of the tail", _tail),
        ("torch's overflows on some processors", _ends),
    ],
    "gelu_tanh": [("torch loses the digits of the tail", _tail)],
    "ndtr": [("torch loses the digits of the tail", _tail)],
    "gelu_backward": [("torch loses the digits of the tail", _tail_slope)],
    "silu": [("torch's exp(-x) overflows", _far)],
    "pow": [
        ("torch has no root in 16 bits on a CPU", _root),
        ("digits of a logarithm", _largest),
        ("chips", _subnormal),
    ],
    "power": [("digits of a logarithm", _largest), ("chips", _subnormal)],
    **{name: [("a quotient of chips may be off by two digits", _largest)] for name in ("div", "x / y")},
    "erf": [("torch's in bf16 on a CPU is 0", _small), ("chips", _subnormal)],
    **{
        name: [("chips take what is below the smallest normal number as 0", _subnormal)]
        for name in ("log", "log2", "sqrt", "rsqrt", "exp", "exp2", "expm1", "sin", "cos", "floor", "ceil")
    },
}


# -- texts -----------------------------------------------------------------------------------------


def forms(op: Op) -> list[tuple[float, ...]]:
    """The numbers with which an operation is tried."""
    several = itertools.product(NUMBERS, repeat=len(op.numbers))
    return [()] + [n for i, n in enumerate(several) if op.numbers and (len(op.numbers) < 2 or i % 7 == 0)]


def _is_said(op: Op, numbers: tuple[float, ...], dtype: torch.dtype) -> bool:
    """Whether the operation has a meaning: a slope or a divisor is a finite number. Powers of integers are
    floats, unless they are products."""
    if op.name == "pow" and not dtype.is_floating_point and any(isinstance(n, int) for n in numbers):
        return 1 <= numbers[0] <= 8
    finite = all(abs(n) < 1e20 and n != 0 for n in numbers)
    return not any(n != n for n in numbers) and (op.name in ("pow", "clamp") or finite)


def _operators() -> Iterator[tuple[str, Any]]:
    """Python's operators of texts, and torch's functions of them."""
    for node in (*BINARY, *COMPARE):
        said = ast.unparse(
            ast.BinOp(ast.Name("x"), node(), ast.Name("y"))
            if node in BINARY
            else ast.Compare(ast.Name("x"), [node()], [ast.Name("y")])
        )
        yield said, lambda x, y, said=said: eval(said, {"x": x, "y": y})


def _rows(arity: int, dtype: torch.dtype) -> Iterator[tuple[str, str, Any]]:
    """Operations of so many operands: the name, the text, and torch's function."""
    args = ["x > y", "x", "y"] if arity == 3 else [*"xy"[:arity]]
    for op in OPS.values():
        for numbers in forms(op) if op.arity == arity else ():
            if _is_said(op, numbers, dtype):
                said = f"{op.name}({', '.join([*args, *map(repr, numbers)])})"
                yield op.name, said, op.function(*numbers)
    for said, function in _operators() if arity == 2 else ():
        if not dtype.is_floating_point or ("//" not in said and "%" not in said):  # those are refused
            yield said, said, function


def of_texts(dtype: torch.dtype, device: str) -> list[str]:
    """Every row of ``OPS`` and every operator of texts. Values of less than 32 bits are computed in 32."""
    found: list[str] = []
    name, small = TYPES[str(dtype)].name, dtype.itemsize < 4
    wide = (torch.float32 if dtype.is_floating_point else torch.int32) if small else dtype
    for arity in (1, 2, 3):
        given = [x.to(wide) for x in operands([dtype] * min(arity, 2), device)]
        if arity > 1 and not dtype.is_floating_point:  # of integers there are no quotients by 0
            given = [x[given[1] != 0] for x in given]
        n, tensors = len(given[0]), given if arity < 3 else [given[0] > given[1], *given]
        lines = [f"tensor {t} {name} [{n}]" for t in "XY"[: len(given)]] + [f"axes n={n}"]
        lines += [f"read {t.lower()} = {t}[n]" for t in "XY"[: len(given)]]
        wanted = {}
        for i, (op, said, function) in enumerate(_rows(arity, dtype)):
            try:
                want = function(*tensors)
            except RuntimeError:  # a number that the type does not have
                continue
            lines.insert(0, f"tensor R{i} {TYPES[str(want.dtype)].name} [{n}]")
            lines.append(f"store R{i}[n] = {said}")
            wanted[f"R{i}"] = (op, said, want)
        results = {r: torch.empty_like(want) for r, (_, _, want) in wanted.items()}
        inputs = dict(zip("XY", (x.to(dtype) for x in given), strict=False))
        text, target = (
            " ;; ".join(["compute extremes", *lines]),
            "interpreter" if device == "cpu" else None,
        )
        transconv.compile(parse(text), target).launch(**inputs, **results)
        for r, (op, said, want) in wanted.items():
            found += wrong(op, results[r], want, given, NEAR.get(want.dtype, 0.0), f"{name} {said}")
    return found


# -- graphs ----------------------------------------------------------------------------------------


def overloads() -> list[Any]:
    """The rows of graphs that work element by element, by torch's own tag."""
    return [o for o in ROWS if torch.Tag.pointwise in getattr(o, "tags", ()) or "hard" in str(o)]


def _arguments(overload: Any, numbers: Sequence[float]) -> Iterator[tuple[Any, ...]]:
    """Arguments of an overload, "x" for a tensor: each number in the place of each that it needs, and
    of those of the limits; None where an argument is none of a tensor and a number."""
    places: list[Sequence[Any]] = []
    for a in overload._schema.arguments:
        kind = str(a.type)
        if "Tensor" in kind:
            places.append(("x",))
        elif kind in ("number", "Optional[number]") and not (a.has_default_value() and a.name in USUAL):
            places.append(numbers)
        elif a.has_default_value():
            break
        else:
            return
    several = itertools.product(*places)
    yield from several if sum(p is numbers for p in places) < 2 else itertools.islice(several, 0, None, 13)


USUAL = ("alpha", "beta", "scale", "input_scale", "threshold")


ROUNDED = (torch.ops.aten.add.Scalar, torch.ops.aten.sub.Scalar)  # torch rounds the number, on a CPU alone


def is_held(number: float, dtype: torch.dtype) -> bool:
    """Whether a type of 16 bits has a number."""
    return dtype.itemsize != 2 or torch.tensor(number, dtype=torch.float64).to(dtype).item() == number


def of_graphs(
    types: Sequence[torch.dtype], device: str, numbers: Sequence[float] = NUMBERS, only: str = ""
) -> list[str]:
    """Every overload that takes tensors of these types, in one graph, which is first called with ones: a
    kernel whose first result is wrong would be torch's from then on."""
    given = operands(types, device)
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(given))]
    wanted = []
    for overload in overloads():
        for arguments in _arguments(overload, numbers):
            if arguments.count("x") != len(given) or only not in str(overload):
                continue
            if "hardtanh" in str(overload) and not arguments[1] <= arguments[2]:  # some releases refuse it
                continue
            if overload in ROUNDED and device == "cpu" and not is_held(arguments[1], given[0].dtype):
                continue
            each, nodes = iter(given), iter(inputs)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    want = overload(*[next(each) if a == "x" else a for a in arguments])
            except (RuntimeError, TypeError):  # no operation of these
                continue
            said = f"{overload}({', '.join(map(str, arguments))}) of {' '.join(map(str, types))}"
            wanted.append((overload._schema.name.rpartition(":")[2], said, want))
            graph.call_function(overload, tuple(next(nodes) if a == "x" else a for a in arguments))
    graph.output(tuple(n for n in graph.nodes if n.op == "call_function"))
    made = backend(fx.GraphModule(torch.nn.Module(), graph), list(given), options={"rest": "eager"})
    made(*map(torch.ones_like, given))
    found: list[str] = []
    for (name, said, want), got in zip(wanted, made(*given), strict=True):
        found += wrong(name, got, want, given, NEAR.get(want.dtype, 0.0), said)
    return found


# -- epilogues -------------------------------------------------------------------------------------


def of_epilogues(device: str, numbers: Sequence[float] = (2.5, -0.5)) -> list[str]:
    """Every row of one or two values behind a convolution by 1, traced; with some numbers where the row
    has one."""
    found = []
    one = torch.ones(1, 1, 1, 1, device=device)
    for op in OPS.values():
        for given_numbers in [(n,) for n in numbers] if len(op.numbers) == 1 else [()]:
            function = op.function(*given_numbers)
            given = operands([torch.float32] * min(op.arity, 2), device)
            if device != "cpu":  # the check of first results takes one that a chip made 0 as wrong
                kept = [t != t.clamp(-LEAST, LEAST) for t in given]
                given = [t[(torch.stack(kept) | (torch.stack([*given]) == 0)).all(0)] for t in given]
            x, *rest = (t.view(1, 1, 1, -1) for t in given)
            told = op.name in CONDITIONS

            def single(acc: Any, function: Any = function) -> Any:
                return function(acc)

            def pair(acc: Any, other: Any, function: Any = function, told: bool = told) -> Any:
                return torch.where(function(acc, other), 1.0, 0.0) if told else function(acc, other)

            def choice(acc: Any, other: Any) -> Any:
                return torch.where(acc > other, acc, other)

            epilogue = {1: single, 2: pair, 3: choice}[op.arity]
            want = epilogue(x + 0.0, *rest)
            got = transconv.fused_conv2d(x, one, epilogue=epilogue, operands=rest)
            said = f"epilogue {op.name} {given_numbers}"
            found += wrong(op.name, got.flatten(), want.flatten(), given, NEAR[torch.float32], said)
    return found


# -- kernels in Python -----------------------------------------------------------------------------

SOURCE = """
import numpy as np
from transconv.kernel import kernel

@kernel
def drawn(group, X, Y, {results}):
    i, = group.work_offset()
    x, y = (group.load(A[i:], shape=group.shape) for A in (X, Y))
"""
# Zeros of quotients are +0 where NumPy's may be -0, and so is the sign of -0 of np.sign.
UNSIGNED = {"floor_divide", "remainder", "sign", "maximum", "minimum", *UNSIGNED_ZEROS}


def _in_numpy(row: Any, x: Any, y: Any) -> Any:
    """NumPy's result, of floats in the type that kernels compute in; None where NumPy refuses. NumPy's own
    functions of halves differ by processor: with AVX-512 its expm1(-0.0) is 0.0."""
    work = x if x.dtype in (np.float32, np.float64) or row.types != "float" else x.astype(np.float32)
    given = {1: (work,), 2: (work, y.astype(work.dtype)), 3: (x > y, x, y)}[row.arity]
    try:
        made = row.numpy(*given)
    except (TypeError, ValueError):
        return None
    return made.astype(x.dtype) if x.dtype == np.float16 and made.dtype == np.float32 else made


def of_kernels(dtype: Any, device: str, folder: Path) -> list[str]:
    """Every row of the functions of kernels, of floats or integers of NumPy."""
    x, y = (t.cpu().numpy() for t in operands([getattr(torch, np.dtype(dtype).name)] * 2, "cpu"))
    if x.dtype.kind == "f":  # of divisors below the normal numbers there are quotients beyond all digits
        kept = (y == 0) | ~(np.abs(y) < np.finfo(x.dtype).smallest_normal)
        x, y = x[kept], y[kept]
    rows, lines = {}, []
    with np.errstate(all="ignore"):
        for row in FUNCTIONS.values():
            if not hasattr(np, row.name) or (row.name == "power" and x.dtype.kind != "f"):  # refused
                continue
            if (want := _in_numpy(row, x, y)) is not None:
                args = {1: "x", 2: "x, y", 3: "x > y, x, y"}[row.arity]
                lines.append(f"    group.store(R{len(rows)}[i:], np.{row.name}({args}))")
                rows[f"R{len(rows)}"] = row, want
        source = SOURCE.format(results=", ".join(rows)) + "\n".join(lines) + "\n"
        results = [torch.from_numpy(np.zeros_like(want)).to(device) for _, want in rows.values()]
        given = [torch.from_numpy(a).to(device) for a in (x, y)]
        loaded(source, folder)(Group(len(x), 256), *given, *results)
    found: list[str] = []
    for (row, want), got in zip(rows.values(), results, strict=True):
        name = "relu" if row.name in UNSIGNED else row.name
        wide = torch.from_numpy(want)
        near = NEAR.get(wide.dtype, 0.0)
        found += wrong(name, got, wide.to(device), given, near, f"np.{row.name}")
    return found
