"""Pages of tables: cells are escaped, numbers stand to the right, nothing is fetched."""

from __future__ import annotations

from transconv.report import PrintedTable, tables_page


def test_cells() -> None:
    page = tables_page(
        "a <model>",
        [
            PrintedTable("kernels", ("name", "us"), (("<b>", 12.34567), ("c", None)), ("two of them",)),
            PrintedTable("empty", ("x",), ()),
        ],
        ["said"],
    )
    assert '<td>&lt;b&gt;</td><td class="n">12.35</td>' in page and "a &lt;model&gt;" in page
    assert '<td>c</td><td class="n">-</td>' in page and "<p>two of them</p>" in page
    assert page.count("<table>") == 1 and "http" not in page.replace("http-equiv", "").replace(
        "http://www.w3.org", ""
    )
