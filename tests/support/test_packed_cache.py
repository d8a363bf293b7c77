"""The caches as one file: packed entries are restored; damaged or foreign ones are refused or ignored
with one line."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_ready import PROBLEM, SM90
from transconv.__main__ import main
from transconv.backend_triton.launch import compile_records
from transconv.conv import Prop, compiler
from transconv.runtime import cache_bundle, check_records, plan_cache

FOLDER = compile_records.folder_of("cd" * 32)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Caches of a name: the function moves to them, and gives Triton's folder."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")

    def forget() -> None:
        compiler.forget()
        check_records.forget()
        compile_records.forget()

    def move(name: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        monkeypatch.setenv("TRANSCONV_CACHE", str(place / "ours"))
        monkeypatch.setattr(compile_records, "folder", lambda: place / "triton")
        forget()
        return place / "triton"

    yield move
    forget()


@pytest.fixture
def packed(caches: Callable[[str], Path], tmp_path: Path) -> Path:
    """A file with a plan and its machine code."""
    place = caches("first") / FOLDER
    step = compiler.plan(PROBLEM, Prop.FWD, SM90).steps[0]
    place.mkdir(parents=True)
    (place / "f.cubin").write_bytes(b"\x7fELF")
    (place / "__grp__f.json").write_text(json.dumps({"child_paths": {"f.cubin": str(place / "f.cubin")}}))
    compile_records.DRAWER.put(
        step.digest, {"triton": compile_records.triton_version(), "folder": FOLDER, "function": "f"}
    )
    check_records.record("ab" * 16, check_records.WRONG, reason="spilt")
    check_records.record(step.digest, check_records.RIGHT)
    path = tmp_path / "kernels.zip"
    assert cache_bundle.pack(path).plans == {"sm_90": 1}
    return path


def test_what_is_packed_comes_back_elsewhere(
    caches: Callable[[str], Path], packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = caches("second")
    said = cache_bundle.unpack(packed)
    assert (said.plans, said.kernels, said.ignored) == ({"sm_90": 1}, 1, ())
    group = json.loads((place / FOLDER / "__grp__f.json").read_text())
    assert Path(group["child_paths"]["f.cubin"]) == place / FOLDER / "f.cubin"
    monkeypatch.setattr("transconv.runtime.compiler.lower", None)  # no pass runs
    step = compiler.plan(PROBLEM, Prop.FWD, SM90, mode="never").steps[0]
    assert check_records.is_wrong("ab" * 16) and not check_records.is_right(step.digest, True)
    assert cache_bundle.info().plans == {"sm_90": 1}


def test_only_what_is_for_a_chip(caches: Callable[[str], Path], packed: Path) -> None:
    place = caches("second")
    said = cache_bundle.unpack(packed, "sm_100")
    assert said.plans == {} and said.ignored == ("1 plans for other chips than sm_100",)
    assert not list(place.iterdir()) and not list(plan_cache.DRAWER.items())


def altered(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def manifest(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        members["manifest.json"] = json.dumps(json.loads(members["manifest.json"]) | changes).encode()

    return change


def with_seal(**changes: Any) -> Callable[[dict[str, bytes]], None]:
    def change(members: dict[str, bytes]) -> None:
        told = json.loads(members["manifest.json"]) | changes
        members["manifest.json"] = json.dumps(told | {"seal": cache_bundle._sealed(told)}).encode()

    return change


def code(members: dict[str, bytes]) -> None:
    members[f"triton/{FOLDER}/f.cubin"] += b"\x90"


def outside(members: dict[str, bytes]) -> None:
    data = members.pop(f"triton/{FOLDER}/f.cubin")
    told = json.loads(members["manifest.json"])
    name = "triton/../../evil"
    told["members"][name] = told["members"].pop(f"triton/{FOLDER}/f.cubin")
    members |= {name: data, "manifest.json": json.dumps(told).encode()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (code, "was changed or is damaged"),
        (outside, "is no name of a member"),
        (lambda m: m.update({"more": b""}), "not those of its manifest"),
        (lambda m: m.pop("manifest.json"), "this is no packed cache"),
        (manifest(format=99), "not those of its manifest"),
        (manifest(transconv="another"), "was packed with another key"),
        (manifest(seal="0" * 64), "was packed with another key"),
        (manifest(seal=None), "was packed with another key"),
        (manifest(seal="\u00e9"), "was packed with another key"),
    ],
)
def test_a_file_that_was_tampered_with_is_refused(
    caches: Callable[[str], Path], packed: Path, why: str, change: Callable[[dict[str, bytes]], None]
) -> None:
    altered(packed, change)
    place = caches("second")
    with pytest.raises(ValueError, match=why):
        cache_bundle.unpack(packed)
    assert not list(place.iterdir()) and not list(plan_cache.DRAWER.items())


def test_another_version_is_ignored_with_one_line(
    caches: Callable[[str], Path], packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    altered(packed, with_seal(triton="3.5.0"))
    place = caches("second")
    assert main(["cache", "unpack", str(packed)]) == 0
    assert "ignored: all of kernels.zip, which is of triton 3.5.0 (here " in capsys.readouterr().out
    assert not list(place.iterdir())


def test_what_others_can_write_is_not_read(
    caches: Callable[[str], Path], packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = caches("second")
    packed.chmod(0o666)
    assert main(["cache", "unpack", str(packed)]) == 2
    packed.chmod(0o644)
    place.mkdir(exist_ok=True)
    place.chmod(0o777)
    assert main(["cache", "unpack", str(packed)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("can be written to by others" in x for x in lines)
    if os.geteuid() == 0:
        place.chmod(0o700)
        os.chown(packed, 12345, -1)
        assert cache_bundle.why_odd(packed.stat()) == "belongs to user 12345"


def test_a_file_of_another_key_needs_its_digest(
    caches: Callable[[str], Path],
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on another machine: the digest that ``pack`` prints says that this is the file."""
    assert main(["cache", "pack", str(packed)]) == 0
    digest = capsys.readouterr().out.splitlines()[-1].removeprefix("digest ")
    monkeypatch.setenv("TRANSCONV_KEY", str(tmp_path / "elsewhere" / "key"))
    caches("second")
    assert main(["cache", "unpack", str(packed)]) == 2
    assert "was packed with another key" in capsys.readouterr().err
    assert main(["cache", "unpack", str(packed), "--digest", "0" * 64]) == 2
    assert "its digest is another" in capsys.readouterr().err
    assert not list(plan_cache.DRAWER.items())
    assert main(["cache", "unpack", str(packed), "--target", "sm_90", "--digest", digest]) == 0
    assert len(list(plan_cache.DRAWER.items())) == 1 and cache_bundle.info().plans == {"sm_90": 1}


def test_a_pipe_is_not_waited_for(
    caches: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    caches("second")
    os.mkfifo(tmp_path / "pipe")
    assert main(["cache", "unpack", str(tmp_path / "pipe")]) == 2
    assert "is no plain file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["cache"],
        ["cache", "info", "--verify"],
        ["cache", "pack", "/tmp/x", "--digest", "a"],
        ["cache", "--verify", "--digest", "a"],
        ["cache", "burn"],
        ["cache", "pack"],
        ["cache", "info", "x"],
        ["cache", "unpack", "/none/x"],
        ["cache", "pack", "/dev/null/x"],
        ["cache", "unpack", __file__, "--target", "sm_1"],
        ["cache", "unpack", __file__],
    ],
)
def test_odd_command_lines(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(words) == 2
    except SystemExit as stop:
        assert stop.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
