"""What is measured of a model: a registry of cases, apart from the runner that times them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer.bench.contenders import logits

__all__ = ["CASES", "Case", "captured", "inference_step", "training_step"]


@dataclass(frozen=True)
class Case:
    """One measured quantity.

    Attributes:
        unit: as printed.
        higher_is_better: how a ratio reads.
        training: whether it runs the training step; otherwise inference.
        value: from seconds a step and images a batch to the printed quantity; `None` for peak memory, not timed.
        batch: the batch it fixes, if any.
    """

    unit: str
    higher_is_better: bool
    training: bool
    value: Callable[[float, int], float] | None
    batch: int | None = None


def _images_per_second(seconds: float, batch: int) -> float:
    return batch / seconds


def _milliseconds(seconds: float, batch: int) -> float:
    return 1e3 * seconds


CASES = {
    "throughput": Case("images/s", True, False, _images_per_second),
    "latency": Case("ms", False, False, _milliseconds, batch=1),
    "training": Case("ms/step", False, True, _milliseconds),
    "memory": Case("MB", False, False, None),
    "training-memory": Case("MB", False, True, None),
}


def inference_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """One forward pass in inference mode."""

    def step() -> None:
        with torch.inference_mode():
            logits(model, images)

    return step


def training_step(model: nn.Module, images: Tensor) -> Callable[[], None]:
    """Forward, cross-entropy, backward and one AdamW step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, capturable=images.is_cuda)
    target = torch.arange(len(images), device=images.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(logits(model, images).float(), target).backward()
        optimizer.step()

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as a CUDA graph, whose replay leaves out the time that Python takes to launch the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
