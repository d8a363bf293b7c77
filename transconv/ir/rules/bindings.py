"""Well-formedness of names: what is bound, allocated, reserved or a parameter before it is used.

Each rule has the signature ``verify.Rule``.
"""

from __future__ import annotations

from collections.abc import Iterator

from transconv.ir import explicit as xp
from transconv.ir import expr as ex
from transconv.ir import stmt as st
from transconv.ir.node import Node
from transconv.ir.rules.names import why_not_name
from transconv.ir.rules.sites import Site, title
from transconv.ir.tensor import Tensor


def var_bound_before_use(site: Site) -> Iterator[str]:
    for e in site.find(ex.Var):
        if e not in site.scope:
            twin = next((v for v in site.scope if isinstance(v, ex.Var) and v.name == e.name), None)
            yield (f"{e.name} is not bound here" if twin is None else
                   f"{e.name} is used as {e.type} and bound as {twin.type}")


def var_bound_once(site: Site) -> Iterator[str]:
    """No name hides another; different branches or loops may bind the same name."""
    if isinstance(site.stmt, (st.Let, st.Alloc, st.For)):
        name = site.stmt.var.name
        for var, by in site.scope.items():
            if isinstance(var, ex.Var) and var.name == name:
                yield f"{name} is already bound by `{title(by)}`"


def update_only_allocated(site: Site) -> Iterator[str]:
    match site.stmt:
        case st.Update(var, _):
            pass
        case st.FuncCall(func, (ex.Var() as var, *_)) if func.multiplies:
            pass
        case _:
            return
    if not isinstance(site.scope.get(var), st.Alloc):
        yield f"{var.name} is not allocated here, so it cannot change"


def tensor_is_parameter(site: Site) -> Iterator[str]:
    for who, tensor in site.tensors():
        if isinstance(tensor, Tensor) and site.params is not None and tensor not in site.params:
            same = any(p.name == tensor.name for p in site.params)
            yield (f"{who} reaches {tensor.name}, which is "
                   + ("another tensor than the parameter of that name" if same
                      else "no parameter of the kernel"))


def workspace_is_of_a_tensor(site: Site) -> Iterator[str]:
    """A workspace is a copy, or holds parts of sums. Only copies have a type without memory of its own
    (tf32): values of other tensors are rounded where they are multiplied."""
    if isinstance(site.stmt, st.Kernel):
        for p in site.stmt.params:
            if p.copy_of and p.parts_of:
                yield f"{p.name} is a copy of {p.copy_of} and holds parts of {p.parts_of}"
            if p.dtype.within and not p.copy_of:
                yield f"{p.name} holds {p.dtype}, and is no copy of a tensor"


def ring_is_reserved(site: Site) -> Iterator[str]:
    """Rings of shared memory and of barriers are reserved before their use, outside of roles."""
    used: list[Node] = [e.buffer for e in site.find(xp.SlotTile)]
    match site.stmt:
        case xp.Fetch(barrier=barrier):
            used.append(barrier)
        case st.FuncCall(_, args):
            used += [a for a in args if isinstance(a, xp.Barrier)]
        case xp.Shared(what) if any(isinstance(s, xp.Role) for s in site.around):
            yield f"{what.name} is reserved inside of a role"
    for ring in dict.fromkeys(used):
        if ring not in site.scope:
            assert isinstance(ring, (xp.Barrier, xp.SmemRing))
            yield f"{ring.name} is not reserved here"


def names_are_identifiers(site: Site) -> Iterator[str]:
    """Names are Python identifiers, because the emitters print them unchanged."""
    names: list[str] = [e.name for e in site.find(ex.Lane)]
    match site.stmt:
        case st.Kernel(name, params):
            names += [name, *(p.name for p in params)]
        case st.Alloc(var, lanes):
            names += [var.name, *(lane.name for lane in lanes)]
        case st.Let(var) | st.For(var):
            names.append(var.name)
    for name in dict.fromkeys(names):
        if reason := why_not_name(name):
            yield f"{name!r} is no name: {reason}"
