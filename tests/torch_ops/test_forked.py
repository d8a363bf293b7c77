"""A process that is forked while a thread of its parent is in the middle of a call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
# The child is ended by an alarm if it waits for a thread that there is none of.
FORKED = """
import os, signal, threading
from torch import nn
import transconv
from transconv.torch_ops.calls import precompile

transconv.convert_(kept := nn.Sequential(nn.Conv2d(3, 4, 3)))
held = threading.Event()

def hold():
    with precompile._networks.lock:
        precompile._networks.all[0].expected[0] = "a question to the parent's processes"
        held.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    transconv.convert_(nn.Sequential(nn.Conv2d(3, 4, 3)))
    asked = [n.expected for n in precompile._networks.all if n.model() is kept]
    os._exit(0 if asked == [{}] else 1)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_guesses_what_follows_anew() -> None:
    done = programs.run(["-c", FORKED], cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
