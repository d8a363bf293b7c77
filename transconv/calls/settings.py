"""transconv.config: settings that a program may change while it runs.

    transconv.config.fallback = "silent" | "warn" | "error"    what a call that torch must do means
    transconv.config.cpu      = "fallback" | "interpret"       what a call on CPU tensors means; without a
                                GPU "interpret" starts Triton's interpreter
    transconv.config.compile  = "auto" | "now" | "background" | "never"
                                what a call does without its kernel
    transconv.config.sizes    = "auto" | "exact" | "any"       whether kernels are for one size each
    transconv.config.steady   = False | True                   whether the same call has the same bits
                                throughout a program: what "auto" stands for is then fixed
    transconv.config.invariant = False | True                  whether the bits of a sample's result depend
                                on the sample alone: not on how many others are in its batch, on its place
                                among them, or on the sizes that came before

A wrong word is a ValueError that lists the legal ones. The environment gives the first values."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from transconv.support import knobs, nearest

FallbackWord = Literal["silent", "warn", "error"]
CpuWord = Literal["fallback", "interpret"]
CompileWord = Literal["auto", "now", "background", "never"]
SizesWord = Literal["auto", "exact", "any"]
WORDS: dict[str, tuple[str | bool, ...]] = {
    "fallback": get_args(FallbackWord),
    "cpu": get_args(CpuWord),
    "compile": get_args(CompileWord),
    "sizes": get_args(SizesWord),
    "steady": (False, True),
    "invariant": (False, True),
}


class Settings:
    """The switches."""

    fallback: FallbackWord
    cpu: CpuWord
    compile: CompileWord
    sizes: SizesWord
    steady: bool
    invariant: bool
    _listeners: list[Callable[[], None]]
    _waiting: int  # how many hold calls back for their kernels

    def __init__(self) -> None:
        object.__setattr__(self, "_listeners", [])
        object.__setattr__(self, "_waiting", 0)
        knobs.name_unknown()
        self.fallback = cast(FallbackWord, knobs.fallback())
        self.cpu = "fallback"
        self.compile = cast(CompileWord, knobs.compile())
        self.sizes = cast(SizesWord, knobs.sizes())
        self.steady = False
        self.invariant = False

    if not TYPE_CHECKING:  # for a type checker the switches are those above, with these words

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in WORDS:
                raise _unknown(name)
            if not any(value is w or (isinstance(value, str) and value == w) for w in WORDS[name]):
                words = [str(word) for word in WORDS[name]]
                raise ValueError(
                    f"transconv.config.{name} = {value!r}; "
                    f"expected one of: {', '.join(words)}{nearest(str(value), words)}"
                )
            object.__setattr__(self, name, value)
            if value == "interpret":
                _begin_interpreter()
            for listener in self._listeners:
                listener()

        def __getattr__(self, name: str) -> Any:
            # Config, Block: what a module of this dotted name held before it became transconv.schedule.
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                return getattr(importlib.import_module("transconv.schedule.schedule"), name)
            except AttributeError:
                raise _unknown(name) from None

    def __dir__(self) -> list[str]:
        return [*WORDS, "on_change"]

    def __repr__(self) -> str:
        return "transconv.config(" + ", ".join(f"{n}={getattr(self, n)!r}" for n in WORDS) + ")"

    @property
    def policy(self) -> FallbackWord:
        """``fallback`` as it is obeyed: an error in invariant mode: torch's sums depend on the batch."""
        return "error" if self.invariant else self.fallback

    @property
    def reach(self) -> SizesWord:
        """``sizes`` as it is obeyed: in invariant mode each kernel is for images of one size, and any
        number of them."""
        return "exact" if self.invariant else self.sizes

    @property
    def mode(self) -> str:
        """``compile`` as a call obeys it that is about to be decided: ``now`` where torch may not compute
        meanwhile, and for "auto" on no GPU, on a stream of its own, as calls are that warm up for the
        capture of a CUDA graph, and with ``torch.backends.cudnn.benchmark``, which asks for the best
        kernel of each size at its first call."""
        if self.compile not in ("auto", "background"):
            return self.compile
        if (
            self.policy == "error"
            or self.steady
            or self._waiting
            or (self.compile == "auto" and not _may_wait())
        ):
            return "now"
        return "background"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within ``with``, calls of all threads wait for their kernels, as those do that are timed: "auto"
        and "background" are ``now``. Nothing else changes."""
        object.__setattr__(self, "_waiting", self._waiting + 1)
        try:
            yield
        finally:
            object.__setattr__(self, "_waiting", self._waiting - 1)

    @contextmanager
    def changed(self, **words: Any) -> Iterator[None]:
        """Within ``with``, switches have these words; behind it those of before, whatever happens."""
        before = {name: getattr(self, name) for name in words}
        try:
            for name, word in words.items():
                setattr(self, name, word)
            yield
        finally:
            for name, word in before.items():
                setattr(self, name, word)

    @property
    def varies(self) -> bool:
        """Whether the sizes that came before decide what answers a call: "auto", where torch may answer
        while a kernel is compiled."""
        return self.reach == "auto" and self.mode == "background"

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after every change."""
        self._listeners.append(listener)


def _unknown(name: str) -> AttributeError:
    return AttributeError(
        f"transconv.config has no switch '{name}'; "
        f"expected one of: {', '.join(WORDS)}{nearest(name, WORDS)}"
    )


def _may_wait() -> bool:
    """Whether kernels may come later: calls go to the default stream of a GPU that is in use, and the
    program does not ask cuDNN to search at first calls either."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_initialized() or torch.backends.cudnn.benchmark:
        return False
    internals = importlib.import_module("transconv.runtime").torch_internals
    stream: int = internals.raw_stream(internals.device_number())  # torch's objects take 20 us
    return stream == 0


def _begin_interpreter() -> None:
    """Have Triton interpret kernels, where there is no GPU for which it would compile them. Warns at the
    caller's line where Triton is loaded already, which it decides then."""
    if knobs.interpret() or importlib.import_module("torch").cuda.is_available():
        return
    if "triton.language" not in sys.modules:
        knobs.use_interpreter()
        return
    warnings.warn(
        'transconv.config.cpu = "interpret" comes too late: Triton is loaded without its interpreter, and '
        "torch computes calls on CPU tensors; set it at the beginning of the program, before a kernel or "
        "torch.compile loads Triton, or start the program with TRITON_INTERPRET=1",
        stacklevel=3,
    )


settings = Settings()
