"""A progress bar over work that was counted beforehand, so that the remaining time holds across unlike passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import Tensor

from weightformer.layers import Block
from weightformer.models import WeightFormer

__all__ = ["Job", "Meter", "block_work", "embed_work", "job_bar", "measure_work", "progress_bar"]

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


class Job:
    """Progress over one image or several, weighted by their pixels.

    Args:
        total: pixels of all images.
        show: called as ``show(name, done, begun, total)``: the image, and pixels finished, found finished when this
            run began, and wanted.
    """

    def __init__(self, total: float, show: Callable[[str, float, float, float], None]) -> None:
        self._total, self._show = total, show
        self._before = self._begun = 0.0

    def image(self, name: str, pixels: float) -> Callable[[float], None]:
        """A listener for the finished share of the next image; the first share it hears was there from the start."""
        before, self._before = self._before, self._before + pixels
        fresh = True

        def listen(share: float) -> None:
            nonlocal fresh
            if fresh:
                self._begun += share * pixels
                fresh = False
            self._show(name, before + share * pixels, self._begun, self._total)

        return listen

    def without(self, name: str, pixels: float) -> None:
        """Leave out the image that was begun last: it failed, and says nothing about speed."""
        self._before -= pixels
        self._total -= pixels
        self._show(name, self._before, self._begun, self._total)


@contextmanager
def progress_bar(name: str, show: bool | Callable[[float], None]) -> Iterator[Callable[[float], None]]:
    """A listener for `Meter`: a bar on the terminal's error stream, the given callable, or nothing."""
    if callable(show):
        yield show
        return
    with job_bar(1.0, show) as job:
        yield job.image(name, 1.0)


@contextmanager
def job_bar(total: float, show: bool) -> Iterator[Job]:
    """A `Job` with or without a bar on the terminal's error stream."""
    if not show:
        yield Job(total, lambda *_: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn

    class Remaining(ProgressColumn):
        """Time left at the mean speed of this run, which a resumed run counts from where it began."""

        def render(self, task: Task) -> Any:
            done = task.completed - task.fields["begun"]
            if done <= 0 or not task.elapsed:
                return "-:--:-- left"
            left = task.elapsed * ((task.total or 0) - task.completed) / done
            return f"{timedelta(seconds=round(left))} left"

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, begun=0.0)

        def update(name: str, done: float, begun: float, total: float) -> None:
            bar.update(task, description=name, completed=done, begun=begun, total=total)

        yield Job(total, update)
