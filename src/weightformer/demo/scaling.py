"""How time and memory of one forward pass grow with the image, beside a twin that has attention.

The twin is timm's VisionTransformer of the same patch, width and depth, without a class token, so that both models
see the same number of tokens. It is measured twice: with PyTorch's fused attention, which never stores the N x N
matrix, and with the explicit softmax that does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from weightformer import ops
from weightformer.analysis.flops import multiply_adds

__all__ = ["ATTENTION", "EXPLICIT", "OURS", "SIDES", "build", "check", "measure", "peak_memory", "slope"]

OURS, ATTENTION, EXPLICIT = "WeightFormer", "attention, fused", "attention, explicit"
SIDES = (32, 48, 64, 96, 128, 192, 256, 384, 512)

_ROUNDS = 5
_MIN_ROUNDS = 3
_SIDE_BUDGET = 6.0  # seconds for one side; the rounds it does not allow are left out
_PASS_LIMIT = 3.0  # a model whose next pass is expected to take more seconds than this is not measured further


def build(side: int) -> dict[str, nn.Module]:
    """The three models for grey images of ``side`` x ``side`` px; the two with attention share their weights."""
    torch.manual_seed(0)
    models: dict[str, Any] = {OURS: timm.create_model("weightformer_micro", in_chans=1)}
    for name in (ATTENTION, EXPLICIT):
        models[name] = VisionTransformer(
            img_size=side,
            in_chans=1,
            num_classes=10,
            patch_size=4,
            embed_dim=64,
            depth=8,
            num_heads=2,
            class_token=False,
            global_pool="avg",
        )
        for block in models[name].blocks:
            block.attn.fused_attn = name == ATTENTION
    models[EXPLICIT].load_state_dict(models[ATTENTION].state_dict())
    return {name: model.eval() for name, model in models.items()}


@torch.inference_mode()
def check(models: dict[str, nn.Module], image: Tensor) -> dict[str, float]:
    """Largest relative difference between forms that must agree: nothing is timed before they do.

    Args:
        models: of `build`, possibly without those that cannot be run at this size.
        image: (1, 1, side, side).

    Raises:
        RuntimeError: they do not agree.
    """
    with ops.implementation("reference"):
        formula = models[OURS](image)
    pairs = {"WeightFormer, fast form against formula": (models[OURS](image), formula)}
    if EXPLICIT in models:
        pairs["attention, fused against explicit"] = (models[ATTENTION](image), models[EXPLICIT](image))
    differences = {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}
    wrong = {name: difference for name, difference in differences.items() if not difference < 1e-4}
    if wrong:
        raise RuntimeError(f"two forms of one computation disagree, so they are not timed: {wrong}")
    return differences


def measure(sides: Sequence[int] = SIDES) -> Iterator[dict[str, Any]]:
    """Measure in a fresh process on one CPU thread; yields one record a side as soon as it is there.

    A record holds ``side``, ``tokens``, ``differences`` (see `check`) and, for each model that was measured at this
    side, ``models[name]`` with ``seconds`` (median), ``rounds``, ``bytes`` (see `peak_memory`) and ``multiply_adds``.

    Raises:
        RuntimeError: the forms disagree, or the process failed.
    """
    code = f"from weightformer.demo.scaling import _main; _main({list(sides)!r})"
    # Threads make small operations slower and their times uneven; the profiler's notices are for its own developers.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            try:
                yield from map(json.loads, process.stdout or ())
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            why = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise RuntimeError(f"measuring time and memory failed: {why}")


def slope(pixels: Sequence[float], values: Sequence[float]) -> float:
    """Exponent e of ``values ~ pixels^e``: least squares on logarithms over the three largest images."""
    return float(np.polyfit(np.log(pixels[-3:]), np.log(values[-3:]), 1)[0])


@torch.inference_mode()
def peak_memory(model: nn.Module, image: Tensor) -> int:
    """The most bytes that tensors made during one forward pass hold at one time; weights and input are not counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(image)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], i, e["args"]["Bytes"]) for i, e in enumerate(events) if e.get("name") == "[memory]")
    return int(np.cumsum([size for *_, size in changes]).max())


def _main(sides: Sequence[int]) -> None:
    """What `measure` runs: one JSON record a line."""
    torch.set_num_threads(1)
    names = [OURS, ATTENTION, EXPLICIT]
    last: dict[str, tuple[int, float]] = {}
    for side in sorted(sides):
        torch.manual_seed(0)
        image = torch.rand(1, 1, side, side)
        names = [name for name in names if name not in last or _expected(name, side, *last[name]) < _PASS_LIMIT]
        if OURS not in names:
            break
        models = {name: model for name, model in build(side).items() if name in names}
        differences = check(models, image)
        memory = {name: peak_memory(model, image) for name, model in models.items()}  # also warms up
        seconds = _interleaved(models, image)
        last = {name: (side, statistics.median(times)) for name, times in seconds.items()}
        record = {
            "side": side,
            "tokens": (side // 4) ** 2,
            "differences": differences,
            "models": {
                name: {
                    "seconds": last[name][1],
                    "rounds": len(seconds[name]),
                    "bytes": memory[name],
                    "multiply_adds": multiply_adds(models[name], 1, side, side),
                }
                for name in names
            },
        }
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


def _expected(name: str, side: int, last_side: int, last_seconds: float) -> float:
    """Seconds that a pass may take at most, from those at a smaller side."""
    return last_seconds * (side / last_side) ** (2 if name == OURS else 4)


@torch.inference_mode()
def _interleaved(models: dict[str, nn.Module], image: Tensor) -> dict[str, list[float]]:
    """Seconds of single passes, the models taking turns, so that a busy moment of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    start = time.perf_counter()
    for done in range(_ROUNDS):
        if done >= _MIN_ROUNDS and time.perf_counter() - start > _SIDE_BUDGET:
            break
        for name, model in models.items():
            before = time.perf_counter()
            model(image)
            seconds[name].append(time.perf_counter() - before)
    return seconds
