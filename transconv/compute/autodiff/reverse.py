"""Gradients of a computation, as computations: reverse mode over its steps.

    read  x = X[m, k]                       read  x = X[m, k]
    read  w = W[n, k]                       read  dy = dY[m, n]
    let   s = sum(x*w; k)           ->      let   dw = sum(dy*where(s <= 0, 0, 1)*x; m)
    store Y[m, n] = relu(s)                 store dW[n, k] = dw              (s is computed again)

Every step has a *flow*, the gradient of its value at each point of the axes that the value depends on.
The steps are visited from the last to the first; each hands its flow to the names that it mentions, times
the partial derivatives of its expression (autodiff/partial_derivatives.py), summed over the axes that the
name does not have. What a sum reduces gets its flow at every element; the flow of an extreme is divided
evenly among equal elements, as torch.amax does; that of a product is multiplied by the product of the
other elements, which one zero does not spoil. Values and sums are in the type of arithmetic.
autodiff/gradient_stores.py stores the flows of reads.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf, prod

from transconv.compute.analysis.pointwise import MOST_NODES, nodes_of
from transconv.compute.analysis.statistics import kept, points, sum_of
from transconv.compute.autodiff.differentiability import reached
from transconv.compute.autodiff.partial_derivatives import flows_from, name_of, partials
from transconv.compute.compute import Compute
from transconv.compute.concatenation import Appended, Axes
from transconv.compute.steps import Read, Reduction, Step, Value, Write
from transconv.compute.text.format import line
from transconv.errors import ComputeError
from transconv.ir import (
    Call,
    Cast,
    Const,
    DType,
    Expr,
    Layout,
    Lt,
    Neg,
    Select,
    Tensor,
    Var,
    View,
    ViewDim,
    eq,
    free_vars,
    select,
    substitute,
)


class Flows(Appended):
    """The flows of the reads of some tensors, from the gradients of some results. ``steps``: the steps of
    the computation and behind them those of the flows; ``reads``: the flow of each read, an expression of
    ``type``; ``kept``: stores of flows that steps behind them read, in order; ``results``: the gradients
    of results. Raises ComputeError for an operation without a derivative, with its line."""

    def __init__(self, compute: Compute, of: Collection[str], given: Collection[str]) -> None:
        super().__init__(compute)
        self.moving = reached(compute, of)
        self.flows: dict[Var, Expr] = {}
        self.results = {t: alike(t, self.fresh(f"d{t.name}")) for t in
                        dict.fromkeys(w.view.tensor for w in compute.writes) if t.name in given}
        self.reads: dict[Read, Expr] = {}
        self.kept: list[Write] = []  # flows that later steps read
        self.stores: set[Var] = set()  # reads of gradients and of these flows
        for step in reversed(compute.steps):
            try:
                self.visit(step)
            except ComputeError as error:
                raise ComputeError(f"{compute.name}: {error}, in the line: "
                                   f"{' '.join(line(step, compute).split())}") from None

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
        view = View(self.results[step.view.tensor], step.view.dims)
        read = Read(self.fresh(f"d{step.view.tensor.name.lower()}"), view)
        self.add(read)
        self.stores.add(read.var)
        flow: Expr = self.number(read.var)
        if step.op in ("max", "min"):
            raise ComputeError(f"{step.op}= has no derivative; expected let m = {step.op}(...)")
        if step.op == "squares":
            total = sum_of(self.compute, step)
            assert total is not None
            count = prod(points(self.compute).values()) / prod(
                self.compute.size(a) // by for a, by in (kept(step) or {}).items())
            mean = Read(self.fresh(f"{total.view.tensor.name.lower()}_sum"), total.view)
            self.add(mean)
            apart = self.number(step.value) - self.number(mean.var) / Const(count, self.type)
            flow = flow * Const(2.0, self.type) * apart
        self.hand(step.value, flow, self.roots(flow) | self.roots(step.value))

    def reduced(self, step: Reduction, flow: Expr) -> None:
        """The flow of the elements of a reduction."""
        domain = self.roots(step.value) | {*step.axes}
        x = self.small(f"{step.name}_of", self.number(step.value))
        one, zero = Const(1.0, self.type), Const(0.0, self.type)
        if step.op in ("max", "min"):
            hit = eq(x, self.number(step.var))
            own = {*step.axes} & self.roots(step.value)
            ties = self.total(f"{step.name}_ties", select(hit, one, zero), own)
            more = prod(self.compute.size(a) for a in {*step.axes} - own)
            each = flow / ties if more == 1 else flow / (ties * Const(float(more), self.type))
            flow = select(hit, each, zero)
        elif step.op == "prod":
            if not {*step.axes} <= self.roots(step.value):
                raise ComputeError("a product over an axis that its elements lack has no derivative")
            # A product with a zero is y, 0 or NaN, also without an element that is finite but not it.
            y = self.number(step.var)
            nil, tame = eq(x, zero), Lt(Call("abs", (x,)), Const(inf, self.type))
            zeros = self.total(f"{step.name}_zeros", select(nil, one, zero), step.axes)
            wild = self.total(f"{step.name}_wild", select(tame, zero, one), step.axes)
            rest = self.total(f"{step.name}_rest", select(nil, one, x), step.axes, "prod")
            alone = eq(select(tame, zero, wild), one)
            others = select(eq(zeros, zero), rest / x, select(alone, zero, y))
            flow = flow * select(nil, select(eq(zeros, one), rest, y), others)
        self.hand(step.value, flow, domain)

    def apart(self, flow: Expr) -> Expr:
        """A flow at the points of a product's result, stored, unless it was read: the products behind it
        read it. Its type is that of both factors, as in torch, if they have one."""
        total = self.compute.sum
        assert total is not None
        if (flow.x if isinstance(flow, Cast) else flow) in self.stores:
            return flow
        types = {r.view.tensor.dtype for r in self.compute.operands}
        dtype = types.pop() if len(types) == 1 else self.type
        dtype = dtype if dtype.kind == "float" else self.type
        rows = tuple((x.name, x.size) for x in self.compute.axes if x.name in self.rooted[total.var])
        view = between(self.fresh(f"{total.name}_flow"), rows, dtype)
        self.kept.append(Write(view, Cast(flow, view.tensor.dtype)))
        read = Read(self.fresh(f"{total.name}_grad"), view)
        self.add(read)
        self.stores.add(read.var)
        return self.number(read.var)

    def shared(self, flow: Expr, domain: Axes) -> Expr:
        """A flow that several operands get: stored, if it depends on a product's result, which would be
        computed again for each of them."""
        total = self.compute.sum
        if self.compute.factors and total and domain == self.rooted[total.var] and (
                free_vars(flow) & self.behind):
            return self.apart(flow)
        return self.small("flow", flow)

    # -- expressions -----------------------------------------------------------------------------

    def hand(self, e: Expr, flow: Expr, domain: Axes) -> None:
        """Give the flow of an expression at every point of some axes to the names that it mentions."""
        if not flows_from(e) & self.moving:
            return
        if isinstance(e, Var):
            self.give(e, flow, domain)
            return
        inner = partials(e, self.type)
        if inner is None:
            raise ComputeError(f"{name_of(e)} has no derivative")
        moving = [(part, slope) for part, slope in inner if flows_from(part) & self.moving]
        flow = self.shared(flow, domain) if len(moving) > 1 else flow
        for part, slope in moving:
            handed = self.scaled(flow, self.slope(slope, part))
            if not isinstance(handed, Const):
                self.hand(part, handed, domain)

    def give(self, v: Var, flow: Expr, domain: Axes) -> None:
        """Add to the flow of a name, summed over the axes that it does not have."""
        over = domain - self.rooted[v]
        own = [a for a in self.compute.sizes if a in over and a in self.roots(flow)]
        if (times := prod(self.compute.size(a) for a in over if a not in own)) > 1:
            flow = flow * Const(float(times), self.type)
        if own:
            flow = self.total(f"{v.name}_sum", flow, own)
        self.flows[v] = self.flows[v] + flow if v in self.flows else flow

    def scaled(self, flow: Expr, slope: Expr) -> Expr:
        """A flow times a derivative; a choice among constants chooses the flow or none."""
        if isinstance(slope, Select) and any(isinstance(e, Const) for e in (slope.yes, slope.no)):
            return select(slope.cond, self.scaled(flow, slope.yes), self.scaled(flow, slope.no))
        if not isinstance(slope, Const) or slope.value not in (1.0, 0.0, -1.0):
            return flow * slope
        return slope if not slope.value else flow if slope.value > 0 else Neg(flow)

    def slope(self, slope: Expr, part: Expr) -> Expr:
        """A derivative, with a name for the operand that it mentions, if that is long."""
        if isinstance(slope, Const):
            return slope
        wide = self.number(part)
        if nodes_of(wide) > MOST_NODES:
            slope = substitute(slope, {wide: self.small("value", wide)})
        return slope if isinstance(slope, Select) else self.small("value", slope)


def alike(tensor: Tensor, name: str, dtype: DType | None = None) -> Tensor:
    """A tensor of another name and the same shape, dense where the first has gaps."""
    dims = tuple(f"{name}_{i}" if d == f"{tensor.name}_{i}" else d for i, d in enumerate(tensor.dims))
    own = dtype or tensor.dtype
    same = own is tensor.dtype and tensor.layout.is_dense and not tensor.layout.offset
    return Tensor(name, dims, tensor.shape, tensor.layout if same else Layout.dense(own, tensor.shape))


def between(name: str, axes: tuple[tuple[str, int], ...], dtype: DType) -> View:
    """A tensor that one text stores for another, with an element for each point of some axes."""
    shape = tuple(n for _, n in axes) or (1,)
    tensor = Tensor(name, tuple(a for a, _ in axes) or ("one",), shape, Layout.dense(dtype, shape))
    return View(tensor, tuple(ViewDim(Var(a)) for a, _ in axes) or (ViewDim(Const(0)),))
