"""From a request in benchdnn's syntax to a job for a worker, or a refusal.

A job is text and numbers, so that it can travel to another process. What benchdnn can ask for and
no kernel here can do is refused with a reason; nothing is left out in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from transconv.conv import ConvProblem, ConvWorkload, Epilogue, Prop, TensorSpec, parse_descriptor
from transconv.errors import ProblemError, ScheduleError, TransconvError
from transconv.ir import DTYPES as ROWS
from transconv.ir import SHORT, Layout
from transconv.schedule import Schedule
from transconv.verify.benchdnn.attributes import (
    FIXED,
    INVALID,
    UNIMPLEMENTED,
    RefusedRequest,
    fixed,
    math_of,
    post_ops,
    rounding,
    scales,
    zero_points,
)
from transconv.verify.benchdnn.requests import BenchdnnRequest

DTYPES = ROWS.table(lambda t: t if t.result else None)
OTHER_DTYPES = ("s4", "u4", "s64", "boolean", "e8m0", "f4_e2m1", "f4_e3m0")
NEXT = " ;; "  # between the schedules of a plan's kernels


@dataclass(frozen=True, slots=True)
class BenchdnnJob:
    """What a worker is told (see benchdnn/run.py). ``mode``: I, R, C or B; ``data``: exact, float or
    both; ``shift``: elements off alignment; ``schedules``: ``best``, ``all``, a number, or texts."""

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
    return BenchdnnJob(str(replace(p, name="")), prop.value, epilogue, bia, mode, request["data"],
               int(request["misalign"]), request["schedule"] or schedules,
               request["attr-deterministic"] == "true", int(request["seed"]), request["target"],
               request.engine == "numpy")


def _prop(word: str) -> Prop:
    if word == "BWD_WB":
        raise RefusedRequest(UNIMPLEMENTED, "the gradient of the bias: torch sums it (BWD_W checks that "
                      "of the weights)")
    return {"FWD": Prop.FWD, "BWD_D": Prop.BWD_D, "BWD_W": Prop.BWD_W}[
        "FWD" if word.startswith("FWD") else word]


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
            raise RefusedRequest(INVALID, f"dtype '{word}' is unknown; expected one of "
                          f"{' '.join(DTYPES)}, or tf32")
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
        p = ConvProblem.of_descriptor(shape, ":".join(dtypes), tags, math if "f32" in dtypes
                                      else "tf32")
    except ProblemError as error:
        if "outside of groups" in str(error):
            raise RefusedRequest(UNIMPLEMENTED, "weights whose groups are not outermost: their output "
                          "channels of all groups must lie one after another") from error
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
                raise RefusedRequest(INVALID, f"--strides: '{part}' has {len(numbers)} numbers; expected "
                              f"{p.ndims + 2}")
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
    return tuple(prod(shape[e] + 1 for e in order[:order.index(d)]) for d in range(len(shape)))


def _epilogue(request: BenchdnnRequest, prop: Prop, p: ConvProblem,
              dtypes: list[str]) -> tuple[str, str]:
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
            raise RefusedRequest(INVALID, "--epilogue and --attr-post-ops or --attr-scales say the same; "
                          "expected one")
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
        raise RefusedRequest(UNIMPLEMENTED, "post-ops, scales and zero points of the weight gradient: "
                      "oneDNN has none either")
    try:
        made = Epilogue.parse("+".join([*words, *last]), ROWS[bia])
        ConvWorkload(p, prop, made).tensors  # noqa: B018  its masks and tags fit, or say why not
    except ScheduleError as error:
        raise RefusedRequest(INVALID, str(error)) from error
    return str(replace(made, bia=None)), bia if made.bia else ""
