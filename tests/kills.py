"""Runs that are killed at a known step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_KILLER = """
import importlib, os, signal, sys
from weightformer.cli import main
room, name, last, *argv = sys.argv[1:]
module = getattr(importlib.import_module(room), name)
original, steps = module.training_step, []
def step(self, batch, batch_idx):
    steps.append(batch_idx)
    if len(steps) == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch, batch_idx)
module.training_step = step
main(argv)
"""


def run_killed(module: type, step: int, argv: Sequence[str]) -> None:
    """Run ``weightformer`` in a process that SIGKILLs itself when it is about to take a training step, from 1.

    Args:
        module: the Lightning module that trains.
        step: counted over all epochs.
        argv: the command line.
    """
    command = [sys.executable, "-c", _KILLER, module.__module__, module.__name__, str(step), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
