"""Evaluates the sums of computations in NumPy, directly from their views.

What is to be computed is judged three times before there is a kernel: as it was asked for, with its
groups merged, and over the copies that its schedule has made.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from transconv.compute import Compute
from transconv.ir import Array, Evaluator, InterpError, Memory, Tensor, View, offsets_of
from transconv.ir import expr as ex
from transconv.passes import forms
from transconv.schedule import Scheduled, is_copy
from transconv.verify.bisect.replay import ReplayedDirection, holder

PIECE = 1 << 22  # products at a time

Flat = dict[str, Array]  # memory in f64, by the name of a tensor


def readings(question: ReplayedDirection) -> list[tuple[str, list[Compute]]]:
    """What is computed, in each of the forms it has before there is a kernel, by stage; those that
    change nothing are left out."""
    asked = [Scheduled(a, c, question.target) for a, c in question.steps() if not sums_parts(a)]
    mains = [s for s in asked if not is_copy(s.compute)]
    found: list[tuple[str, list[Compute]]] = []
    before: list[Compute] = []
    for form in forms():
        made = [form.of(s) for s in mains]
        if made != before:
            packed = any(t.copy_of for a in made for t in a.tensors)
            found.append((form.name, [form.of(s) for s in asked] if packed else made))
        before = made
    return found


def sums_parts(compute: Compute) -> bool:
    """Whether it adds the parts of another one's sum."""
    return any(x.role == "part" for x in compute.axes)


def meaning(question: ReplayedDirection, computes: Sequence[Compute]) -> Array:
    """The sums that computations describe when they follow one another, in logical shape. Raises
    InterpError for a coordinate outside of its tensor where the mask lets it through."""
    tensors = {t.name: t for a in computes for t in a.tensors}
    tensors |= {t.name: t for a, _ in question.steps() if not is_copy(a) for t in a.tensors}
    flat: Flat = {n: np.full(t.layout.span, np.nan) for n, t in tensors.items()}
    for name, values in question.values.items():
        if name in tensors:
            flat[name][offsets_of(tensors[name])] = values
    for compute in computes:
        _store(compute, _sums(compute, flat), flat)
    result: Tensor = holder(tensors, computes, question.result)
    return np.asarray(flat[result.name][offsets_of(result)])


def _outer(compute: Compute) -> list[ex.Var]:
    summed = compute.axes_of("K")
    return [x.var for x in compute.axes if x not in summed]


def _sums(compute: Compute, flat: Flat) -> Array:
    """One for each point of the axes that are not summed."""
    summed = compute.axes_of("K")
    outer = [x for x in compute.axes if x not in summed]
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
        for view in (compute.a, compute.b):
            if view is not None:
                product = product * _read(view, env, flat[view.tensor.name])
        sizes = [x.size for x in axes]
        total += np.broadcast_to(product, sizes).sum(tuple(range(len(outer), len(axes))))
    return total


def _store(compute: Compute, total: Array, flat: Flat) -> None:
    """Put the sums where the view of the result says."""
    env = {v: _along(i, np.arange(total.shape[i]), total.ndim)
           for i, v in enumerate(_outer(compute))}
    place, mask = _places(compute.c, env)
    where = np.broadcast_to(mask, total.shape)
    flat[compute.c.tensor.name][np.broadcast_to(place, total.shape)[where]] = total[where]


def _along(axis: int, values: Array, rank: int) -> Array:
    return values.reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))


def _places(view: View, env: Mapping[ex.Var, Array]) -> tuple[Array, Array]:
    """Where the elements of a view lie in memory, and which of them exist."""
    evaluator = Evaluator(Memory({}), {}, max(1, next(iter(env.values())).ndim if env else 1))
    evaluator.env.update(env)
    mask = evaluator.compute(view.mask()).astype(np.bool_)
    for name, dim, size in zip(view.tensor.dims, view.dims, view.tensor.shape, strict=True):
        coordinate = evaluator.compute(dim.coord)
        if (((coordinate < 0) | (coordinate >= size)) & mask).any():
            raise InterpError(f"the view of {view.tensor.name} leaves 0..{size} along {name}")
    return evaluator.compute(view.offset()), mask


def _read(view: View, env: Mapping[ex.Var, Array], values: Array) -> Array:
    place, mask = _places(view, env)
    return np.where(mask, values[np.where(mask, place, 0)], 0.0)
