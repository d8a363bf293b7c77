"""Elementwise operations: one row each, from which every list of operations is derived.

A row has the meaning of an operation (an expression of the IR), the equivalent function of torch, its
derivative, and where it may be used. The form of an expression determines the text of kernels, which
tests/golden compares. Derivatives are those of torch, also at points where a function has none: 0 for relu
at 0, one half each for equal operands of a maximum. ``register`` adds rows:

    register(Op("cube", 1, lambda x: x * x * x, torch="mypackage.cube", activation=True))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import inf, isfinite, isnan, log, pi
from typing import Any, cast

import numpy as np

from transconv import ir
from transconv.ir import Call, Const, Expr, eq, f64, maximum, minimum, ne, select

Expression = Callable[..., Expr]
Partials = Callable[..., tuple[Expr | None, ...]]
TorchFunction = str | Callable[..., Any]  # "torch.nn.functional.gelu", or the function itself

RESERVED = ("bias", "res")  # words of an epilogue that are no functions of its value


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """An operation of ``arity`` values: ``expression`` builds the IR of the result from that of the
    operands, of any types; ``torch`` names the function of tensors that computes the same.

    ``numbers``: names and defaults of the numbers that follow the operands, such as the slope of a leaky
    ReLU; they are constants of the expression. ``options``: keyword arguments of torch's function.
    ``derivative``: the partial derivatives as expressions of the operands, None for an operand without one
    (a condition). ``gradient``: torch's function (g, y, *gradient_with) of the result's gradient and the
    result, if these suffice; torch differentiates other operations from their operands. ``exact``: integer
    operands give integers, without rounding on any chip. ``activation``: allowed in epilogues; ``drawn``:
    the fuzzer may choose it there. ``steepest``: a bound of the absolute derivative, by which checks scale
    errors. ``spelled``: other spellings: dotted names of torch's modules and functions, and methods such
    as ``.relu_``; a module matches the row whose ``options`` are its attributes. ``onednn``: oneDNN's
    names, each with alpha and beta, None where oneDNN's function ignores the number."""

    name: str
    arity: int
    expression: Expression
    torch: TorchFunction
    _: KW_ONLY
    numbers: tuple[tuple[str, float], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    derivative: Partials | None = None
    gradient: TorchFunction | None = None
    gradient_with: tuple[float, ...] = ()
    exact: bool = False
    activation: bool = False
    drawn: bool = True
    steepest: float = 1.5
    spelled: tuple[str, ...] = ()
    onednn: tuple[tuple[str, float | None, float | None], ...] = ()

    def __str__(self) -> str:
        return self.name

    def __call__(self, *values: Expr) -> Expr:
        """The IR's expression of these operands, and of numbers where they differ from the row's.
        TypeError unless there are ``arity`` operands, and at most as many numbers as the row has."""
        if not self.arity <= len(values) <= self.arity + len(self.numbers):
            numbers = f" and up to {len(self.numbers)} numbers" if self.numbers else ""
            raise TypeError(f"{self.name} takes {self.arity} values{numbers}, not {len(values)}")
        return self.expression(*values)

    @property
    def defaults(self) -> tuple[float, ...]:
        """The row's numbers."""
        return tuple(value for _, value in self.numbers)

    def function(self, *numbers: float) -> Callable[..., Any]:
        """The function of torch tensors, with these numbers or the row's. Imports torch."""
        found = named(self.torch)
        if self.numbers:
            given = (*numbers, *self.defaults[len(numbers) :])
            return lambda *tensors: found(*tensors, *given)
        return functools.partial(found, **dict(self.options)) if self.options else found

    def from_result(self) -> Callable[..., Any] | None:
        """A function (g, y) of torch tensors that gives the operand's gradient; None if ``gradient`` is.
        Imports torch."""
        if self.gradient is None:
            return None
        found, given = named(self.gradient), self.gradient_with
        return (lambda g, y: found(g, y, *given)) if given else found


OPS: ir.RowTable[Op] = ir.RowTable()
"""Every operation, by name."""
table = OPS.table


def register(op: Op) -> Op:
    """Add a row to all tables and return it. ValueError for a name that is not an identifier, that is
    taken, or that another row had before in this process, because cached kernels have operations by
    name."""
    if ir.why_not_name(op.name) or op.name in RESERVED:
        raise ValueError(
            f"'{op.name}' cannot name an operation; expected a Python name other than "
            f"{' and '.join(RESERVED)}"
        )
    if op.name in OPS or OPS.first(op) is not op:
        raise ValueError(f"'{op.name}' already names an operation in this process")
    return OPS.add(op)


def unregister(name: str) -> None:
    """Remove a row from all tables. KeyError for an unknown name."""
    OPS.remove(name)


def named(function: TorchFunction) -> Callable[..., Any]:
    """The object of a dotted name, whose leading parts are imported as modules; a function is returned
    unchanged. Raises ImportError or AttributeError if there is none."""
    if not isinstance(function, str):
        return function
    root, *rest = function.split(".")
    found: Any = importlib.import_module(root)
    path = root
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part, None) or importlib.import_module(path)
    return cast(Callable[..., Any], found)


# The expression of each activation.
ACTIVATIONS: dict[str, Expression] = table(lambda op: op if op.activation else None)
"""The operations that are allowed in epilogues, by name."""


FUNCTIONAL = "torch.nn.functional"
ATEN = "torch.ops.aten"


def _const(value: float, like: Expr) -> Expr:
    return Const(int(value) if like.dtype.is_integer else value, like.dtype)


def _call(name: str, x: Expr) -> Expr:
    return Call(name, (x,))


def _sigmoid(x: Expr) -> Expr:
    return _call("sigmoid", x)


def _where(cond: Expr, x: Expr, yes: float = 1.0, no: float = 0.0) -> Expr:
    return select(cond, _const(yes, x), _const(no, x))


def _decayed(x: Expr) -> Expr:
    """exp(-|x|), which never overflows."""
    return _call("exp", -_call("abs", x))


def _slope(x: Expr) -> Expr:
    """The derivative of sigmoid. 1 - sigmoid(x) would lose the digits of what is left of 1."""
    t = _decayed(x)
    whole = _const(1.0, x) + t
    return t / (whole * whole)


# -- activations -----------------------------------------------------------------------------------

GELU_SCALE = 1.5957691216057308  # 2 sqrt(2/pi): tanh(u) is 2 sigmoid(2 u) - 1


def _ndtr(x: Expr) -> Expr:
    return _call("ndtr_wide" if x.dtype is f64 else "ndtr", x)


def _density(x: Expr) -> Expr:
    """The density of the standard normal distribution."""
    return _call("exp2", x * x * _const(-0.5 / log(2), x)) * _const((2 * pi) ** -0.5, x)


def _gelu_inner(x: Expr) -> Expr:
    return (x + x * x * x * _const(0.044715, x)) * _const(GELU_SCALE, x)


def _gelu_tanh_slope(x: Expr) -> Expr:
    """Far from 0, where x * x may overflow, it is that of 40: 0 or 1."""
    near = minimum(maximum(x, _const(-40.0, x)), _const(40.0, x))
    grows = (_const(1.0, x) + near * near * _const(3 * 0.044715, x)) * _const(GELU_SCALE, x)
    return _sigmoid(_gelu_inner(near)) + near * _slope(_gelu_inner(near)) * grows


def _hardswish(x: Expr) -> Expr:
    six = minimum(maximum(x + _const(3.0, x), _const(0.0, x)), _const(6.0, x))
    return x * (six * _const(1 / 6, x))  # x * six may overflow


def _hardswish_slope(x: Expr) -> Expr:
    middle = x * _const(1 / 3, x) + _const(0.5, x)
    return select(
        x <= _const(-3.0, x), _const(0.0, x), select(x >= _const(3.0, x), _const(1.0, x), middle)
    )


def _tanh_slope(x: Expr) -> Expr:
    """1 - tanh(x)**2 without the difference: 4 t / (1 + t)**2 with t = exp(-2 |x|)."""
    t = _call("exp", _call("abs", x) * _const(-2.0, x))
    whole = _const(1.0, x) + t
    return _const(4.0, x) * t / (whole * whole)


def _number(value: float | Expr, like: Expr) -> Expr:
    """A number of a row, which may be a constant of an expression already."""
    return value if isinstance(value, Expr) else _const(float(value), like)


def _is(value: float | Expr, number: float) -> bool:
    return value == number if not isinstance(value, Const) else value.value == number


def _softplus(x: Expr, beta: float | Expr = 1.0) -> Expr:
    """log(1 + exp(beta x)) / beta; x where beta x > 20, as in torch: in f32 they are one for beta 1."""
    if _is(beta, 1.0):
        scaled, found = x, _softplus_1(x)
    else:
        scaled = x * _number(beta, x)
        found = _softplus_1(scaled) / _number(beta, x)
    whole = _is(beta, 1.0) and x.dtype is not f64
    return found if whole else select(scaled > _const(20.0, x), x, found)


def _softplus_slope(x: Expr, beta: float | Expr = 1.0) -> Expr:
    scaled = x if _is(beta, 1.0) else x * _number(beta, x)
    found = _sigmoid(scaled)
    return select(scaled > _const(20.0, x), _const(1.0, x), found) if x.dtype is f64 else found


def _softplus_1(x: Expr) -> Expr:
    """max(x, 0) + log(1 + t) with t = exp(-|x|), which never overflows. 1 + t loses the digits of a small
    t; log(u) t / (u - 1) with u = 1 + t does not (Goldberg 1991, theorem 4)."""
    t = _decayed(x)
    u = _const(1.0, x) + t
    near = select(eq(u, _const(1.0, x)), t, _call("log", u) * t / (u - _const(1.0, x)))
    return maximum(x, _const(0.0, x)) + near


def _elu(x: Expr, alpha: float | Expr = 1.0) -> Expr:
    below = _call("expm1", x)
    return select(x > _const(0.0, x), x, below if _is(alpha, 1.0) else _number(alpha, x) * below)


def _elu_slope(x: Expr, alpha: float | Expr = 1.0) -> Expr:
    below = _call("exp", x)
    return select(
        x > _const(0.0, x), _const(1.0, x), below if _is(alpha, 1.0) else _number(alpha, x) * below
    )


def _clamp(x: Expr, low: float | Expr = -inf, high: float | Expr = inf) -> Expr:
    above = x if _is(low, -inf) else maximum(x, _number(low, x))
    return above if _is(high, inf) else minimum(above, _number(high, x))


def _clamp_slope(x: Expr, low: float | Expr = -inf, high: float | Expr = inf) -> Expr:
    return _where((x >= _number(low, x)) & (x <= _number(high, x)), x)


def _leaky(x: Expr, slope: float | Expr = 0.01) -> Expr:
    return select(x > _const(0.0, x), x, x * _number(slope, x))


def _mish_parts(x: Expr) -> tuple[Expr, Expr, Expr]:
    """(t, n, s) with t = exp(-|x|) and tanh(softplus(x)) = n / (n + s), which neither cancels nor
    overflows: (1 + 2t) / (1 + 2t + 2t**2) above 0, t (t + 2) / (t (t + 2) + 2) below."""
    t, two, above = _decayed(x), _const(2.0, x), x > _const(0.0, x)
    return (t, select(above, t * two + _const(1.0, x), t * (t + two)), select(above, t * t * two, two))


def _mish(x: Expr) -> Expr:
    _, n, s = _mish_parts(x)
    return x * (n / (n + s))


def _mish_slope(x: Expr) -> Expr:
    """With h = n / (n + s): h + x (1 - h**2) sigmoid(x), and 1 - h**2 = s (2n + s) / (n + s)**2."""
    _, n, s = _mish_parts(x)
    whole = n + s
    rest = (s / whole) * ((n * _const(2.0, x) + s) / whole)
    return n / whole + x * rest * _sigmoid(x)


MOST_MULTIPLIED = 8  # the largest power that is computed by multiplications


def _exponent(exponent: float | Expr, x: Expr) -> float:
    """The exponent as the type of x has it."""
    given = np.asarray(float(cast(Const, _number(exponent, x)).value))
    return float(ir.convert(given, x.dtype).item())


def _power(x: Expr, exponent: float | Expr = 2.0) -> Expr:
    """x**exponent of IEEE 754: multiplications for small whole exponents and halves, else by a logarithm.
    Of -inf these would be NaN, which broken powers are not. For a half it is the root, as in torch."""
    e = _exponent(exponent, x)
    if e == 0.5:
        return _call("sqrt", x)
    size, whole, one = _call("abs", x), abs(e) % 1 == 0, _const(1.0, x)
    if not isfinite(e):
        return select(eq(x if isnan(e) else size, one), one, _by_logarithm(size, e))
    if not whole and (abs(e) % 1 != 0.5 or abs(e) > MOST_MULTIPLIED + 1):
        return select(eq(x, _const(-inf, x)), _const(inf if e > 0 else 0.0, x), _by_logarithm(x, e))
    if e < 0:
        return one / _power(x, -e)
    if whole and e > MOST_MULTIPLIED:  # the other factor has the sign
        return x * _by_logarithm(size, e - 1) if e % 2 else _by_logarithm(size, e)
    even = int(e) % 2 == 0
    factors = [x] * int(e) if whole else [_call("sqrt", x), *[x] * (int(e) - even), *[size] * even]
    product = functools.reduce(lambda a, b: a * b, factors or [one])
    return product if whole else select(eq(x, _const(-inf, x)), _const(inf, x), product)


def _by_logarithm(x: Expr, exponent: float) -> Expr:
    """x**exponent of what is not negative."""
    return _call("exp2", _call("log2", x) * _const(exponent, x))


def _power_slope(x: Expr, exponent: float | Expr = 2.0) -> Expr:
    e = _exponent(exponent, x)
    return _const(e, x) * _power(x, e - 1) if e else _const(0.0, x)


ACTIVATION_ROWS = (
    Op(
        "relu",
        1,
        lambda x: maximum(x, _const(0.0, x)),
        "torch.relu",
        exact=True,
        activation=True,
        derivative=lambda x: (select(x <= _const(0.0, x), _const(0.0, x), _const(1.0, x)),),  # 1 of NaN
        gradient=f"{ATEN}.threshold_backward.default",
        gradient_with=(0,),
        onednn=(("relu", 0, None),),
        spelled=("torch.nn.ReLU", "torch.relu_", f"{FUNCTIONAL}.relu", ".relu", ".relu_"),
    ),
    Op(
        "relu6",
        1,
        lambda x: minimum(maximum(x, _const(0.0, x)), _const(6.0, x)),
        f"{FUNCTIONAL}.relu6",
        exact=True,
        activation=True,
        derivative=lambda x: (_where((x > _const(0.0, x)) & (x < _const(6.0, x)), x),),
        gradient=f"{ATEN}.hardtanh_backward.default",
        gradient_with=(0, 6),
        onednn=(("clip", 0, 6), ("clip_v2", 0, 6)),
        spelled=("torch.nn.ReLU6",),
    ),
    Op(
        "sigmoid",
        1,
        _sigmoid,
        "torch.sigmoid",
        activation=True,
        derivative=lambda x: (_slope(x),),
        gradient=f"{ATEN}.sigmoid_backward.default",
        onednn=(("logistic", None, None),),
        spelled=("torch.nn.Sigmoid", f"{FUNCTIONAL}.sigmoid", ".sigmoid"),
    ),
    Op(
        "silu",
        1,
        lambda x: x * _sigmoid(x),
        f"{FUNCTIONAL}.silu",
        activation=True,
        derivative=lambda x: (_sigmoid(x) + x * _slope(x),),
        onednn=(("swish", 1, None),),
        spelled=("torch.nn.SiLU",),
    ),
    Op(
        "tanh",
        1,
        lambda x: _call("tanh", x),
        "torch.tanh",
        activation=True,
        derivative=lambda x: (_tanh_slope(x),),
        gradient=f"{ATEN}.tanh_backward.default",
        onednn=(("tanh", None, None),),
        spelled=("torch.nn.Tanh", f"{FUNCTIONAL}.tanh", ".tanh"),
    ),
    Op(
        "gelu",
        1,
        lambda x: x * _ndtr(x),
        f"{FUNCTIONAL}.gelu",
        options=(("approximate", "none"),),
        activation=True,
        derivative=lambda x: (_ndtr(x) + x * _density(x),),
        onednn=(("gelu_erf", None, None),),
        spelled=("torch.nn.GELU",),
    ),
    Op(
        "gelu_tanh",
        1,
        lambda x: x * _sigmoid(_gelu_inner(x)),
        f"{FUNCTIONAL}.gelu",
        options=(("approximate", "tanh"),),
        activation=True,
        derivative=lambda x: (_gelu_tanh_slope(x),),
        onednn=(("gelu_tanh", None, None),),
        spelled=("torch.nn.GELU",),
    ),
    Op(
        "hardswish",
        1,
        _hardswish,
        f"{FUNCTIONAL}.hardswish",
        activation=True,
        derivative=lambda x: (_hardswish_slope(x),),
        onednn=(("hardswish", 1 / 6, 0.5),),
        spelled=("torch.nn.Hardswish",),
    ),
    Op(
        "softplus",
        1,
        _softplus,
        f"{FUNCTIONAL}.softplus",
        numbers=(("beta", 1.0),),
        derivative=lambda x, beta=1.0: (_softplus_slope(x, beta),),
    ),
    Op(
        "elu",
        1,
        _elu,
        f"{FUNCTIONAL}.elu",
        numbers=(("alpha", 1.0),),
        derivative=lambda x, alpha=1.0: (_elu_slope(x, alpha),),
    ),
    Op(
        "leaky_relu",
        1,
        _leaky,
        f"{FUNCTIONAL}.leaky_relu",
        numbers=(("negative_slope", 0.01),),
        exact=True,
        derivative=lambda x, slope=0.01: (select(x > _const(0.0, x), _const(1.0, x), _number(slope, x)),),
    ),
    Op(
        "clamp",
        1,
        _clamp,
        "torch.clamp",
        numbers=(("min", -inf), ("max", inf)),
        exact=True,
        derivative=lambda x, low=-inf, high=inf: (_clamp_slope(x, low, high),),
    ),
    Op("mish", 1, _mish, f"{FUNCTIONAL}.mish", derivative=lambda x: (_mish_slope(x),)),
    Op(
        "pow",
        1,
        _power,
        "torch.pow",
        numbers=(("exponent", 2.0),),
        derivative=lambda x, exponent=2.0: (_power_slope(x, exponent),),
    ),
)
"""The rows of activations; epilogues may use those with ``activation``."""


# -- functions of one value ------------------------------------------------------------------------


def _sign(x: Expr) -> Expr:
    return select(x > _const(0.0, x), _const(1.0, x), _where(x < _const(0.0, x), x, -1.0))


def _function(name: str, derivative: float | None = None) -> Op:
    """The row of a function in ``ir.CALLS``; ``derivative``: if it is a constant."""
    slopes = {
        "exp": lambda x: _call("exp", x),
        "expm1": lambda x: _call("exp", x),
        "exp2": lambda x: _call("exp2", x) * _const(log(2), x),
        "log": lambda x: _const(1.0, x) / x,
        "log2": lambda x: _const(1 / log(2), x) / x,
        "sqrt": lambda x: _const(0.5, x) / _call("sqrt", x),
        "rsqrt": lambda x: _const(-0.5, x) * _call("rsqrt", x) * _call("rsqrt", x) * _call("rsqrt", x),
        "sin": lambda x: _call("cos", x),
        "cos": lambda x: -_call("sin", x),
        "erf": lambda x: _call("exp", -(x * x)) * _const(2 * pi**-0.5, x),
        "abs": _sign,
    }
    return Op(
        name,
        1,
        lambda x: _call(name, x),
        f"torch.{name}",
        exact=name in ("abs", "floor", "ceil"),
        derivative=lambda x: (_const(derivative, x) if derivative is not None else slopes[name](x),),
    )


FUNCTION_ROWS = (
    *map(_function, ("abs", "exp", "exp2", "expm1", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf")),
    _function("floor", 0.0),
    _function("ceil", 0.0),
    Op("ndtr", 1, _ndtr, "torch.special.ndtr", derivative=lambda x: (_density(x),)),
    Op("neg", 1, lambda x: -x, "torch.neg", exact=True, derivative=lambda x: (_const(-1.0, x),)),
    Op(
        "round",
        1,
        lambda x: _call("nearest", x),
        "torch.round",
        exact=True,  # halves to the even number
        derivative=lambda x: (_const(0.0, x),),
    ),
)
"""Functions of one value."""


# -- operations of several values ------------------------------------------------------------------


def _extremum(loses: Callable[[Expr, Expr], Expr], a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The derivatives of an extremum: 0 for the operand that loses, a half for equal ones, else 1; so 1
    for both where one is NaN, as in torch."""
    nil, half, one = _const(0.0, a), _const(0.5, a), _const(1.0, a)
    inner = select(eq(a, b), half, one)
    return select(loses(a, b), nil, inner), select(loses(b, a), nil, inner)


BINARY_ROWS = (
    Op(
        "add",
        2,
        lambda a, b: a + b,
        "torch.add",
        exact=True,
        derivative=lambda a, b: (_const(1.0, a), _const(1.0, b)),
    ),
    Op(
        "sub",
        2,
        lambda a, b: a - b,
        "torch.sub",
        exact=True,
        derivative=lambda a, b: (_const(1.0, a), _const(-1.0, b)),
    ),
    Op("mul", 2, lambda a, b: a * b, "torch.mul", exact=True, derivative=lambda a, b: (b, a)),
    Op(
        "div",
        2,
        lambda a, b: a / b,
        "torch.div",
        derivative=lambda a, b: (_const(1.0, b) / b, -(a / b) / b),
    ),  # b*b would overflow
    Op(
        "max",
        2,
        maximum,
        "torch.maximum",
        exact=True,
        derivative=lambda a, b: _extremum(lambda a, b: a < b, a, b),
    ),
    Op(
        "min",
        2,
        minimum,
        "torch.minimum",
        exact=True,
        derivative=lambda a, b: _extremum(lambda a, b: a > b, a, b),
    ),
    Op("lt", 2, lambda a, b: a < b, "torch.lt", exact=True),
    Op("le", 2, lambda a, b: a <= b, "torch.le", exact=True),
    Op("gt", 2, lambda a, b: a > b, "torch.gt", exact=True),
    Op("ge", 2, lambda a, b: a >= b, "torch.ge", exact=True),
    Op("eq", 2, eq, "torch.eq", exact=True),
    Op("ne", 2, ne, "torch.ne", exact=True),
    Op(
        "where",
        3,
        select,
        "torch.where",
        exact=True,
        derivative=lambda cond, a, b: (
            None,
            select(cond, _const(1.0, a), _const(0.0, a)),
            select(cond, _const(0.0, a), _const(1.0, a)),
        ),
    ),
)
"""Operations of two or three values."""

for _row in (*ACTIVATION_ROWS, *FUNCTION_ROWS, *BINARY_ROWS):
    register(_row)
