"""Depthwise convolutions that look only to the past, with a state: a read of either the state or the
input, chosen by a mask. Positions of another sequence are masked, too.

    v[t, k] = t + k < K - 1 ? S[t + k] : X[t + k - (K - 1)]        K width, K - 1 elements of state
    Y[t]    = activation(sum(v[t, k]*W[k]; k) + B)

The result may be several tensors of some features each: every store has a mask, and every gradient is 0
outside of its own. Heads may be divided by their norm; then the sum over k is written out (``x0``, ``x1``,
...), so that the norm is the one reduction:

    store Y[n, c-0, e, t] = a * l2          let l2 = rsqrt(sum(a*a; e) + eps), of e features of a head c
    store Y1[n, c-8, e, t] = a

Every function takes the operands and the results as ``Strided``, and returns a ``Formula``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transconv.compute.elementwise import OPS
from transconv.compute.library.page import Gradient, LibraryFormula, NamedSpace, Placed, Strided, held
from transconv.compute.steps import render
from transconv.ir import Var


@dataclass(frozen=True, slots=True)
class FeatureParts:
    """What becomes of sums: an ``activation``, then parts of ``counts`` features each, whose heads of
    ``head`` features are divided by ``norms``: ``l2``, the root of the sum of squares and ``eps``,
    ``rms``, of their mean; empty: by none. Each is a multiple of a head."""

    activation: str
    counts: tuple[int, ...]
    norms: tuple[str, ...]
    head: int
    eps: float

    @staticmethod
    def numbers(dim: int, split: Any, norm: Any, head: int, eps: float) -> tuple[Any, ...]:
        """The parts of a result of ``dim`` features as hashable numbers of a call. ValueError."""
        counts = () if split is None else tuple(split)
        norms = (norm,) * max(1, len(counts)) if norm is None or isinstance(norm, str) else tuple(norm)
        if len(norms) != max(1, len(counts)) or not {*norms} <= {None, "l2", "rms"}:
            raise ValueError(f"norm={norm!r}; expected 'l2', 'rms' or None, one for all parts or for each")
        if split is not None and (sum(counts) != dim or any(type(n) is not int or n < 1 for n in counts)):
            raise ValueError(f"split={split}; expected numbers of features that add up to {dim}")
        head = head if any(norms) else 1
        if type(head) is not int or head < 1 or any(n % head for n in counts or (dim,)):
            raise ValueError(f"head={head}; expected a number that divides {counts or dim} features")
        return counts, ",".join(n or "" for n in norms), head, float(eps)

    @classmethod
    def of(cls, x: Strided, numbers: tuple[Any, ...]) -> FeatureParts:
        """Of x, by an activation and ``numbers``."""
        activation, counts, norms, *head = numbers
        return cls(activation, counts or x.shape[1:2], tuple(norms.split(",")), *head)

    @property
    def normed(self) -> bool:
        """Whether a head is divided by its norm."""
        return any(self.norms)

    @property
    def places(self) -> list[str]:
        """The coordinate of the first dim of features of each part."""
        before = [sum(self.counts[:i]) // self.head for i in range(len(self.counts))]
        return [f"c-{n}" for n in before] if len(before) > 1 else ["c"]

    def names(self, name: str) -> tuple[str, ...]:
        """Those of the parts of a tensor: Y, Y1, Y2."""
        return tuple(f"{name}{i or ''}" for i in range(len(self.counts)))

    def page(
        self,
        sizes: Sequence[int],
        tensors: Mapping[str, Placed],
        parts: Mapping[str, Sequence[Strided]],
        called: Mapping[str, str],
        numbers: str,
    ) -> NamedSpace:
        """The page of tensors in the space of n, c, t, k and q, and of the ``parts`` of others. Features
        of a head are its last dim. Operands that move with k are there at each k, too."""
        n, c, *inner = sizes
        placed, called = {**tensors}, {**called}
        for name, each in parts.items():
            for own, t, at in zip(self.names(name), each, self.places, strict=True):
                placed[own] = t, [0, 1 if at == "c" else at, 2]
        for name, (t, dims) in tensors.items() if self.normed else ():
            for k in [f"{k}" for k in range(inner[1] if name in MOVING else 0)]:
                moved = [k if d == 3 else d.replace("k", k) if isinstance(d, str) else d for d in dims]
                placed[name + k], called[name + k] = (t, moved), called.get(name, name)
        for name, (t, dims) in placed.items() if self.head > 1 else ():
            for i in [i for i, d in enumerate(dims) if d in (1, *self.places)]:
                t = t.split(i, t.shape[i] // self.head, self.head)
                placed[name] = t, [*dims[: i + 1], 5, *dims[i + 1 :]]
        if self.normed or len(self.counts) > 1:  # offsets of parts are numbers
            numbers = f"{numbers} c e {' '.join((*self.places, *map(str, range(inner[1]))))}"
        space = (n, c // self.head, *inner, self.head)
        return NamedSpace(["n", "c", "t", "k", "q", "e"], space, placed, called, "t k q", numbers)

    def stored(self, value: str, index: Strided | None = None) -> list[str]:
        """The lines that store the parts of a value."""
        made = f"{self.activation}({value})" if self.activation else value
        own = [f"a * {norm}" if norm else "a" if self.normed else made for norm in self.norms]
        pairs = zip(self.names("Y"), own, strict=True)
        stores = [f"store {{{name}}} = {_of_a_sequence(of, index)}" for name, of in pairs]
        return [f"let a = {made}", *self.factors(), *stores] if self.normed else stores

    def factors(self) -> list[str]:
        """The lines of what norms multiply ``a`` by."""
        used = [norm for norm in ("l2", "rms") if norm in self.norms]
        return [f"let {norm} = rsqrt(sum(a*a; {{e}}){self.divided(norm)} + {self.eps})" for norm in used]

    def divided(self, norm: str) -> str:
        """What makes a mean of a sum, where the norm is of a mean."""
        return f" / {float(self.head)}" * (norm == "rms")

    def flow(self) -> list[str]:
        """The lines of the gradient ``g`` of the activation's result from those of the parts."""
        if len(self.counts) == 1 and not self.normed:
            return ["read g = {G}"]
        lines = [f"read g{i} = {{{name}}}" for i, name in enumerate(self.names("G"))] + self.factors()
        terms = list[str]()
        for norm in dict.fromkeys(self.norms):
            own = " + ".join(f"g{i}" for i, of in enumerate(self.norms) if of == norm)
            terms.append(own)
            if norm:
                lines += [f"let u_{norm} = {own}", f"let s_{norm} = sum(u_{norm}*a; {{e}})"]
                terms[-1] = f"(u_{norm} - a*{norm}*{norm}*s_{norm}{self.divided(norm)})*{norm}"
        return [*lines, f"let g = {' + '.join(terms)}"]


def causal_window(
    x: Strided,
    w: Strided,
    b: Strided | None,
    state: Strided | None,
    index: Strided | None,
    y: Sequence[Strided],
    parts: FeatureParts,
) -> LibraryFormula:
    """The convolution of x [n, c, t] with w [c, k], a bias b [c], the elements ``state`` [n, c, k - 1]
    before x, and ``index`` [n, t], the number of the sequence of each position: a position reads those of
    its own, and is 0 where its number is negative."""
    width, past = w.shape[1], w.shape[1] - 1
    operands: dict[str, Placed] = {"X": (x, [0, 1, f"t + k - {past}"]), "W": (w, [1, 3])}
    operands |= {"B": (b, [1])} if b else {}
    operands |= {"S": (state, [0, 1, "t + k"])} if state else {}
    operands |= {"J": (index, [0, 2]), "J_k": (index, [0, f"t + k - {past}"])} if index else {}
    flow = Strided.dense(x.shape, y[0].dtype)
    behind: dict[str, Placed] = {"dX": (x.like(), [0, 1, 2]), "dW": (w.like(), [1, 3])}
    called = {"J_k": "J", "J_t": "J"}
    for name, t in (("G", y[0]), ("H", flow))[len(y) > 1 :]:
        behind |= {name: (t, [0, 1, 2]), f"{name}_t": (t, [0, 1, f"t + {past} - k"])}
        behind[f"{name}_s"] = (t, [0, 1, "q - k"])
        called |= {f"{name}_t": name, f"{name}_s": name}
    behind |= {"dB": (b.like(), [1])} if b else {}
    behind |= {"dS": (state.like(), [0, 1, 4])} if state else {}
    behind |= {"J_t": (index, [0, f"t + {past} - k"])} if index else {}
    sizes = *x.shape, width, max(1, past)
    page = parts.page(sizes, operands | behind, {"Y": y, "G": y}, called, "k q")
    read, value = _read(operands, past, parts)
    name = f"causal_window_{parts.activation or 'linear'}"
    text = page.sized(name, *read, f"let p = {value}", *parts.stored("p", index))
    gradients = _gradients(page, operands, past, parts)
    given = tuple(name for name in ("X", "W", "B", "S", "J") if name in operands)
    return LibraryFormula(page, text, given, parts.names("Y"), gradients, flows=parts.names("G"))


MOVING = {"X", "W", "S", "J_k"}  # operands of which each k reads others


def _read(
    operands: Mapping[str, Placed], past: int, parts: FeatureParts | None = None
) -> tuple[list[str], str]:
    """The lines that read the operands, ``v`` the last of them, and the sum, which is written out where
    norms follow."""
    written = parts is not None and parts.normed
    each = [f"{k}" for k in range(past + 1)] if written else [""]
    called, found, values = {"J_k": "there"}, list[str](), list[str]()
    for name in operands:
        own = called.get(name, name.lower())
        found += [f"read {own}{i} = {{{name}{i}}}" for i in (each if name in MOVING else [""])]
    for i in each:
        value = f"where(there{i} == j, x{i}, 0)" if "J" in operands else f"x{i}"
        value = f"where(t + {i or 'k'} < {past}, s{i}, {value})" if "S" in operands else value
        values.append(f"let v{i} = {value}")
    total = " + ".join(f"v{i}*w{i}" for i in each) if written else "sum(v*w; {k})"
    return [*found, *values], f"{total}{' + b' * ('B' in operands)}"


def _of_a_sequence(value: str, index: Strided | None) -> str:
    return f"where(j < 0, 0, {value})" if index else value


def _gradients(
    page: NamedSpace, operands: Mapping[str, Placed], past: int, parts: FeatureParts
) -> tuple[Gradient, ...]:
    """The texts of the gradients: first that of the sums, if it is not the result's, from sums that are
    computed again."""
    read, value = _read(operands, past, parts)
    indexed, activation = "J" in operands, parts.activation
    found, g = [], "G"
    if activation or indexed or parts.normed or len(parts.counts) > 1:
        z, slope = Var("p", held(page.tensors["X"].dtype)), "g"
        if activation:
            derivative = OPS[activation].derivative
            assert derivative is not None, activation
            (by,) = derivative(z)
            assert by is not None, activation
            slope = f"g * ({render(by)})"
        g = "H"
        lines = ["read j = {J}"] * indexed
        if activation or parts.normed:
            lines = [*read, f"let p = {value}"]
        if parts.normed:
            lines.append(f"let a = {activation}(p)" if activation else "let a = p")
        lines += parts.flow()
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
    rest = [line for line in _read(operands, past)[0] if "{W}" not in line and "{B}" not in line]
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
    y: Sequence[Strided],
    after: Strided,
    parts: FeatureParts,
) -> LibraryFormula:
    """The convolution of x [n, c, t] behind the last elements of ``state`` [rows, c, s], and the state
    ``after`` it, [n, c, s]. ``lengths`` [n]: the state is a ring in which element number l lies at l % s,
    and so many elements came before x. ``rows`` [n]: the row of each sample in the state."""
    past, size, steps = w.shape[1] - 1, state.shape[2], x.shape[2]
    row: int | str = "row" if rows else 0
    before = f"t + k - {past}"
    at, kept = f"t + k + {size - past}" if size > past else "t + k", f"q + {steps}"
    if lengths:
        at, kept = f"wrap({before} + length, {size})", "q"
    operands: dict[str, Placed] = {"X": (x, [0, 1, before]), "S": (state, [row, 1, at]), "W": (w, [1, 3])}
    operands |= {"B": (b, [1])} if b else {}
    tensors = operands | {
        "T": (after, [0, 1, 4]),
        "S_kept": (state, [row, 1, kept]),
        "X_new": (x, [0, 1, f"wrap(q - length, {size})" if lengths else f"q + {steps} - {size}"]),
    }
    tensors |= {"L": (lengths, [0])} if lengths else {}
    tensors |= {"R": (rows, [0])} if rows else {}
    called = {"S_kept": "S", "X_new": "X"}
    page = parts.page((*x.shape, past + 1, size), tensors, {"Y": y}, called, "t k q")
    read, value = _read(operands, past, parts)
    is_new = f"wrap(q - length, {size}) < {steps}" if lengths else f"q >= {size - steps}"
    text = page.text(
        f"causal_step_{parts.activation or 'linear'}",
        "read row = {R}" if rows else "",
        "read length = {L}" if lengths else "",
        *read,
        *parts.stored(value),
        "read old = {S_kept}",
        "read new = {X_new}",
        f"store {{T}} = where({is_new}, new, old)",
    )
    given = [name for name in ("X", "S", "W", "B", "L", "R") if name in tensors]
    return LibraryFormula(page, text, tuple(given), (*parts.names("Y"), "T"))
