"""Depthwise convolutions that look only to the past, with a state: a read of either the state or the
input, chosen by a mask. Positions of another sequence are masked, too.

    v[t, k] = t + k < K - 1 ? S[t + k] : X[t + k - (K - 1)]        K width, K - 1 elements of state
    Y[t]    = activation(sum(v[t, k]*W[k]; k) + B)

Every function takes the operands and the results as ``Strided``, and returns a ``Formula``.
"""

from __future__ import annotations

from collections.abc import Mapping

from transconv.compute.elementwise import OPS
from transconv.compute.library.page import Gradient, LibraryFormula, NamedSpace, Placed, Strided, held
from transconv.compute.steps import render
from transconv.ir import Var


def causal_window(
    x: Strided,
    w: Strided,
    b: Strided | None,
    state: Strided | None,
    index: Strided | None,
    activation: str,
    y: Strided,
) -> LibraryFormula:
    """The convolution of x [n, c, t] with w [c, k], a bias b [c], the elements ``state`` [n, c, k - 1]
    before x, and ``index`` [n, t], the number of the sequence of each position: a position reads those of
    its own, and is 0 where its number is negative."""
    width, past = w.shape[1], w.shape[1] - 1
    operands: dict[str, Placed] = {"X": (x, [0, 1, f"t + k - {past}"]), "W": (w, [1, 3])}
    operands |= {"B": (b, [1])} if b else {}
    operands |= {"S": (state, [0, 1, "t + k"])} if state else {}
    operands |= {"J": (index, [0, 2]), "J_k": (index, [0, f"t + k - {past}"])} if index else {}
    flow = Strided.dense(y.shape, y.dtype)
    behind: dict[str, Placed] = {
        "Y": (y, [0, 1, 2]),
        "dX": (x.like(), [0, 1, 2]),
        "dW": (w.like(), [1, 3]),
    }
    called = {"J_k": "J", "J_t": "J"}
    for name, t in (("G", y), ("H", flow)):
        behind |= {name: (t, [0, 1, 2]), f"{name}_t": (t, [0, 1, f"t + {past} - k"])}
        behind[f"{name}_s"] = (t, [0, 1, "q - k"])
        called |= {f"{name}_t": name, f"{name}_s": name}
    behind |= {"dB": (b.like(), [1])} if b else {}
    behind |= {"dS": (state.like(), [0, 1, 4])} if state else {}
    behind |= {"J_t": (index, [0, f"t + {past} - k"])} if index else {}
    page = NamedSpace(
        ["n", "c", "t", "k", "q"],
        (*x.shape, width, max(1, past)),
        operands | behind,
        called,
        keeps="t k q",
        numbers="k q",
    )
    read, value = _read(operands, past)
    made = f"{activation}(p)" if activation else "p"
    text = page.sized(
        f"causal_window_{activation or 'linear'}",
        *read,
        f"let p = {value}",
        f"store {{Y}} = {_of_a_sequence(made, index)}",
    )
    gradients = _gradients(page, operands, past, activation)
    given = tuple(name for name in ("X", "W", "B", "S", "J") if name in operands)
    return LibraryFormula(page, text, given, gradients=gradients)


def _read(operands: Mapping[str, Placed], past: int) -> tuple[list[str], str]:
    """The lines that read the operands, ``v`` the last of them, and the sum."""
    names = {"J_k": "there"}
    found = [f"read {names.get(name, name.lower())} = {{{name}}}" for name in operands]
    value = "where(there == j, x, 0)" if "J" in operands else "x"
    value = f"where(t + k < {past}, s, {value})" if "S" in operands else value
    return [*found, f"let v = {value}"], f"sum(v*w; {{k}}){' + b' * ('B' in operands)}"


def _of_a_sequence(value: str, index: Strided | None) -> str:
    return f"where(j < 0, 0, {value})" if index else value


def _gradients(
    page: NamedSpace, operands: Mapping[str, Placed], past: int, activation: str
) -> tuple[Gradient, ...]:
    """The texts of the gradients: first that of the sums, if it is not the result's, from sums that are
    computed again."""
    read, value = _read(operands, past)
    indexed = "J" in operands
    found, g = [], "G"
    if activation or indexed:
        z, slope = Var("p", held(page.tensors["X"].dtype)), "g"
        if activation:
            derivative = OPS[activation].derivative
            assert derivative is not None, activation
            (by,) = derivative(z)
            assert by is not None, activation
            slope = f"g * ({render(by)})"
        g = "H"
        lines = [*read, f"let p = {value}"] if activation else ["read j = {J}"]
        slope = _of_a_sequence(slope, operands["J"][0] if indexed else None)
        found.append(
            Gradient(
                page.sized("causal_window_slope", *lines, "read g = {G}", f"store {{H}} = {slope}"), {}
            )
        )
    own = ["read j = {J}", "read there = {J_t}", "let h = where(there == j, g, 0)"]
    of_x = page.sized(
        "causal_window_gradient_x",
        f"read g = {{{g}_t}}",
        "read w = {W}",
        *(own if indexed else ["let h = g"]),
        "store {dX} = sum(h*w; {k})",
    )
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
    y: Strided,
    after: Strided,
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
    tensors: dict[str, Placed] = {
        "X": (x, [0, 1, before]),
        "S": (state, [row, 1, at]),
        "W": (w, [1, 3]),
        "Y": (y, [0, 1, 2]),
        "T": (after, [0, 1, 4]),
        "S_kept": (state, [row, 1, kept]),
        "X_new": (x, [0, 1, f"wrap(q - length, {size})" if lengths else f"q + {steps} - {size}"]),
    }
    tensors |= {"B": (b, [1])} if b else {}
    tensors |= {"L": (lengths, [0])} if lengths else {}
    tensors |= {"R": (rows, [0])} if rows else {}
    page = NamedSpace(
        ["n", "c", "t", "k", "q"],
        (*x.shape, w.shape[1], size),
        tensors,
        {"S_kept": "S", "X_new": "X"},
        keeps="t k q",
        numbers="t k q",
    )
    made = f"sum(v*w; {{k}}){' + b' if b else ''}"
    is_new = f"wrap(q - length, {size}) < {steps}" if lengths else f"q >= {size - steps}"
    text = page.text(
        f"causal_step_{activation or 'linear'}",
        "read row = {R}" if rows else "",
        "read length = {L}" if lengths else "",
        "read x = {X}",
        "read s0 = {S}",
        "read w = {W}",
        "read b = {B}" if b else "",
        f"let v = where({before} < 0, s0, x)",
        f"store {{Y}} = {f'{activation}({made})' if activation else made}",
        "read old = {S_kept}",
        "read new = {X_new}",
        f"store {{T}} = where({is_new}, new, old)",
    )
    given = [name for name in ("X", "S", "W", "B", "L", "R") if name in tensors]
    return LibraryFormula(page, text, tuple(given), ("Y", "T"))
