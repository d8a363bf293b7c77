"""A process of ``python -m bench dynamo``: PyTorch's benchmark runner for one model and one compiler.

The runner is the script of a suite in ``benchmarks/dynamo`` of PyTorch (``timm_models.py``,
``huggingface.py``, ``torchbench.py``). It runs as ``python timm_models.py ...`` does, but in a thread,
which waits before it times calls until all processes have compiled. What it would fetch is made here:
weights are random, of one seed, and configurations are those of their classes.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import transconv
from bench.graph_measures import of_report
from bench.waves import take
from transconv.graph.graph_report import Report

Row = dict[str, Any]
SEED = 1337  # the runner's own
QUICK = 64  # pixels of images in sizes for a CPU
# Configurations that huggingface.py fetches by name, as their classes make them.
CONFIGURATIONS: dict[str, tuple[str, dict[str, int]]] = {
    "allenai/longformer-base-4096": ("LongformerConfig", {"max_position_embeddings": 4098}),
    "t5-small": ("T5Config", {}),
    "distilgpt2": ("GPT2Config", {"n_layer": 6}),
    "google/fnet-base": ("FNetConfig", {}),
    "YituTech/conv-bert-base": ("ConvBertConfig", {}),
}
_running: dict[str, Run] = {}


def work(step: str, key: str, share: tuple[int, int] = (0, 1), **job: Any) -> Row:
    """``prepare``: start the runner, until it ends or is about to time calls; ``time``: let it, which is
    the last thing that a process does. ``job``: what Run takes. Returns the row when there is one."""
    take(step, share)
    if step == "prepare":
        _running[key] = Run(**job)
        return _running[key].prepared()
    return _running.pop(key).ended()


class Run:
    """One run of the runner. ``folder``: where it is; ``side``: a backend's name; ``words``: its further
    arguments; ``log``: the file for what it prints; ``timing``: whether it is about to time calls."""

    def __init__(
        self, folder: str, suite: str, model: str, side: str, words: list[str], log: str, quick: bool
    ) -> None:
        self.folder, self.suite, self.model, self.log, self.quick = folder, suite, model, Path(log), quick
        self.made: list[Any] = []
        self.ready, self.go, self.timing, self.error = threading.Event(), threading.Event(), False, ""
        self.words = [*words, "--only", model, "--output", str(self.log.with_suffix(".csv").resolve())]
        self.words += ["--inductor"] if side == "inductor" else [f"--backend={side}"]
        self.thread = threading.Thread(target=self.run, daemon=True)
        if "cpu" in words:  # only results are compared there
            transconv.config.cpu = "interpret"

    def prepared(self) -> Row:
        """Start it. The row, if there is nothing to time."""
        self.log.with_suffix(".csv").unlink(missing_ok=True)
        self.thread.start()
        self.ready.wait()
        if self.timing:
            return {}
        early = {"error": "it ended before calls were timed"} if "--performance" in self.words else {}
        return early | self.ended()

    def ended(self) -> Row:
        """Wait for its end, which is the process's, too, and read what it wrote; ``error``: why it wrote
        nothing."""
        self.go.set()
        self.thread.join()
        found = row_of(self.log.with_suffix(".csv")) | {"fatal": True}
        if "status" not in found:
            return found | {"error": self.error or "the runner wrote no row"}
        graphs = tuple(g for made in self.made for g in made.transconv.graphs)
        if graphs:
            found |= {k: v for k, v in of_report(Report(graphs)).items() if k in ("ours", "regions")}
        found["note"] = "; ".join(r for g in graphs for r in (*g.remarks, g.whole) if r)[:600]
        return found

    def run(self) -> None:
        """The thread: the script's ``main``."""
        with self.log.open("w", encoding="utf-8") as file, streams(file):
            try:
                sys.argv = [str(Path(self.folder, f"{self.suite}.py")), *self.words]
                self.script()
            except SystemExit as end:  # a warm-up that failed wrote a row
                self.error = f"the runner ended with {end.code}"
            except Exception as error:
                import traceback

                traceback.print_exc()
                self.error = f"{type(error).__name__}: {error}"[:500]
            finally:
                self.ready.set()

    def script(self) -> None:
        """Import the suite and start it as its script does."""
        for place in (self.folder, *map(str, Path(self.folder).resolve().parents[:3])):
            if place == self.folder or Path(place, "torchbenchmark").is_dir():
                sys.path.insert(0, place)
        common: Any = importlib.import_module("common")
        common.MAX_DOWNLOAD_ATTEMPTS = 0  # nothing appears by asking again
        timed = common.speedup_experiment

        def waiting(*given: Any, **named: Any) -> Any:
            self.timing = True
            self.ready.set()
            self.go.wait()
            return timed(*given, **named)

        common.speedup_experiment = waiting
        self.note_backends()
        {"timm_models": timm, "huggingface": huggingface, "torchbench": torchbench}[self.suite](self)

    def note_backends(self) -> None:
        """Keep what calls of our backend make, and give it a second name, with CUDA graphs."""
        dynamo: Any = importlib.import_module("torch._dynamo")
        dynamo.list_backends()  # which reads those of packages, and would take the name again

        def noting(mode: str | None) -> Callable[..., Any]:
            def backend(gm: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
                self.made.append(transconv.graph.backend(gm, inputs, mode=mode, **options))
                return self.made[-1]

            return backend

        dynamo.register_backend(noting(None), name="transconv")
        dynamo.register_backend(noting("reduce-overhead"), name="transconv_cudagraphs")


def timm(run: Run) -> None:
    models: Any = importlib.import_module("timm.models")
    create = models.create_model
    less = {"pretrained_cfg_overlay": {"input_size": (3, QUICK, QUICK)}} if run.quick else {}

    def random(name: str, **options: Any) -> Any:
        torch.manual_seed(SEED)
        return create(name, **options | {"pretrained": False} | less)

    models.create_model = random
    suite: Any = importlib.import_module("timm_models")
    suite.TIMM_MODELS.setdefault(run.model, 64)  # timm has more than the list
    suite.timm_main()


def huggingface(run: Run) -> None:
    transformers: Any = importlib.import_module("transformers")

    def made(name: str, **_: Any) -> Any:
        kind, options = CONFIGURATIONS[name]
        return getattr(transformers, kind)(**options)

    transformers.AutoConfig.from_pretrained = made
    try:
        importlib.import_module("huggingface_llm_models")
    except ImportError:  # a copy of the runner without the models whose weights are fetched
        sys.modules["huggingface_llm_models"] = module = types.ModuleType("huggingface_llm_models")
        module.HF_LLM_MODELS = {}  # type: ignore[attr-defined]
    importlib.import_module("huggingface").huggingface_main()


def torchbench(run: Run) -> None:
    class Left(dict[str, Any]):
        """Weights that stay as they were drawn."""

    weights = importlib.import_module("torchvision.models._api").WeightsEnum
    load = torch.nn.Module.load_state_dict

    def loaded(self: torch.nn.Module, state: Any, *given: Any, **named: Any) -> Any:
        return None if isinstance(state, Left) else load(self, state, *given, **named)

    weights.get_state_dict = lambda *_, **__: Left()
    torch.nn.Module.load_state_dict = loaded  # type: ignore[method-assign]
    torch.manual_seed(SEED)
    suite: Any = importlib.import_module("torchbench")
    suite.torchbench_main()


@contextlib.contextmanager
def streams(file: Any) -> Any:
    """What the process prints goes to a file, that of its children too."""
    kept = [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)


def row_of(path: Path) -> Row:
    """The last row of the runner's file, by our columns; empty if there is none. Accuracy has a status;
    a performance row whose speedup is 0 has none that is known."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return {}
    found = rows[-1]
    names = {
        "accuracy": "status",
        "speedup": "speedup",
        "abs_latency": "ms",
        "compilation_latency": "compile_s",
        "compression_ratio": "compression",
        "eager_peak_mem": "eager_peak_gb",
        "dynamo_peak_mem": "peak_gb",
        "batch_size": "batch",
        "unique_graphs": "graphs",
        "graph_breaks": "breaks",
    }
    row: Row = {ours: found[theirs] for theirs, ours in names.items() if found.get(theirs)}
    if "speedup" in row:
        row["status"] = "timed" if float(row["speedup"]) else "failed"
    return row
