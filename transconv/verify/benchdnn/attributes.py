"""Translates benchdnn's attribute options to an epilogue, or says why there is none.

    post-ops := PO { "+" PO }
    PO       := sum[:SCALE[:ZERO[:DT]]] | FUNCTION[:ALPHA[:BETA[:SCALE]]] | OP:DT[:MASK[:TAG]] | ...
    scales   := ARG:MASK[:SCALE][:DT] { "+" ... }

Also here: benchdnn's post-op ``dw``: a depthwise convolution behind a convolution, in one primitive.

    dw:k3s1p1[:TYPE]     older: dw_k3s1p1

oneDNN fuses the two, and may refuse to. Here they are two problems, checked one after the other: the
second reads what the first stores, in the type of its result, and has ``TYPE`` itself (default: the same).
Words before ``dw`` belong to the first, those behind it to the second, and scales to the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from transconv.conv import (
    MOST_OPERATIONS,
    Descriptor,
    known,
    parse_descriptor,
    post_op,
    print_descriptor,
    split,
)
from transconv.errors import ProblemError, ScheduleError
from transconv.verify.benchdnn.requests import BenchdnnRequest

UNIMPLEMENTED, INVALID = "UNIMPLEMENTED", "INVALID_ARGUMENTS"


class RefusedRequest(Exception):
    """A request that is not carried out: its status word, and the reason for people."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason



def post_ops(text: str, ndims: int) -> list[str]:
    """The words of an epilogue, which are benchdnn's own; ``ndims`` counts the result's dimensions. Raises
    Refused, for the post-op that is to blame."""
    words = [re.sub("^(eltwise|binary)_", "", word) for word in split(text)]  # older files have these
    for word in words:
        name, *arguments = word.split(":")
        if name == "dw" or name.startswith("dw_k"):
            raise RefusedRequest(INVALID, f"post-op {word}: expected one dw:k3s1p1[:TYPE] of a forward "
                          "convolution, with a window that fits its result")
        if given := [w for a in arguments for w in a.split(".") if w in OTHERS]:
            raise RefusedRequest(UNIMPLEMENTED, f"post-op {word}: no tensor has the type {given[0]}")
        try:
            found = post_op(word)
        except ScheduleError as error:
            raise RefusedRequest(INVALID, str(error)) from error
        if found is None:
            raise RefusedRequest(
                INVALID, f"post-op '{word}' is unknown; expected one of {', '.join(known())}"
            )
        if any(o.mask >= 1 << ndims for o in found.operands):
            raise RefusedRequest(
                INVALID, f"post-op '{word}' has a mask for more than the {ndims} dimensions of the result"
            )
    if len(words) > MOST_OPERATIONS:
        raise RefusedRequest(INVALID, f"{len(words)} post-ops; expected at most {MOST_OPERATIONS}")
    return words


OTHERS = ("e8m0", "f4_e2m1", "f4_e3m0", "s4", "u4")


# -- scales ----------------------------------------------------------------------------------------


def scales(text: str, grouped: bool, forward: bool) -> tuple[list[str], list[str]]:
    """The words before the bias, and those behind all post-ops: ``ARG:MASK[:SCALE][:TYPE[:GROUPS]]``,
    joined by ``+``. Sums are multiplied by the scales of src and wei, and divided by that of dst. Raises
    Refused."""
    ahead: list[str] = []
    behind: list[str] = []
    for part in filter(None, text.split("+")):
        argument, *words = part.split(":")
        if argument not in ("src", "wei", "dst"):
            raise RefusedRequest(INVALID, f"--attr-scales={part}: scales are of src, wei and dst")
        mask, *rest = words or ["common"]
        along = _scaled_along(part, argument, mask, grouped)
        if along and argument == "wei" and not forward:
            raise RefusedRequest(
                UNIMPLEMENTED,
                f"--attr-scales={part}: the channels of these scales are summed, "
                "so that no factor of a sum says them",
            )
        number, kind = _scale(part, rest)
        word = f":{kind}:per_oc" if along else f":{number}"
        if argument == "dst":
            behind.append(f"div{word}")
        else:
            ahead.append(f"mul{word}")
    return ahead, behind


def _scaled_along(part: str, argument: str, mask: str, grouped: bool) -> bool:
    """Whether there is a scale for each channel; else there is one."""
    legal = {"src": (), "wei": ("per_oc", "3" if grouped else "1"), "dst": ("per_oc", "per_dim_1", "2")}
    if mask in ("", "common", "0", "host_scalar"):
        return False
    if mask in legal[argument]:
        return True
    known = " ".join(("common", *legal[argument]))
    raise RefusedRequest(UNIMPLEMENTED, f"--attr-scales={part}: oneDNN's convolutions have no scales of "
                  f"{argument} with the mask {mask}; expected one of {known}")


def _scale(part: str, words: list[str]) -> tuple[float, str]:
    """The number (1 if it is left out), and the type of many."""
    number, kind = 1.0, "f32"
    for word in filter(None, words):
        try:
            number = float(word)
            continue
        except ValueError:
            pass
        if word not in ("f32", "f16", "bf16"):
            raise RefusedRequest(UNIMPLEMENTED if "x" in word or word in OTHERS else INVALID,
                          f"--attr-scales={part}: '{word}'; expected a number, and f32, f16 or bf16: "
                          "groups of scales and other types are for oneDNN's matrix products")
        kind = word
    if not number > 0 or number == float("inf"):
        raise RefusedRequest(INVALID, f"--attr-scales={part}: expected a scale that is greater than 0")
    return number, kind


# -- zero points -----------------------------------------------------------------------------------

CHANNELS = ("per_oc", "per_ic", "per_dim_1", "2")


def zero_points(text: str, forward: bool) -> tuple[list[str], list[str]]:
    """The words before everything else, and those behind it: ``ARG:MASK[:ZERO][:TYPE]``, joined by ``+``.
    The zero points of operands are drawn; that of the result, src where not ``forward``, is added last.
    Raises Refused."""
    ahead: list[str] = []
    behind: list[str] = []
    result, along_data = ("dst", "per_ic") if forward else ("src", "per_oc")
    for part in filter(None, text.split("+")):
        argument, *words = part.split(":")
        mask, *rest = words or ["common"]
        along = mask in CHANNELS
        if argument not in ("src", "wei", "dst"):
            raise RefusedRequest(
                INVALID, f"--attr-zero-points={part}: zero points are of src, wei and dst"
            )
        if not along and mask not in ("", "common", "0", "host_scalar") or along and argument == "wei":
            raise RefusedRequest(
                UNIMPLEMENTED,
                f"--attr-zero-points={part}: oneDNN's convolutions have no zero "
                f"points of {argument} with the mask {mask}",
            )
        if any("x" in word for word in rest):
            raise RefusedRequest(
                UNIMPLEMENTED,
                f"--attr-zero-points={part}: groups of zero points are for oneDNN's matrix products",
            )
        numbers = [word for word in rest if word.lstrip("-").isdecimal()]
        if argument != result:
            ahead.append(f"zero:{argument}{f':{along_data}' if along else ''}")
        elif along or not numbers:
            behind.append(f"add:s32:{'per_oc' if along else 'common'}")
        else:
            behind.append(f"add:{numbers[0]}")
    return ahead, behind


# -- other attributes ------------------------------------------------------------------------------

# Attributes that have one value here; any other word is a reason.
FIXED = {
    "attr-acc-mode": (("", "strict", "relaxed", "any", "f32", "f16", "s32"), "accumulators of that type"),
    "attr-dropout": (("",), "dropout: its mask is a second result, and an epilogue has one"),
    "alg": (("DIRECT", "AUTO", "direct", "auto"), "Winograd: products are summed directly"),
}


ROUNDED = {"dst": "dst", "diff_src": "src", "diff_weights": "wei", "src": "src", "wei": "wei"}
"""The names of results in ``--attr-rounding-mode``."""


def rounding(text: str, result: str) -> list[str]:
    """The last word, of ``ARG:MODE`` joined by ``+``: ``environment`` is to nearest, ``stochastic`` up or
    down at random. Raises Refused."""
    words: list[str] = []
    for part in filter(None, text.split("+")):
        argument, _, mode = part.partition(":")
        if argument not in ROUNDED or mode not in ("environment", "stochastic"):
            raise RefusedRequest(INVALID, f"--attr-rounding-mode={part} is unknown; expected one of "
                          f"{' '.join(ROUNDED)}, and environment or stochastic")
        if mode == "stochastic" and ROUNDED[argument] != result:
            raise RefusedRequest(
                INVALID, f"--attr-rounding-mode={part}: this direction rounds {result} alone"
            )
        words += ["stochastic"] * (mode == "stochastic")
    return words[:1]


def fixed(option: str, value: str) -> None:
    """Raises Refused for a value that no kernel can obey."""
    legal, reason = FIXED[option]
    if value not in legal:
        raise RefusedRequest(UNIMPLEMENTED, f"{reason} (--{option})")


def math_of(fpmath: str) -> str:
    """How f32 is multiplied: ``tf32`` or ``ieee``. Raises Refused."""
    mode, _, integers = fpmath.partition(":")
    if mode not in ("strict", "tf32", "any", "f16", "bf16") or integers not in ("", "true", "false"):
        raise RefusedRequest(INVALID, f"--attr-fpmath={fpmath} is unknown; expected strict, tf32, any, "
                      "bf16 or f16")
    # A mode is a permission: tf32 has at least the digits and the range of both 16-bit types.
    return "ieee" if mode == "strict" else "tf32"


_WORD = re.compile(r"dw[_:]k(\d+)s(\d+)p(\d+)(?::(\w+))?")
BETWEEN = {"stag": "dtag", "strides": "", "attr-scales": "", "attr-zero-points": ""}


def apart(request: BenchdnnRequest) -> Iterator[BenchdnnRequest]:
    """The request, or the two that stand for one with a ``dw``. One that cannot be read stays as it is, to
    be refused with the others."""
    words = split(request["attr-post-ops"])
    found = [(i, m) for i, w in enumerate(words) if (m := _WORD.fullmatch(w))]
    types = request["dt"].split(":") if not request["cfg"] else []
    if len(found) != 1 or len(types) not in (1, 3) or not request["dir"].startswith("FWD"):
        yield request
        return
    (at, match), = found
    k, stride, pad = (int(n) for n in match.groups()[:3])
    try:
        first = parse_descriptor(request.descriptor)
    except ProblemError:
        yield request
        return
    if not k or not stride or any(o + 2 * pad < k for o in first.o):
        yield request
        return
    types = types * 3 if len(types) == 1 else types
    yield _with(request, request.descriptor, {"attr-post-ops": "+".join(words[:at])})
    n = len(first.o)
    second = Descriptor(first.mb, first.oc, first.oc, first.oc, first.o,
                        tuple((o + 2 * pad - k) // stride + 1 for o in first.o), (k,) * n, (stride,) * n,
                        (1,) * n, (pad,) * n, grouped=True)
    options = dict(request.options)
    yield _with(request, print_descriptor(second), {
        "dt": ":".join((types[2], types[1], match[4] or types[2])), "wtag": "any",
        "attr-post-ops": "+".join(words[at + 1:]),
        **{name: options.get(of, "") for name, of in BETWEEN.items()}})


def _with(request: BenchdnnRequest, descriptor: str, given: dict[str, str]) -> BenchdnnRequest:
    options = dict(request.options) | given
    return replace(request, descriptor=descriptor, options=tuple(options.items()))
