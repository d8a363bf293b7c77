"""Plans on disk that somebody else wrote, moved or altered: none is executed, none leaves the cache
folder, and the answer is made anew."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.known_kernels import known_kernels  # noqa: F401  (a fixture)
from transconv.__main__ import main
from transconv.backend_triton.launch import jit_module
from transconv.conv import compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.conv.workload import ConvWorkload
from transconv.runtime import Plan, plan_cache, steps
from transconv.support import files, knobs, records
from transconv.target.records import TARGETS

ROOT = Path(__file__).parents[2]
PROBLEM = ConvProblem.parse("mb1ic4ih6oc4oh6kh3ph1")
TARGET = TARGETS["interpreter"]
WORKLOAD = ConvWorkload(PROBLEM, Prop.FWD)
EVIL = "open(__import__('os').environ['EVIL'], 'w').close()"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """The name and the text of a plan's file, and the key that it is sealed with."""
    place = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSCONV_CACHE", str(place / "cache"))
        patch.setenv("TRANSCONV_KEY", str(place / "key"))
        patch.setenv("TRANSCONV_VERIFY", "0")
        forget()
        compiler.plan(PROBLEM, Prop.FWD, TARGET)
        (path,) = (place / "cache").glob(f"{plan_cache.DRAWER.name}/*.json")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        return path.name, path.read_text(), (place / "key").read_text()


@pytest.fixture
def plan_file(
    written: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """The file of a plan in a cache of the test's own, with a key of its own."""
    key, path = (
        tmp_path_factory.mktemp("state") / "ours" / "key",
        tmp_path / "cache" / plan_cache.DRAWER.name,
    )
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRANSCONV_KEY", str(key))
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    (tmp_path / "cache").mkdir(mode=0o700)
    for folder in (path, key.parent):
        folder.mkdir(mode=0o700)
    path = path / written[0]
    for file, text in ((path, written[1]), (key, written[2])):
        file.touch(mode=0o600)
        file.write_text(text)
    forget()
    yield path
    forget()
    assert not (tmp_path / "evil").exists()


def forget() -> None:
    compiler.forget()
    files.forget()
    records.forget()


def found() -> Plan | None:
    """The plan on disk."""
    forget()
    return plan_cache.find(WORKLOAD, TARGET, False, Plan, lambda: pytest.fail("the passes run"))


def answers_anew() -> None:
    """A call is answered, and rightly, by a plan that this process made."""
    forget()
    made = compiler.plan(PROBLEM, Prop.FWD, TARGET)
    src, wei = torch.ones(PROBLEM.shapes["src"]), torch.ones(PROBLEM.shapes["wei"])
    dst = torch.zeros(PROBLEM.shapes["dst"])
    made.launch(src=src, wei=wei, dst=dst)
    assert dst[0, 0, 2, 2] == 36


def content(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())["content"]
    return told


def with_evil_text(told: dict[str, Any]) -> dict[str, Any]:
    """A plan whose text does something else, with the digest of that text."""
    step = told["steps"][0]
    step["source"] = EVIL + "\n" + step["source"]
    step["digest"] = steps.digest_of(step["source"], steps.Schedule.parse(step["schedule"]), TARGET)
    return told


def checksummed(name: str, key: str, told: dict[str, Any]) -> str:
    """The text of a record as anybody can write it: with a checksum, and without a seal."""
    return json.dumps({"drawer": name, "key": key, "checksum": records._checksum(told), "content": told})


# -- who wrote it ----------------------------------------------------------------------------------


def test_a_plan_is_read_without_the_passes(plan_file: Path) -> None:
    plan = found()
    assert plan is not None and plan_cache.content_of(plan)["steps"] == content(plan_file)["steps"]


def test_an_altered_plan_is_never_executed(plan_file: Path) -> None:
    """A right mode and owner, a right checksum: the seal is missing, or that of another text."""
    told = with_evil_text(content(plan_file))
    whole = json.loads(plan_file.read_text())
    for text in (
        checksummed(plan_cache.DRAWER.name, plan_file.stem, told),
        json.dumps(whole | {"content": told}),
        json.dumps(whole | {"content": told, "seal": records.seal(b"guessed", "", "")}),
        json.dumps(whole | {"content": told, "seal": None}),
        json.dumps(whole | {"content": told, "seal": "\u00e9"}),
        json.dumps(whole | {"content": told, "seal": [whole["seal"]]}),
    ):
        plan_file.write_text(text)
        assert found() is None
        answers_anew()
        assert found() is not None  # replaced


def test_a_plan_under_the_name_of_another_one_is_not_read(plan_file: Path) -> None:
    compiler.plan(ConvProblem.parse("mb2ic4ih6oc4oh6kh3ph1"), Prop.FWD, TARGET)
    (other,) = set(plan_file.parent.glob("*.json")) - {plan_file}
    shutil.copy(other, plan_file)
    assert found() is None
    answers_anew()


def test_plans_of_a_version_without_seals_are_passed_over(
    plan_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = plan_file.parent.with_name("plans-2")
    before.mkdir(mode=0o700)
    (before / plan_file.name).write_text(checksummed("plans-2", plan_file.stem, content(plan_file)))
    plan_file.unlink()
    assert found() is None and not caplog.records


@as_root
@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: os.chown(p, 65534, 65534),
        lambda p: p.chmod(0o620),
        lambda p: p.chmod(0o602),
        lambda p: os.chown(p.parent, 65534, 65534),
        lambda p: p.parent.chmod(0o770),
        lambda p: os.chown(p.parents[1], 65534, 65534),
        lambda p: p.parents[1].chmod(0o707),
        lambda p: os.chown(p.parents[2], 65534, 65534),
        lambda p: p.parents[2].chmod(0o777),
    ],
    ids=[
        "file",
        "file by group",
        "file by all",
        "folder",
        "folder by group",
        "cache",
        "cache by all",
        "parent",
        "parent by all",
    ],
)
def test_what_others_own_or_write_is_not_read(
    plan_file: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a right seal: a plan of last month, put back, would be one."""
    spoil(plan_file)
    assert found() is None
    assert len([r for r in caplog.records if r.name == "transconv.cache"]) == 1
    answers_anew()


def test_a_file_of_another_user_as_any_user_sees_it(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of what is open counts, whatever the path said before."""
    real = os.fstat

    def anothers(handle: int) -> os.stat_result:
        told = list(real(handle))
        told[4] = os.geteuid() + 1
        return os.stat_result(told)

    monkeypatch.setattr(os, "fstat", anothers)
    assert found() is None


def test_a_file_planted_before_the_folder_was_closed(plan_file: Path, tmp_path: Path) -> None:
    """The folder was open, somebody left a plan, and then the user closed it."""
    told = with_evil_text(content(plan_file))
    plan_file.write_text(checksummed(plan_cache.DRAWER.name, plan_file.stem, told))
    plan_file.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(plan_file, 65534, 65534)
    plan_file.parents[1].chmod(0o700)
    assert found() is None
    answers_anew()


def test_links_are_not_followed(plan_file: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(plan_file, elsewhere)
    plan_file.symlink_to(elsewhere)
    assert found() is None
    plan_file.unlink()
    shutil.move(elsewhere, plan_file)
    assert found() is not None
    shutil.move(plan_file.parent, elsewhere)
    plan_file.parent.symlink_to(elsewhere)
    assert found() is not None  # the user's own link to the user's own folder
    if os.geteuid() == 0:
        os.chown(plan_file.parent, 65534, 65534, follow_symlinks=False)
        assert found() is None


def test_a_file_swapped_while_it_is_read(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at is what is read: a file of the same name that comes in between is neither."""
    right = plan_file.read_text()
    evil = checksummed(plan_cache.DRAWER.name, plan_file.stem, with_evil_text(content(plan_file)))
    real = os.open

    def swapped(path: Any, *rest: Any, **more: Any) -> int:
        handle = real(path, *rest, **more)
        if Path(path) == plan_file:
            (tmp_path / "new").write_text(evil)
            os.replace(tmp_path / "new", plan_file)
        return handle

    monkeypatch.setattr(os, "open", swapped)
    assert found() is not None
    monkeypatch.undo()
    assert plan_file.read_text() == evil != right


def test_sticky_parents_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    mine = tmp_path / "public" / "mine"
    mine.mkdir(mode=0o700)
    assert files.why_untrusted(mine) == ""
    (tmp_path / "public").chmod(0o777)
    assert "where others can replace it (mode 0777; chmod go-w" in files.why_untrusted(mine)
    (tmp_path / "public").chmod(0o775)
    monkeypatch.setattr(files, "_is_private", lambda *_: True)
    assert files.why_untrusted(mine) == ""  # a group of this user alone
    monkeypatch.setattr(files, "_is_private", lambda *_: False)
    assert "where others can replace it" in files.why_untrusted(mine)


# -- every byte, every field -----------------------------------------------------------------------


def test_no_byte_may_differ(plan_file: Path) -> None:
    """Drawn: whatever byte is flipped, the plan is the same, as of a space, or is not read."""
    whole, want = plan_file.read_bytes(), content(plan_file)
    rng = random.Random(37)
    forget()
    assert plan_cache.DRAWER.get(plan_file.stem) == want
    for at in sorted(rng.sample(range(len(whole)), 120)):
        flipped = whole[at] ^ (1 << rng.randrange(8))
        plan_file.write_bytes(whole[:at] + bytes([flipped]) + whole[at + 1 :])
        assert plan_cache.DRAWER.get(plan_file.stem) in (None, want), at


def fields_of(told: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a JSON value."""
    if at:
        yield at
    for key in told if isinstance(told, dict) else range(len(told)) if isinstance(told, list) else ():
        yield from fields_of(told[key], (*at, key))


HOSTILE: tuple[Any, ...] = ("../../evil", "a\nb", EVIL, -1, 1 << 80, 0.5, True, None, [], {}, [None], "")


def test_no_field_may_be_what_it_is_not(plan_file: Path) -> None:
    """Each field with a right seal, as damage of a program's own would leave it: the plan is not read, or
    is one that differs in words for people alone; nothing is written outside of the cache."""
    want = content(plan_file)
    assert found() is not None  # with its readable copy
    before = {p for p in plan_file.parents[2].rglob("*")}
    harmless = {
        ("why",),
        ("rejected",),
        ("tuned",),
        ("estimated",),
        ("question",),
        ("steps", 0, "does"),
        ("steps", 0, "grid"),
        ("steps", 0, "early"),
        ("steps", 0, "explicit"),
        ("steps", 0, "where"),
        ("steps", 0, "programs"),
        ("steps", 0, "boxes"),
        ("schedule",),
    }
    refused = 0
    for at in [*fields_of(want)]:
        for value in HOSTILE:
            told = copy.deepcopy(want)
            inside: Any = told
            for key in at[:-1]:
                inside = inside[key]
            if inside[at[-1]] == value and type(inside[at[-1]]) is type(value):
                continue
            inside[at[-1]] = value
            try:
                plan = plan_cache.read(told, WORKLOAD, TARGET, False, Plan, lambda: pytest.fail("passes"))
            except plan_cache.UNREADABLE:
                refused += 1
                continue
            assert any(at[: len(h)] == h for h in harmless), (at, value)
            assert [s.source for s in plan.steps] == [s["source"] for s in want["steps"]]
    assert refused > 300
    assert {p for p in plan_file.parents[2].rglob("*")} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("function", "../../evil"),
        ("function", "evil"),
        ("grid", -1),
        ("grid", 1 << 31),
        ("grid", True),
        ("params", ["src", "wei"]),
        ("params", ["src", "wei", "dst", "dst"]),
        ("params", "src"),
        ("params", ["src", "wei", "dat"]),
        ("types", ["float32", "float32", "float64"]),
        ("warps", 64),
        ("stages", 99),
        ("zero", "nothing"),
        ("digest", "0" * 32),
        ("boxes", [None]),
        ("does", "a b"),
        ("early", 1),
        ("sizes", "N=8 in 1..64"),
        ("source", "x = 1\n"),
    ],
)
def test_fields_of_a_step(plan_file: Path, field: str, value: Any, tmp_path: Path) -> None:
    told = content(plan_file)
    told["steps"][0][field] = value
    plan_cache.DRAWER.put(plan_file.stem, told)
    assert found() is None
    assert not list(tmp_path.rglob("evil*"))
    answers_anew()


def test_a_plan_without_steps_is_none(plan_file: Path) -> None:
    for steps_ in ([], {}, None, [{}]):
        plan_cache.DRAWER.put(plan_file.stem, {**content(plan_file), "steps": steps_})
        assert found() is None


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "a b", "a\n", "xª", "1a", "class", "a.b"])
def test_kernels_have_names_of_files(plan_file: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a kernel"):
        jit_module.write("x = 1\n", name)


@pytest.mark.parametrize(
    "text", [EVIL, "here_v0.real", "__import__('os')", "here_v0(1)[0]", "x", "0 or x"]
)
def test_an_estimate_is_arithmetic(text: str) -> None:
    from transconv.cost import CostFormula

    with pytest.raises(ValueError, match="expected arithmetic"):
        CostFormula((), (), text)
    with pytest.raises(ValueError, match="expected arithmetic"):
        CostFormula((), (("here_v0", text),), "here_v0")
    with pytest.raises(ValueError, match="expected arithmetic"):
        CostFormula((), ((text, "1"),), "1")
    assert CostFormula((), (("here_v0", "(here_c0 * 1e-06)"),), "(here_v0 if here_v0 > 0.5 else 2)").us


TEXTS = (
    "mb8ic64ih28oc64oh28kh3ph1 dt=bf16 tag=nhwc",
    "mb2ic16ih9oc8oh5kh3sh2ph1",
    "mb8ic64ih29oc64oh15kh3sh2ph1 dt=bf16 tag=nhwc",
    "g8mb2ic8ih9oc8oh9kh3ph1 dt=f16 tag=nhwc",
)


@pytest.mark.slow
@pytest.mark.parametrize("open_", [frozenset(), frozenset({"mb", "ih", "iw"})], ids=["exact", "any"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_is_written_is_read(text: str, open_: frozenset[str]) -> None:
    """What judges fields refuses no plan of the compiler's own: boxes, planes, copies, phases."""
    from transconv.runtime import build

    for prop in Prop:
        asked = ConvWorkload(ConvProblem.parse(text), prop, open=open_)
        plan = build(asked, TARGETS["sm_90"], None, None, False, Plan)
        told = json.loads(json.dumps(plan_cache.content_of(plan)))
        again = plan_cache.read(told, asked, TARGETS["sm_90"], False, Plan, lambda: pytest.fail("passes"))
        assert json.loads(json.dumps(plan_cache.content_of(again))) == told


# -- the key ---------------------------------------------------------------------------------------


def test_the_key_is_the_users_alone_and_outside(plan_file: Path) -> None:
    key = knobs.key()
    shutil.rmtree(key.parent)
    assert found() is None  # another one is made
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert not key.is_relative_to(knobs.cache()) and len(key.read_text().strip()) == 64


@pytest.mark.parametrize(
    "spoil", [lambda k: k.unlink(), lambda k: k.write_text("ab" * 32 + "\n")], ids=["removed", "rotated"]
)
def test_with_another_key_plans_are_made_again(plan_file: Path, spoil: Callable[[Path], None]) -> None:
    spoil(knobs.key())
    assert found() is None
    answers_anew()
    assert found() is not None


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda k: k.chmod(0o640), "can be read by others"),
        pytest.param(lambda k: k.chmod(0o604), "can be read by others", marks=pytest.mark.slow),
        (lambda k: k.chmod(0o620), "others"),
        (lambda k: k.write_text(""), "is damaged"),
        pytest.param(lambda k: k.write_text("x" * 64), "is damaged", marks=pytest.mark.slow),
        (lambda k: (k.unlink(), k.mkdir()), "Is a directory"),
        (lambda k: (k.unlink(), os.mkfifo(k, 0o600)), "is no plain file"),
        (lambda k: k.parent.chmod(0o777), "where others can replace it"),
        pytest.param(lambda k: os.chown(k, 65534, 65534), "user 65534", marks=as_root),
        pytest.param(lambda k: os.chown(k.parent, 65534, 65534), "user 65534", marks=as_root),
    ],
)
def test_a_key_that_others_know_is_none(
    plan_file: Path, spoil: Callable[[Path], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing sealed is read or written, all else works, and one message says so."""
    text = plan_file.read_text()
    spoil(knobs.key())
    for _ in range(2):
        compiler.forget()
        if not caplog.records:
            forget()
        assert plan_cache.find(WORKLOAD, TARGET, False, Plan, lambda: pytest.fail("passes")) is None
        compiler.plan(PROBLEM, Prop.FWD, TARGET)
    assert plan_file.read_text() == text and not plan_cache.DRAWER.put("a", {})
    told = [r.getMessage() for r in caplog.records if r.name == "transconv.cache"]
    assert len(told) == 1 and why in told[0] and "TRANSCONV_KEY names another file" in told[0], told
    answers_anew()


@pytest.mark.parametrize("place", ["cache/key", "file/key", "cache/plans-3/key"])
def test_where_no_key_can_be(
    plan_file: Path,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSCONV_KEY", str(tmp_path / place))
    assert found() is None and len(caplog.records) == 1
    assert ("lies in the cache" if place.startswith("cache") else "cannot be made") in caplog.text
    answers_anew()


def test_processes_make_one_key(tmp_path: Path) -> None:
    code = "from transconv.support import records; print(records.user_key().hex())"
    environment = knobs.child_environment(
        {"TRANSCONV_KEY": str(tmp_path / "state" / "key"), "TRANSCONV_CACHE": str(tmp_path / "cache")},
        str(ROOT),
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    assert len({child.communicate(timeout=60)[0] for child in children}) == 1
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["key"]


# -- compared with the passes ----------------------------------------------------------------------


def test_verify_finds_what_differs(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forget()
    assert main(["cache", "--verify"]) == 0
    assert "1 plans are as the passes make them; 0 are not; 0 are not compared" in capsys.readouterr().out
    told = content(plan_file)
    for change, words in (
        (lambda t: t["steps"][0].update(grid=t["steps"][0]["grid"] + 1), "steps[0].grid is "),
        (lambda t: t.update(why="a better one"), 'why is "a better one", the passes make "'),
        (lambda t: t.update(tuned=True), "tuned is true, the passes make false"),
        (with_evil_text, "steps[0].source is "),
        (lambda t: t.update(steps=3), "it is no plan"),
    ):
        other = copy.deepcopy(told)
        change(other)
        plan_cache.DRAWER.put(plan_file.stem, other)  # with a right seal
        assert main(["cache", "--verify"]) == 1
        out = capsys.readouterr().out
        assert words in out and "0 plans are as the passes make them; " in out, out
    plan_file.write_text(checksummed(plan_cache.DRAWER.name, plan_file.stem, told))
    assert main(["cache", "--verify"]) == 1
    assert "is not sealed with this user's key; it is never executed" in capsys.readouterr().out
    other = {**told, "files": "another"}
    plan_cache.DRAWER.put(plan_file.stem, other)
    assert main(["cache", "--verify"]) == 0
    assert "not compared: " in capsys.readouterr().out
