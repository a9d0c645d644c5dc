"""Peak memory of one step beyond the weights and the input, by two measures, the same for every model.

What the process needs: on a CPU, how far the resident set rises above that before the step, in a process of its own
that has run the model at `WARM_SIZE` px and gave back what that freed. So the libraries' code and threads are not
charged to the image; kernels that a library compiles for this image size are, and so is what the C allocator cannot
reuse.

What tensors need: the sum of their bytes at the fullest moment, which is the same in every run. On a CPU the profiler
reports every allocation of torch's; on a GPU torch keeps count, and the two measures are one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weightformer.bench.cases import inference_step, training_step
from weightformer.bench.contenders import resolve

__all__ = ["WARM_SIZE", "Peak", "address_space_limit", "measure", "peak", "tensor_bytes"]

WARM_SIZE = 224


@dataclass(frozen=True)
class Peak:
    """Megabytes (1e6 bytes) beyond weights and input: of the process, and of tensors alone."""

    process: float
    tensors: float


def peak(*, timeout: float | None = None, **spec: Any) -> Peak:
    """What one step needs at its peak.

    Args:
        timeout: seconds to wait for the process that measures on a CPU.
        spec: the arguments of `measure`.

    Raises:
        MemoryError: the step does not fit.
        TimeoutError: the process took longer.
        RuntimeError: the step fails for another reason.
    """
    if spec["device"] != "cpu":
        return measure(**spec)
    command = [sys.executable, "-m", "weightformer.bench.memory", json.dumps(spec)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{spec['name']} at {spec['size']} px took longer than {timeout:.0f} s") from None
    if result.returncode == 0:
        return Peak(**json.loads(result.stdout.splitlines()[-1]))
    if result.returncode < 0 or "allocate memory" in result.stderr or "MemoryError" in result.stderr:
        raise MemoryError(f"{spec['name']} at {spec['size']} px does not fit in memory")
    raise RuntimeError(f"measuring the memory of {spec['name']} failed:\n{result.stderr[-2000:]}")


def measure(
    name: str, variant: str, size: int, batch: int, dtype: str, device: str, training: bool, threads: int
) -> Peak:
    """The measurement itself, in this process."""
    target, precision = torch.device(device), getattr(torch, dtype)
    if target.type == "cpu":
        torch.set_num_threads(threads)
    contender = resolve(name, variant)

    def step_at(size: int, batch: int) -> Callable[[], None]:
        images = torch.randn(batch, 3, size, size, device=target, dtype=precision)
        step = (training_step if training else inference_step)(contender.load(size, target, precision), images)
        if contender.compiled:
            step()  # the compiler's memory is not the model's
        return step

    with contender.active(), address_space_limit(target):
        warm = step_at(min(size, WARM_SIZE), 1)  # kept to the end: weights freed here would leave holes to be filled
        warm()
        step = step_at(size, batch)
        gc.collect()
        before = _reset_peak(target)
        step()
        process = _peak(target) - before
        if target.type != "cpu":
            return Peak(process / 1e6, process / 1e6)
        del step
        tensors = tensor_bytes(step_at(size, batch))  # of a first step, too: a second one has its optimizer's state
    return Peak(process / 1e6, tensors / 1e6)


def tensor_bytes(step: Callable[[], None]) -> int:
    """Bytes that tensors allocated by ``step`` on the CPU hold at its fullest moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    assert run.profiler is not None
    changes = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(held, default=0)


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
    sys.stdout.write(json.dumps(asdict(measure(**json.loads(sys.argv[1])))) + "\n")
