"""What MkDocs does beside its own: pages that lie outside of docs/, links that lead out of it, notebooks.

In: the files of docs/. Out: the same, and CONTRIBUTING.md, SECURITY.md and CHANGELOG.md as pages,
notebooks as pages, and every other file of the repository that a page links to as a file of the site.
"""

from __future__ import annotations

import logging
import os.path
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TOP = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
HOME = "README.md"  # of docs/; the repository's README has the same place in the site
LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.transconv")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made, or that lie outside of docs/."""
    for name in TOP:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        uri = path.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, uri, content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of docs/ lead to a copy of the file, which becomes a part of the site."""
    uri = page.file.src_uri
    if uri == HOME:  # it has tabs above, and no neighbours
        page.meta["hide"] = ["navigation"]
    folder = ROOT if uri in TOP else (DOCS / uri).parent

    def inside(match: re.Match[str]) -> str:
        head, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(folder / target))
        if not path.exists():
            return match[0]  # MkDocs warns, or it is one of the pages that were made
        found = place(path, files, config)
        if found is None:  # a folder: named, but nowhere to go
            return match[1].strip("![(").removesuffix("]")
        if found == HOME and path == ROOT / "README.md":
            anchor = ""
        return f"{head}{os.path.relpath(found, Path(uri).parent)}{anchor})"

    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if p.startswith("```") else LINK.sub(inside, p) for p in pieces)


def place(path: Path, files: Files, config: MkDocsConfig) -> str | None:
    """Where a file of the repository lies in the site; those outside of docs/ are added to it."""
    if path.is_relative_to(DOCS):
        uri = path.relative_to(DOCS).as_posix()
        return uri if path.suffix != ".ipynb" else uri.removesuffix(".ipynb") + ".md"
    if path == ROOT / "README.md":
        return HOME
    uri = path.relative_to(ROOT).as_posix()
    if uri in TOP:
        return uri
    if path.is_dir():
        return None
    # Beside its name a page of the repository would be rendered: it is shown as text.
    uri = f"files/{uri}" + (".txt" if path.suffix == ".md" else "")
    if files.get_file_from_path(uri) is None:
        files.append(
            File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED)
        )
    return uri


def page_of(path: Path) -> str:
    """A notebook in Markdown: its texts, its programs, and what they printed when they were executed."""
    parts = [f"*This page is the notebook `docs/notebooks/{path.name}`.*"]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            if text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    head = next(i for i, part in enumerate(parts) if part.startswith("# "))
    parts.insert(0, parts.pop(head))
    return "\n\n".join(parts) + "\n"
