"""Plans on disk, which another process or machine made: texts, launches, and all caches as one file.

Choosing schedules and running the passes take most of the time of a start. A record has what launches
need, so that neither is done again; the kernels' IR is made again only when it is asked for. A record's
key is a digest of all that the plan depends on, including this package's files. Its texts are executed:
records are sealed with a key of the user's (``support/records.py``), and each field is judged as it is
read. What a record says is compared with what the passes make in ``compilation/recompilation.py``.

The file for another machine has plans, Triton's machine code of their kernels, and which kernels are known
to be wrong. It is a zip archive: ``manifest.json`` with versions and a digest of every other member,
records as JSON, and machine code by its folder in Triton's cache. The digests find damage, not malice:
like a library, the file has code that is executed. So it must belong to the user or to root, nobody else
may be able to write to it, and it must be known who packed it: the manifest is sealed with the user's key,
and of a file that was packed with another one the reader names the digest.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from transconv.backend_triton import Launcher, unspecialised, write
from transconv.backend_triton.launch import compile_records
from transconv.compute import Workload, of_sizes, sizes_of
from transconv.cost import CostFormula
from transconv.ir import DTYPES, Expr, Layout, LayoutBlock, Sizes, Tensor
from transconv.passes import STAGES, running, stages
from transconv.runtime import check_records
from transconv.runtime.compilation.plan_request import PlanRequest
from transconv.runtime.plans import LoweredStep, Plan, PlanStep
from transconv.runtime.steps import digest_of
from transconv.schedule import Schedule, registered_words
from transconv.selection import files_digest, stamp
from transconv.support import (
    Content,
    Drawer,
    __version__,
    knobs,
    records,
    replace_data,
    triton_version,
    why_foreign,
    why_untrusted,
)
from transconv.target import Target

SCHEMA = 4
DRAWER = Drawer("plans", SCHEMA, longest=1 << 22, lasting=False, sealed=True)
MOST_PROGRAMS = (1 << 31) - 1  # of a launch
TEXT = 1 << 20  # characters of a kernel's text
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading a record that is none may raise; errors of schedules and computations are ValueErrors."""
Made = TypeVar("Made", bound=Plan)
Again = Callable[[], Plan]  # makes the plan by running the passes


def keeps() -> bool:
    """Whether plans are read and written: not if the user sets a schedule, dumps, traces or verifies the
    passes, or has registered words or passes that other processes lack."""
    return not (knobs.schedule() or knobs.verify() or knobs.dump() or knobs.debug() >= 2
                or registered_words() or len(stages()) != len(STAGES))


def key(workload: Workload, target: Target, deterministic: bool) -> str:
    """The name of a plan's record; empty if plans are neither read nor written."""
    if not keeps():
        return ""
    return name_of(workload, target, deterministic, workload.direction, workload.behind,
                   [str(t) for t in workload.tensors])


def name_of(workload: Workload, target: Target, *more: Any) -> str:
    """A digest of a workload, of what its plan depends on, and of ``more``."""
    told = (SCHEMA, triton_version(), sorted(running().items()), type(workload).__name__, str(workload),
            workload.math, stamp(workload, target), *more)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def keep(plan: Plan) -> None:
    """Write a plan to disk; not one of a given schedule."""
    name = key(plan.workload, plan.target, plan.deterministic)
    if name and not plan.fixed:
        DRAWER.put(name, content_of(plan))


def content_of(plan: Plan) -> Content:
    """What the record of a plan has."""
    return {
        "files": files_digest(), "target": plan.target.name, "why": plan.why,
        "question": PlanRequest(plan.workload, plan.target, plan.deterministic).job,
        "schedule": str(plan.schedule), "rejected": plan.rejected, "tuned": plan.tuned,
        "workspaces": [tensor_content(t) for t in plan.workspaces.values()],
        "estimated": [[list(map(str, f.counts)), [*map(list, f.lines)], f.us]
                      for f in plan.formulas()] if plan.required else [],
        "steps": [_step(s) for s in plan.steps]}


def find(workload: Workload, target: Target, deterministic: bool, kind: type[Made],
         again: Again) -> Made | None:
    """The plan of a record; None if there is none, if it is unreadable, or if one of its kernels is known
    to be wrong."""
    name = key(workload, target, deterministic)
    content = DRAWER.get(name) if name else None
    if content is None:
        return None
    try:
        plan = read(content, workload, target, deterministic, kind, functools.cache(again))
    except UNREADABLE:
        return None
    return None if any(check_records.is_wrong(s.digest) for s in plan.steps) else plan


def read(content: Content, workload: Workload, target: Target, deterministic: bool, kind: type[Made],
         again: Again) -> Made:
    """The plan of a record's content, each field of which is judged by its type and range and against the
    others. Raises what is ``UNREADABLE`` for what is not as ``keep`` writes it."""
    if content["target"] != target.name or content["files"] != files_digest():
        raise ValueError(f"{content['target']!r:.80}; expected a plan of this version for {target.name}")
    listed, sizes = records.several(content["steps"]), None
    if sized := next((s["sizes"] for s in listed if s["sizes"] is not None), None):
        sizes = sizes_of(records.text(sized))
    spaces = {t.name: t for t in [tensor_of(t, sizes) for t in records.several(content["workspaces"])]}
    given = {t.name: t for t in workload.tensors}
    if given.keys() & spaces.keys() or len(spaces) < len(content["workspaces"]):
        raise ValueError(f"workspaces {', '.join(spaces)}; expected names of their own")
    steps = tuple([_read(s, target, again, at, given | spaces) for at, s in enumerate(listed)])
    if missing := [n for n in workload.results if 0 not in given[n].shape and all(
            n not in s.params for s in steps)]:
        raise ValueError(f"no kernel stores {missing[0]}")
    plan = kind(workload, target, Schedule.parse(records.text(content["schedule"])), steps, spaces,
                rejected=records.whole(content["rejected"], most=1 << 16),
                why=records.text(content["why"]), tuned=records.flag(content["tuned"]),
                deterministic=deterministic)
    if plan.required:
        plan.estimated = tuple([_formula(f, plan.required.sizes)
                                for f in records.several(content["estimated"])])
    return plan


def _step(step: PlanStep) -> Content:
    run = step.launcher
    sized = {"sizes": str(run.sizes), "where": list(map(str, run.requires.where)),
             "programs": str(run.programs)} if run.requires else {"sizes": None}
    return {**sized, "does": step.does, "schedule": str(step.schedule), "source": step.source,
            "function": run.function, "file": step.path.stem if step.path else run.function,
            "grid": run.grid, "warps": run.warps, "stages": run.stages, "fuse": run.fuse,
            "boxes": [b and [tensor_content(b[0]), list(b[1])] for b in run.boxes],
            "explicit": run.explicit, "early": run.early, "params": list(step.params),
            "types": list(run.types), "digest": step.digest, "zero": step.zero and step.zero.name}


def _read(
    kept: Content, target: Target, again: Again, at: int, known: Mapping[str, Tensor]
) -> PlanStep:
    """A step; ``known``: the tensors of the call and the plan's workspaces, by name."""
    schedule, source = Schedule.parse(records.text(kept["schedule"])), records.text(kept["source"], TEXT)
    function = records.name(kept["function"])
    if not re.search(rf"^def {function}\(", source, re.MULTILINE):
        raise ValueError(f"{function}: the text defines no such function")
    if (kept["warps"], kept["stages"]) != (schedule.warps, schedule.stages):
        raise ValueError(f"{function}: warps and stages are not those of {schedule}")
    sizes = sizes_of(records.text(kept["sizes"])) if kept["sizes"] is not None else None
    if unspecialised(source) != (sizes.names if sizes else ()):
        raise ValueError(f"{function}: it takes other sizes")
    params = tuple([known[records.name(n)] for n in records.several(kept["params"])])
    types, fuse = tuple([t.dtype.torch for t in params]), records.flag(kept["fuse"])
    if not params or kept["types"] != [*types]:
        raise ValueError(f"{function}: its tensors are of other types")
    if kept["digest"] != digest_of(source, schedule, target, () if fuse else types):
        raise ValueError(f"{function}: the text is another")
    boxes = _boxes(kept["boxes"], params, sizes)
    explicit, early = records.flag(kept["explicit"]), records.flag(kept["early"])
    path, words = write(source, records.name(kept["file"])), (schedule.warps, schedule.stages)
    grid: int | Expr = records.whole(kept["grid"], most=MOST_PROGRAMS)
    requires = None
    if sizes:
        where = tuple([of_sizes(records.text(c), sizes) for c in records.several(kept["where"])])
        requires, grid = replace(sizes, where=where), of_sizes(records.text(kept["programs"]), sizes)
    run = Launcher(source, function, path, grid, *words, boxes, explicit, early, types, kept["digest"],
                   fuse, sizes, requires)

    def lowered() -> LoweredStep:
        step = again().steps[at]
        return LoweredStep(step.compute, step.kernel)

    zero = None if kept["zero"] is None else known[records.name(kept["zero"])]
    return PlanStep(records.name(kept["does"]), schedule, lowered, source, path, run,
                tuple([t.name for t in params]), kept["digest"], zero)


def _boxes(kept: Any, params: tuple[Tensor, ...], sizes: Sizes | None) -> tuple[Any, ...]:
    """The boxes of a step: for each tensor None, or as what it is seen and the extents, within its
    memory."""
    listed = records.several(kept)
    if listed and len(listed) != len(params):
        raise ValueError(f"{len(listed)} boxes of {len(params)} tensors")
    made: list[Any] = []
    for box, tensor in zip(listed, params, strict=False):
        if box is None:
            made.append(None)
            continue
        seen, extents = box
        view = tensor_of(seen, sizes)
        extents = [records.whole(n, 1, 1 << 16) for n in records.several(extents)]
        if (view.name, view.dtype) != (tensor.name, tensor.dtype) or len(extents) != len(view.dims) or (
                not sizes and not view.planes and view.layout.span > tensor.layout.span):
            raise ValueError(f"a box of {view}; expected one of {tensor}")
        made.append((view, tuple(extents)))
    return tuple(made)


def _formula(kept: Any, sizes: Sizes) -> CostFormula:
    counts, lines, us = kept
    return CostFormula(tuple([of_sizes(records.text(c), sizes) for c in records.several(counts)]),
                   tuple([(n, t) for n, t in records.several(lines)]), us)


def tensor_content(tensor: Tensor) -> Content:
    """What a record has of a tensor."""
    lay = tensor.layout
    return {"name": tensor.name, "dims": list(tensor.dims), "shape": list(tensor.shape),
            "dtype": lay.dtype.name, "blocks": [[b.dim, b.size, b.stride] for b in lay.blocks],
            "offset": lay.offset, "near": tensor.near and tensor.near.name,
            "copy_of": tensor.copy_of, "parts_of": tensor.parts_of, "planes": tensor.planes,
            "extents": list(map(str, tensor.extents)), "pitches": list(map(str, tensor.pitches)),
            "every": list(tensor.every)}


def tensor_of(kept: dict[str, Any], sizes: Sizes | None = None) -> Tensor:
    """The tensor of a record's content. Raises what is ``UNREADABLE``."""
    dims = tuple([records.text(d) for d in records.several(kept["dims"], 64)])
    shape = tuple([records.whole(n) for n in records.several(kept["shape"])])
    blocks = tuple([LayoutBlock(records.whole(d, most=len(dims) - 1), records.whole(n),
                                records.whole(step))
                    for d, n, step in records.several(kept["blocks"])])
    every = tuple([records.whole(n, 1) for n in records.several(kept["every"])])
    if len(shape) != len(dims) or len(every) not in (0, len(dims)):
        raise ValueError(f"{len(shape)} sizes of {len(dims)} dims")
    layout = Layout(DTYPES[kept["dtype"]], len(dims), blocks, records.whole(kept["offset"]))
    near = None if kept["near"] is None else DTYPES[kept["near"]]
    extents, pitches = (tuple([of_sizes(records.text(e), sizes) for e in records.several(kept[name])])
                        if sizes else () for name in ("extents", "pitches"))
    copy_of, parts_of = (kept[n] and records.name(kept[n]) for n in ("copy_of", "parts_of"))
    return Tensor(records.name(kept["name"]), dims, shape, layout, near, copy_of, parts_of,
                  records.flag(kept["planes"]), extents, pitches, every=every)


FORMAT = 1
MANIFEST = "manifest.json"
RECORDS = {
    "plans": DRAWER,
    "compiled": compile_records.DRAWER,
    "verdicts": check_records.DRAWER,
}
LONGEST = 1 << 28  # bytes of one member
MOST = 1 << 33  # bytes of all members
_NAME = re.compile(r"(records/(plans|compiled|verdicts)/[A-Za-z0-9_.-]{1,120}\.json"
                   r"|triton/[A-Z2-7]{40,64}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200})")
GROUP = "__grp__"  # the prefix of Triton's list of the files of a kernel, with their paths


@dataclass(frozen=True)
class BundleContents:
    """The contents of the caches, or of a file: number of plans by chip, of compiled kernels and of bytes.
    ``ignored``: what was left out and why, a line each; ``digest``: of a file that was packed, SHA-256."""

    plans: dict[str, int]
    kernels: int
    bytes: int
    ignored: tuple[str, ...] = ()
    digest: str = ""

    def __str__(self) -> str:
        chips = ", ".join(f"{n} plans for {chip}" for chip, n in sorted(self.plans.items())) or "no plans"
        head = f"{chips}; {self.kernels} compiled kernels, {self.bytes / 1e6:.1f} megabytes"
        return "\n".join([head, *(f"ignored: {line}" for line in self.ignored),
                          *([f"digest {self.digest}"] if self.digest else [])])


def versions() -> dict[str, str]:
    """The versions that a plan and its machine code depend on."""
    return {"transconv": __version__, "files": files_digest(), "triton": triton_version()}


def info() -> BundleContents:
    """The contents of a file that ``pack`` would write now."""
    return _summed(_members())


def pack(path: Path) -> BundleContents:
    """Write all plans of this version, and their machine code, to a file, atomically. Raises OSError."""
    members = _members()
    manifest = {"format": FORMAT, **versions(),
                "members": {name: _digest(data) for name, data in members.items()}}
    manifest["seal"] = _sealed(manifest)
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
            for name, data in members.items():
                archive.writestr(name, data)
        fresh.chmod(0o644)
        with fresh.open("rb") as file:
            digest = _sha256(file)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return replace(_summed(members), digest=digest)


def unpack(path: Path, chip: str = "", digest: str = "") -> BundleContents:
    """Put the contents of a file into the caches of this user, for one ``chip`` or for all. ``digest``:
    what ``pack`` said of the file, which is needed where that was done with another key than this user's.
    A file of another version is ignored, with one line. Raises OSError, and ValueError for a file that is
    not a packed cache, is damaged, or that another user could have written or packed."""
    # Opened once, as another file of its name may be there afterwards; a pipe has nobody wait.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if reason := why_odd(os.fstat(handle)):
            raise ValueError(f"{path}: {reason}; nothing is read from it")
        place = compile_records.folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := why_untrusted(place):
            raise ValueError(f"{place}: {reason}; nothing is put there")
        if digest and _sha256(file) != digest.lower().removeprefix("sha256:"):
            raise ValueError(f"{path}: its digest is another than {digest}; nothing is read from it")
        manifest, members = _read_file(path, file)
    if not digest and not _is_sealed(manifest):
        raise ValueError(f"{path}: was packed with another key than this user's, and has kernels that "
                         "your GPU would run; give the digest that cache pack printed (--digest)")
    here = versions()
    if other := [f"{n} {manifest.get(n)} (here {v})" for n, v in here.items() if manifest.get(n) != v]:
        return BundleContents({}, 0, 0, (f"all of {path.name}, which is of {', '.join(other)}",))
    wanted, ignored = _for_chip(members, chip)
    for name, data in wanted.items():
        _, kind, rest = name.split("/", 2) if name.startswith("records/") else ("", "", "")
        if kind:
            content = json.loads(data)
            if kind == "verdicts":
                check_records.record(rest.removesuffix(".json"), check_records.WRONG,
                                reason=str(content.get("reason", "")),
                                function=str(content.get("function", "")))
            else:
                RECORDS[kind].put(rest.removesuffix(".json"), content)
    for name, data in sorted(wanted.items(), key=lambda m: GROUP in m[0]):  # a list of files comes last
        if name.startswith("triton/"):
            _, folder, member = name.split("/")
            (place / folder).mkdir(mode=0o700, exist_ok=True)
            replace_data(place / folder / member,
                         _placed(data, place / folder) if GROUP in member else data)
    return _summed(wanted, ignored)


def why_odd(status: os.stat_result) -> str:
    """Why what has this status is no file of the user's or root's alone; empty if it is."""
    return "is no plain file" if not stat.S_ISREG(status.st_mode) else why_foreign(status, also=(0,))


# -- the caches ------------------------------------------------------------------------------------


def _members() -> dict[str, bytes]:
    """All members of a file except the manifest."""
    made: dict[str, bytes] = {}
    here = files_digest()
    for name, plan in DRAWER.items():
        if plan.get("files") != here:
            continue
        made[f"records/plans/{name}.json"] = _json(plan)
        for step in plan["steps"]:
            for aligned in (True, False):
                key = compile_records.name_of(str(step["digest"]), aligned)
                found = compile_records.DRAWER.get(key)
                if found is not None and compile_records.lies_in(found):
                    made[f"records/compiled/{key}.json"] = _json(found)
                    made |= dict(_machine_code(str(found["folder"])))
    for name, verdict in check_records.DRAWER.items():
        if verdict.get("verdict") == check_records.WRONG:  # each machine checks the other kernels itself
            made[f"records/verdicts/{name}.json"] = _json(verdict)
    return made


def _machine_code(folder: str) -> Iterator[tuple[str, bytes]]:
    for path in sorted((compile_records.folder() / folder).iterdir()):
        if path.is_file() and _NAME.fullmatch(f"triton/{folder}/{path.name}"):
            yield f"triton/{folder}/{path.name}", path.read_bytes()


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _sha256(file: IO[bytes]) -> str:
    """The digest of an open file, in hexadecimal digits."""
    seen = hashlib.sha256()
    file.seek(0)
    while data := file.read(1 << 20):
        seen.update(data)
    return seen.hexdigest()


def _sealed(manifest: dict[str, Any]) -> str:
    """The seal of a manifest with this user's key; empty if there is none."""
    secret = records.user_key()
    return "" if secret is None else records.seal(secret, *_signed(manifest))


def _is_sealed(manifest: dict[str, Any]) -> bool:
    """Whether a manifest is sealed with this user's key."""
    secret = records.user_key()
    return secret is not None and records.is_sealed(manifest.get("seal"), secret, *_signed(manifest))


def _signed(manifest: dict[str, Any]) -> tuple[str, str]:
    told = {name: said for name, said in manifest.items() if name != "seal"}
    return "packed", json.dumps(told, sort_keys=True)


def _summed(members: dict[str, bytes], ignored: tuple[str, ...] = ()) -> BundleContents:
    plans = Counter(str(json.loads(d).get("target")) for n, d in members.items()
                    if n.startswith("records/plans/"))
    return BundleContents(dict(plans), sum(n.startswith("records/compiled/") for n in members),
                   sum(map(len, members.values())), ignored)


# -- a file ----------------------------------------------------------------------------------------


def _read_file(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and its members. Raises ValueError if one is missing or damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {i.filename: i for i in archive.infolist()}
            if sum(i.file_size for i in infos.values()) > MOST or any(
                    i.file_size > LONGEST for i in infos.values()):
                raise ValueError(f"{path}: has more than {MOST} bytes, or a member of more than {LONGEST}")
            manifest = json.loads(archive.read(MANIFEST))
            told = manifest["members"]
            if manifest["format"] != FORMAT or set(infos) != {MANIFEST, *told}:
                raise ValueError(f"{path}: its members are not those of its manifest")
            if odd := [n for n in told if not _NAME.fullmatch(n)]:
                raise ValueError(f"{path}: {odd[0]!r} is no name of a member")
            members = {n: archive.read(n) for n in told}
    except (zipfile.BadZipFile, KeyError, TypeError, RecursionError, UnicodeDecodeError,
            NotImplementedError, EOFError) as error:
        raise ValueError(f"{path}: this is no packed cache, or it is damaged ({error})") from error
    if wrong := [n for n, data in members.items() if _digest(data) != told[n]]:
        raise ValueError(f"{path}: {wrong[0]} was changed or is damaged; nothing is read from it")
    return manifest, members


def _for_chip(members: dict[str, bytes], chip: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The members that plans of a chip need, and a line about those that are left out."""
    if not chip:
        return members, ()
    plans = {n: json.loads(d) for n, d in members.items() if n.startswith("records/plans/")}
    mine = {n: p for n, p in plans.items() if p.get("target") == chip}
    keys = {compile_records.name_of(s["digest"], a) for p in mine.values() for s in p["steps"]
            for a in (True, False)}
    records = {n for n in members if n.startswith("records/compiled/") and Path(n).stem in keys}
    folders = {json.loads(members[n])["folder"] for n in records}
    wanted = {n: d for n, d in members.items() if n in mine or n in records
              or n.startswith("records/verdicts/") or n.split("/")[1] in folders}
    others = len(plans) - len(mine)
    return wanted, (f"{others} plans for other chips than {chip}",) if others else ()


def _placed(data: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, with their paths on this machine."""
    names = json.loads(data)["child_paths"]
    return json.dumps({"child_paths": {n: str(folder / Path(n).name) for n in names}}).encode()
