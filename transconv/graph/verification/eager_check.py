"""The first results of a graph, held against torch's own operators on the graph that was handed over.

    first call                 every kernel, behind its launch, on the operands that it had
    the next 4 sets of sizes   where sizes are names: as many kernels as 20 ms allow, others each time
    up to 16                   sets in which a size has another number of bits, or other factors of 2:
                               those that cross the edge of a tile or need another mask

A kernel whose result is not torch's is refused, as one that cannot be had is: torch computes its
operations, in this call and later ones. What Inductor makes of regions that kernels leave is compared in
the first call. The check is none of a warm call's: one whose sizes were seen runs what it ran before. It
draws no random numbers, and is over before a CUDA graph is captured. TRANSCONV_TRUST=never switches it
off. A result that is not torch's is left as a folder:

    case.py       computed(...): the operations, on the nearest operands that are known; calls: the inputs
    inputs.pt     the tensors of the calls
    kernel.txt    the kernel's computation

``transconv report-wrong FOLDER/case.py`` makes a report of it (see verification/wrong_report.py)."""

from __future__ import annotations

import hashlib
import io
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from transconv.calls import stats
from transconv.compute import Workload
from transconv.graph.fusion.index_ir import Piece
from transconv.graph.regions.region_kernel import RefusedKernel, Region, RegionKernel
from transconv.graph.verification.agreement import difference, room
from transconv.graph.verification.fx_reference import (
    RecordedNode,
    Reference,
    Unknown,
    Values,
    bytes_of,
    origin,
    without_modes,
)
from transconv.runtime import FirstSizes, is_capturing, is_collecting
from transconv.support import Unsupported, knobs, leave_text, replace_data

Tensor = torch.Tensor
log = logging.getLogger("transconv.graph")
STALL = 0.02  # seconds that a check of further sizes may take
USUAL = 0.001  # seconds for a kernel that was not compared before, or has few elements
SMALL = 1 << 12  # elements: what takes torch longer than is usual is the machine
ELEMENT = (3e-8, 1e-9)  # seconds for an element of a result, on a CPU and a GPU
FEW = 1 << 26  # bytes that are there, or torch says that they are not
NEVER = (0, USUAL, 0.0)
MEMORY = "there is no memory for torch's operators beside ours"
LOST: type[Exception] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


class Checks:
    """What was compared of a graph. ``agreed``: kernels that were, for sizes of which others are not yet;
    ``took``: of each kernel, how often and how long, and how much longer for sizes that are ``larger``
    than the first ones by a factor; ``left_out``: what was not compared, with how many results; ``wrong``:
    what differed."""

    def __init__(self, gm: fx.GraphModule, device: torch.device) -> None:
        self.device = device
        self.reference = Reference(gm) if knobs.trust() != "never" else None
        self.sizes = FirstSizes()
        self.agreed: set[object] = set()
        self.took: dict[object, tuple[int, float, float]] = {}
        self.larger = 1.0
        self.left_out: Counter[str] = Counter()
        self.wrong: list[str] = []

    def due(self, values: tuple[int, ...]) -> bool:
        """Whether a call of these sizes is compared."""
        if self.reference is None or not self.sizes.due(values) or knobs.trust() == "never":
            return False
        return (
            self.device.type in ("cpu", "cuda") and not is_collecting() and not is_capturing(self.device)
        )

    def done(self, values: tuple[int, ...]) -> None:
        """That a call was compared. Where sizes are numbers there is no other one."""
        self.sizes.done(values)
        self.agreed = set()
        if not values:
            self.reference = None
            self.took.clear()

    def note(self, key: object, seconds: float, got: Tensor) -> None:
        """How long it took to compare a result, if not the machine was busy: the shortest time counts, and
        of few elements what is usual."""
        times, base, more = self.took.get(key, (0, seconds, seconds))
        least = got.numel() * ELEMENT[got.device.type == "cuda"]
        rest = 0.0 if got.numel() <= SMALL else max(0.0, seconds - USUAL)
        self.took[key] = times + 1, min(base, seconds, USUAL), min(more, max(least, rest) / self.larger)

    def chosen(self, every: Sequence[object], values: tuple[int, ...]) -> set[object] | None:
        """What is compared for further sizes: what was compared least often, as much as time allows."""
        if not self.sizes.seen:
            return None
        self.larger = max(1.0, prod(values) / max(1, prod(self.sizes.seen[0])))
        left, found = STALL, set()
        for one in sorted(every, key=lambda k: self.took.get(k, NEVER)[0]):
            left -= self.expected(one)
            if left >= 0:
                found.add(one)
        return found

    def expected(self, key: object) -> float:
        """How many seconds it takes to compare a kernel."""
        _, base, more = self.took.get(key, NEVER)
        return base + self.larger * more

    def remarks(self) -> tuple[str, ...]:
        """What a report says."""
        return (
            *[f"differs from torch's operators: {why}" for why in self.wrong],
            *[
                f"not compared with torch's operators: {n} of its results, {why}"
                for why, n in self.left_out.items()
            ],
        )


class WatchedCall:
    """One call whose results are compared. ``chosen``: what is compared of it; None: all. ``named``:
    whether there are further sizes; ``spent``: seconds so far; ``waiting``: kernels of it were not there
    yet, so that it is to be compared again; ``overs``: for what processes compile of these, whether it may
    be there."""

    def __init__(self, checks: Checks, values: Values, chosen: set[object] | None, named: bool) -> None:
        self.checks, self.values, self.chosen, self.named = checks, values, chosen, named
        self.waiting = False
        self.overs: list[Callable[[], bool]] = []
        self.began = self.spent = 0.0  # ``began``: the last comparison

    def enter(self, nodes: Sequence[fx.Node], made: Sequence[Any]) -> None:
        """That results of a region are known."""
        for node, value in zip(nodes, made, strict=True):
            self.values.enter(origin(node), value)

    def difference(
        self, key: object, name: str, got: Tensor, tf32: bool, works: Sequence[Workload]
    ) -> str:
        """In what a result differs from torch's, where it can be told, with the operations."""
        if name not in self.values.pending or not self.has_time(key):
            return ""
        began, checks = time.perf_counter(), self.checks
        self.began = began
        try:
            self.expect_room(name, got)
            with without_modes():
                why = difference(self.values, name, got, tf32)
            if not why:
                stats.held("right", us(began))
                if self.is_slow_at_first(time.perf_counter() - began, got):
                    began = time.perf_counter()  # what torch loads when it is first asked is not counted
                    with without_modes():
                        difference(self.values, name, got, tf32)
                return ""
            return self.told(name, why, works)
        except torch.OutOfMemoryError:
            self.leave(MEMORY)
        except LOST:
            raise
        except Unknown as error:
            self.leave(str(error))
        except Exception as error:  # a program must not stop for a bug of ours
            log.warning("a result was not compared: %s", error, exc_info=True)
            self.leave(f"{type(error).__name__}: {error}")
        finally:
            took = time.perf_counter() - began
            self.spent += took
            checks.note(key, took, got)
        return ""

    def took(self, key: object, name: str, got: Tensor, tf32: bool) -> float | None:
        """The seconds in which a result was found to be torch's; None where it was not. Nothing is noted:
        ``difference`` tells what it is then."""
        began = time.perf_counter()
        try:
            self.expect_room(name, got)
            with without_modes():
                why = difference(self.values, name, got, tf32)
        except torch.OutOfMemoryError:
            return None
        except LOST:
            raise
        except Exception:
            return None
        return None if why else time.perf_counter() - began

    def is_slow_at_first(self, seconds: float, got: Tensor) -> bool:
        """Whether to compare once more, to know how long it takes: a GPU's first call of an operation
        loads what it needs, and further sizes are compared in less than ``STALL``."""
        return self.named and self.chosen is None and got.is_cuda and seconds > STALL / 2

    def compiled(self, region: Region, made: Sequence[Any]) -> tuple[list[Any], str]:
        """What another compiler makes of a region of torch's, compared in a graph's first call alone; with
        torch's own values in the place of what differs, and in what."""
        found, wrong = [*made], ""
        for i, node in enumerate(region.outputs if self.chosen is None else ()):
            name, t = origin(node), made[i]
            if name not in self.values.of.nodes or not isinstance(t, Tensor):
                continue
            if why := self.difference(region, name, t, torch.backends.cuda.matmul.allow_tf32, []):
                found[i] = self.values.evaluated(self.values.needed(name), [name])[name]
                wrong = wrong or why
        return found, wrong

    def has_time(self, key: object) -> bool:
        """Whether a result is compared: of further sizes until the time is over, if the machine is slower
        than was thought."""
        if key in self.checks.agreed:
            return False
        if self.chosen is None:
            return True
        late = self.spent and self.spent + self.checks.expected(key) > STALL
        return key in self.chosen and not late

    def told(self, name: str, why: str, works: Sequence[Workload]) -> str:
        """Note that a result is wrong, and leave its case on the disk; the whole sentence."""
        said = f"{self.said(name)}: {why}"
        stats.held("wrong", us(self.began))
        self.checks.wrong.append(said)
        try:
            return said + saved(self.values, name, said, works)
        except Exception as error:  # wrong it is all the same
            log.warning("the case of a wrong result was not written: %s", error, exc_info=True)
            return said

    def leave(self, why: str) -> None:
        """Note that something is not compared."""
        stats.held("left out", us(self.began))
        self.checks.left_out[why] += 1

    def expect_room(self, name: str, got: Tensor) -> None:
        """Raises Unknown where the memory does not suffice."""
        needed = bytes_of(self.values.needed(name)) * self.checks.larger + 2 * got.nbytes
        if needed > FEW and needed > self.room(got.device):
            raise Unknown(MEMORY)

    def room(self, device: torch.device) -> int:
        """Bytes that can be had."""
        return room(device)

    def said(self, name: str) -> str:
        """The operations that make a result, and the line that asked for the last of them."""
        nodes = self.values.needed(name) or [self.values.of.nodes[name]]
        words = [
            re.sub(r"^(aten|prims)\.|\.default$", "", str(n.target))
            for n in nodes
            if n.target is not torch.ops.aten.view.default and "getitem" not in str(n.target)
        ]
        places = re.findall(r'File "([^"]+)", line (\d+)', nodes[-1].node.meta.get("stack_trace") or "")
        where = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
        return f"{', '.join(dict.fromkeys(words)) or name}{where}"


class RegionWatch:
    """The kernels of a region in one call. ``blamed``: the nodes that make what differs, by name."""

    def __init__(self, watch: WatchedCall, region: Region, kernels: Sequence[RegionKernel]) -> None:
        self.watch, self.region = watch, region
        self.names: dict[Piece, list[str]] = {}
        for node, piece in region.pieces.items():
            if isinstance(piece, Piece) and origin(node):
                self.names.setdefault(piece, []).append(origin(node))
        self.last = {piece: kernel for kernel in kernels for piece in kernel.stored}
        self.blamed: frozenset[str] = frozenset()

    def look(self, kernel: RegionKernel, tensors: Sequence[Tensor]) -> None:
        """Compare what a kernel has stored, once all of it is there. Raises Unsupported where it is not
        torch's."""
        tf32 = _rounds(kernel.workload)
        for piece, t in zip(kernel.stored, tensors[len(kernel.given) :], strict=True):
            if name := self.name(piece, kernel):
                if why := self.watch.difference(kernel, name, t, tf32, [kernel.workload]):
                    self.blamed = self.makers(name)
                    raise Unsupported("wrong", why)
                self.watch.values.enter(name, t)

    def name(self, piece: Piece, kernel: RegionKernel) -> str:
        """What torch calls a value of which a kernel has stored the last part; empty if nothing else asks
        for it, or it was compared."""
        names = self.names.get(piece)
        if self.last[piece] is not kernel or not names:
            return ""
        name = min(names, key=lambda n: self.watch.values.of.order.get(n, 0))
        return "" if name in self.watch.values.settled else name

    def agrees(self, kernel: RegionKernel, tensors: Sequence[Tensor]) -> bool:
        """Whether all that a kernel has stored is torch's, in the first call of a graph of numbers. It is
        known then, and not compared again."""
        watch, tf32 = self.watch, _rounds(kernel.workload)
        if watch.named or watch.chosen is not None or kernel in watch.checks.agreed:
            return False
        state, times = watch.values.state(), list[tuple[float, Tensor]]()
        for piece, t in zip(kernel.stored, tensors[len(kernel.given) :], strict=True):
            name = self.name(piece, kernel)
            took = watch.took(kernel, name, t, tf32) if name in watch.values.pending else None
            if took is None:
                watch.values.restore(state)
                return False
            watch.values.enter(name, t)
            times.append((took, t))
        for took, t in times:
            stats.held("right", round(took * 1e6))
            watch.checks.note(kernel, took, t)
        return True

    def makers(self, name: str) -> frozenset[str]:
        """The nodes of the region that make a value of known ones, by their names."""
        makers = {name, *(n.name for n in self.watch.values.needed(name))}
        return frozenset(node.name for node in self.region.nodes if origin(node) in makers)

    def results(self, kernels: Sequence[RegionKernel], made: Sequence[Tensor]) -> None:
        """Compare what a region hands out, where that is not what a kernel has stored. Raises Refused."""
        tf32 = any(_rounds(k.workload) for k in kernels)
        for node, t in zip(self.region.outputs, made, strict=True):
            name = origin(node)
            if name in self.watch.values.of.nodes and self.watch.values.known.get(name) is not t:
                if why := self.watch.difference(self.region, name, t, tf32, [k.workload for k in kernels]):
                    raise RefusedKernel("of a region", self.makers(name), "wrong", why)
        self.watch.enter(self.region.outputs, made)


def us(began: float) -> int:
    """Microseconds since then."""
    return round((time.perf_counter() - began) * 1e6)


def _rounds(workload: Workload) -> bool:
    """Whether a kernel multiplies f32 as tf32."""
    return any(c.factors is not None and c.math == "tf32" for c in workload.computations)


class FirstCall:
    """What runs in the place of a graph's way in a call that is compared. ``entered`` is called once
    there is nothing left to compare for its sizes: with the reason where all of it is to be torch's.
    ``waits``: torch answers the call, of which what Inductor has compiled is compared, and what becomes of
    the results of regions."""

    def __init__(
        self,
        checks: Checks,
        way: Any,
        values: tuple[int, ...],
        places: Sequence[int],
        waits: bool,
        entered: Callable[[str], None],
    ) -> None:
        self.checks, self.way, self.values, self.places = checks, way, values, places
        self.waits, self.entered = waits, entered

    def parts(
        self, sizes: Mapping[str, int], given: list[Any], numbers: Mapping[str, int | float]
    ) -> list[Any]:
        """As ``Parts.__call__``."""
        checks, parts = self.checks, self.way.parts
        assert checks.reference is not None
        every = [k for found in parts.launches() for k in (*found.kernels, found.region)]
        watch = WatchedCall(
            checks, checks.reference.values(given), checks.chosen(every, self.values), bool(self.values)
        )
        wait = self.way.wait
        made: list[Any] = parts.compared(sizes, given, numbers, watch, wait if self.waits else None)
        wrong = "" if watch.waiting else self.ends(watch, made)
        if self.waits:
            wait.seen = True
        elif watch.overs:
            wait.renew(sizes, watch.overs)
        if wrong or not (watch.waiting or self.waits):
            checks.done(self.values)
            self.entered(wrong)
        return made

    def ends(self, watch: WatchedCall, made: list[Any]) -> str:
        """Compare what is handed out, or written to inputs, where it is not what is known. What differs
        becomes torch's; in what."""
        reference = watch.values.of
        written = [reference.written.get(place) for place in self.places]
        wrong = ""
        for i, name in enumerate([*reference.results, *written]):
            if name is None or not isinstance(made[i], Tensor) or watch.values.known.get(name) is made[i]:
                continue
            tf32 = any(_rounds(k.workload) for found in self.way.parts.launches() for k in found.kernels)
            if why := watch.difference(self, name, made[i], tf32, []):
                made[i] = watch.values.evaluated(watch.values.needed(name), [name])[name]
                wrong = wrong or why
        if wrong:
            stats.announce("wrong", wrong, "a graph")
            stats.add(False, "wrong", 1)
        return wrong


LARGEST = 1 << 26  # bytes of tensors that are written to the disk
TEXT = '''"""{title}

    transconv report-wrong {file}

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
    given = [
        values.of.nodes[x] for x in dict.fromkeys(x for n in nodes for x in n.inputs) if x in values.known
    ]
    held = [values.known[n.name] for n in given]
    if not nodes or sum(t.nbytes for t in held if isinstance(t, Tensor)) > LARGEST:
        return ""
    function = text_of(values, nodes, given, name)
    key = hashlib.sha256(f"{function}{[_like(x) for x in held]}".encode()).hexdigest()[:12]
    folder = knobs.cache() / "wrong" / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())[:40]}_{key}"
    named = any(isinstance(n, torch.SymInt) for x in given for n in _sizes(x))
    calls = [_first(given, held), tuple(held)] if named else [tuple(held)]
    data = io.BytesIO()
    torch.save(
        [tuple(x.detach().cpu() if isinstance(x, Tensor) else x for x in call) for call in calls], data
    )
    device = next((t.device.type for t in held if isinstance(t, Tensor)), "cpu")
    title = re.sub(r'["\\]', "'", said).replace("\n", " ")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_data(folder / "inputs.pt", data.getvalue())
    leave_text(
        folder,
        "case.py",
        TEXT.format(title=title, file=folder / "case.py", dynamic=named, device=device, function=function),
    )
    leave_text(folder, "kernel.txt", "\n\n".join(str(c) for w in works for c in w.computations))
    return f"; transconv report-wrong {folder / 'case.py'} makes a report of it"


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
    return text[text.index("def forward") :].replace("def forward(self, ", "def computed(").strip()


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
            return torch.randn(shape, generator=drawn, device="cpu").to(now.dtype)
        return torch.zeros(shape, dtype=now.dtype, device="cpu")

    return tuple(made(n, x) for n, x in zip(given, held, strict=True))


def _like(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}" if isinstance(x, Tensor) else str(x)
