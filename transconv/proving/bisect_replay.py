"""The proving ground. In: the launches of a plan. Out: what they compute at any stage, in NumPy.

The operands are small integers, so that every order of summation gives the same bits; what no
element maps to, and the result before the run, hold NaN: what is read or left out by mistake shows.
A stage after which the kernel breaks a rule of the IR, or a pass that fails, counts as wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from transconv.algorithm import Algorithm
from transconv.compiler import plan_steps
from transconv.config import Config
from transconv.epilogue import Epilogue
from transconv.errors import ConfigError
from transconv.ir import Kernel, Roles, Tensor, View, find, rewrite
from transconv.ir import expr as ex
from transconv.ir.evaluate import Evaluator, convert
from transconv.ir.interp import run
from transconv.ir.memory import Array, InterpError, Memory, offsets_of
from transconv.ir.verify import VerifyError, verify
from transconv.legality import why_not
from transconv.passes import naive
from transconv.pipeline import PIPELINE, Context
from transconv.problem import ConvProblem, Prop
from transconv.target import Target

EXACT = {"bias", "res", "relu", "relu6"}  # epilogues that keep whole numbers whole
SPACING = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-21, "f64": 2.0**-50}
PIECE = 1 << 22  # products at a time, where the algorithm itself is evaluated


@dataclass(slots=True)
class Question:
    """One direction of one problem, with its data in logical shape by tensor name, and in f64 the
    ``sums`` and the ``answer``, which the epilogue makes of them."""

    problem: ConvProblem
    prop: Prop
    target: Target
    config: Config | None
    epilogue: Epilogue
    values: dict[str, Array] = field(default_factory=dict)
    sums: Array = field(default_factory=lambda: np.zeros(0))
    answer: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def result(self) -> str:
        return self.prop.result

    def steps(self) -> list[tuple[Algorithm, Config]]:
        """The algorithms and their configs. Raises ConfigError for what is not legal."""
        made = plan_steps(self.problem, self.prop, self.target, self.config, self.epilogue)
        for algorithm, config in made:
            if reason := why_not(config, algorithm, self.target):
                raise ConfigError(f"{config}: {reason}")
        return made

    def fill(self, seed: int = 0) -> None:
        """Draw the operands and work out the answer, with an oracle that knows no kernels."""
        import torch

        from transconv.proving.data import density
        from transconv.proving.oracle import after, convolve

        p, random = self.problem, np.random.default_rng(seed)
        share = density(p, self.prop)
        for name in self.prop.operands:
            drawn = random.integers(-2, 3, p.shapes[name]).astype(np.float64)
            self.values[name] = drawn * (random.random(drawn.shape) < share)
            share = 1.0
        for tensor in self.extra():
            self.values[tensor.name] = random.integers(-8, 9, tensor.shape).astype(np.float64)
        given = {n: torch.from_numpy(v) for n, v in self.values.items()}
        a, b = (given[n] for n in self.prop.operands)
        sums = convolve(p, self.prop, a, b)
        self.sums = sums.numpy()
        self.answer = after(sums, slice(None), str(self.epilogue), given).numpy()

    def extra(self) -> tuple[Tensor, ...]:
        """What the epilogue reads."""
        made = plan_steps(self.problem, self.prop, self.target, self.config, self.epilogue)
        return tuple(v.tensor for v in self.epilogue.views(made[0][0].c)) if made else ()

    def buffers(self, tensors: Mapping[str, Tensor]) -> dict[str, Array]:
        """Memory for the tensors: operands in place, NaN everywhere else."""
        made = {}
        for name, tensor in tensors.items():
            made[name] = np.full(tensor.layout.span, np.nan, tensor.dtype.numpy)
            if name in self.values:
                made[name][offsets_of(tensor)] = self.values[name]
        return made

    def wrong(self, got: Array, slack: float = 0.0) -> str:
        """How a result in logical shape differs from the answer; empty where it does not.
        ``slack``: in spacings of the type, for machines that cut instead of rounding."""
        dtype = getattr(self.problem, self.result).dtype
        if not set(self.epilogue.ops) <= EXACT:
            slack = max(slack, 4.0)
        want = convert(self.answer, dtype).astype(np.float64)
        return differing(self.result, got.astype(np.float64), want, slack * SPACING[dtype.name])


def differing(name: str, got: Array, want: Array, relative: float = 0.0) -> str:
    """How two arrays differ, in words; empty where they do not."""
    bad = ~(np.abs(got - want) <= relative * np.maximum(1.0, np.abs(want)))
    if not bad.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    return (f"{int(bad.sum())} of {bad.size} elements of {name} are wrong, the first at "
            f"[{', '.join(map(str, first))}]: {got[first]:g}, expected {want[first]:g}")


# -- what an algorithm means -----------------------------------------------------------------------


def meaning(question: Question, algorithms: Sequence[Algorithm]) -> Array:
    """The sums that some algorithms describe, straight from their views, in logical shape. Raises
    InterpError for a coordinate outside of its tensor where the mask lets it through."""
    spec_shape = question.problem.shapes[question.result]
    out = np.full(spec_shape, np.nan)
    for algorithm in algorithms:
        summed = algorithm.axes_of("K")
        outer = [x for x in algorithm.axes if x not in summed]
        grid = prod(x.size for x in outer)
        total = np.zeros([x.size for x in outer])
        inner = 0  # K axes that fit into a piece are taken at once, the outermost one by one
        while inner < len(summed) and grid * prod(
                x.size for x in summed[len(summed) - inner - 1:]) <= PIECE:
            inner += 1
        alone, together = summed[:len(summed) - inner], summed[len(summed) - inner:]
        for at in itertools.product(*(range(x.size) for x in alone)):
            axes = [*outer, *together]
            env = {x.var: _along(i, np.arange(x.size), len(axes)) for i, x in enumerate(axes)}
            env |= {x.var: np.full((1,) * len(axes), n) for x, n in zip(alone, at, strict=True)}
            product = np.ones((1,) * len(axes))
            for view in (algorithm.a, algorithm.b):
                if view is not None:
                    product = product * _read(view, env, question.values[view.tensor.name])
            sizes = [x.size for x in axes]
            total += np.broadcast_to(product, sizes).sum(tuple(range(len(outer), len(axes))))
        env = {x.var: _along(i, np.arange(x.size), len(outer)) for i, x in enumerate(outer)}
        place, mask = _coordinates(algorithm.c, env)
        shape = tuple(x.size for x in outer)
        where = np.broadcast_to(mask, shape)
        _inside(algorithm.c, place, mask)
        out[tuple(np.broadcast_to(c, shape)[where] for c in place)] = total[where]
    return out


def _along(axis: int, values: Array, rank: int) -> Array:
    return values.reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))


def _coordinates(view: View, env: Mapping[ex.Var, Array]) -> tuple[list[Array], Array]:
    evaluator = Evaluator(Memory({}), {}, max(1, next(iter(env.values())).ndim if env else 1))
    evaluator.env.update(env)
    return ([evaluator.compute(d.coord) for d in view.dims],
            evaluator.compute(view.mask()).astype(np.bool_))


def _inside(view: View, place: list[Array], mask: Array) -> None:
    for name, coordinate, size in zip(view.tensor.dims, place, view.tensor.shape, strict=True):
        if (((coordinate < 0) | (coordinate >= size)) & mask).any():
            raise InterpError(f"the view of {view.tensor.name} leaves 0..{size} along {name}")


def _read(view: View, env: Mapping[ex.Var, Array], values: Array) -> Array:
    place, mask = _coordinates(view, env)
    _inside(view, place, mask)
    found = values[tuple(np.where(mask, c, 0) for c in place)]
    return np.where(mask, found, 0.0)


# -- what kernels compute --------------------------------------------------------------------------


@dataclass(slots=True)
class Stages:
    """One launch: the kernel after ``naive`` and every pass, up to the one that failed, if any."""

    algorithm: Algorithm
    config: Config
    context: Context
    kernels: list[tuple[str, Kernel]] = field(default_factory=list)
    failed: str = ""  # the stage that raised
    reason: str = ""

    @staticmethod
    def of(algorithm: Algorithm, config: Config, target: Target, precision: str,
           switches: Mapping[str, bool]) -> Stages:
        made = Stages(algorithm, config, Context(algorithm, config, target, precision))
        made.extend("naive", lambda: naive.naive(algorithm, f"conv_{algorithm.name}"))
        for step in PIPELINE:
            if made.failed:
                break
            on = switches.get(step.name, step.default) or not step.optional
            kernel = made.kernels[-1][1]
            made.extend(step.name, lambda s=step, k=kernel, on=on:  # type: ignore[misc]
                        s.run(k, made.context) if on else k)
        return made

    def extend(self, stage: str, make: Callable[[], Kernel]) -> None:
        """Make the next kernel, and hold it against the rules of the IR."""
        try:
            kernel = make()
            verify(kernel)
        except VerifyError as error:
            self.failed, self.reason = stage, f"the kernel breaks a rule of the IR: {error}"
        except Exception as error:  # whatever a pass may raise
            self.failed, self.reason = stage, f"the pass failed: {type(error).__name__}: {error}"
        else:
            self.kernels.append((stage, kernel))

    def kernel(self, stage: int) -> Kernel:
        return self.kernels[stage][1]

    def orders(self, stage: int) -> int:
        """How many orders of events a stage should be tried in."""
        return 3 if find(self.kernel(stage), Roles) else 1


NAMES = ("naive", *(p.name for p in PIPELINE))
BLOCKWISE = NAMES.index("blockwise")  # from here on the parts of a split sum exist
NARROW = NAMES.index("narrow")
FINAL = NAMES.index("final")  # from here on divisions may round as the target's do


def as_targets_divide(kernel: Kernel) -> Kernel:
    """The kernel with integer divisions that round towards zero, spelled with the IR's own, which
    round down. Divisors are positive."""
    def towards_zero(e: ex.Expr) -> ex.Expr:
        if isinstance(e, (ex.FloorDiv, ex.Mod)) and e.dtype.kind == "int":
            return ex.Select(ex.Lt(e.a, ex.Const(0)), ex.Neg(type(e)(ex.Neg(e.a), e.b)), e)
        return e

    return rewrite(kernel, towards_zero)


def compute(question: Question, launches: Sequence[Stages], stages: Sequence[int],
            seed: int = 0) -> Array:
    """The result, in logical shape, of running each launch at its stage (0 is ``naive``); ``seed``
    says who goes first among the roles of a kernel that has them. Raises InterpError for what no
    target would forgive."""
    whole = [n for n in stages if n < BLOCKWISE]
    if whole and len(whole) < len(stages):
        raise ValueError("either all launches are looked at before `blockwise`, or none")
    work = []
    for launch, n in zip(launches, stages, strict=True):
        if not (whole and any(x.role == "part" for x in launch.algorithm.axes)):
            kernel = launch.kernel(n)
            work.append((launch, as_targets_divide(kernel) if n >= FINAL else kernel))
    tensors = {t.name: t for launch, kernel in work
               for t in (*launch.algorithm.tensors, *kernel.params)}
    # A box sees memory as other dimensions: the tensor as the algorithm has it says where it lies.
    tensors |= {t.name: t for launch, _ in work for t in launch.algorithm.tensors}
    buffers = question.buffers(tensors)
    if not whole and any(s.config.split_k > 1 and s.config.reduce == "atomic" for s, _ in work):
        buffers[question.result][:] = 0
    memory = Memory(buffers)
    for _, kernel in work:
        memory.new_launch()
        run(kernel, memory, seed=seed)
    result = next(launch.algorithm.c.tensor for launch, _ in work)
    return np.asarray(memory.buffers[question.result][offsets_of(result)])
