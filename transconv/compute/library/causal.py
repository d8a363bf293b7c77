"""Depthwise convolutions that look only to the past, with a state: a read of either the state or the
input, chosen by a mask. Positions of another sequence are masked, too.

    v[t, k] = t + k < K - 1 ? S[t + k] : X[t + k - (K - 1)]        K width, K - 1 elements of state
    Y[t]    = activation(sum(v[t, k]*W[k]; k) + B)

The result may be several tensors, each of some channels (``ChannelParts``): every store has
a mask, and every gradient is 0 outside of its own. Heads of them may be divided by their norm; then the
sum over k is written out, so that the norm is the one reduction.

    store Y  = a * r     0 <= c < 8             r = rsqrt(sum(a*a; e) + eps), a head of e features
    store Y1 = a         8 <= c < 24

Every function takes the operands and the results as ``Strided``, and returns a ``Formula``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from transconv.compute.elementwise import OPS
from transconv.compute.library.page import Dim, Gradient, LibraryFormula, NamedSpace, Placed, Strided, held
from transconv.compute.steps import render
from transconv.ir import Var


class ChannelParts(NamedTuple):
    """The tensors of a result: how many ``channels`` each has, and the ``norms`` of their heads, empty for
    none, of so many features (``head``): ``l2``, by the root of the sum of squares, ``rms``, by that of
    their mean. Channels of a part are a multiple of a head."""

    channels: tuple[int, ...]
    norms: tuple[str, ...]
    head: int = 1
    eps: float = 1e-6

    @property
    def names(self) -> tuple[str, ...]:
        """The results."""
        return tuple(f"Y{i or ''}" for i in range(len(self.channels)))

    def tensors(self, given: Sequence[Strided], names: Sequence[str]) -> dict[str, Placed]:
        """Tensors of the parts, of n, c and t, in the space of n, heads, features and t."""
        found: dict[str, Placed] = {}
        for i, (t, name) in enumerate(zip(given, names, strict=True)):
            place: Dim = f"c-{sum(self.channels[:i]) // self.head}" if len(given) > 1 else 1
            found[name] = heads(t, 1, self.head), [0, place, 2, 3]
        return found

    @property
    def numbers(self) -> str:
        """Coordinates and names of which forms have numbers."""
        places = [f"c-{sum(self.channels[:i]) // self.head}" for i in range(len(self.channels))]
        return f" c e {' '.join(places)}" if len(places) > 1 or any(self.norms) else ""

    def made(self, value: str, mask: Callable[[str], str]) -> list[str]:
        """The lines that store a value's parts, scaled by norms, each as ``mask`` has it."""
        if not any(self.norms):
            return [f"store {{{name}}} = {mask(value)}" for name in self.names]
        stores = (
            f"store {{{name}}} = {mask(f'a * {norm}' if norm else 'a')}"
            for name, norm in zip(self.names, self.norms, strict=True)
        )
        return [f"let a = {value}", *self.factors(), *stores]

    def factors(self) -> list[str]:
        """The lines of what the norms multiply ``a`` by."""
        by = {"l2": "", "rms": f" / {float(self.head)}"}
        used = [norm for norm in by if norm in self.norms]
        return [f"let {norm} = rsqrt(sum(a*a; {{e}}){by[norm]} + {self.eps})" for norm in used]

    def slope(self, flows: Sequence[str]) -> list[str]:
        """The lines of the gradient ``g`` of ``a`` before the norms from those of the parts."""
        lines = [f"read g{i} = {{{flow}}}" for i, flow in enumerate(flows)]
        sums, terms = self.factors(), list[str]()
        for norm in dict.fromkeys(self.norms):
            own = " + ".join(f"g{i}" for i, of in enumerate(self.norms) if of == norm)
            count = f" / {float(self.head)}" * (norm == "rms")
            sums += [f"let of_{norm} = {own}"] * bool(norm)
            terms.append(
                f"(of_{norm} - a*{norm}*{norm}*sum(of_{norm}*a; {{e}}){count})*{norm}" if norm else own
            )
        return [*lines, *sums, f"let g = {' + '.join(terms)}"]


def heads(t: Strided, dim: int, head: int) -> Strided:
    """A tensor with its channels as heads of features."""
    return t.split(dim, t.shape[dim] // head, head)


def causal_window(
    x: Strided,
    w: Strided,
    b: Strided | None,
    state: Strided | None,
    index: Strided | None,
    activation: str,
    y: Sequence[Strided],
    parts: ChannelParts,
) -> LibraryFormula:
    """The convolution of x [n, c, t] with w [c, k], a bias b [c], the elements ``state`` [n, c, k - 1]
    before x, and ``index`` [n, t], the number of the sequence of each position: a position reads those of
    its own, and is 0 where its number is negative."""
    width, past, head = w.shape[1], w.shape[1] - 1, parts.head
    flow = heads(Strided.dense(x.shape, y[0].dtype), 1, head)
    x, w, b, state = (
        heads(x, 1, head),
        heads(w, 0, head),
        b and heads(b, 0, head),
        state and heads(state, 1, head),
    )
    operands: dict[str, Placed] = {"X": (x, [0, 1, 2, f"t + k - {past}"]), "W": (w, [1, 2, 4])}
    operands |= {"B": (b, [1, 2])} if b else {}
    operands |= {"S": (state, [0, 1, 2, "t + k"])} if state else {}
    operands |= {"J": (index, [0, 3]), "J_k": (index, [0, f"t + k - {past}"])} if index else {}
    behind: dict[str, Placed] = parts.tensors(y, parts.names)
    behind |= {"dX": (x.like(), [0, 1, 2, 3]), "dW": (w.like(), [1, 2, 4])}
    called = {"J_k": "J", "J_t": "J"}
    flows = tuple(name.replace("Y", "G") for name in parts.names)
    behind |= parts.tensors(y, flows) | {"H": (flow, [0, 1, 2, 3])}
    for name, (t, _) in [(name, behind[name]) for name in ("G", "H")]:
        behind[f"{name}_t"] = (t, [0, 1, 2, f"t + {past} - k"])
        behind[f"{name}_s"] = (t, [0, 1, 2, "q - k"])
        called |= {f"{name}_t": name, f"{name}_s": name}
    behind |= {"dB": (b.like(), [1, 2])} if b else {}
    behind |= {"dS": (state.like(), [0, 1, 2, 5])} if state else {}
    behind |= {"J_t": (index, [0, f"t + {past} - k"])} if index else {}
    unrolled = _unrolled(operands, width, called) if any(parts.norms) else {}
    page = NamedSpace(
        ["n", "c", "e", "t", "k", "q"],
        (x.shape[0], x.shape[1], head, x.shape[3], width, max(1, past)),
        operands | behind | unrolled,
        called,
        keeps="t k q",
        numbers=f"k q{parts.numbers} {' '.join(map(str, range(width)))}",
    )
    read, value = _read(operands, past, range(width) if unrolled else ())
    made = f"{activation}(p)" if activation else "p"
    text = page.sized(
        f"causal_window_{activation or 'linear'}",
        *read,
        f"let p = {value}",
        *parts.made(made, lambda value: _of_a_sequence(value, index)),
    )
    gradients = _gradients(page, operands, past, activation, parts, flows, (read, value))
    given = tuple(name for name in ("X", "W", "B", "S", "J") if name in operands)
    return LibraryFormula(page, text, given, parts.names, gradients, flows=flows)


def _unrolled(operands: Mapping[str, Placed], width: int, called: dict[str, str]) -> dict[str, Placed]:
    """The operands at each k, which is dim 4 of the space."""
    found: dict[str, Placed] = {}
    for i, name in product(range(width), MOVING & operands.keys()):
        t, dims = operands[name]
        own = [f"{i}" if d == 4 else d.replace("k", f"{i}") if isinstance(d, str) else d for d in dims]
        found[f"{name}{i}"] = t, own
        called[f"{name}{i}"] = called.get(name, name)
    return found


MOVING = {"X", "W", "S", "J_k"}  # operands that have other elements at each k


def _read(operands: Mapping[str, Placed], past: int, steps: Sequence[int] = ()) -> tuple[list[str], str]:
    """The lines that read the operands, ``v`` the last of them, and the sum; written out for these
    ``steps`` of k."""
    names, each, values = {"J_k": "there"}, [*map(str, steps)] or [""], list[str]()
    found = [
        f"read {names.get(name, name.lower())}{i} = {{{name}{i}}}"
        for name in operands
        for i in (each if name in MOVING else ("",))
    ]
    for i in each:
        value = f"where(there{i} == j, x{i}, 0)" if "J" in operands else f"x{i}"
        value = f"where(t + {i or 'k'} < {past}, s{i}, {value})" if "S" in operands else value
        values.append(f"let v{i} = {value}")
    total = " + ".join(f"v{i}*w{i}" for i in each) if steps else "sum(v*w; {k})"
    return [*found, *values], f"{total}{' + b' * ('B' in operands)}"


def _of_a_sequence(value: str, index: Strided | None) -> str:
    return f"where(j < 0, 0, {value})" if index else value


def _gradients(
    page: NamedSpace,
    operands: Mapping[str, Placed],
    past: int,
    activation: str,
    parts: ChannelParts,
    flows: Sequence[str],
    sums: tuple[list[str], str],
) -> tuple[Gradient, ...]:
    """The texts of the gradients: first that of the sums, if it is not the result's, from sums that are
    computed again."""
    read, value = sums
    indexed, normed = "J" in operands, any(parts.norms)
    found, g = [], "G"
    if activation or indexed or normed or len(flows) > 1:
        z, slope = Var("p", held(page.tensors["X"].dtype)), "g"
        if activation:
            derivative = OPS[activation].derivative
            assert derivative is not None, activation
            (by,) = derivative(z)
            assert by is not None, activation
            slope = f"g * ({render(by)})"
        g = "H"
        lines = [*read, f"let p = {value}"] if activation or normed else ["read j = {J}"] * indexed
        lines += [f"let a = {activation}(p)" if activation else "let a = p"] * normed
        lines += parts.slope(flows) if normed or len(flows) > 1 else ["read g = {G}"]
        slope = _of_a_sequence(slope, operands["J"][0] if indexed else None)
        found.append(Gradient(page.sized("causal_window_slope", *lines, f"store {{H}} = {slope}"), {}))
    own = ["read j = {J}", "read there = {J_t}", "let h = where(there == j, g, 0)"]
    of_x = page.sized(
        "causal_window_gradient_x",
        f"read g = {{{g}_t}}",
        "read w = {W}",
        *(own if indexed else ["let h = g"]),
        "store {dX} = sum(h*w; {k})",
    )
    read, _ = _read(operands, past)
    rest = [line for line in read if "{W}" not in line and "{B}" not in line]
    of_w = page.sized(
        "causal_window_gradient_w", f"read g = {{{g}}}", *rest, "store {dW} = sum(g*v; {n} {t})"
    )
    found += [Gradient(of_x, {"dX": "X"}), Gradient(of_w, {"dW": "W"})]
    if "B" in operands:
        text = page.sized("causal_window_gradient_b", f"read g = {{{g}}}", "store {dB} = sum(g; {n} {t})")
        found.append(Gradient(text, {"dB": "B"}))
    if "S" in operands:
        lines = [f"read g = {{{g}_s}}", "read w = {W}", "store {dS} = sum(g*w; {k})"]
        found.append(Gradient(page.sized("causal_window_gradient_s", *lines), {"dS": "S"}))
    return tuple(found)


def causal_step(
    x: Strided,
    state: Strided,
    w: Strided,
    b: Strided | None,
    lengths: Strided | None,
    rows: Strided | None,
    activation: str,
    y: Sequence[Strided],
    after: Strided,
    parts: ChannelParts,
) -> LibraryFormula:
    """The convolution of x [n, c, t] behind the last elements of ``state`` [rows, c, s], and the state
    ``after`` it, [n, c, s]. ``lengths`` [n]: the state is a ring in which element number l lies at l % s,
    and so many elements came before x. ``rows`` [n]: the row of each sample in the state."""
    past, size, steps, head = w.shape[1] - 1, state.shape[2], x.shape[2], parts.head
    x, state, after = (heads(t, 1, head) for t in (x, state, after))
    w, b = heads(w, 0, head), b and heads(b, 0, head)
    row: int | str = "row" if rows else 0
    before = f"t + k - {past}"
    at, kept = f"t + k + {size - past}" if size > past else "t + k", f"q + {steps}"
    if lengths:
        at, kept = f"wrap({before} + length, {size})", "q"
    tensors: dict[str, Placed] = {
        "X": (x, [0, 1, 2, before]),
        "S": (state, [row, 1, 2, at]),
        "W": (w, [1, 2, 4]),
    }
    called = {"S_kept": "S", "X_new": "X"}
    unrolled = _unrolled(tensors, past + 1, called) if any(parts.norms) else {}
    new = f"wrap(q - length, {size})" if lengths else f"q + {steps} - {size}"
    tensors |= parts.tensors(y, parts.names) | unrolled
    tensors |= {
        "T": (after, [0, 1, 2, 5]),
        "S_kept": (state, [row, 1, 2, kept]),
        "X_new": (x, [0, 1, 2, new]),
    }
    tensors |= {"B": (b, [1, 2])} if b else {}
    tensors |= {"L": (lengths, [0])} if lengths else {}
    tensors |= {"R": (rows, [0])} if rows else {}
    page = NamedSpace(
        ["n", "c", "e", "t", "k", "q"],
        (x.shape[0], x.shape[1], head, steps, past + 1, size),
        tensors,
        called,
        keeps="t k q",
        numbers="t k q",
    )
    each = [*map(str, range(past + 1))] if unrolled else [""]
    made = " + ".join(f"v{i}*w{i}" for i in each) if unrolled else "sum(v*w; {k})"
    made += " + b" if b else ""
    is_new = f"wrap(q - length, {size}) < {steps}" if lengths else f"q >= {size - steps}"
    text = page.text(
        f"causal_step_{activation or 'linear'}",
        "read row = {R}" if rows else "",
        "read length = {L}" if lengths else "",
        *(f"read x{i} = {{X{i}}}" for i in each),
        *(f"read {'s' if i else 's0'}{i} = {{S{i}}}" for i in each),
        *(f"read w{i} = {{W{i}}}" for i in each),
        "read b = {B}" if b else "",
        *(f"let v{i} = where(t + {i or 'k'} - {past} < 0, {'s' if i else 's0'}{i}, x{i})" for i in each),
        *parts.made(f"{activation}({made})" if activation else made, str),
        "read old = {S_kept}",
        "read new = {X_new}",
        f"store {{T}} = where({is_new}, new, old)",
    )
    given = [name for name in ("X", "S", "W", "B", "L", "R") if name in tensors]
    return LibraryFormula(page, text, tuple(given), (*parts.names, "T"))
