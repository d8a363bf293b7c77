"""Translates benchdnn's attribute options to an epilogue, or says why there is none.

    post-ops := PO { "+" PO }
    PO       := sum[:SCALE[:ZERO[:DT]]] | FUNCTION[:ALPHA[:BETA[:SCALE]]] | OP:DT[:MASK[:TAG]] | ...
"""

from __future__ import annotations

from transconv.compute import ACTIVATIONS, OPS
from transconv.ir import multiplied

UNIMPLEMENTED, INVALID = "UNIMPLEMENTED", "INVALID_ARGUMENTS"


class Refused(Exception):
    """A request that is not carried out: its status word, and the reason for people."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason



def functions(name: str) -> list[tuple[str, float, float]]:
    """What benchdnn's function of this name is here: our word for it, with its alpha and beta."""
    found = [(op.name, alpha, beta) for op in OPS.values() if op.activation
             for theirs, alpha, beta in op.onednn if theirs == name]
    return [("", 1, 0)] if name == "linear" else found


OTHER_FUNCTIONS = ("abs", "elu", "exp", "hardsigmoid", "log", "mish", "pow", "round", "soft_relu",
                   "sqrt", "square", "clip_v2_dst", "elu_dst", "exp_dst", "logistic_dst",
                   "relu_dst", "sqrt_dst", "tanh_dst")
BINARY = ("add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "sub")
OTHERS = ("dw", "prelu", "select")
NEAR = 1e-4  # what 1/6 is written as differs between files


def post_ops(text: str, result: str, ndims: int, tag: str) -> tuple[list[str], str]:
    """The words of an epilogue, and the bias's element type if there is one among them. ``result``
    is the type of what is stored, ``ndims`` counts its dimensions, ``tag`` is its layout. Raises
    Refused."""
    words: list[str] = []
    bia = ""
    for part in filter(None, text.split("+")):
        name, *arguments = part.split(":")
        if name == "sum":
            words.append(_sum(part, arguments, result))
        elif functions(name):
            words += filter(None, [_function(part, name, arguments)])
        elif name in BINARY:
            word, dtype = _binary(part, name, arguments, result, ndims, tag)
            words.append(word)
            bia = dtype if word == "bias" else bia
        elif name in (*OTHER_FUNCTIONS, *OTHERS) or name.startswith("dw_k"):
            raise Refused(UNIMPLEMENTED, f"post-op {name}: epilogues have "
                          f"{', '.join(ACTIVATIONS)}, a bias and a residual")
        else:
            raise Refused(INVALID, f"post-op '{part}' is unknown")
    return words, bia


def _numbers(part: str, words: list[str], defaults: tuple[float, ...]) -> list[float]:
    try:
        given = [float(w) if w else d for w, d in zip(words, defaults, strict=False)]
    except ValueError:
        raise Refused(INVALID, f"post-op '{part}' has an argument that is no number") from None
    return given + list(defaults[len(given):])


def _sum(part: str, arguments: list[str], result: str) -> str:
    scale, zero = _numbers(part, arguments[:2], (1, 0))
    dtype = arguments[2] if len(arguments) > 2 else ""
    if scale != 1 or zero != 0:
        raise Refused(UNIMPLEMENTED, "post-op sum with a scale or a zero point: a residual is "
                      "added as it is")
    if dtype not in ("", result):
        raise Refused(UNIMPLEMENTED, f"post-op sum of {dtype} to {result}: a residual is of the "
                      "result's type")
    return "res"


def _function(part: str, name: str, arguments: list[str]) -> str:
    alpha, beta, scale = _numbers(part, arguments, (0, 0, 1))
    for ours, a, b in functions(name):
        if abs(alpha - a) < NEAR and abs(beta - b) < NEAR and scale == 1:
            return ours
    wanted = " or ".join(f"{name}:{a:.4g}:{b:.4g}" for _, a, b in functions(name))
    raise Refused(UNIMPLEMENTED, f"post-op {name} with alpha {alpha:g}, beta {beta:g}, scale "
                  f"{scale:g}: epilogues have {wanted}")


def _binary(part: str, name: str, arguments: list[str], result: str, ndims: int,
            tag: str) -> tuple[str, str]:
    """``bias`` for one value per channel, ``res`` for a tensor like the result."""
    if not arguments:
        raise Refused(INVALID, f"post-op '{part}' has no type; expected {name}:DT")
    if name != "add":
        raise Refused(UNIMPLEMENTED, f"post-op {name}: of tensors, epilogues only add")
    dtype, mask, layout = (*arguments, "", "")[:3]
    masks = {"": 0, "common": 0, "per_oc": 2, "per_dim_1": 2, "per_tensor": 2**ndims - 1}
    if mask not in masks and not mask.isdecimal():
        raise Refused(INVALID, f"post-op '{part}' has the mask '{mask}', which is unknown")
    bits = masks[mask] if mask in masks else int(mask)
    if bits == 2 and dtype in (t.name for t in multiplied("float")):
        return "bias", dtype
    if bits == 2**ndims - 1 and dtype == result and layout in ("", "any", tag):
        return "res", ""
    raise Refused(UNIMPLEMENTED, "post-op add: epilogues add one value per channel, or a tensor "
                  f"of the result's type ({result}) and layout")


# Attributes that have one value here; any other word is a reason.
FIXED = {
    "attr-scales": (("",), "scales of tensors: nothing here is quantised"),
    "attr-zero-points": (("",), "zero points: nothing here is quantised"),
    "attr-acc-mode": (("strict", "relaxed", "any", "f32"), "sums are kept in f32, or in f64 for f64"),
    "attr-rounding-mode": (("", "dst:environment"), "results are rounded to the nearest"),
    "attr-dropout": (("",), "dropout: no epilogue draws random numbers"),
    "alg": (("DIRECT", "AUTO", "direct", "auto"), "Winograd: products are summed directly"),
}


def fixed(option: str, value: str) -> None:
    """Raises Refused for a value that no kernel can obey."""
    legal, reason = FIXED[option]
    if value not in legal:
        raise Refused(UNIMPLEMENTED, f"{reason} (--{option})")


def math_of(fpmath: str, dtype: str) -> str:
    """How f32 is multiplied: ``tf32`` or ``ieee``. Raises Refused."""
    mode, _, integers = fpmath.partition(":")
    if mode not in ("strict", "tf32", "any", "f16", "bf16") or integers not in ("", "true", "false"):
        raise Refused(INVALID, f"--attr-fpmath={fpmath} is unknown; expected strict, tf32, any, "
                      "bf16 or f16")
    if mode in ("f16", "bf16") and dtype == "f32":
        raise Refused(UNIMPLEMENTED, f"f32 multiplied as {mode}: ieee and tf32 are there "
                      "(--attr-fpmath)")
    return "ieee" if mode in ("strict", "f16", "bf16") else "tf32"
