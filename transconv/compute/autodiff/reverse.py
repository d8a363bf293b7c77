"""Gradients of a computation, as computations: reverse mode over its steps.

    read  x = X[m, k]                       read  x = X[m, k]
    read  w = W[n, k]                       read  dy = dY[m, n]
    let   s = sum(x*w; k)           ->      let   dw = sum(dy*where(s <= 0, 0, 1)*x; m)
    store Y[m, n] = relu(s)                 store dW[n, k] = dw              (s is computed again)

Every step has a *flow*, the gradient of its value at each point of the axes that the value depends on. The
steps are visited from the last to the first; each hands its flow to the names that it mentions, times the
partial derivatives of its expression, summed over the axes that the name does not have. What a sum reduces
gets its flow at every element; the flow of an extreme is divided evenly among equal elements, as
torch.amax does; that of a product is multiplied by the product of the other elements, which one zero does
not spoil. Values and sums are in the type of arithmetic. autodiff/gradient_stores.py stores the flows of
reads.

A partial derivative is that of a row in the table of operations. A text writes operations out, so a row is
found by its expression: ``row(part)`` is the expression itself, because nodes are interned. The derivative
is then torch's, also where a function has none (0 for relu at 0) and where the rule of each node would
overflow (elu, softplus):

    x * sigmoid(x)        is silu(x): the derivative of its row
    a * b                 is mul(a, b)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import product
from math import inf, isfinite, prod

from transconv import ir
from transconv.compute.analysis.pointwise import MOST_NODES, nodes_of
from transconv.compute.analysis.statistics import kept, points, sum_of
from transconv.compute.compute import Compute
from transconv.compute.elementwise import OPS, Op
from transconv.compute.steps import Read, Reduction, Step, Value, Write, fresh, line, uncast, used
from transconv.ir import eq, find, free_vars, select, substitute
from transconv.support import ComputeError

Axes = frozenset[str]


class Flows:
    """The flows of the reads of some tensors, from the gradients of some results. ``steps``: the steps of
    the computation and behind them those of the flows; ``reads``: the flow of each read, an expression of
    ``type``; ``kept``: stores of flows that steps behind them read, in order; ``results``: the gradients
    of results. Raises ComputeError for an operation without a derivative, with its line.

    ``type``: of arithmetic; ``rooted``: the axes that each name depends on; ``behind``: the names that
    depend on the result of the computation's product."""

    def __init__(self, compute: Compute, of: Collection[str], given: Collection[str]) -> None:
        self.compute, self.type = compute, compute.type
        self.taken = {*compute.names.all, *(t.name for t in compute.tensors)}
        self.steps: list[Step] = [s for s in compute.steps if not isinstance(s, Write)]
        self.rooted: dict[ir.Var, Axes] = dict(compute.names.rooted)
        self.named: dict[ir.Expr, ir.Var] = {}
        self.totals: dict[tuple[str, ir.Expr, tuple[str, ...]], ir.Var] = {}
        self.behind: set[ir.Var] = set()
        for step in self.steps:
            self.follow(step)
        self.moving = reached(compute, of)
        self.flows: dict[ir.Var, ir.Expr] = {}
        self.results = {
            t: alike(t, self.fresh(f"d{t.name}"))
            for t in dict.fromkeys(w.view.tensor for w in compute.writes)
            if t.name in given
        }
        self.reads: dict[Read, ir.Expr] = {}
        self.kept: list[Write] = []  # flows that later steps read
        self.stores: set[ir.Var] = set()  # reads of gradients and of these flows
        for step in reversed(compute.steps):
            try:
                self.visit(step)
            except ComputeError as error:
                raise ComputeError(
                    f"{compute.name}: {error}, in the line: {' '.join(line(step, self.type).split())}"
                ) from None

    def total(self, name: str, value: ir.Expr, axes: Collection[str], op: str = "sum") -> ir.Expr:
        """A reduction, made once."""
        if not axes:
            return self.name(name, value)
        ordered = tuple(a for a in self.compute.sizes if a in axes)
        if (op, value, ordered) not in self.totals:
            made = Reduction(self.fresh(name), op, value, ordered)
            self.add(made)
            self.totals[op, value, ordered] = made.var
        return self.totals[op, value, ordered]

    def small(self, name: str, e: ir.Expr) -> ir.Expr:
        """An expression, as a name if it is long."""
        return e if nodes_of(e) <= MOST_NODES else self.name(name, e)

    def name(self, name: str, e: ir.Expr) -> ir.Expr:
        """The name of an expression, a new one unless it is short or has one."""
        if nodes_of(e) <= 2:
            return e
        if e not in self.named:
            made = Value(self.fresh(name), e)
            self.add(made)
            self.named[e] = made.var
        return self.named[e]

    def add(self, step: Read | Value | Reduction) -> None:
        """Put a step behind the others."""
        own = frozenset(a for v in used(step) for a in self.rooted.get(v, (v.name,)))
        self.rooted[step.var] = own - {*step.axes} if isinstance(step, Reduction) else own
        self.steps.append(step)
        self.follow(step)

    def follow(self, step: Step) -> None:
        """Note whether a step's value depends on a product's result."""
        product = self.compute.factors and step is self.compute.sum
        if not isinstance(step, Write) and (product or used(step) & self.behind):
            self.behind.add(step.var)

    def roots(self, e: ir.Expr) -> Axes:
        """The axes that an expression depends on."""
        return frozenset(a for v in free_vars(e) for a in self.rooted.get(v, (v.name,)))

    def number(self, e: ir.Expr) -> ir.Expr:
        """An expression in the type of arithmetic."""
        return e if e.dtype is self.type else ir.Cast(e, self.type)

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        found = fresh(name, self.taken)
        self.taken.add(found)
        return found

    # -- flows -----------------------------------------------------------------------------------

    def visit(self, step: Step) -> None:
        """Hand a step's flow to what it mentions."""
        if isinstance(step, Write):
            if step.view.tensor in self.results and flows_from(step.value) & self.moving:
                self.stored(step)
            return
        flow = self.flows.pop(step.var, None)
        if flow is None:
            return
        if isinstance(step, Read):
            self.reads[step] = self.name(f"{step.name}_grad", flow)
        elif isinstance(step, Value):
            self.hand(step.value, self.name(f"{step.name}_grad", flow), self.rooted[step.var])
        elif self.compute.factors and step is self.compute.sum:
            self.reduced(step, self.apart(flow))
        else:
            self.reduced(step, self.name(f"{step.name}_grad", flow))

    # -- steps -----------------------------------------------------------------------------------

    def stored(self, step: Write) -> None:
        """The flow of a stored value is the gradient of its place."""
        view = ir.View(self.results[step.view.tensor], step.view.dims)
        read = Read(self.fresh(f"d{step.view.tensor.name.lower()}"), view)
        self.add(read)
        self.stores.add(read.var)
        flow: ir.Expr = self.number(read.var)
        if step.op in ("max", "min"):
            raise ComputeError(f"{step.op}= has no derivative; expected let m = {step.op}(...)")
        if step.op == "squares":
            total = sum_of(self.compute, step)
            assert total is not None
            count = prod(points(self.compute).values()) / prod(
                self.compute.size(a) // by for a, by in (kept(step) or {}).items()
            )
            mean = Read(self.fresh(f"{total.view.tensor.name.lower()}_sum"), total.view)
            self.add(mean)
            apart = self.number(step.value) - self.number(mean.var) / ir.Const(count, self.type)
            flow = flow * ir.Const(2.0, self.type) * apart
        self.hand(step.value, flow, self.roots(flow) | self.roots(step.value))

    def reduced(self, step: Reduction, flow: ir.Expr) -> None:
        """The flow of the elements of a reduction."""
        domain = self.roots(step.value) | {*step.axes}
        x = self.small(f"{step.name}_of", self.number(step.value))
        one, zero = ir.Const(1.0, self.type), ir.Const(0.0, self.type)
        if step.op in ("max", "min"):
            hit = eq(x, self.number(step.var))
            own = {*step.axes} & self.roots(step.value)
            ties = self.total(f"{step.name}_ties", select(hit, one, zero), own)
            more = prod(self.compute.size(a) for a in {*step.axes} - own)
            each = flow / ties if more == 1 else flow / (ties * ir.Const(float(more), self.type))
            flow = select(hit, each, zero)
        elif step.op == "prod":
            if not {*step.axes} <= self.roots(step.value):
                raise ComputeError("a product over an axis that its elements lack has no derivative")
            # A product with a zero is y, 0 or NaN, also without an element that is finite but not it.
            y = self.number(step.var)
            nil, tame = eq(x, zero), ir.Lt(ir.Call("abs", (x,)), ir.Const(inf, self.type))
            zeros = self.total(f"{step.name}_zeros", select(nil, one, zero), step.axes)
            wild = self.total(f"{step.name}_wild", select(tame, zero, one), step.axes)
            rest = self.total(f"{step.name}_rest", select(nil, one, x), step.axes, "prod")
            alone = eq(select(tame, zero, wild), one)
            others = select(eq(zeros, zero), rest / x, select(alone, zero, y))
            flow = flow * select(nil, select(eq(zeros, one), rest, y), others)
        self.hand(step.value, flow, domain)

    def apart(self, flow: ir.Expr) -> ir.Expr:
        """A flow at the points of a product's result, stored, unless it was read: the products behind it
        read it. Its type is that of both factors, as in torch, if they have one."""
        total = self.compute.sum
        assert total is not None
        if uncast(flow) in self.stores:
            return flow
        types = {r.view.tensor.dtype for r in self.compute.operands}
        dtype = types.pop() if len(types) == 1 else self.type
        dtype = dtype if dtype.kind == "float" else self.type
        rows = tuple((x.name, x.size) for x in self.compute.axes if x.name in self.rooted[total.var])
        view = between(self.fresh(f"{total.name}_flow"), rows, dtype)
        self.kept.append(Write(view, ir.Cast(flow, view.tensor.dtype)))
        read = Read(self.fresh(f"{total.name}_grad"), view)
        self.add(read)
        self.stores.add(read.var)
        return self.number(read.var)

    def shared(self, flow: ir.Expr, domain: Axes) -> ir.Expr:
        """A flow that several operands get: stored, if it depends on a product's result, which would be
        computed again for each of them."""
        total = self.compute.sum
        if (
            self.compute.factors
            and total
            and domain == self.rooted[total.var]
            and (free_vars(flow) & self.behind)
        ):
            return self.apart(flow)
        return self.small("flow", flow)

    # -- expressions -----------------------------------------------------------------------------

    def hand(self, e: ir.Expr, flow: ir.Expr, domain: Axes) -> None:
        """Give the flow of an expression at every point of some axes to the names that it mentions."""
        if not flows_from(e) & self.moving:
            return
        if isinstance(e, ir.Var):
            self.give(e, flow, domain)
            return
        inner = partials(e, self.type)
        if inner is None:
            raise ComputeError(f"{name_of(e)} has no derivative")
        moving = [(part, slope) for part, slope in inner if flows_from(part) & self.moving]
        flow = self.shared(flow, domain) if len(moving) > 1 else flow
        for part, slope in moving:
            handed = self.scaled(flow, self.slope(slope, part))
            if not isinstance(handed, ir.Const):
                self.hand(part, handed, domain)

    def give(self, v: ir.Var, flow: ir.Expr, domain: Axes) -> None:
        """Add to the flow of a name, summed over the axes that it does not have."""
        over = domain - self.rooted[v]
        own = [a for a in self.compute.sizes if a in over and a in self.roots(flow)]
        if (times := prod(self.compute.size(a) for a in over if a not in own)) > 1:
            flow = flow * ir.Const(float(times), self.type)
        if own:
            flow = self.total(f"{v.name}_sum", flow, own)
        self.flows[v] = self.flows[v] + flow if v in self.flows else flow

    def scaled(self, flow: ir.Expr, slope: ir.Expr) -> ir.Expr:
        """A flow times a derivative; a choice among constants chooses the flow or none."""
        if isinstance(slope, ir.Select) and any(isinstance(e, ir.Const) for e in (slope.yes, slope.no)):
            return select(slope.cond, self.scaled(flow, slope.yes), self.scaled(flow, slope.no))
        if not isinstance(slope, ir.Const) or slope.value not in (1.0, 0.0, -1.0):
            return flow * slope
        return slope if not slope.value else flow if slope.value > 0 else ir.Neg(flow)

    def slope(self, slope: ir.Expr, part: ir.Expr) -> ir.Expr:
        """A derivative, with a name for the operand that it mentions, if that is long."""
        if isinstance(slope, ir.Const):
            return slope
        wide = self.number(part)
        if nodes_of(wide) > MOST_NODES:
            slope = substitute(slope, {wide: self.small("value", wide)})
        return slope if isinstance(slope, ir.Select) else self.small("value", slope)


def alike(tensor: ir.Tensor, name: str, dtype: ir.DType | None = None) -> ir.Tensor:
    """A tensor of another name and the same shape, dense where the first has gaps."""
    dims = tuple(f"{name}_{i}" if d == f"{tensor.name}_{i}" else d for i, d in enumerate(tensor.dims))
    own = dtype or tensor.dtype
    same = own is tensor.dtype and tensor.layout.is_dense and not tensor.layout.offset
    layout = tensor.layout if same else ir.Layout.dense(own, tensor.shape)
    return ir.Tensor(name, dims, tensor.shape, layout)


def between(name: str, axes: tuple[tuple[str, int], ...], dtype: ir.DType) -> ir.View:
    """A tensor that one text stores for another, with an element for each point of some axes."""
    shape = tuple(n for _, n in axes) or (1,)
    tensor = ir.Tensor(name, tuple(a for a, _ in axes) or ("one",), shape, ir.Layout.dense(dtype, shape))
    return ir.View(tensor, tuple(ir.ViewDim(ir.Var(a)) for a, _ in axes) or (ir.ViewDim(ir.Const(0)),))


def reached(compute: Compute, of: Collection[str]) -> set[ir.Var]:
    """The names whose values depend on floats of some tensors, other than by conditions."""
    found: set[ir.Var] = set()
    for step in compute.steps:
        if isinstance(step, Read):
            found |= {step.var} if step.view.tensor.name in of and step.var.type.kind == "float" else set()
        elif not isinstance(step, Write) and flows_from(step.value) & found:
            found.add(step.var)
    return found


def reaches(compute: Compute) -> dict[str, frozenset[str]]:
    """For each stored tensor, those that it depends on in a way that has a derivative, or that is refused
    when one is asked for. Integers, conditions and places of extremes have none."""
    found: dict[str, set[str]] = {w.view.tensor.name: set() for w in compute.writes}
    for name in {r.view.tensor.name for r in compute.reads}:
        moving = reached(compute, (name,))
        for w in compute.writes:
            if w.view.tensor.dtype.kind == "float" and flows_from(w.value) & moving:
                found[w.view.tensor.name].add(name)
    return {name: frozenset(tensors) for name, tensors in found.items()}


NODES: dict[type[ir.Expr], str] = {
    ir.Add: "add",
    ir.Sub: "sub",
    ir.Mul: "mul",
    ir.Div: "div",
    ir.Max: "max",
    ir.Min: "min",
    ir.Neg: "neg",
    ir.Select: "where",
}
"""The row of each node that is an operation by itself."""

Partials = tuple[tuple[ir.Expr, ir.Expr], ...]


def partials(e: ir.Expr, dtype: ir.DType) -> Partials | None:
    """The operands of an expression's outermost operation, each with the derivative with respect to it, of
    ``dtype``; constants, conditions and zeros are left out. None for an operation without a derivative."""
    if isinstance(e, ir.Cast):
        return ((e.x, ir.Const(1.0, dtype)),) if e.x.dtype.kind == "float" else ()
    if (found := _row_of(e)) is None:
        return None
    row, operands, numbers = found
    if row.derivative is None:
        return None
    values = [o if o.dtype in (dtype,) or o.dtype.kind != "float" else ir.Cast(o, dtype) for o in operands]
    each = row.derivative(*values, *(ir.Const(float(n.value), dtype) for n in numbers))
    return tuple(
        (o, d)
        for o, d in zip(operands, each, strict=True)
        if d is not None and not isinstance(o, ir.Const) and not is_number(d, 0.0)
    )


def is_number(e: ir.Expr, number: float) -> bool:
    """Whether an expression is a constant of this value."""
    return isinstance(e, ir.Const) and e.value == number


def parts_of(e: ir.Expr) -> Iterator[ir.Expr]:
    """The operands of an expression's nodes through which derivatives may flow: not its conditions."""
    match e:
        case ir.Select(_, yes, no):
            yield from (yes, no)
        case ir.Cast(x):
            yield from (x,) if x.dtype.kind == "float" else ()
        case _:
            yield from (c for c in e.children() if isinstance(c, ir.Expr) and c.dtype.kind == "float")


def flows_from(e: ir.Expr) -> set[ir.Var]:
    """The float variables that an expression depends on other than by conditions and integers."""
    found: set[ir.Var] = set()
    seen: set[ir.Expr] = set()
    left = [e] if e.dtype.kind == "float" else []
    while left:
        at = left.pop()
        if at in seen:
            continue
        seen.add(at)
        if isinstance(at, ir.Var):
            found.add(at)
        left += parts_of(at)
    return found


def name_of(e: ir.Expr) -> str:
    """The name of an expression's outermost operation, for messages."""
    if isinstance(e, ir.Call):
        return e.name
    return NODES.get(type(e), type(e).__name__.lower())


def _row_of(e: ir.Expr) -> tuple[Op, tuple[ir.Expr, ...], tuple[ir.Const, ...]] | None:
    """The row whose expression this is, with its operands and numbers."""
    if (found := _function_of(e)) is not None:
        return found
    if isinstance(e, ir.Call):
        row = OPS.get(e.name)
        return (row, tuple(e.args), ()) if row is not None and row(*e.args) is e else None
    if type(e) not in NODES:
        return None
    return OPS[NODES[type(e)]], tuple(c for c in e.children() if isinstance(c, ir.Expr)), ()


@lru_cache(maxsize=4096)
def _function_of(e: ir.Expr) -> tuple[Op, tuple[ir.Expr, ...], tuple[ir.Const, ...]] | None:
    """The row of one operand that writes out to this expression."""
    inner = [p for p in find(e, ir.Expr) if p is not e and p.dtype is e.dtype and flows_from(p)]
    constants = [c for c in find(e, ir.Const) if c.type is e.dtype and isfinite(c.value)]
    for row in OPS.values():
        if row.arity == 1 and row.derivative is not None and type(e) in _roots(row, e.dtype):
            for numbers in _numbers(row, constants):
                for part in inner:
                    if row(part, *numbers) is e:
                        return row, (part,), numbers
    return None


def _numbers(row: Op, constants: list[ir.Const]) -> Iterator[tuple[ir.Const, ...]]:
    """The numbers that a row may have in an expression with these constants, first its own."""
    yield ()
    if row.numbers and constants:
        usual = [ir.Const(n, constants[0].type) for n in row.defaults]
        yield from product([*dict.fromkeys([*constants, *usual])], repeat=len(row.numbers))


@lru_cache(maxsize=1024)
def _roots(row: Op, dtype: ir.DType) -> frozenset[type[ir.Expr]]:
    """The classes of a row's outermost node, whatever its numbers are."""
    some = [ir.Const(n, dtype) for n in (-2.5, 1.0, 2.0, 2.3, *row.defaults)]
    choices = [(), *product(some, repeat=len(row.numbers))]
    return frozenset(type(row(ir.Var("x", dtype), *numbers)) for numbers in choices)
