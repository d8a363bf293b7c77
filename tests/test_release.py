"""The source distribution and the wheel: built, looked into, and the wheel installed in an empty
environment and used from another folder. Nothing is downloaded.

``make release`` has this look at what lies in ``dist``; otherwise both are built here, from a copy.
Links of the README to other files of the repository do not work on a package index, which shows the
README alone: that is known.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests.installed import build, copy_sources, environment, ran
from tests.shown import ROOT
from transconv.support import __version__

STEM = f"transconv-{__version__}"
DATA = {
    "py.typed",
    "data/tuned_h200.csv",
    "data/resnet50.txt",
    "verify/fuzz/corpus/generated.txt",
    "verify/fuzz/corpus/compiled.txt",
}
TEMPLATES = (".html", ".css", ".js", ".j2", ".jinja")

FIRST = """
import runpy, sys
sys.argv[1:] = ["doctor"]
try:
    runpy.run_module("transconv", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert ended.code == 0, ended.code
import torch, transconv
from transconv.cli.run import NETWORK
transconv.config.fallback = "silent"
x, w = torch.randn(2, 8, 14, 14), torch.randn(16, 8, 3, 3)
y = transconv.conv2d(x, w, padding=1)
torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, padding=1), rtol=1e-3, atol=1e-3)
print(transconv.__file__, NETWORK.is_file())
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both distributions."""
    if given := os.environ.get("TRANSCONV_DIST"):
        return ROOT / given
    source = tmp_path_factory.mktemp("source")
    copy_sources(source)
    for name in ("tests", "bench"):  # what must stay outside
        (source / name).mkdir()
        shutil.copy(ROOT / "tests" / "support" / "test_errors.py", source / name)
    templates = source / "transconv" / "cli" / "templates" / "pages"  # what must come inside
    templates.mkdir(parents=True)
    for kind in TEMPLATES:
        (templates / f"page{kind}").write_text("x")
    return build(source)


def names_of(dist: Path) -> tuple[list[str], list[str]]:
    """What is in the wheel, and in the source distribution."""
    with tarfile.open(dist / f"{STEM}.tar.gz") as source:
        inside = [m.name.removeprefix(f"{STEM}/") for m in source.getmembers() if m.isfile()]
    return zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl").namelist(), inside


@pytest.mark.slow
def test_both_hold_the_package_and_nothing_else(dist: Path) -> None:
    sources = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "transconv").rglob("*")
        if p.suffix in (".py", ".csv", ".txt", *TEMPLATES)
        and p.is_file()
        and p.parent.suffix != ".dist-info"
    }  # the entry of a checkout; a wheel has its own
    for names in names_of(dist):
        assert sources <= {*names}, sources - {*names}
        assert {f"transconv/{name}" for name in DATA} <= {*names}
        outside = r"(^|/)(tests?|bench|docs|results|golden)/|\.pyc$|(^|/)test_"
        assert not [n for n in names if re.search(outside, n)]
        if "TRANSCONV_DIST" not in os.environ:
            assert {f"transconv/cli/templates/pages/page{k}" for k in TEMPLATES} <= {*names}
    wheel, source = names_of(dist)
    assert not [n for n in wheel if "data/dynamo" in n], "a wheel has the entry of its metadata alone"
    assert {n.split("/")[0] for n in wheel} == {"transconv", f"{STEM}.dist-info"}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= {*source}
    for built in dist.iterdir():
        assert built.stat().st_size < 3 << 20, f"{built.name} is larger than a package of text should be"


@pytest.mark.slow
def test_the_wheel_is_for_any_machine_and_its_metadata_are_valid(dist: Path) -> None:
    wheel = zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl")
    tags = wheel.read(f"{STEM}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: true" in tags and "Tag: py3-none-any" in tags
    told = Metadata.from_email(wheel.read(f"{STEM}.dist-info/METADATA"), validate=True)
    assert told.name == "transconv" and str(told.version) == __version__
    assert told.license_expression == "Apache-2.0" and told.summary and told.keywords
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert [name for name in told.provides_extra or () if f"| `{name}` |" not in page] == []
    plain = {r.name for r in told.requires_dist or () if r.marker is None or "extra" not in str(r.marker)}
    assert plain == {"jinja2", "numpy", "sympy", "torch", "tqdm", "triton"}
    assert any(c.startswith("Programming Language :: Python :: 3") for c in told.classifiers or ())
    assert told.description_content_type == "text/markdown"
    rendered(told.description or "")


def rendered(description: str) -> None:
    """A package index renders the README: every fence is closed, headings are headings."""
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(description, extensions=["fenced_code", "tables"])
    assert html.startswith("<h1>transconv</h1>") and "```" not in html
    assert html.count("<pre>") == len(re.findall(r"^```\w+$", description, re.MULTILINE))


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    """Installed without its dependencies, which are then lent to it, and used from another folder."""
    here = tmp_path / "environment"
    python = environment(dist / f"{STEM}-py3-none-any.whl", here)
    site = here / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shown = ran(
        here / "bin" / "transconv",
        "show",
        "mb2ic16ih14oc32oh14kh3ph1",
        "--target",
        "sm_90",
        "--stage",
        "emit",
        cwd=tmp_path,
    )
    assert "@triton.jit" in shown and "tl.store" in shown

    # As `transconv doctor`, and a first call in the same process.
    said = ran(python, "-c", FIRST, cwd=tmp_path)
    assert f"ok   transconv {__version__} in {site}/transconv" in said
    # A second test is not begun where the first took long.
    assert "ok   self-test" in said and said.count("self-test") == 2 and "works here" in said, said
    assert said.splitlines()[-1] == f"{site}/transconv/__init__.py True"


def test_a_published_release_names_its_repository(tmp_path: Path) -> None:
    """The workflow adds the addresses of wherever the tag is, and describes and attests what it builds."""
    toml, yaml = pytest.importorskip("tomllib"), pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))["jobs"]
    steps = jobs["build"]["steps"]
    at = next(i for i, step in enumerate(steps) if "[project.urls]" in step.get("run", ""))
    assert steps[at + 1]["run"] == "make release"
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = re.sub(r"\$\{\{ github\.(\w+).*? \}\}", r"https://\1", steps[at]["run"])
    ran("bash", "-e", "-c", script, cwd=tmp_path)
    told = toml.loads((tmp_path / "pyproject.toml").read_text("utf-8"))
    assert {*told["project"]["urls"]} == {"Documentation", "Source", "Issues", "Changelog"}
    assert told["project"]["name"] == "transconv"
    used = " ".join(step.get("uses", "") for step in steps)
    assert all(word in used for word in ("sbom-action", "attest-build-provenance", "attest-sbom"))


def test_the_change_log_has_a_section_of_this_version() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == __version__


def test_the_demo_has_the_network_of_the_benchmarks() -> None:
    """A copy, because an installed package has no bench/."""
    ours, theirs = ROOT / "transconv/data/resnet50.txt", ROOT / "bench/problems/resnet50.txt"
    assert ours.read_text() == theirs.read_text()
