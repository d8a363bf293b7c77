"""The newcomer (newcomer.py) does all that a page says, and tells what did not go as the page says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs import newcomer

PAGE = """
```python
# shown.py
print("one\\ntwo")
```
<!-- shown: "two" -->
```text
$ python shown.py
{shown}
```
<!-- shown: "no" -->
```text
$ python -c "raise SystemExit('no {refused}')"
no good
```
```sh
N="3"
test $N = 3  # goes on \\
    # here
test {number} = $N
make test
```
```python
assert {holds}
```
```text
no command
```
"""


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> newcomer.Visit:
    """At a page in a folder of its own, with this process's Python."""
    monkeypatch.setattr(newcomer, "ROOT", tmp_path)
    for name in ("bin", "folder", "beside"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "beside" / "bench").mkdir()
    paths = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return newcomer.Visit(tmp_path / "page.md", tmp_path / "folder", tmp_path / "beside", paths, True)


def test_all_steps_of_a_page(visit: newcomer.Visit) -> None:
    visit.page.write_text(PAGE.format(shown="two", refused="good", number=3, holds=True), "utf-8")
    visit.typed()
    assert visit.failures == [] and visit.passed == 5
    assert [line for line, _ in visit.left_out] == ["make test"]
    assert (visit.folder / "shown.py").is_file() and (visit.folder / "bench").is_dir()


def test_what_does_not_go_as_the_page_says(visit: newcomer.Visit) -> None:
    visit.page.write_text(PAGE.format(shown="three", refused="use", number=4, holds=False), "utf-8")
    visit.typed()
    assert visit.passed == 1 and visit.tried == 5
    shown, refused, ended, raised = visit.failures
    assert "it prints" in refused and "no use" in refused
    assert "it prints" in shown and "three" in shown
    assert "test 4 = $N" in ended and "it ends with 1" in ended
    assert "AssertionError" in raised


def test_every_page_of_the_documentation_is_visited() -> None:
    names = [page.relative_to(newcomer.ROOT).as_posix() for page in newcomer.PAGES]
    assert {"README.md", "docs/README.md", "docs/distributed.md", "docs/how_to_add/pass.md"} <= {*names}
    steps = [step for page in newcomer.PAGES for step in newcomer.steps(page)]
    assert len(steps) > 250 and sum(bool(s.left_out) for s in steps) < 40
    assert {s.left_out for s in steps} - {""} == {why for _, why in newcomer.LEFT_OUT}


def test_settings_are_no_commands() -> None:
    assert all(map(newcomer.SETTING.match, ('P="mb8 dt=bf16"', "export A=0", "A=0  # zero")))
    assert not any(map(newcomer.SETTING.match, ("A=1 python x.py", "transconv show P=3")))
