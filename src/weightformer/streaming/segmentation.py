"""UperNet on a WeightFormer, exact for any height and width.

The passes over the backbone keep the maps that the head takes. Of the head, only the pyramid pooling sees the whole
image, and it sees means over regions: one more pass adds them up. All else is local, so the head then runs over one
window after the other, each with a margin wider than what a pixel's class depends on, and what the margin holds is
dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer.models import WeightFormer
from weightformer.streaming.embedding import check_image
from weightformer.streaming.outputs import DenseOutput, accumulator_dtype
from weightformer.streaming.passes import region_areas, region_sums, segments
from weightformer.streaming.progress import Meter, progress_bar
from weightformer.streaming.rows import Rows
from weightformer.streaming.run import Passes, choose_folder, digest, opened
from weightformer.streaming.workspace import RowStore, num_bytes, open_workspace

__all__ = ["stream_segmentation"]

# In cells of the coarsest map, or in tokens where these are larger. A pixel's logits reach less than 4 cells: at most
# two convolutions and two enlargements there or nearly there, and less on every finer map (1/2 + 1/4 + ...).
_MARGIN = 4
_CORE = 16


def stream_segmentation(
    model: nn.Module,
    source: Any,
    output: Any,
    out: str | os.PathLike[str] | None,
    strip_rows: int,
    memory: int | str | None,
    workspace: str | os.PathLike[str] | None,
    progress: bool | Callable[[float], None],
) -> Tensor | Path:
    """`weightformer.streaming.stream` for a `weightformer.tasks.segmentation.upernet.UperNet`."""
    backbone: Any = model.backbone
    assert isinstance(backbone, WeightFormer)
    _check_norms(model)
    training = model.training
    weight = backbone.patch_embed.proj.weight
    with ExitStack() as stack:
        stack.callback(model.train, training)
        model.eval()
        image = stack.enter_context(opened(source))
        check_image(backbone, image)
        listener = stack.enter_context(progress_bar(image.name, progress))
        patch = backbone.patch_embed.patch_size
        rows, width = Rows(-(-image.height // patch)), -(-image.width // patch)
        shape = (rows.height, width, backbone.embed_dim)
        indices: list[int] = sorted(model.indices)  # type: ignore[arg-type]
        size = (1 + len(indices)) * num_bytes(shape, weight.dtype)
        folder, temporary = choose_folder(size, memory, workspace, weight.device, None)
        run = {}
        if workspace is not None:
            run = {"model": digest(model), "image": image.identity(), "strip_rows": str(strip_rows)}
        sink = DenseOutput(image.height, nn.Identity(), None if out is None else Path(out))
        tokens = stack.enter_context(
            open_workspace(folder, shape, weight.dtype, weight.device, run, temporary=temporary)
        )
        maps = [tokens.keep(f"map-{i}") for i in indices]
        head = _Head(model, maps, (rows.height, width), (image.height, image.width))
        taps = {backbone.blocks[i]: store for i, store in zip(indices, maps, strict=True)}
        passes = Passes(
            backbone,
            image,
            segments(backbone.blocks),
            rows,
            width,
            strip_rows,
            tokens,
            listener,
            taps=taps,
            work_after=head.work,
        )
        passes.run(_Nothing())
        for row, values in head.bands(passes.meter, labels=output == "segmentation"):
            sink.add(row, values)
        return sink.result()


class _Nothing:
    """Takes the final tokens of the backbone, which no head wants."""

    def add(self, row: int, strip: Tensor) -> None:
        """See `weightformer.streaming.outputs.Output`."""

    def result(self) -> None:
        """See `weightformer.streaming.outputs.Output`."""


class _Head:
    """Neck and decode head over the stored maps of an image.

    Args:
        model: the UperNet.
        maps: what the backbone left, rows of tokens (W, C).
        grid: H and W.
        size: height and width of the image, in pixels.
    """

    def __init__(
        self, model: nn.Module, maps: Sequence[RowStore], grid: tuple[int, int], size: tuple[int, int]
    ) -> None:
        self._maps, self._grid, self._size = maps, grid, size
        self._head: Any = model.decode_head
        neck: Any = model.neck
        self._scales: Sequence[nn.Module] = getattr(neck, "scales", [nn.Identity()])
        exponents = getattr(neck, "scale_exponents", [0])
        self._patch: int = model.backbone.patch_embed.patch_size  # type: ignore
        # Windows are counted in cells of so many tokens; the coarsest map has ``fine`` of its own to a cell, a side.
        self._cell, self._fine = 2 ** max(0, -min(exponents)), 2 ** max(0, min(exponents))
        self._cells = tuple(-(-side // self._cell) for side in grid)
        self._context: list[Tensor] = []
        self.work = _work(neck, self._head, exponents) * _windowed(self._cells) * self._cell**2

    def bands(self, meter: Meter, *, labels: bool) -> Iterator[tuple[int, Tensor]]:
        """First pixel row and logits (n, width, K), or the likeliest classes (n, width), in bands from the top."""
        self._context = self._head.pool(self._means())
        height, width = self._cells
        for top in range(0, height, _CORE):
            rows = (top, min(top + _CORE, height))
            strips = self._read(rows)
            parts = []
            for left in range(0, width, _CORE):
                columns = (left, min(left + _CORE, width))
                logits = self._window(strips, rows, columns).permute(1, 2, 0)
                parts.append(_labels(logits) if labels else logits)
                meter.add(self.work * (rows[1] - top) * (columns[1] - left) // (height * width))
            yield top * self._cell * self._patch, torch.cat(parts, 1)
        meter.add(meter.total - meter.done)  # what rounding left

    def _read(self, rows: tuple[int, int]) -> list[Tensor]:
        """Rows of all maps (1, C, h, W) for a band of cells and its margin."""
        first, last = _with_margin(rows, self._cells[0])
        start, stop = first * self._cell, min(last * self._cell, self._grid[0])
        device = self._context[0].device
        return [store.read(start, stop).to(device)[None].permute(0, 3, 1, 2) for store in self._maps]

    def _window(self, strips: list[Tensor], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Logits (K, h, w) of the pixels of a window of cells."""
        around = _with_margin(rows, self._cells[0]), _with_margin(columns, self._cells[1])
        left, right = around[1][0] * self._cell, min(around[1][1] * self._cell, self._grid[1])
        maps = [scale(strip[..., left:right]) for scale, strip in zip(self._scales, strips, strict=True)]
        logits = self._head.decode(maps, [_enlarged(x, self._cells, around, self._fine) for x in self._context])
        height, width = (side * self._patch for side in strips[0][..., left:right].shape[-2:])
        logits = F.interpolate(logits, size=(height, width), mode="bilinear")[0]
        unit = self._cell * self._patch
        top, left = (inner[0] - outer[0] for inner, outer in zip((rows, columns), around, strict=True))
        bottom, right = (
            min(inner[1] * unit, side) - outer[0] * unit
            for inner, outer, side in zip((rows, columns), around, self._size, strict=True)
        )
        return logits[:, top * unit : bottom, left * unit : right]

    def _means(self) -> list[Tensor]:
        """Region means (1, C, s, s) of the coarsest map, for every scale of the pyramid pooling."""
        store, scale, (height, width) = self._maps[-1], self._scales[-1], self._cells
        like: Tensor = self._head.classifier.weight
        dtype = accumulator_dtype(like.device)
        sums: dict[int, Tensor] = {}
        for top in range(0, height, _CORE):
            start, stop = top * self._cell, min((top + _CORE) * self._cell, self._grid[0])
            x = scale(store.read(start, stop).to(like.device)[None].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            for size in self._head.pool_scales:
                part = region_sums(x, top * self._fine, height * self._fine, dtype, size)
                sums[size] = sums[size] + part if size in sums else part
        area = height * self._fine, width * self._fine
        means = [total / region_areas(*area, total, size) for size, total in sums.items()]
        return [mean.permute(0, 3, 1, 2).to(like.dtype) for mean in means]


def _labels(logits: Tensor) -> Tensor:
    """The likeliest class (h, w)."""
    return logits.argmax(-1).to(torch.uint8 if logits.shape[-1] <= 256 else torch.int16)


def _with_margin(cells: tuple[int, int], count: int) -> tuple[int, int]:
    return max(cells[0] - _MARGIN, 0), min(cells[1] + _MARGIN, count)


def _enlarged(x: Tensor, size: Sequence[int], window: Sequence[tuple[int, int]], unit: int) -> Tensor:
    """A window of a map (1, C, s, s) that is enlarged bilinearly to ``size`` units, as by ``F.interpolate``."""
    rows, columns = (
        _bilinear(x.shape[-1], length * unit, start * unit, stop * unit).to(x)
        for length, (start, stop) in zip(size, window, strict=True)
    )
    return rows @ x @ columns.mT


def _bilinear(count: int, length: int, start: int, stop: int) -> Tensor:
    """(stop - start, count): how much of each of ``count`` cells goes into positions of an enlarged side."""
    position = ((torch.arange(start, stop, dtype=torch.float64) + 0.5) * count / length - 0.5).clamp_min(0)
    lower = position.floor().long().clamp_max(count - 1)
    upper = (lower + 1).clamp_max(count - 1)
    share = (position - lower)[:, None]
    return F.one_hot(lower, count) * (1 - share) + F.one_hot(upper, count) * share


def _windowed(cells: Sequence[int]) -> int:
    """Cells that all windows compute, margins included."""
    total = 1
    for count in cells:
        spans = (_with_margin((start, min(start + _CORE, count)), count) for start in range(0, count, _CORE))
        total *= sum(stop - start for start, stop in spans)
    return total


def _work(neck: nn.Module, head: Any, exponents: Sequence[int]) -> int:
    """Multiply-adds of neck and decode head, about, a token."""

    def weights(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim == 4)

    finest = 4 ** exponents[0]
    work = weights(neck) * finest + (weights(head.fuse) + weights(head.classifier)) * finest
    for lateral, smooth, exponent in zip(head.lateral, head.smooth, exponents, strict=False):
        work += round((weights(lateral) + weights(smooth)) * 4.0**exponent)
    return work + round(weights(head.context) * 4.0 ** exponents[-1])


def _check_norms(model: nn.Module) -> None:
    for part in (model.neck, model.decode_head):
        if any(isinstance(module, nn.GroupNorm) for module in part.modules()):  # type: ignore[union-attr]
            raise ValueError(
                "norm: group takes its statistics over the whole map and cannot be streamed; train with head.norm: "
                "batch or sync_batch"
            )
