"""``transconv.optimize``: one line for a model, which chooses how it runs and says what it chose.

fast = transconv.optimize(model)                          compiled by its first call
fast = transconv.optimize(model, x)                       compiled now, by many processes
fast = transconv.optimize(model, x, measure=True)         the fastest of eager, torch.compile, ours
print(transconv.graph.report(fast))                       what was chosen, the times, the kernels
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from transconv.calls.settings import settings
from transconv.graph import graph_report
from transconv.graph.backend_options import RESTS, compiled_alone, is_time
from transconv.support import nearest
from transconv.torch_ops import arguments, modules
from transconv.torch_ops.conversion.inference import Inference
from transconv.torch_ops.conversion.prepare import undisturbed

Tensor = torch.Tensor
Call = Callable[..., Any]
Example = tuple[tuple[Any, ...], dict[str, Any]]
EAGER, INDUCTOR, OURS, RECORDED = "eager", "torch.compile", "transconv", "transconv, CUDA graphs"
OTHER = "inductor"  # the backend of torch.compile that is measured beside ours
log = logging.getLogger("transconv.graph")
CALLS, ROUNDS, BUDGET_S = 5, 7, 2.0  # calls in a row; rounds at least; seconds of a side at most
TURNS = 3  # of calls with and without a CUDA graph
FURTHEST = 0.1  # from eager's results, relative, that a side which is kept may be
AS_NUDGED = 4.0  # times as far as eager's are for inputs that are rounded otherwise


@dataclass(frozen=True, slots=True)
class TimedSide:
    """A way to run a model, and what was measured of it: milliseconds of a call, or of a training step;
    how far its results are from eager's, relative; ``error``: why it does not run."""

    name: str
    ms: float | None = None
    difference: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Optimization:
    """What ``optimize`` did with a model: ``kept``, the name of a side; three ``lines`` for people;
    ``sides``: the table of times, if they were measured."""

    kept: str
    lines: tuple[str, ...]
    sides: tuple[TimedSide, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.lines, *self.table()])

    def table(self) -> Iterator[str]:
        """The times, line by line: the fastest first."""
        if self.sides:
            eager = next(s.ms for s in self.sides if s.name == EAGER) or 0.0
            yield f"  {'':24} {'ms':>9} {'x eager':>8}  difference"
        for s in sorted(self.sides, key=lambda s: (s.ms is None, s.ms or 0.0)):
            kept = "   kept" if s.name == self.kept else ""
            yield (
                f"  {s.name:24} {s.error}"
                if s.ms is None
                else (f"  {s.name:24} {s.ms:9.4g} {eager / s.ms:8.2f}  {s.difference:10.1e}{kept}")
            )


def optimize(
    model: nn.Module,
    example: Any = None,
    *,
    measure: bool = False,
    training: bool | None = None,
    cudagraphs: bool | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    rest: str = "inductor",
    tune: float = 0.0,
    verbose: bool = True,
) -> Any:
    """A copy of a model that shares its weights and runs as is best for it: a graph compiled by transconv,
    with CUDA graphs where they are legal, images with features last, and weights copied once for
    inference. ``example``: a tensor, or a tuple of arguments, or a dictionary of named ones; the copy is
    then compiled at once. ``measure``: time it beside eager torch and torch.compile, and keep the fastest
    of those whose results are eager's, also if that is eager. Where rounding an input otherwise moves
    eager's gradients as far, as of deep models in bf16, that comparison tells little, and the one of the
    graph's first results with torch's operators (``stats().compared``) vouches. Prints three lines and
    the table, unless ``verbose`` is False; ``transconv.graph.report`` of the copy has them, too.

    ``training``: None: as ``model.training`` says. For inference the copy computes without gradients, its
    parameters are frozen (the model's are not), and writes to the model's weights are seen; what is set to
    another tensor, in the model or in the copy, belongs to that one alone. For training
    weights of images are put in memory with features last, in place. ``cudagraphs``: None: where an
    example is on one GPU and a call is faster with them, by some calls of each; results are copies
    then. True: always (in training with the rules of torch's ``mode="reduce-overhead"``).
    ``filter_fn(module, name)`` may leave modules to torch, as ``transconv.off`` does. ``rest``: who
    computes what has no kernel. ``tune``: seconds in which schedules of a graph's costly kernels are timed
    first, as ``mode="max-autotune"`` does; what is found is kept for other processes.

    Without a GPU it stays eager and says so. Class, state dict, ``train`` and ``eval`` are the model's; a
    deep copy or a pickle of the copy is eager. TypeError for what is no module or cannot be copied,
    ValueError for a model whose weights have no values yet, for words that are not known, and where
    ``measure`` has no example."""
    arguments.expect_module(model, "optimize")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "transconv.optimize: a ScriptModule is compiled already; hand over the module "
            "from which it was made"
        )
    name, weights = type(model).__name__, [*model.parameters(), *model.buffers()]
    _expect(
        not any(map(nn.parameter.is_lazy, weights)),
        f"{name} has lazy modules, whose weights have no shape yet",
        "a model that was called once: model(x)",
    )
    _expect(
        not any(t.is_meta for t in (*weights, *_tensors(example))),
        f"{name} or its example is on torch's meta device, without values",
        'a model that was loaded: model.to_empty(device="cuda"), then model.load_state_dict(..)',
    )
    _expect(rest in RESTS, f"rest={rest!r}", f"one of: {', '.join(RESTS)}{nearest(str(rest), RESTS)}")
    _expect(is_time(tune), f"tune={tune!r}", "seconds, 0 or more")
    for switch, word in (("training", training), ("cudagraphs", cudagraphs)):
        _expect(word in (None, False, True), f"{switch}={word!r}", "None, False or True")
    _expect(
        filter_fn is None or callable(filter_fn), f"filter_fn={filter_fn!r}", "a function(module, name)"
    )
    if measure and example is None:
        raise ValueError(
            "transconv.optimize: measure=True needs an example; write "
            "optimize(model, x, measure=True), x as the model is called"
        )
    training = model.training if training is None else training
    trial = trial_of(model, example, training, filter_fn, rest, tune)
    with settings.waiting():
        made = trial.chosen(measure, cudagraphs)
    if verbose:
        print(made)
    fast: Any = trial.model
    fast._compiled_call_impl = ChosenCall(
        trial.calls[made.kept], made, training, made.kept == RECORDED, trial.handle
    )
    return fast


def _expect(holds: bool, given: str, expected: str) -> None:
    """Raises ValueError where something else was given."""
    if not holds:
        raise ValueError(f"transconv.optimize: {given}; expected {expected}")


class ChosenCall:
    """What a call of an optimized model runs. ``compiled``: the function of torch.compile, or eager's;
    ``recorded``: its results lie in the memory of a CUDA graph, and are copied."""

    def __init__(
        self,
        compiled: Call,
        optimization: Optimization,
        training: bool = True,
        recorded: bool = False,
        handle: Inference | None = None,
    ) -> None:
        self.compiled, self.optimization = compiled, optimization
        self.training, self.recorded, self.handle = training, recorded, handle

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.training:
            return self.compiled(*given, **named)
        with torch.no_grad():
            if not self.recorded:
                return self.compiled(*given, **named)
            begin: Call = torch.compiler.cudagraph_mark_step_begin
            begin()
            made = self.compiled(*given, **named)
            return _pytree.tree_map_only(Tensor, torch.clone, made)


@dataclass(slots=True)
class ModelTrial:
    """The ways to run a model, each a function; ``given``: arguments of an example, or None."""

    model: nn.Module
    given: Example | None
    training: bool
    rest: str
    tune: float = 0.0
    calls: dict[str, Call] = field(default_factory=dict)
    handle: Inference | None = None
    weights: dict[Any, Tensor] = field(default_factory=dict)

    def chosen(self, measure: bool, cudagraphs: bool | None) -> Optimization:
        """The choice: by times, or else by what there is."""
        ours = self.prepare()
        possible = ours and self.device().type == "cuda" and cudagraphs is not False
        legal = possible and self.recordable()
        if measure:
            return self.fastest(*self.tried(legal or (possible and bool(cudagraphs))))
        if not ours:
            return self.choice(
                EAGER,
                f"it stays eager: {self.why_eager()}",
                ('expected: torch\'s own time; transconv.compile(.., target="sm_90") has kernels'),
            )
        if self.given is not None:
            self.run(OURS)
        asked = possible and cudagraphs
        kept = RECORDED if asked or (legal and self.recorded_is_faster()) else OURS
        if kept == RECORDED and self.given is not None:
            self.run(RECORDED)
        what = "a compiled graph" + ", CUDA graphs" * (kept == RECORDED)
        return self.choice(kept, what, self.expected())

    def prepare(self) -> bool:
        """Name the ways to run the model; whether kernels of ours are among them."""
        self.calls[EAGER] = self.model._call_impl
        if self.device().type == "cpu" and settings.cpu != "interpret":
            return False
        options = {"rest": self.rest, "tune": self.tune}
        self.calls[OURS] = self.compiled("transconv", options)
        self.calls[RECORDED] = self.compiled("transconv", options | {"cudagraphs": True})
        self.handle = None if self.training else Inference(self.model)
        if self.training and self.device().type != "cpu":
            put_features_last(self.model)
        return True

    def why_eager(self) -> str:
        """Why there are no kernels for it."""
        here = torch.cuda.is_available()
        return "its weights are on the CPU; model.cuda() moves them" if here else "there is no GPU here"

    def recordable(self) -> bool:
        """Whether a call may be a CUDA graph unasked: inference of an example on a GPU."""
        on_gpu = self.given is not None and all(t.is_cuda for t in _tensors(self.given))
        return on_gpu and not self.training

    def choice(
        self, kept: str, what: str, expected: str, sides: tuple[TimedSide, ...] = ()
    ) -> Optimization:
        """With the three lines."""
        weights = ", weights copied once" if self.handle is not None and kept in (OURS, RECORDED) else ""
        off = [name for name, m in self.model.named_modules() if modules.is_off(m)]
        left = ", ".join(off[:4]) + " .." * (len(off) > 4)
        left = left or "no module; transconv.off(module) leaves one out"
        left = left if kept in (OURS, RECORDED) else "all of it"
        return Optimization(
            kept,
            (
                f"transconv.optimize: {type(self.model).__name__} for "
                f"{'training' if self.training else 'inference'}: {what}{weights}",
                f"  {expected}",
                f"  left to torch: {left}",
            ),
            sides,
        )

    def recorded_is_faster(self) -> bool:
        """Whether a call takes less time in a CUDA graph, the copies of its results included. The host may
        need longer than the kernels, or not: an estimate of either is worth less than a few calls."""
        if self.gaps():
            return False
        try:
            self.run(RECORDED)
        except Exception as error:  # such as too little memory for another pool: the graph runs as it is
            log.warning(
                "optimize: %s runs without CUDA graphs: %s: %s",
                type(self.model).__name__,
                type(error).__name__,
                error,
            )
            return False
        seconds = [(self.seconds(OURS), self.seconds(RECORDED)) for _ in range(TURNS)]
        ours, recorded = (min(times) for times in zip(*seconds, strict=True))
        return bool(recorded < ours)

    def tried(self, recorded: bool) -> tuple[dict[str, TimedSide], float]:
        """The sides, compiled and compared with eager, and how far results of one that is kept may be from
        eager's."""
        names = [EAGER, INDUCTOR, *(n for n in (OURS, RECORDED) if n in self.calls)]
        names = names if recorded else [n for n in names if n != RECORDED]
        sides, want = {n: TimedSide(n) for n in names}, self.run(EAGER)
        # Of a model that draws random numbers, such as for dropout, no two results are alike. Gradients of
        # many layers may hang on how their inputs were rounded.
        varied = (
            2 * _apart(self.run(EAGER, seed=1), want),
            AS_NUDGED * _apart(self.run(EAGER, given=_nudged(self.given)), want),
        )
        furthest = max(FURTHEST, *(v for v in varied if v < float("inf")))
        for n in names:
            try:
                if n == INDUCTOR:
                    self.calls[n] = self.compiled(OTHER)
                made = self.run(n)
                sides[n] = replace(sides[n], difference=_apart(made, want))
            except Exception as error:  # torch's compiler may need what is not installed
                first = next(iter(str(error).strip().splitlines()), "")
                sides[n] = replace(sides[n], error=f"{type(error).__name__}: {first[:90]}")
        return sides, furthest

    def fastest(self, sides: dict[str, TimedSide], furthest: float) -> Optimization:
        """The choice among sides, which are timed in turn."""
        taken: dict[str, list[float]] = {n: [] for n, side in sides.items() if not side.error}
        for _ in range(ROUNDS):
            for n, times in taken.items():
                if sum(times) * CALLS < BUDGET_S or not times:
                    times.append(self.seconds(n))
        sides |= {
            n: replace(sides[n], ms=sorted(times)[len(times) // 2] * 1e3) for n, times in taken.items()
        }
        timed = [s for s in sides.values() if s.ms is not None]
        right = [s for s in timed if s.name == EAGER or (s.difference or 0.0) <= furthest]
        kept = min(right, key=lambda s: s.ms or 0.0)
        said = (
            f"measured: {kept.ms:.4g} ms a {'step' if self.training else 'call'}, "
            f"{(sides[EAGER].ms or 0.0) / (kept.ms or 1.0):.2f} times as fast as eager"
            if kept.name != EAGER
            else f"measured: {kept.ms:.4g} ms; no other way was faster and right"
        )
        return self.choice(
            kept.name,
            f"kept {kept.name}" + ("" if OURS in sides else f"; {self.why_eager()}"),
            said + (f"; {self.expected()}" if OURS in taken else ""),
            tuple(sides.values()),
        )

    def compiled(self, how: Any, options: Any = None) -> Call:
        """The model through torch's compiler."""
        return compiled_alone(self.model._call_impl, type(self.model).__name__, how, options=options)

    def run(self, name: str, seed: int = 0, given: Example | None = None) -> list[Tensor]:
        """Results of the example, and in training all gradients as one vector: one that is zero, as of
        a bias before a batch norm, is rounding alone. The model's state stays as it was."""
        given = given or self.given
        with undisturbed(self.model, _tensors(given)):
            torch.manual_seed(seed)
            results, gradients = self.step(self.runner(name), given)
            made = [t.detach().clone() for t in results]
            return [*made, torch.cat([t.flatten() for t in gradients])] if gradients else made

    def runner(self, name: str) -> Call:
        return ChosenCall(self.calls[name], Optimization(name, ()), self.training, name == RECORDED)

    def step(self, call: Call, given: Example | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """A call, of the example if no other arguments are given, and in training its gradients."""
        positional, named = given or self.given or ((), {})
        with torch.set_grad_enabled(self.training):
            results = _tensors(call(*positional, **named))
            ends = [t for t in results if t.requires_grad]
            of = [t for t in self.model.parameters() if t.requires_grad]
            grads = (
                torch.autograd.grad(ends, of, [self.weight(t) for t in ends], allow_unused=True)
                if ends and of
                else ()
            )
        return results, [t for t in grads if t is not None]

    def weight(self, result: Tensor) -> Tensor:
        """The gradient of a result."""
        key = result.shape, result.dtype, result.device
        if key not in self.weights:
            self.weights[key] = _weights(result)
        return self.weights[key]

    def seconds(self, name: str) -> float:
        """Of one of several calls in a row."""
        call = self.runner(name)
        with undisturbed(self.model, _tensors(self.given)):
            self.wait()
            began = time.perf_counter()
            for _ in range(CALLS):
                self.step(call)
            self.wait()
            return (time.perf_counter() - began) / CALLS

    def wait(self) -> None:
        if self.device().type == "cuda":
            torch.cuda.synchronize(self.device())

    def device(self) -> torch.device:
        """Where it computes: the first of its weights or of the example that is on no CPU."""
        found = (
            t.device for t in (*self.model.parameters(), *self.model.buffers(), *_tensors(self.given))
        )
        return next((d for d in found if d.type != "cpu"), torch.device("cpu"))

    def graphs(self) -> tuple[graph_report.GraphReport, ...]:
        return graph_report.report(self.calls[OURS]).graphs

    def gaps(self) -> int:
        """Regions that torch computes."""
        return sum(len(g.rows) - len(g.kernels) for g in self.graphs())

    def expected(self) -> str:
        """What the report estimates."""
        if self.given is None:
            return "expected: transconv.graph.report tells it after the first call, which compiles"
        kernels = [k for g in self.graphs() for k in g.kernels]
        many = graph_report.many
        return (
            f"expected: {sum(k.us for k in kernels):.4g} us (estimated) in "
            f"{many(len(kernels), 'kernel')} for {sum(len(k.operations) for k in kernels)} "
            f"operations; {many(self.gaps(), 'region')} of torch"
        )


def trial_of(
    model: nn.Module,
    example: Any,
    training: bool,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    rest: str = "inductor",
    tune: float = 0.0,
) -> ModelTrial:
    """The trial of a copy of a model that shares its weights (``optimize`` has the arguments)."""
    return ModelTrial(_sharing(model, training, filter_fn), _arguments(example), training, rest, tune)


def _sharing(model: nn.Module, training: bool, keep: Callable[[nn.Module, str], bool] | None) -> nn.Module:
    """A copy of a model with its weights and buffers; for inference its parameters need no gradient."""

    def shared(t: Tensor) -> Tensor:
        frozen = isinstance(t, nn.Parameter) and t.requires_grad and not training
        return nn.Parameter(t.detach(), requires_grad=False) if frozen else t

    # What a hook computes from parameters before each call, such as torch's weight_norm, is an attribute.
    found = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor))
    computed = (t for t in found if not t.is_leaf)  # which cannot be copied
    memo: dict[int, Any] = {id(t): shared(t) for t in (*model.parameters(), *model.buffers(), *computed)}
    try:
        twin: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # by an attribute of the model's own, such as a lock or an open file
        raise TypeError(
            f"transconv.optimize: {type(model).__name__} cannot be copied ({type(error).__name__}: "
            f'{error}); torch.compile(model, backend="transconv") compiles the model itself'
        ) from error
    for name, module in twin.named_modules():
        if keep is not None and name and not keep(module, name):
            modules.off(module)
    return twin.train(training) if training is not model.training else twin


def _arguments(example: Any) -> Example | None:
    if example is None:
        return None
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _nudged(given: Example | None) -> Example | None:
    """An example whose floats are one unit in the last place larger or smaller, in turn."""

    def nudged(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        signs = torch.arange(t.numel(), device=t.device).view(t.shape) % 2 * 2 - 1
        return (t.detach().double() * (1 + torch.finfo(t.dtype).eps * signs)).to(t.dtype)

    made: Example | None = _pytree.tree_map(nudged, given)
    return made


def put_features_last(model: nn.Module) -> None:
    """Put weights of images in memory as kernels read them."""
    for p in model.parameters():
        if type(p) is nn.Parameter and p.dim() in (4, 5):
            p.data = p.data.contiguous(
                memory_format=(torch.channels_last if p.dim() == 4 else torch.channels_last_3d)
            )


def _tensors(of: Any) -> list[Tensor]:
    return [t for t in _pytree.tree_leaves(of) if isinstance(t, Tensor)]


def _weights(result: Tensor) -> Tensor:
    """What a result's gradient is: of both signs, since norms take constants away."""
    numbers = torch.arange(result.numel(), device=result.device) % 7 - 3
    return numbers.to(result.dtype).view(result.shape)


def _apart(made: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative difference, by root mean squares of what is finite; infinite where NaN or
    infinities are not at the same places."""
    return max((_difference(a, b) for a, b in zip(made, want, strict=True)), default=0.0)


def _difference(made: Tensor, want: Tensor) -> float:
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (made, want))
    a, b = a.double(), b.double()
    finite = b.isfinite()
    if not bool((a.isfinite() == finite).all() & ((a == b) | (a.isnan() & b.isnan()) | finite).all()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
