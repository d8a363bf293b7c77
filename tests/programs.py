"""Programs in Python that tests run: forks of a process that has imported torch and sympy, which takes
longer than most of the programs do.

``run`` is as ``subprocess.run([sys.executable, "-c" or "-m", ..], text=True, capture_output=True)``:
folder, environment and arguments are the program's own, and neither transconv nor Triton is imported yet.
Hashes of strings differ from those of the tests. Options of ``python`` are the server's, and torch is
there: a test about either starts a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LONGEST_S = 300.0


# -- the side of the tests --------------------------------------------------------------------------


@functools.cache
def _server(asking: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The connection to the server of this process, which ends with it, and the server."""
    ours, its = socket.socketpair()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONHASHSEED"] = "7" if os.environ.get("PYTHONHASHSEED") != "7" else "8"
    server = subprocess.Popen(
        [sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment
    )
    its.close()
    return ours, server


def end() -> None:
    """Ends the server if there is one: only the times of processes that were waited for are counted."""
    if _server.cache_info().currsize:
        connection, server = _server(os.getpid())
        connection.shutdown(socket.SHUT_RDWR)  # forks of this process have copies
        connection.close()
        server.wait()
        _server.cache_clear()


def run(
    words: Sequence[str],
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = LONGEST_S,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs ``-c code`` or ``-m module`` with arguments. Raises what ``subprocess.run`` does."""
    ours, its = socket.socketpair()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, ours:
        asked = {
            "words": list(words),
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
        }
        body = json.dumps(asked).encode()
        with tempfile.TemporaryFile() as question:
            question.write(body)
            question.seek(0)
            socket.send_fds(
                _server(os.getpid())[0],
                [b"?"],
                [its.fileno(), question.fileno(), out.fileno(), err.fileno()],
            )
        its.close()
        answers = ours.makefile("r")
        told = answers.readline()
        if not told:
            raise RuntimeError("the process that forks programs has ended")
        pid = int(told)
        if not select.select([ours], [], [], timeout)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            answers.readline()
            raise subprocess.TimeoutExpired(list(words), timeout, *_read(out, err))
        done = subprocess.CompletedProcess(list(words), int(answers.readline()), *_read(out, err))
    if check:
        done.check_returncode()
    return done


def _read(*files: IO[bytes]) -> list[str]:
    for file in files:
        file.seek(0)
    return [file.read().decode() for file in files]


# -- the side of the server -------------------------------------------------------------------------


def serve(asking: socket.socket) -> dict[str, Any]:
    """Forks a process for each question until no one can ask any more. Returns in the forks alone, with
    what each has to become."""
    while True:
        word, fds, _, _ = socket.recv_fds(asking, 1, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not word:
            os._exit(0)
        if os.fork() == 0:
            asking.close()
            return _forked(*fds)
        for fd in fds:
            os.close(fd)


def _forked(answer: int, question: int, out: int, err: int) -> dict[str, Any]:
    """This process tells the number of the program's and how that ended; its child is the program."""
    with open(question, encoding="utf-8") as file:
        asked: dict[str, Any] = json.load(file)
    program = os.fork()
    if program:
        os.write(answer, f"{program}\n".encode())
        _, status = os.waitpid(program, 0)
        os.write(answer, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    for fd, to in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(fd, to)
        os.close(fd)
    os.close(answer)
    return asked


def become(words: list[str], cwd: str, env: dict[str, str]) -> None:
    """Does what the interpreter does with these arguments, and ends as it does, without freeing memory."""
    status = 1
    try:
        _execute(words, cwd, env)
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            status = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _execute(words: list[str], cwd: str, env: dict[str, str]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    kind, what, *rest = words
    sys.argv = [kind, *rest]
    if kind == "-m":
        sys.path[0] = cwd
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    assert kind == "-c", f"{kind}: expected -c or -m"
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    import sympy  # noqa: F401
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(500_000, 50, 100)  # as in the tests
    become(**serve(socket.socket(fileno=int(sys.argv[1]))))
