"""A result that is not torch's, as a folder: the operations and what they were handed.

    case.py       computed(...): the operations, on the nearest operands that are known; calls: the inputs
    inputs.pt     the tensors of the calls
    kernel.txt    the kernel's computation

``python -m transconv report-wrong FOLDER/case.py`` makes a report of it (see
verification/wrong_report.py).
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from transconv import knobs
from transconv.compute import Workload
from transconv.disk_cache import leave_text, replace_data
from transconv.graph.verification.fx_reference import RecordedNode, Values

Tensor = torch.Tensor
LARGEST = 1 << 26  # bytes of tensors that are written to the disk
TEXT = '''"""{title}

    python -m transconv report-wrong {file}

makes a report that can be sent."""

from pathlib import Path

import torch
from torch import device, inf, nan

dynamic = {dynamic}
calls = torch.load(Path(__file__).with_name("inputs.pt"), map_location="{device}", weights_only=True)


{function}
'''


def saved(values: Values, name: str, said: str, works: Sequence[Workload]) -> str:
    """Write the case of a result in the cache's folder, and say where it is; empty for large ones. Raises
    OSError."""
    nodes = values.needed(name)
    given = [values.of.nodes[x] for x in dict.fromkeys(x for n in nodes for x in n.inputs)
             if x in values.known]
    held = [values.known[n.name] for n in given]
    if not nodes or sum(t.nbytes for t in held if isinstance(t, Tensor)) > LARGEST:
        return ""
    function = text_of(values, nodes, given, name)
    key = hashlib.sha256(f"{function}{[_like(x) for x in held]}".encode()).hexdigest()[:12]
    folder = knobs.cache() / "wrong" / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())[:40]}_{key}"
    named = any(isinstance(n, torch.SymInt) for x in given for n in _sizes(x))
    calls = [_first(given, held), tuple(held)] if named else [tuple(held)]
    data = io.BytesIO()
    torch.save([tuple(x.detach().cpu() if isinstance(x, Tensor) else x for x in call) for call in calls],
               data)
    device = next((t.device.type for t in held if isinstance(t, Tensor)), "cpu")
    title = re.sub(r'["\\]', "'", said).replace("\n", " ")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_data(folder / "inputs.pt", data.getvalue())
    leave_text(folder, "case.py", TEXT.format(title=title, file=folder / "case.py", dynamic=named,
                                              device=device, function=function))
    leave_text(folder, "kernel.txt", "\n\n".join(str(c) for w in works for c in w.computations))
    return f"; python -m transconv report-wrong {folder / 'case.py'} makes a report of it"


def text_of(
    values: Values, nodes: Sequence[RecordedNode], given: Sequence[RecordedNode], name: str
) -> str:
    """Operations as a function of Python, ``computed``."""
    graph = fx.Graph()
    known = {x.node: graph.placeholder(x.name) for x in given}
    for n in nodes:
        args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), known.__getitem__)
        known[n.node] = graph.create_node("call_function", n.target, args, kwargs, n.name)
    graph.output(known[values.of.nodes[name].node])
    text = graph.python_code("self").src
    text = re.sub(r";  \w+( = \w+)* = None\b.*", "", text)  # what is freed
    return text[text.index("def forward"):].replace("def forward(self, ", "def computed(").strip()


def _sizes(node: RecordedNode) -> Sequence[Any]:
    """The sizes of a value as torch traced it."""
    val = node.node.meta.get("val")
    return val.shape if isinstance(val, Tensor) else [val]


def _first(given: Sequence[RecordedNode], held: Sequence[Any]) -> tuple[Any, ...]:
    """Operands of the sizes for which the graph was made."""
    drawn = torch.Generator().manual_seed(1)

    def like(n: Any) -> int:
        return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)

    def made(node: RecordedNode, now: Any) -> Any:
        if not isinstance(now, Tensor):
            return like(_sizes(node)[0]) if isinstance(now, int) else now
        shape = [like(n) for n in _sizes(node)]
        if now.is_floating_point():
            return torch.randn(shape, generator=drawn).to(now.dtype)
        return torch.zeros(shape, dtype=now.dtype)
    return tuple(made(n, x) for n, x in zip(given, held, strict=True))


def _like(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}" if isinstance(x, Tensor) else str(x)
