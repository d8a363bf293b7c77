"""The disk cache with many writers, damaged files, folders that cannot be trusted, full disks and
killed processes: results stay right, records are not lost, and one message says why."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transconv
from transconv import runtime
from transconv.backend_triton.launch import jit_module
from transconv.calls import route_cache
from transconv.conv import compiler
from transconv.conv.conv_problem import ConvProblem, Prop
from transconv.runtime import check_records
from transconv.support import Drawer, knobs
from transconv.support import files as keep
from transconv.support import records as drawer
from transconv.target.records import TARGETS

ROOT = Path(__file__).parents[2]
DRAWER = Drawer("sums", 1)
is_root = os.geteuid() == 0
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own, with no message given yet."""
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    keep.forget()
    check_records.forget()
    yield tmp_path / "cache"
    keep.forget()
    check_records.forget()


def child(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A process in which DRAWER is defined."""
    start = """
        import os, resource, signal, sys, threading, time
        from transconv.support import files as keep
        from transconv.support import Drawer
        DRAWER = Drawer("sums", 1)
    """
    text = textwrap.dedent(start) + textwrap.dedent(code)
    environment = knobs.child_environment({}, str(ROOT))
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "transconv.cache" and r.levelno >= logging.WARNING
    ]


# -- many at once ----------------------------------------------------------------------------------


def test_many_writers_lose_nothing() -> None:
    """Processes with threads count up the same records, while readers see only whole ones."""
    work = """
        def count(thread):
            for turn in range(6):
                DRAWER.update(f"count{turn % 3}", lambda old: {
                    "n": (old or {}).get("n", 0) + 1, "filling": "x" * 3000})
                DRAWER.put(f"own-{os.getpid()}-{thread}", {"turn": turn})
        threads = [threading.Thread(target=count, args=(n,)) for n in range(3)]
        [t.start() for t in threads]; [t.join() for t in threads]
    """
    workers = [child(work) for _ in range(3)]
    seen = 0
    while any(w.poll() is None for w in workers):
        for key, content in DRAWER.items():
            assert len(content.get("filling", "x" * 3000)) == 3000, key
            seen += 1
    for worker in workers:
        _out, err = worker.communicate()
        assert worker.returncode == 0 and not err, err
    found = dict(DRAWER.items())
    assert sum(found[f"count{n}"]["n"] for n in range(3)) == 3 * 3 * 6
    assert [c["turn"] for key, c in found.items() if key.startswith("own")] == [5] * 9
    assert seen > 10


@pytest.mark.slow
def test_many_processes_compile_into_one_cache(cache: Path) -> None:
    """Each leaves a whole file, and the same one."""
    code = """
        from transconv.conv import compiler
        from transconv.conv import ConvProblem, Prop
        from transconv.target import TARGETS
        for sizes in ("mb1ic4ih6oc4oh6kh3ph1", "mb2ic4iw9oc8ow9kw3pw1"):
            made = compiler.build(ConvProblem.parse(sizes), Prop.FWD, TARGETS["sm_90"])
            print(made.steps[0].path.read_text() == made.source)
    """
    assert [ended(w).split() for w in [child(code) for _ in range(3)]] == [["True"] * 2] * 3
    assert len(list(cache.glob("*.py"))) == 2 and not list(cache.glob(f"{keep.PARTIAL}*"))


# -- damaged files ---------------------------------------------------------------------------------


def test_every_truncation_and_every_flipped_bit(caplog: pytest.LogCaptureFixture) -> None:
    content = {"config": "mb.oh.ow:64 oc:32 | mma", "us": 12.5, "wrong": None}
    assert DRAWER.put("a", content)
    path = DRAWER.path("a")
    assert path is not None
    whole = path.read_bytes()
    assert DRAWER.get("a") == content and not warnings(caplog)
    for n in range(len(whole) - 1):  # the last byte ends the line
        path.write_bytes(whole[:n])
        assert DRAWER.get("a") is None
    assert len(warnings(caplog)) == 1 and "damaged" in warnings(caplog)[0]
    for n in range(len(whole)):
        path.write_bytes(whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :])
        assert DRAWER.get("a") in (None, content)  # a space may become something else
    path.write_bytes(whole)
    assert DRAWER.get("a") == content
    assert DRAWER.update("a", lambda old: {"n": 1}) == {"n": 1} == DRAWER.get("a")


@pytest.mark.parametrize(
    "other",
    [
        lambda text: json.dumps({**json.loads(text), "key": "b"}),
        lambda text: json.dumps({**json.loads(text), "drawer": "sums-2"}),
        lambda text: json.dumps({**json.loads(text), "content": {"n": 2}}),
        lambda text: "[" * 100_000,
        lambda text: "null",
        lambda text: '{"content": 1}',
        lambda text: text + " " * (1 << 23),
        lambda text: "\x00" * 4096,
    ],
    ids=["key", "drawer", "sum", "deep", "null", "bare", "long", "zeros"],
)
def test_files_of_somebody_else(other: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    DRAWER.put("a", {"n": 1})
    path = DRAWER.path("a")
    assert path is not None
    path.write_text(other(path.read_text()))
    for _ in range(2):
        assert DRAWER.get("a") is None and list(DRAWER.items()) == []
    assert len(warnings(caplog)) == 1 and str(path) in warnings(caplog)[0]
    assert DRAWER.put("a", {"n": 3}) and DRAWER.get("a") == {"n": 3}


def test_too_much_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A record that no one would read must not take the place of one that is read."""
    small = Drawer("sums", 1, longest=1000)
    assert small.put("a", {"n": 1})
    assert not small.put("a", {"n": "x" * 1000}) and small.get("a") == {"n": 1}
    assert len(warnings(caplog)) == 1 and "more than 1000 bytes" in warnings(caplog)[0]


def test_things_that_are_no_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe would block its reader, a link leads elsewhere, a folder cannot be replaced."""
    DRAWER.put("keep", {})
    at = DRAWER.path("a")
    assert at is not None
    os.mkfifo(at)
    assert DRAWER.get("a") is None
    at.unlink()
    (tmp_path / "elsewhere").write_text("mine")
    at.symlink_to(tmp_path / "elsewhere")
    assert DRAWER.get("a") is None
    assert DRAWER.put("a", {}) and not at.is_symlink()  # the link is replaced, not followed
    assert (tmp_path / "elsewhere").read_text() == "mine"
    at.unlink()
    at.mkdir()
    assert DRAWER.get("a") is None and not DRAWER.put("a", {})
    assert at.is_dir() and len(warnings(caplog)) == 4
    (at.parent / "not a key!.json").write_text("{}")
    assert list(DRAWER.items()) == [("keep", {})]


@pytest.mark.parametrize("key", ["", ".", "../a", ".hidden", "a/b", "a" * 121, "a\n", "é"])
def test_keys_cannot_leave_the_drawer(key: str) -> None:
    with pytest.raises(ValueError, match="cannot name a record"):
        DRAWER.get(key)


@interpreted
def test_a_tampered_copy_is_never_executed(cache: Path) -> None:
    """The readable copy of a kernel is written, not read: what runs is the text in memory."""
    p = ConvProblem.parse("mb1ic4ih6oc4oh6kh3ph1")
    path = compiler.build(p, Prop.FWD, TARGETS["interpreter"]).steps[0].path
    assert path is not None
    path.write_bytes(b"raise SystemExit('tampered') \xff")
    made = compiler.build(p, Prop.FWD, TARGETS["interpreter"])
    src, wei, dst = torch.ones(p.shapes["src"]), torch.ones(p.shapes["wei"]), torch.zeros(p.shapes["dst"])
    path.write_bytes(b"raise SystemExit('tampered again')")
    made.launch(src, wei, dst)
    assert dst[0, 0, 2, 2] == 36
    assert jit_module.write(made.source, path.stem) == path and path.read_text() == made.source


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("spoil", ["planted", "given away", "open to a group", "a path", "an open parent"])
def test_a_plan_of_somebody_else_is_not_executed(
    spoil: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right checksum and a folder of mode 0700 say nothing of who wrote a file in it."""
    monkeypatch.setenv("TRANSCONV_VERIFY", "0")
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    p = ConvProblem.parse("mb1ic4ih6oc4oh6kh3ph1")
    compiler.forget()
    compiler.plan(p, Prop.FWD, TARGETS["interpreter"])
    (path,) = cache.glob("plans-*/*.json")
    whole = json.loads(path.read_text())
    step = whole["content"]["steps"][0]
    if spoil == "a path":
        step["function"] = "../../evil"
    else:
        step["source"] = f"open(__import__('os').environ['EVIL'], 'w').close()\n{step['source']}"
        step["digest"] = runtime.steps.digest_of(
            step["source"], runtime.steps.Schedule.parse(step["schedule"]), TARGETS["interpreter"]
        )
    path.write_text(json.dumps(whole | {"checksum": drawer._checksum(whole["content"])}))
    if spoil == "given away" and is_root:
        os.chown(path, 65534, 65534)
    path.chmod(0o660 if spoil == "open to a group" else 0o600)
    tmp_path.chmod(0o777 if spoil == "an open parent" else 0o700)
    cache.chmod(0o700)
    compiler.forget()
    keep.forget()
    src, wei, dst = torch.ones(p.shapes["src"]), torch.ones(p.shapes["wei"]), torch.zeros(p.shapes["dst"])
    compiler.plan(p, Prop.FWD, TARGETS["interpreter"]).launch(src=src, wei=wei, dst=dst)
    compiler.forget()
    assert dst[0, 0, 2, 2] == 36
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.skipif(not is_root, reason="only root can give files away")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: os.chown(p, 65534, 65534),
        lambda p: p.chmod(0o622),
        lambda p: p.parents[2].chmod(0o777),
        lambda p: os.chown(p.parents[2], 65534, 65534),
    ],
    ids=["file", "open file", "open parent", "parent"],
)
def test_records_of_others_are_not_read(spoil: Callable[[Path], None]) -> None:
    """Choices, too."""
    DRAWER.put("a", {"n": 1})
    path = DRAWER.path("a")
    assert path is not None and DRAWER.get("a") == {"n": 1}
    keep.forget()
    spoil(path)
    assert DRAWER.get("a") is None


# -- folders ---------------------------------------------------------------------------------------


def works_without_keeping(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Nothing is kept, nothing fails, and there is one message."""
    for _ in range(2):
        assert not DRAWER.put("a", {"n": 1})
        assert DRAWER.get("a") is None and list(DRAWER.items()) == []
        assert DRAWER.update("a", lambda old: {"n": 2 if old is None else 3}) == {"n": 2}
        DRAWER.drop("a")
        check_records.record("k" * 32, check_records.WRONG)
        assert check_records.is_wrong("k" * 32)  # in memory
        assert jit_module.write("x = 1\n", "kernel") is None
    told = warnings(caplog)
    assert len(told) == 1 and words in told[0] and "TRANSCONV_CACHE" in told[0], told


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_folders_that_others_can_write_to(
    cache: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    cache.chmod(mode)
    works_without_keeping(caplog, f"can be written to by others (mode {mode:04o}")
    assert list(cache.iterdir()) == []


def test_folders_of_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    if is_root:
        os.chown(cache, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    works_without_keeping(caplog, "belongs to user")


@pytest.mark.skipif(not is_root, reason="only root can make another user's link")
@pytest.mark.parametrize("inside", ["", "deeper", "to-mine/deeper"])
def test_links_of_others(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """A link in a public folder can be turned around later by whoever owns it; also one that leads to a
    folder above, or that another link leads through."""
    (tmp_path / "mine" / "deeper").mkdir(mode=0o700, parents=True)
    (tmp_path / "mine" / "to-mine").symlink_to("../cache")
    os.chown(tmp_path / "mine" / "to-mine", 1234, 1234, follow_symlinks=False)
    os.chown(tmp_path / "mine" / "deeper", 1234, 1234)
    (tmp_path / "mine").chmod(0o700)
    cache.symlink_to(tmp_path / "mine")
    assert DRAWER.put("a", {})  # a link of one's own is fine
    os.chown(cache, 65534, 65534, follow_symlinks=False)
    code = """
        os.setuid(1234)
        os.environ["TRANSCONV_CACHE"] = sys.argv[1]
        print(keep.folder())
    """
    os.chown(tmp_path / "mine", 1234, 1234)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    process = child(code, str(cache / inside))
    out, err = process.communicate(timeout=60)
    assert out.split() == ["None"] and f"is reached through {cache}, a link of user 65534" in err


def test_a_path_that_cannot_be_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "file" / "cache"))
    works_without_keeping(caplog, "Not a directory")


def test_a_read_only_folder_is_still_read(cache: Path) -> None:
    """The user's own, without the right to write: choices are read, news are not kept."""
    DRAWER.put("a", {"n": 1})
    code = """
        if os.geteuid() == 0:
            os.setuid(1234)
        print(DRAWER.get("a"), DRAWER.put("b", {}), DRAWER.put("a", {}), DRAWER.get("a"))
        print(DRAWER.update("c", lambda old: {"n": 5}), list(DRAWER.items()))
    """
    inside = [cache, *cache.iterdir(), *cache.glob("*/*")]
    for path in inside:
        if is_root:
            os.chown(path, 1234, 1234)
        path.chmod(0o500 if path.is_dir() else 0o400)
    for folder in list(cache.parents)[:-2]:
        folder.chmod(folder.stat().st_mode | 0o011)
    process = child(code)
    out, err = process.communicate(timeout=60)
    for path in inside:
        path.chmod(0o700)
    assert out.splitlines() == ["{'n': 1} False False {'n': 1}", "{'n': 5} [('a', {'n': 1})]"], err
    assert err.count("\n") == 1 and "cannot be written to (Permission denied)" in err


@pytest.mark.skipif(not is_root, reason="only root can become a user who does not exist")
def test_nobody_has_no_home() -> None:
    """In a container whose user has neither a name nor a home."""
    code = """
        os.setuid(54321)
        for name in ("TRANSCONV_CACHE", "XDG_CACHE_HOME", "HOME"):
            os.environ.pop(name, None)
        print(keep.folder(), DRAWER.put("a", {}))
    """
    process = child(code)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["None", "False"] and err.count("\n") == 1 and "home" in err


# -- disks -----------------------------------------------------------------------------------------


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk(
    call: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DRAWER.put("a", {"n": 1})
    check_records.record("k" * 32, check_records.WRONG)
    monkeypatch.setattr(os, call, full)
    for _ in range(3):
        assert not DRAWER.put("a", {"n": 2})
        assert DRAWER.get("a") == {"n": 1}  # the old record stands
        assert DRAWER.update("a", lambda old: {**(old or {}), "m": 1}) == {"n": 1, "m": 1}
    lost = call == "replace"  # nobody waits until the disk has what can be made again
    assert (jit_module.write("x = 1\n", "kernel") is None) is lost
    assert Drawer("made", 1, lasting=False).put("a", {"n": 1}) is not lost
    check_records.record("k" * 32, check_records.RIGHT)
    check_records.forget()
    assert check_records.is_wrong("k" * 32)
    told = warnings(caplog)
    assert len(told) == 1 + 2 * lost, "one for each folder"
    assert all("No space left on device" in t for t in told)
    assert not list(cache.rglob(f"{keep.PARTIAL}*"))


def test_a_disk_that_fills_while_a_file_is_written(cache: Path) -> None:
    """The kernel itself refuses, in the middle of the text."""
    code = """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        DRAWER.put("a", {"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        print(DRAWER.put("a", {"n": "x" * 100_000}), DRAWER.get("a"), DRAWER.put("b", {}))
    """
    process = child(code)
    out, err = process.communicate(timeout=60)
    assert out.split("\n")[0] == "False {'n': 1} True" and err.count("File too large") == 1
    assert not list(cache.rglob(f"{keep.PARTIAL}*"))


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_in_the_middle(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a writer is killed, the record is whole, and its lock does not outlive it."""
    code = """
        n = 0
        while True:
            DRAWER.update("a", lambda old: {"n": (old or {"n": 0})["n"] + 1, "filling": "x" * 200_000})
            if n == 0:
                print("started", flush=True)
            n += 1
    """
    last = 0
    for turn in range(8):
        process = child(code)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.003 * turn)
        process.kill()
        process.wait()
        process.communicate()
        found = DRAWER.get("a")
        assert found is not None and len(found["filling"]) == 200_000 and found["n"] > last
        last = found["n"]
        started = time.monotonic()
        DRAWER.update("a", lambda old: {**(old or {}), "more": True})
        assert time.monotonic() - started < 1
    left = cache / "sums-1" / f"{keep.PARTIAL}a.dead"
    left.write_text("half")
    keep.forget()
    DRAWER.put("b", {})
    assert left.exists()  # its writer may be alive
    os.utime(left, (1, 1))
    keep.forget()
    DRAWER.put("b", {})
    assert not left.exists()


def test_a_writer_that_sleeps_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drawer, "PATIENCE", 0.3)
    process = child("""
        def change(old):
            print("inside", flush=True)
            time.sleep(60)
            return {}
        DRAWER.update("a", change)
    """)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    assert DRAWER.update("a", lambda old: {"n": 1}) == {"n": 1} == DRAWER.get("a")
    process.kill()
    process.communicate()
    assert len(warnings(caplog)) == 1 and "held the lock" in warnings(caplog)[0]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(drawer.fcntl, "flock", refuse)
    for n in range(3):
        DRAWER.update("a", lambda old, n=n: {"n": n})
    assert DRAWER.get("a") == {"n": 2} and len(warnings(caplog)) == 1


# -- through the front door ------------------------------------------------------------------------


@pytest.mark.every(2)
@interpreted
@pytest.mark.parametrize("spoil", ["world-writable", "full", "damaged"])
def test_convolutions_do_not_mind(
    spoil: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    monkeypatch.setattr(runtime.compiler, "_plans", {})
    monkeypatch.setattr(transconv.config, "cpu", "interpret")
    transconv.stats(reset=True)
    cache.mkdir(mode=0o700)
    if spoil == "world-writable":
        cache.chmod(0o777)
    elif spoil == "full":
        monkeypatch.setattr(os, "replace", full)
    else:
        (cache / "verdicts-2").write_text("no folder")
    x, w = torch.randn(1, 3, 6, 6), torch.randn(5, 3, 3, 3)
    got = transconv.conv2d(x, w, padding=1)
    route_cache.forget()
    torch.testing.assert_close(got, torch.nn.functional.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4)
    assert transconv.stats(reset=True).native == {"fwd": 1}
    places = [text.split(": ")[0] for text in warnings(caplog)]
    assert places and len({*places}) == len(places)  # one message for each
    assert stat.S_IMODE(cache.stat().st_mode) == (0o777 if spoil == "world-writable" else 0o700)


def test_the_page_names_every_drawer() -> None:
    from transconv.selection import candidates as shortlist
    from transconv.selection import tuning_db

    page = (ROOT / "docs" / "caches.md").read_text(encoding="utf-8")
    for kept in (check_records.DRAWER, tuning_db.DRAWER, shortlist.DRAWER):
        assert f"| `{kept.name}/` |" in page
    assert f"after {drawer.PATIENCE:g} seconds" in page and keep.STALE == 3600
