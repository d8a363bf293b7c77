"""``kernel.as_operator``: a kernel as an operator of ``torch.library``, with a fake and a gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transconv.kernel.annotations import Group
from transconv.kernel.launch.kernel_plan import LoweredKernel, stored_by
from transconv.kernel.source import FunctionSource
from transconv.support import KernelError

NUMBERS = {"float": "float", "int": "int", "bool": "bool"}
GRAD = "grad_"
Results = Sequence[str] | Mapping[str, Callable[..., Any] | None]


class Operable(Protocol):
    """A kernel, as far as an operator needs it."""

    python: Callable[..., Any]

    @property
    def source(self) -> FunctionSource:
        """The function's tree and lines."""

    def __call__(self, *args: Any) -> Any:
        """A launch."""

    def lower(self, *args: Any) -> LoweredKernel:
        """The kernel for such arguments."""


def as_operator(
    kernel: Operable,
    name: str,
    *,
    group: Callable[..., Group],
    results: Results,
    backward: Operable | None = None,
) -> Any:
    """Register the operator ``name`` (``mine::silu``) and return it.

    ``results``: the parameters of the kernel that the operator allocates and returns; with functions that
    make them (``{"Y": lambda X: X.new_empty(X.shape[0])}``), else they are as the first tensor is.
    ``group`` gives the Group of a call. Both kinds of functions take arguments of the operator by their
    names. Parameters are tensors unless they are annotated as ``float``, ``int`` or ``bool``.

    ``backward``: a kernel whose parameters are named after arguments and results of this one, ``grad_Y``
    for the gradient of a result, and ``grad_X`` for that of an argument, which it writes. Raises
    KernelError for names that do not fit."""
    made = Operator(kernel, name, group, _made(kernel, name, results))
    return made.registered(backward)


class Operator:
    """A kernel as an operator: what it takes, and how its results are made."""

    def __init__(
        self,
        kernel: Operable,
        name: str,
        group: Callable[..., Group],
        results: Mapping[str, Callable[..., Any]],
    ) -> None:
        self.kernel, self.name, self.group, self.results = kernel, name, group, results
        self.parameters = kernel.source.parameters[1:]
        self.arguments = tuple(p for p in self.parameters if p not in results)
        notes = inspect.signature(kernel.python).parameters
        said = {
            p: getattr(notes[p].annotation, "__name__", str(notes[p].annotation)) for p in self.arguments
        }
        self.kinds = {p: NUMBERS.get(said[p], "Tensor") for p in self.arguments}
        if "::" not in name:
            raise KernelError(
                f"as_operator({name!r}); expected a name with a namespace, such as 'mine::{name}'"
            )
        self.checked = False
        self.library: Any = None

    @property
    def schema(self) -> str:
        """The operator's schema in torch's words."""
        gives = ", ".join("Tensor" for _ in self.results)
        takes = ", ".join(f"{kind} {p}" for p, kind in self.kinds.items())
        return f"({takes}) -> {gives if len(self.results) == 1 else f'({gives})'}"

    def registered(self, backward: Operable | None) -> Any:
        """The operator, registered with its fake and its backward."""
        import torch

        from transconv.torch_ops import transforms

        made = torch.library.custom_op(self.name, self.run, mutates_args=(), schema=self.schema)
        made.register_fake(lambda *args: self.given(self.allocated(args)))
        kept, gradients = self.with_backward(backward) if backward is not None else (self.kept, self.none)

        def call(*args: Any) -> tuple[Any, ...]:
            found = made(*args)
            return found if isinstance(found, tuple) else (found,)

        def keep(ctx: Any, inputs: Any, output: Any) -> None:
            transforms.refuse_tangents(self.name, inputs, inside=True)
            kept(ctx, inputs, output if isinstance(output, tuple) else (output,))

        made.register_autograd(
            lambda ctx, *above: gradients(ctx, ctx.needs_input_grad, *above), setup_context=keep
        )
        space, name = self.name.split("::")
        new_library: Any = torch.library.Library
        # Which lives as long as this object, that is as long as the operator.
        self.library = new_library(space, "FRAGMENT")
        transforms.known_by(
            self.library, name, transforms.Rules(self.name, call, kept, gradients, transforms.looped(call))
        )
        return made

    def allocated(self, args: Sequence[Any]) -> dict[str, Any]:
        """The results of a call, not computed yet."""
        given = dict(zip(self.arguments, args, strict=True))
        return {n: called(make, given, f"the function of {n}") for n, make in self.results.items()}

    def given(self, results: Mapping[str, Any]) -> Any:
        """The results as the operator returns them."""
        found = tuple(results.values())
        return found[0] if len(found) == 1 else found

    def run(self, *args: Any) -> Any:
        """Launch the kernel."""
        from transconv.torch_ops.transforms import refuse_tangents

        refuse_tangents(self.name, args)
        results = self.allocated(args)
        given = dict(zip(self.arguments, args, strict=True))
        group = called(self.group, given, "group")
        values = [{**given, **results}[p] for p in self.parameters]
        if not self.checked:
            self.check(group, values)
        self.kernel(group, *values)
        return self.given(results)

    def check(self, group: Group, values: Sequence[Any]) -> None:
        """Refuse a kernel that writes to an argument."""
        body = self.kernel.lower(group, *values).kernel
        for name in stored_by(body):
            if name in self.arguments:
                raise KernelError(
                    f"the operator {self.name} writes to its argument {name}; "
                    f"expected stores to results alone ({' '.join(self.results)})"
                )
        self.checked = True

    def kept(self, ctx: Any, inputs: Any, results: Any) -> None:
        """Keep nothing for a backward kernel that is not there."""

    def none(self, ctx: Any, needed: Any, *above: Any) -> Any:
        """Raises KernelError: there is no backward kernel."""
        raise KernelError(
            f"the operator {self.name} has no backward kernel; expected backward= to "
            "as_operator, or arguments that require no gradient"
        )

    def with_backward(self, backward: Operable) -> tuple[Callable[..., None], Callable[..., Any]]:
        """Register the backward kernel, which is an operator of its own; what is kept for it, and the
        gradients by it."""
        names = backward.source.parameters[1:]
        grads = [f"{GRAD}{a}" for a in self.arguments if f"{GRAD}{a}" in names]
        known = {*self.arguments, *self.results, *(f"{GRAD}{r}" for r in self.results), *grads}
        if unknown := [n for n in names if n not in known]:
            raise KernelError(
                f"the backward kernel of {self.name} has a parameter {unknown[0]}; expected "
                f"some of {' '.join(sorted(known))}"
            )
        if not grads:
            told = " ".join(f"{GRAD}{a}" for a in self.arguments)
            raise KernelError(
                f"the backward kernel of {self.name} writes no gradient; expected a parameter of {told}"
            )
        like = {g: _like(g.removeprefix(GRAD)) for g in grads}
        back = Operator(backward, f"{self.name}_backward", self.group, like)
        operator = back.registered(None)

        def kept(ctx: Any, inputs: Any, results: Any) -> None:
            values = dict(zip(self.arguments, inputs, strict=True))
            values |= dict(zip(self.results, results, strict=True))
            ctx.numbers = {n: v for n, v in values.items() if self.kinds.get(n, "Tensor") != "Tensor"}
            ctx.names = [n for n in back.arguments if n in values and n not in ctx.numbers]
            ctx.save_for_backward(*(values[n] for n in ctx.names))

        def gradients(context: Any, needed: Any, *above: Any) -> Any:
            values = {**context.numbers, **dict(zip(context.names, context.saved_tensors, strict=True))}
            values |= {f"{GRAD}{r}": g for r, g in zip(self.results, above, strict=True)}
            for at, a in enumerate(self.arguments):
                if needed[at] and f"{GRAD}{a}" not in grads:
                    raise KernelError(
                        f"the backward kernel of {self.name} has no {GRAD}{a}, the gradient "
                        "of an argument that requires one"
                    )
            found = operator(*(values[n] for n in back.arguments))
            each = dict(zip(grads, (found,) if len(grads) == 1 else found, strict=True))
            return tuple(each.get(f"{GRAD}{a}") for a in self.arguments)

        return kept, gradients


def called(function: Callable[..., Any], given: Mapping[str, Any], what: str) -> Any:
    """A function of some arguments, by their names."""
    names = list(inspect.signature(function).parameters)
    if unknown := [n for n in names if n not in given]:
        raise KernelError(f"{what} asks for {unknown[0]}; expected some of {' '.join(given)}")
    return function(**{n: given[n] for n in names})


def _made(kernel: Operable, name: str, results: Results) -> dict[str, Callable[..., Any]]:
    """How each result is made."""
    parameters = kernel.source.parameters[1:]
    given = (
        dict(results)
        if isinstance(results, Mapping)
        else dict.fromkeys([results] if isinstance(results, str) else results)
    )
    if not given or any(n not in parameters for n in given):
        raise KernelError(
            f"the results of {name} are {' '.join(given) or 'none'}; expected some of "
            f"{' '.join(parameters)}"
        )
    first = next((p for p in parameters if p not in given), "")
    order = sorted(given, key=parameters.index)
    return {n: given[n] or _like(first) for n in order}


def _like(name: str) -> Callable[..., Any]:
    """A function of one argument of this name, which makes a tensor like it."""

    def made(**given: Any) -> Any:
        import torch

        return torch.empty_like(given[name])

    function: Any = made
    function.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)])
    return made
