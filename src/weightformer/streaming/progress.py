"""A progress bar over work that was counted beforehand, so that the remaining time holds across unlike passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from weightformer.layers import Block
from weightformer.models import WeightFormer

__all__ = ["Meter", "block_work", "embed_work", "measure_work", "progress_bar"]

# Normalisation, residuals and convolution are bound by memory: an element costs as much time as so many multiply-adds.
_ELEMENT = 250


def embed_work(model: WeightFormer) -> int:
    """Work to make one token from its pixels."""
    return model.patch_embed.proj.weight.numel() + _ELEMENT * model.embed_dim


def measure_work(block: Block) -> int:
    """Work of the pass that measures what a dynamic block predicts its linear weight from, a token."""
    fc1: Any = block.fc1
    r, s = fc1.ranks
    features = sum(layer.weight.numel() for layer in fc1.children()) + r * s
    pooled = 0.0 if fc1.regions else 0.25 if fc1.pool == "2" else 1.0
    return _ELEMENT * fc1.in_features + int(pooled * features)


def block_work(block: Block) -> int:
    """Work to apply a block whose weights are known, a token."""
    fc1: Any = block.fc1
    return 2 * fc1.in_features * fc1.out_features + _ELEMENT * fc1.in_features


class Meter:
    """Counts finished work and tells a listener its share of the total.

    Args:
        total: all work of the run.
        listener: called with a number from 0 to 1.
    """

    def __init__(self, total: int, listener: Callable[[float], None]) -> None:
        self.total, self.done = total, 0
        self._listener = listener

    def add(self, work: int) -> None:
        """Report finished work."""
        self.done += work
        self._listener(self.done / self.total)

    def count(self, strips: Iterator[Tensor], work_per_row: int) -> Iterator[Tensor]:
        """The same strips; each counts when the next one is asked for."""
        for strip in strips:
            rows = len(strip)
            yield strip
            self.add(rows * work_per_row)


@contextmanager
def progress_bar(name: str, show: bool | Callable[[float], None]) -> Iterator[Callable[[float], None]]:
    """A listener for `Meter`: a bar on the terminal's error stream, the given callable, or nothing."""
    if callable(show) or not show:
        yield show if callable(show) else lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn

    class Remaining(ProgressColumn):
        """Time left at the mean speed of this run, which a resumed run counts from where it began."""

        def render(self, task: Task) -> Any:
            done = task.completed - task.fields["begun"]
            if not done or not task.elapsed:
                return "-:--:-- left"
            left = task.elapsed * ((task.total or 0) - task.completed) / done
            return f"{timedelta(seconds=round(left))} left"

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=1.0, begun=0.0)
        started = False

        def listen(share: float) -> None:
            nonlocal started
            if not started:
                bar.update(task, begun=share)
                started = True
            bar.update(task, completed=share)

        yield listen
