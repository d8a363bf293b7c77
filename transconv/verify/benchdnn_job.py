"""Jobs of benchdnn: a request in its syntax as a job for a worker, or a refusal.

A job is text and numbers, so that it can travel to another process. What benchdnn can ask for and
no kernel here can do is refused with a reason; nothing is left out in silence. Attributes become an
epilogue:

    post-ops := PO { "+" PO }
    PO       := sum[:SCALE[:ZERO[:DT]]] | FUNCTION[:ALPHA[:BETA[:SCALE]]] | OP:DT[:MASK[:TAG]] | ...
    scales   := ARG:MASK[:SCALE][:DT] { "+" ... }

The post-op ``dw:k3s1p1[:TYPE]`` (older: ``dw_k3s1p1``) is a depthwise convolution after a convolution, in
one primitive. oneDNN fuses the two, and may refuse to. Here they are two problems, checked one after the
other: the second reads what the first stores, in the type of its result, and has ``TYPE`` itself (default:
the same). Words before ``dw`` belong to the first, those behind it to the second, and scales to the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from transconv.conv import (
    MOST_OPERATIONS,
    ConvProblem,
    ConvWorkload,
    Descriptor,
    Epilogue,
    Prop,
    TensorSpec,
    known,
    parse_descriptor,
    post_op,
    print_descriptor,
    split,
)
from transconv.ir import DTYPES as ROWS
from transconv.ir import ELSEWHERE, SHORT, Layout
from transconv.schedule import Schedule
from transconv.support import ProblemError, ScheduleError, TransconvError, nearest
from transconv.verify.benchdnn_requests import BenchdnnRequest

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
            raise RefusedRequest(
                INVALID,
                f"post-op {word}: expected one dw:k3s1p1[:TYPE] of a forward "
                "convolution, with a window that fits its result",
            )
        if given := [w for a in arguments for w in a.split(".") if w in OTHERS]:
            raise RefusedRequest(UNIMPLEMENTED, f"post-op {word}: no tensor has the type {given[0]}")
        try:
            found = post_op(word)
        except ScheduleError as error:
            raise RefusedRequest(INVALID, str(error)) from error
        if found is None:
            raise RefusedRequest(
                INVALID,
                f"post-op '{word}' is unknown; expected one of {', '.join(known())}"
                f"{nearest(word, known())}",
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
        argument = "src" if argument == "src0" else argument
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
    raise RefusedRequest(
        UNIMPLEMENTED,
        f"--attr-scales={part}: oneDNN's convolutions have no scales of "
        f"{argument} with the mask {mask}; expected one of {known}",
    )


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
            raise RefusedRequest(
                UNIMPLEMENTED if "x" in word or word in OTHERS else INVALID,
                f"--attr-scales={part}: '{word}'; expected a number, and f32, f16 or bf16: "
                "groups of scales and other types are for oneDNN's matrix products",
            )
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
        argument = "src" if argument == "src0" else argument  # oneDNN's other name for it
        mask, *rest = words or ["common"]
        along = mask in CHANNELS
        if argument not in ("src", "wei", "dst"):
            raise RefusedRequest(
                INVALID, f"--attr-zero-points={part}: zero points are of src, wei and dst"
            )
        if (not along and mask not in ("", "common", "0", "host_scalar")) or (along and argument == "wei"):
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
            raise RefusedRequest(
                INVALID,
                f"--attr-rounding-mode={part} is unknown; expected one of "
                f"{' '.join(ROUNDED)}, and environment or stochastic",
            )
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
        raise RefusedRequest(
            INVALID, f"--attr-fpmath={fpmath} is unknown; expected strict, tf32, any, bf16 or f16"
        )
    # A mode is a permission: tf32 has at least the digits and the range of both 16-bit types.
    return "ieee" if mode == "strict" else "tf32"


_WORD = re.compile(r"dw[_:]k(\d+)s(\d+)p(\d+)(?::(\w+))?")
BETWEEN = {"stag": "dtag", "strides": "", "attr-zero-points": ""}
BEHIND = re.compile(r"attr_post_op_dw_(?=wei:|dst:)")  # scales of the second one


def apart(request: BenchdnnRequest) -> Iterator[BenchdnnRequest]:
    """The request, or the two that stand for one with a ``dw``, or with the gradients of weights and bias.
    One that cannot be read stays as it is, to be refused with the others."""
    if request["dir"] == "BWD_WB":
        yield _with(request, request.descriptor, {"dir": "BWD_W"})
        yield request  # now that of the bias
        return
    words = split(request["attr-post-ops"])
    found = [(i, m) for i, w in enumerate(words) if (m := _WORD.fullmatch(w))]
    types = request["dt"].split(":") if not request["cfg"] else []
    if len(found) != 1 or len(types) not in (1, 3) or not request["dir"].startswith("FWD"):
        yield request
        return
    ((at, match),) = found
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
    given = [*filter(None, request["attr-scales"].split("+"))]
    own = [part for part in given if not BEHIND.match(part)]
    added = [BEHIND.sub("", part) for part in given if BEHIND.match(part)]
    # What the first one divides by is a factor of what the second one reads.
    added += ["src" + part.removeprefix("dst") for part in own if part.startswith("dst:")]
    yield _with(
        request, request.descriptor, {"attr-post-ops": "+".join(words[:at]), "attr-scales": "+".join(own)}
    )
    n = len(first.o)
    second = Descriptor(
        first.mb,
        first.oc,
        first.oc,
        first.oc,
        first.o,
        tuple((o + 2 * pad - k) // stride + 1 for o in first.o),
        (k,) * n,
        (stride,) * n,
        (1,) * n,
        (pad,) * n,
        grouped=True,
    )
    options = dict(request.options)
    yield _with(
        request,
        print_descriptor(second),
        {
            "dt": ":".join((types[2], types[1], match[4] or types[2])),
            "wtag": "any",
            "attr-post-ops": "+".join(words[at + 1 :]),
            "attr-scales": "+".join(added),
            **{name: options.get(of, "") for name, of in BETWEEN.items()},
        },
    )


def _with(request: BenchdnnRequest, descriptor: str, given: dict[str, str]) -> BenchdnnRequest:
    options = dict(request.options) | given
    return replace(request, descriptor=descriptor, options=tuple(options.items()))


DTYPES = ROWS.table(lambda t: t if t.result else None)
OTHER_DTYPES = ("s4", "u4", "s64", "boolean", "e8m0", "f4_e2m1", "f4_e3m0")
NEXT = " ;; "  # between the schedules of a plan's kernels


@dataclass(frozen=True, slots=True)
class BenchdnnJob:
    """A job for a worker (see benchdnn_run.py). ``bia``, of a weight gradient: that of the bias, of
    this type, in its place; ``mode``: I, R, C or B; ``data``: exact, float or both; ``shift``: elements
    off alignment; ``schedules``: ``best``, ``all``, a number, or texts."""

    problem: str
    prop: str
    epilogue: str = ""
    bia: str = ""
    mode: str = "C"
    data: str = "exact+float"
    shift: int = 0
    schedules: str = "best"
    deterministic: bool = False
    seed: int = 0
    target: str = ""
    numpy: bool = False


def job_of(request: BenchdnnRequest, schedules: str = "best") -> BenchdnnJob:
    """Raises Refused with benchdnn's status word and a reason."""
    prop = _prop(request["dir"])
    for option in FIXED:
        fixed(option, request[option])
    mode = _mode(request.mode)
    dtypes, is_tf32 = _dtypes(request)
    math = "tf32" if is_tf32 else math_of(request["attr-fpmath"])
    try:
        p = _problem(request, dtypes, math)
        epilogue, bia = _epilogue(request, prop, p, dtypes)
        p = spaced(p, prop, request["strided"])
        for text in filter(None, request["schedule"].split(NEXT)):
            Schedule.parse(text)
    except TransconvError as error:
        raise RefusedRequest(INVALID, f"{request.where}: {error}") from error
    return BenchdnnJob(
        str(replace(p, name="")),
        prop.value,
        epilogue,
        bia,
        mode,
        request["data"],
        int(request["misalign"]),
        request["schedule"] or schedules,
        request["attr-deterministic"] == "true",
        int(request["seed"]),
        request["target"],
        request.engine == "numpy",
    )


def _prop(word: str) -> Prop:
    return {"FWD": Prop.FWD, "BWD_D": Prop.BWD_D, "BWD_W": Prop.BWD_W, "BWD_WB": Prop.BWD_W}[
        "FWD" if word.startswith("FWD") else word
    ]


def _mode(letters: str) -> str:
    if set(letters) & set("PFS"):
        raise RefusedRequest(UNIMPLEMENTED, f"mode {letters}: times are measured by 'python -m bench'")
    for letter in "BCRI":  # the later contain less
        if letter in letters:
            return letter
    return "I"


def _dtypes(request: BenchdnnRequest) -> tuple[list[str], bool]:
    """The element types of src, wei and dst, and whether f32 is multiplied as tf32."""
    words = _legacy(request["cfg"]) if request["cfg"] else request["dt"].split(":")
    if len(words) not in (1, 3):
        raise RefusedRequest(INVALID, f"--dt={request['dt']} has {len(words)} types; expected 1 or 3")
    is_tf32 = set(words) == {"tf32"}
    words = ["f32" if is_tf32 else w for w in words]
    words = words * 3 if len(words) == 1 else words
    for word in words:
        if word in OTHER_DTYPES:
            raise RefusedRequest(UNIMPLEMENTED, f"dtype {word}: kernels compute with {' '.join(DTYPES)}")
        if _ours(word) not in DTYPES:
            hint = nearest(word, DTYPES, ELSEWHERE)
            raise RefusedRequest(
                INVALID, f"dtype '{word}' is unknown; expected one of {' '.join(DTYPES)}, or tf32{hint}"
            )
    return [_ours(w) for w in words], is_tf32


def _ours(word: str) -> str:
    """The name here of benchdnn's type (i8 for s8)."""
    return next((t.name for t in DTYPES.values() if word in t.aliases), word)


def _legacy(cfg: str) -> list[str]:
    """The types in a word such as ``bf16bf16f32``."""
    known = [*DTYPES, *(name for t in DTYPES.values() for name in t.aliases), *OTHER_DTYPES]
    names = "|".join(sorted(known, key=len, reverse=True))
    found = re.findall(names, cfg)
    if "".join(found) != cfg or len(found) not in (1, 2, 3):
        raise RefusedRequest(INVALID, f"--cfg={cfg} is unknown; expected types as --dt has them")
    return found[:1] * 3 if len(found) == 1 else [found[0], found[-2], found[-1]]


def _problem(request: BenchdnnRequest, dtypes: list[str], math: str) -> ConvProblem:
    shape = parse_descriptor(request.descriptor)
    if int(request["mb"]):
        shape = replace(shape, mb=int(request["mb"]))
    given = [request[o] for o in ("stag", "wtag", "dtag")]
    if request["tag"] and set(given) != {"any"}:
        raise RefusedRequest(INVALID, "--tag is for the three tensors; expected it alone")
    tags: str | list[str] = request["tag"] or given
    try:
        p = ConvProblem.of_descriptor(shape, ":".join(dtypes), tags, math if "f32" in dtypes else "tf32")
    except ProblemError as error:
        if "outside of groups" in str(error):
            raise RefusedRequest(
                UNIMPLEMENTED,
                "weights whose groups are not outermost: their output "
                "channels of all groups must lie one after another",
            ) from error
        raise
    return _with_strides(p, request["strides"], shape.grouped) if request["strides"] else p


def _with_strides(p: ConvProblem, text: str, grouped: bool) -> ConvProblem:
    """``--strides=SRC:WEI:DST``, each empty or one number for each dimension, joined by ``x``."""
    parts = text.split(":")
    if len(parts) != 3:
        raise RefusedRequest(INVALID, f"--strides={text} has {len(parts)} parts; expected SRC:WEI:DST")
    specs = []
    for part, (name, spec) in zip(parts, p.specs.items(), strict=True):
        if part:
            try:
                numbers = [int(n) for n in part.split("x")]
            except ValueError:
                raise RefusedRequest(INVALID, f"--strides: '{part}' has no numbers") from None
            if name == "wei" and grouped and len(numbers) == p.ndims + 3:
                if p.g > 1 and numbers[0] != p.ocg * numbers[1]:
                    raise RefusedRequest(UNIMPLEMENTED, "weights whose groups are not one after another")
                numbers = numbers[1:]
            if len(numbers) != p.ndims + 2:
                raise RefusedRequest(
                    INVALID, f"--strides: '{part}' has {len(numbers)} numbers; expected {p.ndims + 2}"
                )
            spec = _strided(spec, p.shapes[name], numbers)
        specs.append(spec)
    return replace(p, src=specs[0], wei=specs[1], dst=specs[2])


def _strided(spec: TensorSpec, shape: Sequence[int], strides: Sequence[int]) -> TensorSpec:
    return TensorSpec(spec.dtype, Layout.from_strides(spec.dtype, shape, strides))


def spaced(p: ConvProblem, prop: Prop, how: str) -> ConvProblem:
    """The problem with tensors as views of others: ``rows`` are cut out of tensors that have one
    more of everything, ``steps`` are every second element, ``expanded`` operands have one image for
    the whole batch. Raises Refused for blocked layouts."""
    if not how:
        return p
    made = []
    for name, spec in p.specs.items():
        strides, shape = spec.layout.strides(), p.shapes[name]
        if strides is None:
            raise RefusedRequest(INVALID, f"--strided={how}: a blocked layout has no strides")
        if how == "steps":
            strides = tuple(2 * s for s in strides)
        elif how == "rows":
            strides = _with_room(shape, strides)
        elif name != "wei" and name != prop.result:
            strides = (0, *strides[1:])
        made.append(_strided(spec, shape, strides))
    return replace(p, src=made[0], wei=made[1], dst=made[2])


def _with_room(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides in the same order, of a tensor that has one more of everything."""
    order = sorted(range(len(shape)), key=lambda d: (strides[d], -d))
    return tuple(prod(shape[e] + 1 for e in order[: order.index(d)]) for d in range(len(shape)))


def _epilogue(request: BenchdnnRequest, prop: Prop, p: ConvProblem, dtypes: list[str]) -> tuple[str, str]:
    """The epilogue's text and the bias's type: of the direction, the post-ops, or our own words."""
    default = "f64" if "f64" in dtypes else "f32"
    bia = _ours(request["bia-dt"] or default)
    if bia not in DTYPES:
        status = UNIMPLEMENTED if bia in OTHER_DTYPES else INVALID
        raise RefusedRequest(status, f"--bia-dt={bia}: expected one of {' '.join(DTYPES)}")
    words = post_ops(request["attr-post-ops"], p.ndims + 2)
    forward = request["dir"].startswith("FWD")
    zeros, added = zero_points(request["attr-zero-points"], forward)
    ahead, behind = scales(request["attr-scales"], p.g > 1, forward)
    ahead, behind = [*zeros, *ahead], [*behind, *added]
    if request["epilogue"]:
        if words or ahead or behind:
            raise RefusedRequest(
                INVALID, "--epilogue and --attr-post-ops or --attr-scales say the same; expected one"
            )
        words = [request["epilogue"]]
    elif request["dir"] == "FWD_B":
        words.insert(0, "bias")
    words = [*ahead, *words, *behind]
    last = rounding(request["attr-rounding-mode"], prop.result)
    if last and p.specs[prop.result].dtype not in SHORT:
        raise RefusedRequest(
            UNIMPLEMENTED,
            f"--attr-rounding-mode: results of {p.specs[prop.result].dtype} are "
            f"not rounded at random, those of {' '.join(map(str, SHORT))} are",
        )
    if words and prop is Prop.BWD_W:
        raise RefusedRequest(
            UNIMPLEMENTED,
            "post-ops, scales and zero points of the weight gradient: oneDNN has none either",
        )
    try:
        made = Epilogue.parse("+".join([*words, *last]), ROWS[bia])
        ConvWorkload(p, prop, made).tensors  # noqa: B018  its masks and tags fit, or say why not
    except ScheduleError as error:
        raise RefusedRequest(INVALID, str(error)) from error
    summed = request["dir"] == "BWD_WB"
    return str(replace(made, bia=None)), bia if made.bia or summed else ""
