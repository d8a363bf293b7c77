"""A wrong result as a report that can be sent: the smallest inputs, versions, the kernels, both results.

A function is computed by torch, in f64, and by kernels of ours, which nothing else checks then. Where the
last is wrong, the sizes of the inputs are halved as long as it stays wrong."""

from __future__ import annotations

import io
import platform
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transconv.calls.settings import settings
from transconv.compute import parse
from transconv.graph.graph_report import Report, found
from transconv.graph.verification.agreement import TIMES, near
from transconv.runtime import build_compute, cache_bundle
from transconv.support import TransconvError, knobs
from transconv.torch_ops.calls.lower_call import target_of

Tensor = torch.Tensor
Call = tuple[Any, ...]
SECONDS = 120.0  # of making inputs smaller
SHOWN = 64  # elements of a tensor that are printed


@dataclass(frozen=True, slots=True)
class WrongResult:
    """A function that is wrong for the last of some calls. ``results``: of it, ours and torch's; ``why``:
    in what they differ; ``kernels``: the texts of computations and their kernels."""

    calls: Sequence[Call]
    ours: Sequence[Any]
    torchs: Sequence[Any]
    why: str
    kernels: Sequence[str]


def wrong_result(
    function: Callable[..., Any], calls: Sequence[Call], dynamic: bool | None = None
) -> WrongResult | None:
    """What is wrong with a function's last call, with the smallest inputs that are found; None where ours
    is torch's. ``dynamic``: as torch.compile takes it."""
    first = _tried(function, calls, dynamic)
    if first is None:
        return None
    ends = time.monotonic() + SECONDS
    smaller = True
    while smaller and time.monotonic() < ends:
        smaller = False
        for last in _halved(first.calls[-1]):
            try:
                made = _tried(function, [*first.calls[:-1], last], dynamic)
            except Exception:  # torch takes no such sizes
                continue
            if made is not None:
                first, smaller = made, True
                break
            if time.monotonic() > ends:
                break
    return first


def _tried(
    function: Callable[..., Any], calls: Sequence[Call], dynamic: bool | None
) -> WrongResult | None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend="transconv", dynamic=dynamic)
    with torch.no_grad():
        torchs = _several(function(*_copied(calls[-1])))
        with _unchecked():
            for call in calls:
                ours = _several(compiled(*_copied(call)))
        why = next(
            (
                f"result {i}: {said}"
                for i, (a, b) in enumerate(zip(ours, torchs, strict=True))
                if isinstance(b, Tensor) and (said := _apart(function, calls[-1], i, a, b))
            ),
            "",
        )
    if not why:
        return None
    graphs = Report(tuple(g for made in found(compiled) for g in made.graphs)).graphs
    texts = [k.text for g in graphs for k in g.kernels]
    return WrongResult(calls, ours, torchs, why, [_with_kernel(t, torchs) for t in texts])


@contextmanager
def _unchecked() -> Iterator[None]:
    """Nothing replaces a result of ours, and none is torch's unseen, or while kernels are compiled."""
    before, trust, fallback = settings.cpu, knobs.given(knobs.trust.name), settings.fallback
    knobs.adopt({knobs.trust.name: "never"})
    settings.cpu, settings.fallback = "interpret", "warn"
    try:
        with settings.waiting():
            yield
    finally:
        settings.cpu, settings.fallback = before, fallback
        knobs.adopt({knobs.trust.name: trust.get(knobs.trust.name, "")})


def _apart(function: Callable[..., Any], call: Call, place: int, ours: Any, torchs: Tensor) -> str:
    """In what a result is not torch's: its error is far above that of torch's own, against f64."""
    if not isinstance(ours, Tensor) or ours.shape != torchs.shape or ours.dtype is not torchs.dtype:
        return "it has another shape or type than torch's"
    eps = torch.finfo(torchs.dtype).eps if torchs.is_floating_point() else 0.0
    if near(ours, torchs, max(eps, 2.0**-10 if torchs.dtype is torch.float32 else 0.0)):
        return ""
    exact = torchs
    if torchs.is_floating_point():
        try:
            exact = _several(function(*map(_wide, _copied(call))))[place]
        except Exception:  # it knows no f64
            exact = torchs.double()
    one, other = (
        torch.nan_to_num((x.double() - exact.double()).abs(), float("inf")) for x in (ours, torchs)
    )
    if torchs.is_floating_point() and float(one.max()) <= TIMES * float(other.max()):
        return ""
    return (
        f"the largest error is {float(one.max()):.4g}, torch's is {float(other.max()):.4g}, in "
        f"{int((ours != torchs).sum())} of {ours.numel()} elements that differ"
    )


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _several(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _copied(call: Call) -> Call:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in call)


def _halved(call: Call) -> Iterator[Call]:
    """The same call with each of its sizes cut in half, everywhere that it stands; then less by one."""
    sizes = sorted({n for x in call if isinstance(x, Tensor) for n in x.shape if n > 1}, reverse=True)
    for n, to in [(n, n // 2) for n in sizes] + [(n, n - 1) for n in sizes]:
        yield tuple(
            _cut(x, n, to) if isinstance(x, Tensor) else to if type(x) is int and x == n else x
            for x in call
        )


def _cut(x: Tensor, n: int, to: int) -> Tensor:
    for d, size in enumerate(x.shape):
        if size == n:
            x = x.narrow(d, 0, to)
    return x.clone()


# -- pages ------------------------------------------------------------------------------------------


def _with_kernel(text: str, results: Sequence[Any]) -> str:
    """A computation, and its kernel."""
    device = next((t.device for t in results if isinstance(t, Tensor)), torch.device("cpu"))
    try:
        made = build_compute(parse(text), target_of(device))
        return f"{text}\n\n# schedule: {made.schedule}\n{made.source}"
    except TransconvError as error:
        return f"{text}\n\n# no kernel: {error}"


def page(wrong: WrongResult, function: str) -> str:
    """The report, in Markdown. ``function``: its text."""
    calls = "\n\n".join(f"Call {i}:\n\n{_shown(call)}" for i, call in enumerate(wrong.calls, 1))
    kernels = "\n\n".join(f"```text\n{k}\n```" for k in wrong.kernels)
    return (
        f"# A wrong result of transconv\n\n{wrong.why}.\n\n## The function\n\n"
        f"```python\n{function}\n```\n\n{calls}\n\n## The results of the last call\n\n"
        f"Of transconv:\n\n{_shown(wrong.ours)}\n\nOf torch:\n\n{_shown(wrong.torchs)}\n\n"
        f"## Versions\n\n```text\n{versions()}\n```\n\n## Kernels\n\n{kernels}\n"
    )


def _shown(values: Sequence[Any]) -> str:
    lines = []
    for x in values:
        if not isinstance(x, Tensor):
            lines.append(f"{type(x).__name__}: {x}")
            continue
        elements = f": {x.tolist()}" if x.numel() <= SHOWN else ""
        lines.append(f"{x.dtype} {[*x.shape]} strides {x.stride()}{elements}")
    return "```text\n" + "\n".join(lines) + "\n```"


def versions() -> str:
    """What a result may depend on, a line each."""

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cuda = torch.version.cuda
    lines = [
        f"transconv {cache_bundle.versions()['transconv']}",
        f"Python {platform.python_version()} on {platform.platform()}",
        *[f"{name} {of(name)}" for name in ("torch", "triton", "numpy")],
        f"{chip}, CUDA {cuda}",
    ]
    return "\n".join([*lines, *[f"{k}={v}" for k, v in knobs.given("TRANSCONV_", "TRITON_").items()]])


def written(wrong: WrongResult, function: str, to: Path) -> Path:
    """Write the page, the tensors and the function to a zip file. Raises OSError."""
    tensors = io.BytesIO()
    torch.save(
        {
            "calls": [[*map(_plain, call)] for call in wrong.calls],
            "ours": [*map(_plain, wrong.ours)],
            "torch": [*map(_plain, wrong.torchs)],
        },
        tensors,
    )
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("report.md", page(wrong, function))
        file.writestr("function.py", function)
        file.writestr("tensors.pt", tensors.getvalue())
    return to


def _plain(x: Any) -> Any:
    return x.detach().cpu() if isinstance(x, Tensor) else x
