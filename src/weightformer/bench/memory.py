"""Peak memory of one step beyond the weights and the input.

On a GPU torch keeps count. On a CPU the step runs in a process of its own, whose resident set is read from the kernel:
after a first step on a small image, so that libraries have loaded what they load once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightformer.bench.cases import inference_step, training_step
from weightformer.bench.contenders import resolve

__all__ = ["address_space_limit", "measure", "peak_megabytes"]


def peak_megabytes(**spec: Any) -> float:
    """Megabytes (1e6 bytes) that one step needs at its peak beyond weights and input.

    Args:
        spec: the arguments of `measure`.

    Raises:
        MemoryError: the step does not fit.
        RuntimeError: the step fails for another reason.
    """
    if spec["device"] != "cpu":
        return measure(**spec)
    command = [sys.executable, "-m", "weightformer.bench.memory", json.dumps(spec)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 0:
        return float(result.stdout.split()[-1])
    if result.returncode < 0 or "allocate memory" in result.stderr or "MemoryError" in result.stderr:
        raise MemoryError(f"{spec['name']} at {spec['size']} px does not fit in memory")
    raise RuntimeError(f"measuring the memory of {spec['name']} failed:\n{result.stderr[-2000:]}")


def measure(
    name: str, variant: str, size: int, batch: int, dtype: str, device: str, training: bool, threads: int
) -> float:
    """The measurement itself, in this process."""
    target, precision = torch.device(device), getattr(torch, dtype)
    if target.type == "cpu":
        torch.set_num_threads(threads)
    contender = resolve(name, variant)
    step_of = training_step if training else inference_step
    model = contender.load(size, target, precision)
    with contender.active(), address_space_limit(target):
        small = contender.load(64, target, precision)
        step_of(small, torch.randn(1, 3, 64, 64, device=target, dtype=precision))()
        del small
        step = step_of(model, torch.randn(batch, 3, size, size, device=target, dtype=precision))
        gc.collect()
        before = _reset_peak(target)
        step()
    return (_peak(target) - before) / 1e6


@contextlib.contextmanager
def address_space_limit(device: torch.device) -> Iterator[None]:
    """Make a CPU allocation that cannot fit raise, rather than wake the kernel's out-of-memory killer (Linux)."""
    if device.type != "cpu" or sys.platform != "linux":
        yield
        return
    page = os.sysconf("SC_PAGE_SIZE")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + int(0.9 * free), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _reset_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # freed pages that the allocator still holds would hide new ones
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark of the resident set
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory on a CPU needs Linux")


if __name__ == "__main__":
    sys.stdout.write(f"{measure(**json.loads(sys.argv[1]))}\n")
