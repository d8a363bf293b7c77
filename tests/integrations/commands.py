"""A console command of an installed package, in a process whose calls on a CPU are interpreted:
``python -m tests.integrations.commands nnUNetv2_train ...``; with ``-predict`` that of transconv."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import transconv
from tests.integrations import torchvision_operators

if __name__ == "__main__":
    torchvision_operators.define()
    transconv.config.cpu = "interpret"
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-predict":
        from transconv.integrations import nnunet

        sys.exit(nnunet.main(["predict", *sys.argv[1:]]))
    (command,) = entry_points(group="console_scripts", name=sys.argv[0])
    sys.exit(command.load()())
