"""Stage 11c. Work in a process of its own, which may die over it: ``Child`` asks, ``serve`` answers.

A child reads a JSON line per job and answers with one, and serves many, so that starting it is paid for
once. It is started by its module's name and never runs the program's own main module.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from transconv import knobs

Job = dict[str, Any]
ROOT = str(Path(__file__).parents[2])


class Child:
    """``module`` is run in a process, started when there is work and again when it has died.
    ``environment`` changes this process's, with {folder} for a folder of the child's own; modules come
    from ``path`` first."""

    def __init__(self, module: str, environment: Mapping[str, str | None],
                 path: Sequence[str] = ()) -> None:
        self.module, self.environment, self.path = module, environment, (*path, ROOT)
        self.folder = tempfile.TemporaryDirectory(prefix="transconv-child-")
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is at."""
        self.end()
        self.folder.cleanup()

    def ask(self, job: Job, timeout_s: float) -> Job:
        """The answer to one job; one with ``reason`` and ``log`` if the process died over it or had to be
        killed."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; reading tells
        line = _line(process.stdout, timeout_s)
        if line is not None and line.endswith(b"\n"):
            answer: Job = json.loads(line)
            return answer
        code = self.end()
        log = Path(self.folder.name, "stderr")
        said = log.read_text(errors="replace")[-20000:] if log.exists() else ""
        return {"reason": f"no answer within {timeout_s:g} s" if line is None
                else f"the compiler's process died ({_cause(code)})", "log": said}

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            folder = self.folder.name
            changes = {k: v and v.format(folder=folder) for k, v in self.environment.items()}
            with open(f"{folder}/stderr", "w+b") as errors:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", self.module], stdin=subprocess.PIPE,
                    env=knobs.child_environment(changes, os.pathsep.join(self.path)),
                    stdout=subprocess.PIPE, stderr=errors)
        return self.process

    def end(self) -> int:
        """Kill what still runs; the exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        with process:
            return process.wait()


def _line(stream: IO[bytes], timeout_s: float) -> bytes | None:
    """The next line; what came before the end of the stream; None when time is up."""
    deadline = time.monotonic() + timeout_s
    got = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while not got.endswith(b"\n"):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return None
            # Answers come one at a time but may lie in the pipe together: take one line only.
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            got += byte
    return bytes(got)


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def serve(handle: Callable[[Job, IO[bytes]], Job]) -> None:
    """Read a JSON line per job from standard input, answer with one each on standard output. ``handle``
    is given the file that holds what compilers print; what it raises is an answer with ``reason``."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Compilers print on both streams and may read; questions and answers have their own.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in asked:
        job = json.loads(line)
        with tempfile.TemporaryFile() as noise:
            kept = os.dup(1), os.dup(2)
            sys.stdout.flush()
            os.dup2(noise.fileno(), 1)
            os.dup2(noise.fileno(), 2)
            try:
                answer: Job | None = None
                try:
                    answer = handle(job, noise)
                except Exception as cause:
                    failed = cause
                sys.stdout.flush()
                noise.seek(0)
                log = noise.read().decode(errors="replace")
            finally:
                os.dup2(kept[0], 1)
                os.dup2(kept[1], 2)
                os.close(kept[0])
                os.close(kept[1])
            if answer is None:
                answer = {"reason": reason_of(failed), "log": f"{failed}\n{log}"[-20000:]}
            print(json.dumps(answer), file=answers, flush=True)


def reason_of(failed: Exception) -> str:
    """The first telling line of a compiler's error."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip(" ^=")]
    telling = [x for x in lines if "error" in x.lower() or "must" in x.lower()]
    return f"{type(failed).__name__}: {(telling or lines or ['no message'])[0][:300]}"
