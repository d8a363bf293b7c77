"""All caches as one file for another machine: plans, Triton's machine code of their kernels, and which
kernels are known to be wrong.

It is a zip archive: ``manifest.json`` with versions and a digest of every other member, records as JSON,
and machine code by its folder in Triton's cache. The digests find damage, not malice: like a library, the
file has code that is executed. So it must belong to the user or to root, nobody else may be able to write
to it, and it must be known who packed it: the manifest is sealed with the user's key, and of a file that
was packed with another one the reader names the digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from transconv.backend_triton.launch import compile_records
from transconv.runtime import check_records, plan_cache
from transconv.selection import files_digest
from transconv.support import knobs, records, replace_data, why_foreign, why_untrusted

FORMAT = 1
MANIFEST = "manifest.json"
RECORDS = {
    "plans": plan_cache.DRAWER,
    "compiled": compile_records.DRAWER,
    "verdicts": check_records.DRAWER,
}
LONGEST = 1 << 28  # bytes of one member
MOST = 1 << 33  # bytes of all members
_NAME = re.compile(
    r"(records/(plans|compiled|verdicts)/[A-Za-z0-9_.-]{1,120}\.json"
    r"|triton/[A-Z2-7]{40,64}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200})"
)
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
        lines = [f"{chips}; {self.kernels} compiled kernels, {self.bytes / 1e6:.1f} megabytes"]
        lines += [f"ignored: {line}" for line in self.ignored]
        return "\n".join([*lines, f"digest {self.digest}"] if self.digest else lines)


def versions() -> dict[str, str]:
    """The versions that a plan and its machine code depend on."""
    return {"transconv": knobs.__version__, "files": files_digest(), "triton": knobs.triton_version()}


def info() -> BundleContents:
    """The contents of a file that ``pack`` would write now."""
    return _summed(_members())


def pack(path: Path) -> BundleContents:
    """Write all plans of this version, and their machine code, to a file, atomically. Raises OSError."""
    members = _members()
    manifest = {"format": FORMAT, **versions(), "members": {n: _digest(d) for n, d in members.items()}}
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
        raise ValueError(
            f"{path}: was packed with another key than this user's, and has kernels that "
            "your GPU would run; give the digest that cache pack printed (--digest)"
        )
    here = versions()
    if other := [f"{n} {manifest.get(n)} (here {v})" for n, v in here.items() if manifest.get(n) != v]:
        return BundleContents({}, 0, 0, (f"all of {path.name}, which is of {', '.join(other)}",))
    wanted, ignored = _for_chip(members, chip)
    for name, data in wanted.items():
        _, kind, rest = name.split("/", 2) if name.startswith("records/") else ("", "", "")
        if kind:
            content = json.loads(data)
            if kind == "verdicts":
                check_records.record(
                    rest.removesuffix(".json"),
                    check_records.WRONG,
                    reason=str(content.get("reason", "")),
                    function=str(content.get("function", "")),
                )
            else:
                RECORDS[kind].put(rest.removesuffix(".json"), content)
    for name, data in sorted(wanted.items(), key=lambda m: GROUP in m[0]):  # a list of files comes last
        if name.startswith("triton/"):
            _, folder, member = name.split("/")
            (place / folder).mkdir(mode=0o700, exist_ok=True)
            replace_data(
                place / folder / member, _placed(data, place / folder) if GROUP in member else data
            )
    return _summed(wanted, ignored)


def why_odd(status: os.stat_result) -> str:
    """Why what has this status is no file of the user's or root's alone; empty if it is."""
    return "is no plain file" if not stat.S_ISREG(status.st_mode) else why_foreign(status, also=(0,))


# -- the caches ------------------------------------------------------------------------------------


def _members() -> dict[str, bytes]:
    """All members of a file except the manifest."""
    made: dict[str, bytes] = {}
    here = files_digest()
    for name, plan in plan_cache.DRAWER.items():
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
    plans = Counter(
        str(json.loads(d).get("target")) for n, d in members.items() if n.startswith("records/plans/")
    )
    return BundleContents(
        dict(plans),
        sum(n.startswith("records/compiled/") for n in members),
        sum(map(len, members.values())),
        ignored,
    )


# -- a file ----------------------------------------------------------------------------------------


def _read_file(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and its members. Raises ValueError if one is missing or damaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {i.filename: i for i in archive.infolist()}
            sizes = [i.file_size for i in infos.values()]
            if sum(sizes) > MOST or max(sizes, default=0) > LONGEST:
                raise ValueError(f"{path}: has more than {MOST} bytes, or a member of more than {LONGEST}")
            manifest = json.loads(archive.read(MANIFEST))
            told = manifest["members"]
            if manifest["format"] != FORMAT or set(infos) != {MANIFEST, *told}:
                raise ValueError(f"{path}: its members are not those of its manifest")
            if odd := [n for n in told if not _NAME.fullmatch(n)]:
                raise ValueError(f"{path}: {odd[0]!r} is no name of a member")
            members = {n: archive.read(n) for n in told}
    except (zipfile.BadZipFile, KeyError, TypeError, RuntimeError, UnicodeDecodeError, EOFError) as error:
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
    keys = {
        compile_records.name_of(s["digest"], a)
        for p in mine.values()
        for s in p["steps"]
        for a in (True, False)
    }
    records = {n for n in members if n.startswith("records/compiled/") and Path(n).stem in keys}
    folders = {json.loads(members[n])["folder"] for n in records}
    wanted = {
        n: d
        for n, d in members.items()
        if n in mine or n in records or n.startswith("records/verdicts/") or n.split("/")[1] in folders
    }
    others = len(plans) - len(mine)
    return wanted, (f"{others} plans for other chips than {chip}",) if others else ()


def _placed(data: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, with their paths on this machine."""
    names = json.loads(data)["child_paths"]
    return json.dumps({"child_paths": {n: str(folder / Path(n).name) for n in names}}).encode()
