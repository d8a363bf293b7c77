"""Stage 11c. Jobs in a child process that may crash: ``Child`` sends jobs, ``serve`` answers them.

A child reads a JSON line per job and answers with one. It serves many jobs, to spread the cost of its
start. It is started by its module's name and never runs the program's own main module.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from transconv import knobs

Job = dict[str, Any]
CLOSING_S = 1.0  # how long ``close`` waits for a thread that gets an answer
ROOT = str(Path(__file__).parents[3])


class Child:
    """A process that runs ``module``, started at the first job and again after it has died.
    ``environment``: changes to this process's; {folder} stands for a temporary folder of the child.
    ``path``: searched for modules first."""

    def __init__(self, module: str, environment: Mapping[str, str | None],
                 path: Sequence[str] = ()) -> None:
        self.module, self.environment, self.path = module, environment, (*path, ROOT)
        self.folder = tempfile.TemporaryDirectory(prefix="transconv-child-")
        self.process: subprocess.Popen[bytes] | None = None
        self.lock, self.closed = threading.Lock(), False
        self.busy = threading.Lock()  # held during a job

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kill the process for good. Another thread may be in ``ask``: it gets the answer that the process
        died, and starts none anew."""
        with self.lock:
            self.closed, process = True, self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, also during a job of another thread."""
        self.kill()
        # Who waits for an answer reads the end of it; only then the pipes are closed.
        if self.busy.acquire(timeout=CLOSING_S):
            try:
                self.end()
            finally:
                self.busy.release()
        self.folder.cleanup()

    def ask(self, job: Job, timeout_s: float) -> Job:
        """The answer to one job; it has ``reason``, ``log`` and ``died`` if the process died, was ended or
        was killed at the time limit."""
        with self.busy:
            return self._asked(job, timeout_s)

    def _asked(self, job: Job, timeout_s: float) -> Job:
        process = self._running()
        if process is None:
            return {"reason": "the compiler's process was ended", "log": "", "died": True}
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; the read below reports that
        line = _line(process.stdout, timeout_s)
        if line is not None and line.endswith(b"\n"):
            answer: Job = json.loads(line)
            return answer
        code = self.end()
        log = Path(self.folder.name, "stderr")
        said = log.read_text(errors="replace")[-20000:] if log.exists() else ""
        return {"reason": f"no answer within {timeout_s:g} s" if line is None
                else f"the compiler's process died ({_cause(code)})", "log": said, "died": True}

    def _running(self) -> subprocess.Popen[bytes] | None:
        """The process, started if there is none; None after ``close``."""
        with self.lock:
            if self.process is None and not self.closed:
                folder = self.folder.name
                changes = {k: v and v.format(folder=folder) for k, v in self.environment.items()}
                with open(f"{folder}/stderr", "w+b") as errors:
                    self.process = subprocess.Popen(
                        [sys.executable, "-m", self.module], stdin=subprocess.PIPE,
                        env=knobs.child_environment(changes, os.pathsep.join(self.path)),
                        stdout=subprocess.PIPE, stderr=errors)
            return self.process

    def end(self) -> int:
        """Kill the process if it still runs; its exit status."""
        if self.process is None:
            return 0
        process, self.process = self.process, None
        process.kill()
        with process:
            return process.wait()


def _line(stream: IO[bytes], timeout_s: float) -> bytes | None:
    """The next line, or the rest at the end of the stream; None when time is up."""
    deadline = time.monotonic() + timeout_s
    got = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while not got.endswith(b"\n"):
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return None
            # The pipe may hold several answers: take one line only.
            byte = os.read(stream.fileno(), 1)
            if not byte:
                break
            got += byte
    return bytes(got)


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def serve(handle: Callable[[Job, IO[bytes]], Job]) -> None:
    """Read a JSON line per job from standard input, answer with one each on standard output. ``handle``
    gets the file that holds the compilers' output; an exception of it is an answer with ``reason``."""
    asked, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Compilers use the standard streams; jobs and answers go through duplicates of them.
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
    """The first line of a compiler's error that states a reason."""
    lines = [line.strip() for line in str(failed).splitlines() if line.strip(" ^=")]
    telling = [x for x in lines if "error" in x.lower() or "must" in x.lower()]
    return f"{type(failed).__name__}: {(telling or lines or ['no message'])[0][:300]}"
