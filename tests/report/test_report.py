"""The page: what it holds, what it weighs, what is escaped, and that it is the same every time."""

from __future__ import annotations

import csv
import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape

from transconv import report as room
from transconv.__main__ import main
from transconv.passes import stages
from transconv.report import LARGEST

DENSE = ("mb32ic64ih56oc128oh28kh3sh2ph1", "dt=bf16", "tag=nhwc")
ROLES = (
    "mb:8 oh:4 ow:4 oc:128 ic:64 | mma | a=box b=box | c=box swap=1 programs=98 stages=6 warps=4 via=gluon"
)
PLAIN = "mb.oh.ow:32 oc:32 ic:16 | mma | stages=2 warps=4"
SMALL = "mb2ic16ih9oc32oh5kh3sh2ph1"
VOID = {"meta", "link", "br", "input", "hr"}


class Structure(HTMLParser):
    """The elements of a page: whether they nest, their ids and their links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.focusable = 0
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.focusable += "tabindex" in found
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if tag == "a" else []
        assert "src" not in found
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def made(tmp_path: Path, *words: str, name: str = "page.html") -> str:
    path = tmp_path / name
    assert main(["report", *words, "-o", str(path)]) == 0
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(
        tmp_path_factory.mktemp("report"),
        *DENSE,
        "--target",
        "sm_90",
        "--no-compile",
        "--prop",
        "fwd",
        "--schedule",
        ROLES,
    )


def visible(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_it_has_every_part_and_nests(dense: str) -> None:
    found = Structure(dense)
    assert len(set(found.ids)) == len(found.ids)
    assert {link[1:] for link in found.links} <= {*found.ids}
    assert all(link.startswith("#") for link in found.links)
    assert found.tags.count("h3") == 1 and found.tags.count("h1") == 1
    for part in ("views", "schedule", "grid", "stages", "code", "time"):
        assert f"s1-1-{part}" in found.ids
    assert found.links[0] == "#content", "the first stop of the keyboard skips to the content"
    assert re.search(r"<pre(?![^>]*tabindex)", dense) is None, "a block that scrolls takes the focus"


def test_nothing_is_asked_of_a_network(dense: str) -> None:
    rest = re.sub(r"<pre.*?</pre>", "", dense, flags=re.DOTALL)
    assert "default-src 'none'" in rest
    assert not re.search(r"https?://|@import|url\((?!#)", rest)


def test_it_tells_schedule_refusals_and_requirements(dense: str) -> None:
    said = visible(dense)
    assert ROLES in said
    assert re.search(r"\d+ legal, \d+ refused, each with the reason", said)
    assert "warps=32" in said and "registers per thread" in said
    assert "begin at multiples of 16 bytes" in said
    assert re.search(r"\d+ of 232448 bytes of shared memory", said)


def test_every_stage_is_there_with_what_it_changed(dense: str) -> None:
    first = dense[dense.index("s1-1-stages") : dense.index("s1-1-code")]
    assert re.findall(r"<b>(\w+)</b>", first) == [s.name for s in stages()]
    assert "unchanged" in first and 'class="came"' in first and 'class="gone"' in first
    added = re.search(r"gridwise</b>.*?\+(\d+)</span>", first)
    assert added and int(added.group(1)) == re.split("<b>(?=gridwise)|<b>(?=blockwise)", first)[1].count(
        'class="came"'
    )


def test_roles_have_a_timeline(dense: str) -> None:
    assert "Roles and ring slots of program 0" in dense
    rows = re.findall(r'class="row"[^>]*>([^<]+)<', dense)
    assert {"matrix unit", "consumer", "producer"} <= {*rows}
    assert sum("_ring[" in r for r in rows) >= 6


def test_it_is_small_and_the_same_every_time(dense: str, tmp_path: Path) -> None:
    assert len(dense.encode()) < LARGEST == 3_000_000
    again = made(
        tmp_path, *DENSE, "--target", "sm_90", "--no-compile", "--prop", "fwd", "--schedule", ROLES
    )
    assert again == dense


@pytest.mark.slow
def test_long_texts_are_cut_and_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGEST", 50_000), ("CODE", 12_000)):
        monkeypatch.setitem(room.page.__globals__, name, value)
    text = made(tmp_path, SMALL, "--target", "sm_90", "--no-compile", "--prop", "fwd", "--schedule", PLAIN)
    said = visible(text)
    assert re.search(r"\d+ of \d+ lines are left out, for the size of the page", said)
    assert "Stages not shown, for the size of the page: fwd" in said


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<b>x</script><script>alert(1)</script>&lt;'onload="
    text = made(
        tmp_path,
        f'{SMALL}n"{name}"',
        "--target",
        "sm_90",
        "--no-compile",
        "--prop",
        "fwd",
        "--schedule",
        PLAIN,
    )
    found = Structure(text)
    assert found.tags.count("script") == 1 and not {"b>x", "alert"} & {*found.tags}
    assert str(escape(name)) in text and name not in text and "<b>x" not in text


def test_a_computation_gets_a_page_too(tmp_path: Path) -> None:
    text = made(tmp_path, "bench/computes/max_pool.txt", "--target", "sm_90", "--no-compile")
    said = visible(text)
    assert "h = oh*2 + kh - 1" in said and "Where the mask is false -inf is read" in said
    assert "h mod 2 = 1, w mod 2 = 0" in said
    norm = (
        "compute norm\n axes n=64 | k=300\n read x = X[n, k]\n let s = sum(x; k)\n"
        " let d = x - s / 300\n let v = sum(d*d; k)\n store Y[n, k] = d * rsqrt(v)"
    )
    assert "stores <code>Y</code>" in made(tmp_path, norm, "--target", "sm_90", "--no-compile")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "words",
    [
        ("mb0ic16ih9oc32oh9kh3ph1", "--schedule", PLAIN),
        ("mb1ic16iw9oc32ow5kw3sw2pw1", "--prop", "bwd_d"),
        ("compute one\n axes n=1\n read x = X[0]\n store Y[n] = 2*x + 1",),
        (
            "compute rows\n tensor I i64 [3]\n tensor X f32 [4, 2]\n axes n=3 k=2\n read i = I[n]\n"
            " read x = X[i, k] else -1\n store Y[n, k] = x",
        ),
    ],
)
def test_small_and_empty_ones_have_a_page(tmp_path: Path, words: tuple[str, ...]) -> None:
    Structure(made(tmp_path, *words, "--target", "gfx942", "--no-compile"))


def test_machine_code_is_marked_and_counted(tmp_path: Path) -> None:
    said = made(
        tmp_path, SMALL, "dt=f16", "tag=nhwc", "--target", "sm_80", "--prop", "fwd", "--schedule", PLAIN
    )
    assert "<h5>SASS</h5>" in said and "PTX<span" in said
    marked = re.findall(r'class="l matrix">([^<]*)<', said)
    assert any("HMMA" in line for line in marked) and any("mma.sync" in line for line in marked)
    assert re.search(r"registers</th>.*?fwd</th><td class=\"n\">\d+</td>", said, re.DOTALL)


def rows(path: Path, *changed: dict[str, str]) -> Path:
    plain = {
        "problem": SMALL + " dt=f16 tag=nhwc",
        "prop": "fwd",
        "ours_us": "5",
        "cudnn_cl_us": "7.5",
        "cudnn_nchw_us": "10",
        "verdict": "right",
        "device": "NVIDIA_H200",
        "epilogue": "",
        "config": PLAIN,
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, plain)
        writer.writeheader()
        writer.writerows({**plain, **more} for more in changed)
    return path


@pytest.mark.slow
def test_a_table_of_times_is_shown_beside_the_estimate(tmp_path: Path) -> None:
    table = rows(
        tmp_path / "times.csv",
        {},
        {"problem": "mb1ic16ih8oc16oh8kh3ph1 dt=f16", "ours_us": "9"},
        {"problem": "mb1ic16ih4oc16oh4kh3ph1 dt=f16"},
    )
    text = made(tmp_path, str(table), "--target", "sm_90", "--no-compile", "--limit", "2")
    said = visible(text)
    assert "The first 2 problems are shown; 1 more are left out (--limit)." in said
    assert "cuDNN, channels last" in said and "1.50" in said and "2.00" in said
    assert "mb.oh.ow:32 oc:32 ic:16 | mma" in said, "the schedule that was measured"
    assert text.count('class="point ours"') == 2 and "<h2>Index</h2>" in text
    other = made(tmp_path, str(table), "--target", "gfx942", "--no-compile", "--limit", "1")
    assert "are of NVIDIA_H200, not of gfx942" in visible(other) and "point ours" not in other
    assert one_page_of_two(tmp_path, table)
    one = made(
        tmp_path,
        SMALL,
        "dt=f16",
        "tag=nhwc",
        "--times",
        str(table),
        "--target",
        "sm_90",
        "--no-compile",
        "--prop",
        "fwd",
    )
    assert one.count('class="point ours"') == 1


def one_page_of_two(tmp_path: Path, table: Path) -> bool:
    """Of a page that would be too large, the last problems are left out."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LARGEST", 60_000), ("CODE", 12_000)):
            patch.setitem(room.page.__globals__, name, value)
        text = made(tmp_path, str(table), "--target", "sm_90", "--no-compile", "--limit", "2")
    return "1 problems are left out, for the size of the page." in text and len(text.encode()) <= 60_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mb1ic2", "-o", "{}"], "ProblemError"),
        (["nothing/there.txt", "-o", "{}"], "no such file: nothing/there.txt"),
        ([SMALL, "-o", "{}", "--schedule", "oc:3 | mma"], "ScheduleError"),
        ([SMALL, "-o", "{}", "--target", "sm_1"], "target 'sm_1' is unknown; expected one of"),
        ([SMALL, "-o", "/proc/x/y.html"], "cannot be written"),
        ([SMALL], "required: -o/--out"),
        ([SMALL, "-o", "{}", "--times", "nowhere.csv"], "'nowhere.csv' is no file; expected a CSV file"),
        ([SMALL, "-o", "{}", "--limit", "0"], "no whole number from 1 to 50"),
        (["{table}", "-o", "{}"], "has no column 'problem'; expected a CSV file of `bench time`"),
        (
            ["bench/results/h200_layers_bf16_nhwc.csv", "-o", "{}", "--dtype", "f16"],
            "the rows have their own",
        ),
        (["bench/computes/matmul.txt", "-o", "{}", "--dtype", "f16"], "is given as text"),
    ],
)
def test_bad_words_are_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    out, table = tmp_path / "page.html", tmp_path / "table.csv"
    out.write_text("before")
    table.write_text("a,b\n1,2\n")
    try:
        code = main(["report", "--no-compile", *(w.format(out, table=table) for w in words)])
    except SystemExit as left:
        code = int(left.code or 0)
    told = capsys.readouterr().err
    assert code == 2 and said in told and told.count("\n") == 1, told
    assert out.read_text() == "before"
    assert {p.name for p in tmp_path.iterdir()} == {"page.html", "table.csv"}


def test_only_the_command_line_and_graphs_know_pages() -> None:
    package = Path(room.__file__).parent.parent
    users = {
        p.relative_to(package).parts[0]
        for p in package.rglob("*.py")
        if "transconv.report" in p.read_text(encoding="utf-8")
    }
    assert users == {"report", "cli", "graph"}
