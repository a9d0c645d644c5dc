"""The forward pass over strips of token rows, exact for any height.

A strip is a tensor (n, W, C) of consecutive token rows. The stages below are generators: each takes strips and yields
strips of the same rows, so that the blocks of a pass chain like function calls. A 3 x 3 convolution waits for the row
below, hence each stage runs one row behind the one that feeds it and keeps two rows of its input.

What is global in a dynamic block is a sum over tokens: `region_sums` for its kernel, a Gram matrix or again region sums
for its weight. Once they are known, the block is a static one, so one stage (`apply_block`) serves both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightformer import ops
from weightformer.layers import Block
from weightformer.ops.dynamic_linear.eager import gram, weight_from_gram

__all__ = [
    "Segment",
    "Strips",
    "Weights",
    "ahead",
    "apply_block",
    "dynamic_weights",
    "kernel_means",
    "kernel_sums",
    "kernel_tokens",
    "measure_weight",
    "predicted_weight",
    "region_areas",
    "region_sums",
    "segments",
    "static_weights",
    "weight_sums_shape",
]

Strips = Iterator[Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """Blocks that one pass over the tokens applies: at most one dynamic block, then static ones."""

    dynamic: Block | None
    static: tuple[Block, ...]
    following: Block | None = None
    """The next segment's dynamic block, whose kernel is predicted from this one's tokens."""

    @property
    def halo(self) -> int:
        """Rows that the segment needs above and below the rows it computes: one a convolution."""
        conv: Any = None if self.following is None else self.following.conv
        return len(self.static) + (self.dynamic is not None) + (0 if conv is None else conv.halo)


def segments(blocks: Iterable[nn.Module]) -> list[Segment]:
    """Split the blocks before each dynamic one; the first segment has none and may be empty.

    Raises:
        ValueError: a block is not one of ours.
    """
    groups: list[tuple[Block | None, list[Block]]] = [(None, [])]
    for i, block in enumerate(blocks):
        if not isinstance(block, Block):
            raise ValueError(f"block {i} is a {type(block).__name__}; only weightformer.layers.Block can be streamed")
        if type(block.act) is not nn.GELU:
            raise ValueError(f"block {i} has the activation {type(block.act).__name__}; only GELU can be streamed")
        if block.dynamic:
            groups.append((block, []))
        else:
            groups[-1][1].append(block)
    following = [dynamic for dynamic, _ in groups[1:]] + [None]
    return [Segment(dynamic, tuple(static), after) for (dynamic, static), after in zip(groups, following, strict=True)]


def region_sums(x: Tensor, row: int, height: int, dtype: torch.dtype, size: int = 3) -> Tensor:
    """Sums over the overlapping regions of `weightformer.ops.region_mean`, of some rows of the grid.

    Args:
        x: tokens (B, n, W, C), rows ``row`` to ``row + n`` of the grid.
        row: the first one.
        height: rows of the whole grid.
        dtype: to accumulate in; within a strip and a column, float32 at least.
        size: K, regions a side.

    Returns:
        (B, K, K, C); added up over all rows and divided by `region_areas`, the region means.
    """
    batch, count, width, channels = x.shape
    x = ops.wide(x)
    rows = _inside(_region_bounds(height, size, x.device), row, count, x.dtype)
    cols = _inside(_region_bounds(width, size, x.device), 0, width, dtype)
    by_rows = (rows @ x.reshape(batch, count, width * channels)).view(batch, size, width, channels)
    return cols @ by_rows.to(dtype)


def region_areas(height: int, width: int, like: Tensor, size: int = 3) -> Tensor:
    """Tokens in each region (K, K, 1), in the type and on the device of ``like``."""
    (top, bottom), (left, right) = (_region_bounds(side, size, like.device) for side in (height, width))
    return ((bottom - top)[:, None, None] * (right - left)[:, None]).to(like.dtype)


def kernel_tokens(conv: Any, strips: Strips, top: bool, bottom: bool) -> Strips:
    """What a dynamic convolution averages over regions: the tokens, or what its own two convolutions make of them.

    Args:
        conv: a `weightformer.layers.DynamicDepthwiseConv2d`.
        strips: consecutive strips of tokens, ``conv.halo`` rows more on either side than wanted.
        top: as in `apply_block`.
        bottom: likewise.
    """
    if conv.predictor != "conv":
        return strips
    first, second = conv.proj1, conv.proj2
    hidden = _by_window(lambda window: F.gelu(_convolve(window, first.weight, first.bias)), strips, top, bottom)
    return _by_window(lambda window: _convolve(window, second.weight, second.bias), hidden, top, bottom)


def kernel_sums(conv: Any, x: Tensor, row: int, height: int, dtype: torch.dtype) -> Tensor:
    """All region sums that the kernel of a dynamic convolution is predicted from.

    Args:
        conv: a `weightformer.layers.DynamicDepthwiseConv2d`.
        x: what `kernel_tokens` returns, as (B, n, W, C).
        row: as in `region_sums`; likewise the others.
        height: see there.
        dtype: see there.

    Returns:
        (B, regions, C); `kernel_means` takes it, added up over all rows.
    """
    return torch.cat([region_sums(x, row, height, dtype, n).flatten(1, 2) for n in conv.region_sizes], dim=1)


def kernel_means(conv: Any, sums: Tensor, height: int, width: int) -> list[Tensor]:
    """The arguments of ``conv.kernel`` from the sums of `kernel_sums` over the whole grid."""
    sizes = conv.region_sizes
    parts = sums.split([n * n for n in sizes], dim=1)
    return [
        part.unflatten(1, (n, n)) / region_areas(height, width, part, n) for part, n in zip(parts, sizes, strict=True)
    ]


def _region_bounds(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and one past last index of each region of a side: ``[floor(i n / K), ceil((i + 1) n / K))``."""
    region = torch.arange(size, device=device)
    return region * length // size, ((region + 1) * length + size - 1) // size


def _inside(bounds: tuple[Tensor, Tensor], start: int, count: int, dtype: torch.dtype) -> Tensor:
    """(K, count): 1 where position ``start + j`` lies in region i."""
    first, end = (bound[:, None] for bound in bounds)
    position = torch.arange(start, start + count, device=first.device)
    return ((position >= first) & (position < end)).to(dtype)


@dataclass(frozen=True)
class Weights:
    """All that `apply_block` needs of a block whose weights are known."""

    kernel: Tensor  # (C, 3, 3)
    kernel_bias: Tensor
    norm: nn.LayerNorm
    fc1: Tensor  # (O, C), or predicted (1, C, O)
    fc1_bias: Tensor
    fc2: nn.Linear


def static_weights(block: Block) -> Weights:
    """The parameters of a static block."""
    conv: Any = block.conv
    fc1: Any = block.fc1
    return Weights(conv.weight.squeeze(1), conv.bias, block.norm2, fc1.weight, fc1.bias, block.fc2)


def dynamic_weights(block: Block, kernel: Tensor, weight: Tensor | None, height: int, width: int) -> Weights:
    """What a dynamic block predicts from the sums over its tokens.

    Args:
        block: the block.
        kernel: `kernel_sums` of the tokens that enter its convolution.
        weight: likewise the sums of `measure_weight`; ``None`` while only the convolution is wanted.
        height: rows of the grid.
        width: tokens a row.
    """
    conv: Any = block.conv
    fc1: Any = block.fc1
    taps = conv.kernel(*kernel_means(conv, kernel, height, width))[0].to(conv.bias.dtype)
    predicted = fc1.bias[None, :0] if weight is None else predicted_weight(block, weight, height, width)
    return Weights(taps, conv.bias, block.norm2, predicted, fc1.bias, block.fc2)


def predicted_weight(block: Block, sums: Tensor, height: int, width: int) -> Tensor:
    """The weight (B, C, O) of a dynamic linear layer from the sums of `measure_weight` over a grid of this size.

    Computed in the type of the sums, returned in the layer's.
    """
    fc1: Any = block.fc1
    if fc1.regions:
        pooled = (sums / region_areas(height, width, sums, fc1.regions)).to(fc1.bias.dtype)
        sums = gram(*fc1.features(pooled.flatten(1, 2))).to(sums.dtype)
    w1, w2, static = (None if p is None else p.to(sums.dtype) for p in (fc1.w1, fc1.w2, fc1.weight))
    assert w2 is not None
    weight = weight_from_gram(sums, w1, w2, static, fc1.scale(height * width), fc1.normalize)
    return weight.to(fc1.bias.dtype)


def weight_sums_shape(block: Block) -> tuple[int, ...]:
    """Shape of what `measure_weight` adds up for one image."""
    fc1: Any = block.fc1
    return (fc1.regions, fc1.regions, fc1.in_features) if fc1.regions else fc1.ranks


def measure_weight(
    block: Block, weights: Weights, strips: Strips, top: bool, bottom: bool, row: int, height: int, total: Tensor
) -> Tensor:
    """Add to ``total`` what a dynamic linear layer's weight is predicted from, of the tokens that enter the layer.

    That is a Gram matrix of features (1, R, S) or, where the layer pools to a fixed number of regions, their sums. For
    2 x 2 pooling the rows must start on an even row of the grid; an odd last row is dropped, as it is there.

    Args:
        block: the block.
        weights: of its convolution, as from `dynamic_weights`.
        strips: as in `apply_block`; likewise the next two.
        top: see there.
        bottom: see there.
        row: number of the first row that is measured.
        height: rows of the whole grid.
        total: zeros (1, *weight_sums_shape) or what was added up so far.
    """
    fc1: Any = block.fc1
    tokens = _by_window(lambda window: _mix(weights, window)[1][0], strips, top, bottom)
    for strip in _row_pairs(tokens) if fc1.pool == "2" and not fc1.regions else tokens:
        if fc1.regions:
            total += region_sums(strip[None], row, height, total.dtype, fc1.regions)
            row += len(strip)
        else:
            total += gram(*fc1.factors(strip[None]))
    return total


def apply_block(weights: Weights, strips: Strips, top: bool, bottom: bool) -> Strips:
    """``x = x + conv(x); x = x + fc2(gelu(fc1(norm2(x))))`` on strips.

    Args:
        weights: the block's parameters, predicted or not.
        strips: consecutive strips.
        top: whether the first row is the grid's first; if not, it serves only as the neighbour of the next row.
        bottom: likewise for the last row.
    """

    def step(window: Tensor) -> Tensor:
        x, y = _mix(weights, window)
        del window  # a strip less in memory
        fc1, fc2 = (weights.fc1, weights.fc1_bias), (weights.fc2.weight, weights.fc2.bias)
        return ops.mlp(x, y, *fc1, *fc2, overwrite_y=True)[0]

    return _by_window(step, strips, top, bottom)


def _mix(weights: Weights, window: Tensor) -> tuple[Tensor, Tensor]:
    """``x + conv(x)`` and its norm2 for the inner rows of a window (n + 2, W, C), both (1, n, W, C)."""
    norm = weights.norm
    x, y = ops.depthwise_norm(window[None], weights.kernel, weights.kernel_bias, norm.weight, norm.bias, norm.eps)
    return x[:, 1:-1], y[:, 1:-1]


def _convolve(window: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """A depthwise convolution with 3 x 3 taps for the inner rows of a window."""
    x = window[None].permute(0, 3, 1, 2)
    y = F.conv2d(x, kernel, bias, padding=(0, 1), groups=x.shape[1])
    return y[0].permute(1, 2, 0).contiguous()


def _by_window(step: Callable[[Tensor], Tensor], strips: Strips, top: bool, bottom: bool) -> Strips:
    """``step`` on strips with one neighbouring row on either side, zero beyond the grid's own border.

    Nothing but two rows is held between strips, so that chained stages do not pile up their windows.
    """
    held: Tensor | None = None
    for strip in strips:
        above = held if held is not None else torch.zeros_like(strip[:1]) if top else strip[:0]
        held = torch.cat([above[-1:], strip[-2:]])[-2:]
        window = [torch.cat([above, strip])]
        del strip  # not held while later stages work
        if len(window[0]) > 2:
            yield step(window.pop())
    if bottom and held is not None:
        yield step(torch.cat([held, torch.zeros_like(held[:1])]))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in a second thread while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(next, items, None)
        while (item := future.result()) is not None:
            future = pool.submit(next, items, None)
            yield item


def _row_pairs(strips: Iterable[Tensor]) -> Strips:
    """The same rows in strips of an even number; an odd last row is dropped."""
    odd: Tensor | None = None
    for strip in strips:
        if odd is not None:
            strip = torch.cat([odd, strip])
        even = len(strip) // 2 * 2
        odd = strip[even:].clone() if even < len(strip) else None
        if even:
            yield strip[:even]
