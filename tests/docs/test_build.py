"""The documentation as a site: built with warnings as errors, and nothing in it leads nowhere or is
fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import griffe
import pytest

from docs.site import rooms
from docs.site.exports import Exports
from tests.docs.names import ROOMS, exported, room
from tests.report.browser import browser, why_not

ROOT = Path(__file__).parents[2]
# What a browser fetches by itself, by tag and attribute; a link that a reader follows is another thing.
FETCHED = {
    ("link", "href"),
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "srcset"),
    ("use", "href"),
    ("video", "src"),
}


class Seen(HTMLParser):
    """The anchors of a page, the links on it, and what it makes a browser fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        self.fetched += [given[key] for of, key in FETCHED if of == tag and key in given]


@dataclass(frozen=True)
class Site:
    folder: Path
    pages: dict[Path, Seen]

    def dead(self, page: Path, link: str) -> bool:
        target, anchor = urldefrag(unquote(link))
        path = Path(os.path.normpath(page.parent / target)) if target else page
        if not (self.folder / path).exists():
            return True
        return bool(anchor) and path in self.pages and anchor not in self.pages[path].anchors


def built(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import gc; gc.disable(); from mkdocs.__main__ import cli; cli()"  # it has time, not memory
    return subprocess.run(
        [sys.executable, "-c", code, "build", "--strict", "--site-dir", str(folder), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    paths = [p for p in sorted(folder.rglob("*.html")) if p.name != "404.html"]
    return Site(folder, {p.relative_to(folder): Seen(p.read_text("utf-8")) for p in paths})


@pytest.mark.slow
def test_no_link_leads_nowhere(site: Site) -> None:
    """Of pages and of the reference, to pages, files and anchors."""
    links = [
        (page, link)
        for page, seen in site.pages.items()
        for link in seen.links + seen.fetched
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(links) > 1000
    assert [f"{page}: {link}" for page, link in links if site.dead(page, link)] == []


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Site) -> None:
    """No font, no script, no picture: the site is read without a network."""
    away = [
        f"{page}: {link}"
        for page, seen in site.pages.items()
        for link in seen.fetched
        if re.match(r"(https?:)?//", link)
    ]
    assert not away
    styles = [*site.folder.rglob("*.css")]
    assert styles and not [
        p for p in styles if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", p.read_text("utf-8"))
    ]


TABS = ("Home", "Speed up a model", "Write an operation", "Write a kernel", "Read a kernel", "Measure")


@pytest.mark.slow
def test_tabs_are_what_a_reader_wants(site: Site) -> None:
    """On every page; Home has no list of neighbours beside them."""
    home = (site.folder / "index.html").read_text("utf-8")
    tabs = re.search(r'<ul class="md-tabs__list">(.*?)</ul>', home, re.DOTALL)
    assert tabs is not None
    said = [re.sub(r"<[^>]+>", "", item).strip() for item in tabs[1].split("</li>")]
    assert tuple(said[: len(TABS)]) == TABS
    assert re.search(r'md-sidebar--primary"[^>]*\bhidden\b', home)
    assert not re.search(
        r'md-sidebar--primary"[^>]*\bhidden\b', (site.folder / "results.html").read_text("utf-8")
    )


def test_the_home_page_says_what_the_readme_says() -> None:
    """What it is, how to install it, the one line, and each kind of model with its worst case."""
    readme, home = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/README.md"))
    first = readme[: readme.index("<!-- end:models -->")]
    program = first.index("```python")
    for part in (first[:program], first[program : first.index("<!-- table")]):
        assert " ".join(part.replace("](docs/", "](").split()) in " ".join(home.split())
    rows = [line for line in first.splitlines() if line.startswith("| ")]
    assert len(rows) >= 5 and "worst case" in rows[0] and set(rows) <= set(home.splitlines())
    assert "](images/report_roles.png)](report.md)" in home, "the picture of a report"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_search_works_from_a_folder(site: Site) -> None:
    """Browsers start no workers of file:// pages."""
    with browser() as driver:
        driver.get((site.folder / "index.html").as_uri())
        driver.find_element("css selector", "input.md-search__input").send_keys("loggers")
        until = time.monotonic() + 30
        found: list[str] = []
        while not found and time.monotonic() < until:
            time.sleep(0.2)
            found = [
                a.get_attribute("href").rpartition("/")[2]
                for a in driver.find_elements("css selector", ".md-search-result__link")
            ]
        assert "settings.html#loggers" in found and not driver.get_log("browser")


@pytest.mark.slow
def test_what_search_needs_is_there(site: Site) -> None:
    """Where there is no browser to try it with."""
    assert (site.folder / "search" / "search_index.js").read_text("utf-8").startswith("var __index = {")
    shims = [link for link in site.pages[Path("index.html")].fetched if link.endswith("iframe-worker.js")]
    assert shims == ["javascripts/iframe-worker.js"] and (site.folder / shims[0]).is_file()


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Site) -> None:
    anchors = set().union(
        *(seen.anchors for page, seen in site.pages.items() if page.parts[0] == "reference")
    )
    elsewhere = {
        "transconv": {
            "config",
            "distributed",
            "functional",
            "graph",
            "kernel",
            "nn",
            "quantized",
            "__version__",
        },
        "transconv.compute": {"library"},
        "transconv.support": {"__version__"},
    }
    missing = [
        f"{name}.{public}"
        for name in ROOMS
        for public in exported(room(name))
        if public not in elsewhere.get(name, ())
        and not anchors & {f"{name}.{public}", home(getattr(room(name), public), public)}
    ]
    assert not missing


def test_imports_under_their_own_names_are_exports() -> None:
    """What the page of a room shows, without the site."""
    text = "from a.b import f as f\nfrom a.b import g, h as k, _p as _p\n\n\ndef own():\n    pass\n"
    for body, names in ((text, {"f", "_p", "own"}), ("from a.b import g\n", None)):
        found = griffe.visit("a", Path("a/__init__.py"), body, extensions=griffe.load_extensions(Exports))
        assert (None if found.exports is None else {*found.exports}) == names


def home(value: object, name: str) -> str:
    """Where a thing is defined: a room may have a file of the same name."""
    if isinstance(value, ModuleType):
        return value.__name__
    return f"{getattr(value, '__module__', '')}.{name}"


@pytest.mark.slow
def test_the_rooms_are_drawn_as_they_are() -> None:
    """``python -m docs.site.rooms`` draws them anew."""
    for mode in rooms.INK:
        assert (rooms.FOLDER / f"rooms_{mode}.svg").read_text("utf-8") == rooms.svg(mode)
    assert {"ir", "passes", "conv", "torch_ops"} <= rooms.rooms().keys()


def test_a_dead_link_is_an_error(tmp_path: Path) -> None:
    """Of a page and of an anchor: the settings do that, so one small site shows it."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[x](b.md#no) and [y](nowhere.md)\n")
    (tmp_path / "docs" / "b.md").write_text("# B\n")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    validation = settings[settings.index("validation:") : settings.index("nav:\n  - Home")]
    path = tmp_path / "mkdocs.yml"
    path.write_text(
        f"site_name: t\ntheme: null\nplugins: []\n{validation}".replace(
            "theme: null", "theme: {name: mkdocs}"
        )
    )
    done = built(tmp_path / "out", "--config-file", str(path))
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr and "'b.md#no'" in done.stderr
