"""``transconv doctor``: every state that is bad or worth a note is told in one line, with
what to do about it; and on a machine where all is well nothing is bad."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transconv.__main__ import main
from transconv.cli import doctor
from transconv.cli.arguments import installation
from transconv.cli.arguments.installation import Finding, guarded, size
from transconv.support import files as keep
from transconv.support import knobs
from transconv.target import TARGETS

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    for name in knobs.given("TRANSCONV_"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRANSCONV_CACHE", str(tmp_path / "cache"))
    keep.forget()
    yield tmp_path / "cache"
    keep.forget()


def only(found: Iterator[Finding], state: str, check: str) -> Finding:
    """The one finding of a state; every finding is one line."""
    listed = list(found)
    assert all(str(f).count("\n") == 0 and str(f).startswith(f.state) for f in listed)
    (one,) = [f for f in listed if f.state == state]
    assert one.check == check
    return one


# -- the command -----------------------------------------------------------------------------------


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert main(["doctor"]) == 0
    assert time.perf_counter() - began < 30  # three seconds of self-test, and imports
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok  |note) \S+ ", line) for line in lines[:-2])
    assert lines[-1].endswith("transconv works here")
    checks = [line.split()[1] for line in lines[:-2]]
    assert {"python", *(p.name for p in installation.PACKAGES)} <= {*checks}
    assert {"chip", "features", "cache", "tuned"} <= {*checks}
    assert checks.count("self-test") == 2 and "right on" in lines[-3]


def test_something_is_bad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON: the same findings, and exit code 1. A variable that every other verb refuses is a line."""
    monkeypatch.setenv("TRANSCONV_TRUST", "sometimes")
    monkeypatch.setattr(doctor, "SECONDS", -1.0)
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["good"] is False and told["transconv"]
    (bad,) = [f for f in told["findings"] if f["state"] == "bad"]
    assert bad["check"] == "setting" and "expected check, always or never" in bad["found"] and bad["todo"]


def test_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--jsn"])
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- software --------------------------------------------------------------------------------------


def test_supported_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    asked = text.split("\ndependencies = [")[1].split("\n]")[0]
    found = dict(re.findall(r'"([a-z0-9]+)>=([\d.]+)', asked))
    assert found == {p.name: p.oldest for p in installation.PACKAGES}
    oldest = ".".join(map(str, installation.OLDEST_PYTHON))
    assert f'requires-python = ">={oldest}"' in text


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        ("2.9.1", "bad", "older than 2.10"),
        ("2.10.0", "ok", "2.10.0"),
        ("2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("3.0", "note", "newer than what the tests run with (2.13)"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, found: str, state: str, said: str) -> None:
    monkeypatch.setattr(installation, "version", lambda name: found)
    told = installation.installed(installation.PACKAGES[0])
    assert told.state == state and said in told.found
    assert (told.todo == "pip install 'torch>=2.10'") == (state == "bad")


def test_what_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = installation.installed(installation.Dependency("no-such-package", "1.0", "2.0"))
    assert (missing.state, missing.found) == ("bad", "not installed") and "pip install" in missing.todo

    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(installation.importlib, "import_module", broken)
    told = installation.installed(installation.PACKAGES[0])
    assert told.state == "bad" and "cannot be imported: OSError: libcudart" in told.found


@pytest.mark.parametrize(("python", "state"), [((3, 9), "bad"), ((3, 10), "ok"), ((3, 15), "note")])
def test_python(python: tuple[int, int], state: str) -> None:
    assert installation.python(python).state == state


# -- variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "state", "said"),
    [
        ("TRANSCONV_TUND", "1", "bad", "did you mean TRANSCONV_TUNED?"),
        ("TRANSCONV_COLOUR", "1", "bad", "there is no such variable"),
        ("TRANSCONV_VERIFY", "yes", "bad", "expected 0 or 1"),
        ("TRANSCONV_FEATURES", "-warp", "bad", "there is no feature 'warp'"),
        ("TRANSCONV_SCHEDULE", "speed=9", "bad", "speed=9"),
        ("TRANSCONV_FEATURES", "-box", "note", "features of the chip are switched"),
        ("TRANSCONV_TRUST", "never", "note", "no kernel's first result is compared"),
        ("TRANSCONV_CONFIG", "stages=2", "note", "the former name of TRANSCONV_SCHEDULE"),
        ("TRITON_CACH_DIR", "/x", "note", "did you mean TRITON_CACHE_DIR?"),
        ("TRANSCONV_TUNED", "0", "ok", "TRANSCONV_TUNED=0"),
        ("TRITON_INTERPRET", "1", "ok", "TRITON_INTERPRET=1"),
        ("TRANSCONV_COMMIT", "abc", "ok", "TRANSCONV_COMMIT=abc"),
    ],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, name: str, text: str, state: str, said: str) -> None:
    if not (name.startswith("TRITON") and state == "ok"):
        monkeypatch.setenv(name, text)
    assert said in str(only(installation.settings({name: text}), state, "setting"))


def test_no_variable() -> None:
    assert only(installation.settings({}), "ok", "settings").found.startswith("no TRANSCONV_*")


# -- caches ----------------------------------------------------------------------------------------


def looked_at(at: Path, strict: bool = True) -> Finding:
    return doctor.folder("cache", at, doctor.OURS, doctor.OWN, strict)


def test_a_cache_that_is_not_there_yet(cache: Path) -> None:
    assert looked_at(cache).state == "ok" and "not there yet" in looked_at(cache).found
    assert not cache.exists()


def test_a_cache_and_what_is_in_it(cache: Path) -> None:
    (cache / "verdicts-2").mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    (cache / "verdicts-2" / "a.json").write_text("x" * 2048)
    assert looked_at(cache).state == "ok" and "1 files, 2 KiB" in looked_at(cache).found
    assert size(3 << 30) == "3.0 GiB"


def test_a_cache_that_others_can_write_to(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    found = looked_at(cache)
    assert found.state == "bad" and "mode 0777; chmod 700 makes it yours alone" in found.found
    assert found.todo.startswith("set TRANSCONV_CACHE")
    assert looked_at(cache, strict=False).state == "note"


def test_a_cache_that_is_read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(doctor, "why_unwritable", lambda path: "Read-only file system")
    found = looked_at(cache)
    assert found.state == "bad" and "cannot be written to (Read-only file system)" in found.found


def test_a_cache_that_cannot_be_made_or_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    found = looked_at(tmp_path / "file" / "cache")
    assert found.state == "bad" and "cannot be" in found.found

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(doctor.knobs, "cache", homeless)
    assert "cannot be found (Could not determine home" in only(doctor.caches(), "bad", "cache").found


# -- the tuned table -------------------------------------------------------------------------------


def test_tuned_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    h200 = TARGETS["sm_90"]
    found = only(doctor.tuned(h200), "ok", "tuned").found
    assert re.match(r"[1-9]\d+ rows of the package's tuned_h200.csv, 0 rows of your cache", found)
    assert "tune FILE" in only(doctor.tuned(TARGETS["sm_80"]), "note", "tuned").todo
    assert "needs none" in only(doctor.tuned(TARGETS["interpreter"]), "ok", "tuned").found
    monkeypatch.setenv("TRANSCONV_TUNED", "0")
    assert "the estimate alone" in only(doctor.tuned(h200), "note", "tuned").found
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    monkeypatch.setenv("TRANSCONV_TUNED", str(tmp_path / "rows.csv"))
    assert "no row of tuned schedules" in only(doctor.tuned(h200), "bad", "tuned").found


def test_rows_of_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transconv.selection.tuning_db.triton_version", lambda: "9.9")
    assert "another version of Triton" in only(doctor.tuned(TARGETS["sm_90"]), "note", "tuned").found


# -- the chip --------------------------------------------------------------------------------------


@on_cpu
def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DRIVERS", ())
    assert "Triton's interpreter" in only(doctor.chip(), "note", "chip").found
    monkeypatch.setattr(doctor, "DRIVERS", (("/dev/null", "NVIDIA"),))
    found = only(doctor.chip(), "bad", "chip")
    assert "there is an NVIDIA device" in found.found and "install torch's build" in found.todo


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have torch report a device that is not there."""

    def pretend(major: int, minor: int) -> None:
        properties = SimpleNamespace(
            name="Test GPU",
            major=major,
            minor=minor,
            multi_processor_count=132,
            L2_cache_size=50 << 20,
            total_memory=80 << 30,
        )
        from transconv.target import records

        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "mem_get_info": lambda: (79 << 30, 80 << 30),
            "get_device_properties": lambda index: properties,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
        records._of_gpu.cache_clear()
        monkeypatch.setattr(records, "_of_gpu", records._of_gpu.__wrapped__)

    return pretend


def test_a_gpu(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(9, 0)
    chip, clock, features = doctor.chip()
    assert chip.state == "ok" and "capability 9.0, 79.0 GiB of 80.0 GiB free" in chip.found
    assert clock.state == "note" and "cannot be read" in clock.found
    assert features.state == "ok" and "box early mma wgmma" in features.found
    monkeypatch.setenv("TRANSCONV_FEATURES", "-wgmma")
    assert "switched by TRANSCONV_FEATURES: -wgmma" in list(doctor.chip())[2].found
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "although there is a GPU" in next(iter(doctor.chip())).found


def test_a_gpu_without_a_record(gpu: Callable[..., None]) -> None:
    gpu(7, 5)
    found = only(doctor.chip(), "bad", "chip")
    assert "target:sm_75" in found.found and "torch computes every call" in found.todo


@pytest.mark.parametrize(
    ("line", "state", "said"),
    [
        ("345, 1980, 700.00, 700.00", "ok", "345 of 1980 MHz, power limit 700 W of 700 W"),
        ("1980, 1980, 450.00, 700.00", "note", "power limit 450 W of 700 W: kernels are slower"),
        ("1980, 1980, [N/A], [N/A]", "ok", "the power limit cannot be read"),
        ("", "note", "cannot be read"),
        ("No devices were found", "note", "cannot be read"),
    ],
)
def test_clocks(line: str, state: str, said: str) -> None:
    assert doctor.clocks(line).state == state and said in doctor.clocks(line).found


# -- the self-test ---------------------------------------------------------------------------------


@on_cpu
@pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
def test_a_kernel_that_is_wrong_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.mapped

    def off_by_one(where: str) -> tuple[Any, Any]:
        got, wanted = right(where)
        return got.index_fill(0, torch.tensor(0), -7), wanted

    def refused(where: str) -> tuple[Any, Any]:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor, "mapped", off_by_one)
    monkeypatch.setattr(doctor, "convolution", refused)
    first, second = doctor.selftest("cpu")
    assert first.state == "bad" and "no kernel image" in first.found
    assert second.state == "bad" and "32 of 512 elements are wrong" in second.found


def test_a_check_that_fails_itself() -> None:
    def failing() -> list[Finding]:
        raise KeyError("surprise")

    assert "KeyError: 'surprise'" in only(guarded("chip", failing), "bad", "chip").found
