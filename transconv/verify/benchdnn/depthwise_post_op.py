"""benchdnn's post-op ``dw``: a depthwise convolution behind a convolution, in one primitive.

    dw:k3s1p1[:TYPE]     older: dw_k3s1p1

oneDNN fuses the two, and may refuse to. Here they are two problems, checked one after the other: the
second reads what the first stores, in the type of its result, and has ``TYPE`` itself (default: the same).
Words before ``dw`` belong to the first, those behind it to the second, and scales to the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from transconv.conv import Descriptor, parse_descriptor, print_descriptor, split
from transconv.errors import ProblemError
from transconv.verify.benchdnn.requests import BenchdnnRequest

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
