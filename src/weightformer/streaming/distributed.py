"""One image over several processes, for training and inference: each holds some rows of its tokens.

What crosses between processes is one token row each way per convolution, and per dynamic block the sums over tokens:
region sums and a Gram matrix, whatever the size of the image. Gradients travel the same way back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from weightformer import ops
from weightformer.layers import Block
from weightformer.models import WeightFormer
from weightformer.ops.dynamic_linear.eager import gram
from weightformer.streaming.outputs import accumulator_dtype
from weightformer.streaming.passes import kernel_means, kernel_sums, predicted_weight, region_sums, segments
from weightformer.streaming.rows import Rows

__all__ = ["RowParallel"]


class RowParallel(nn.Module):
    """A WeightFormer over the rows of one batch of images, split over a process group.

    Every process calls it with its own pixel rows and gets the same logits; each computes the loss from them and calls
    ``backward``, and finds in every parameter the gradient of that loss, the same on all processes. Random masks
    (drop-path, dropout) are drawn alike on all. Not to be wrapped in DistributedDataParallel over the same group.

    Args:
        model: the same weights on every process; its ``global_pool`` must be ``"avg"``.
        group: the processes, in the order of their rows; all by default.

    Attributes:
        sent: bytes that this process sent in the last forward, by block index, for ``"halo"`` and ``"statistics"``.

    Raises:
        ValueError: the model does not pool, or has a block that is not one of ours.
    """

    def __init__(self, model: WeightFormer, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if model.global_pool != "avg":
            raise ValueError(f"RowParallel needs global_pool='avg', the model has {model.global_pool!r}")
        segments(model.blocks)
        self.group: Any = dist.group.WORLD if group is None else group
        self.sent: list[dict[str, int]] = []
        self._body = _Body(model)

    def pixel_rows(self, height: int) -> tuple[int, int]:
        """First and one past last pixel row of this process, for images of this height.

        Raises:
            ValueError: there are too few rows for the processes.
        """
        patch = self._body.model.patch_embed.patch_size
        rows = Rows(-(-height // patch), self.group)
        return rows.start * patch, min(rows.stop * patch, height)

    def forward(self, part: Tensor, height: int) -> Tensor:
        """Logits (B, num_classes) of images (B, in_chans, height, width).

        Args:
            part: this process's rows of them, as `pixel_rows` says.
            height: pixels of the whole images.

        Raises:
            ValueError: the part has another number of rows.
        """
        top, bottom = self.pixel_rows(height)
        if part.shape[-2] != bottom - top:
            raise ValueError(f"this process holds rows {top} to {bottom} of {height}, got {part.shape[-2]} rows")
        rows = Rows(-(-height // self._body.model.patch_embed.patch_size), self.group)
        # Each process sees a part of every parameter's gradient: identities whose backward adds up the parts.
        parameters = {name: _SumGradients.apply(value, rows) for name, value in self._body.named_parameters()}
        with self._same_random_numbers(part.device):
            logits, self.sent = functional_call(self._body, parameters, (part, rows))
        return logits

    @contextmanager
    def _same_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw the same masks on every process while training, and leave each one's own generator as it was."""
        if not self.training:
            yield
            return
        seed = torch.randint(2**31, (1,), device=device)
        dist.broadcast(seed, dist.get_global_rank(self.group, 0), group=self.group)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(seed))
            yield


class _Body(nn.Module):
    """The forward over this process's rows; `RowParallel` calls it with parameters whose gradients are summed."""

    def __init__(self, model: WeightFormer) -> None:
        super().__init__()
        self.model = model

    def forward(self, part: Tensor, rows: Rows) -> tuple[Tensor, list[dict[str, int]]]:
        """Logits, and the bytes sent by each block."""
        model, sent = self.model, []
        patch = model.patch_embed.patch_size
        part = F.pad(part, (0, -part.shape[-1] % patch, 0, -part.shape[-2] % patch))
        x = model.embed_norm(model.patch_embed(part))
        for block in model.blocks:
            rows.sent.update(halo=0, statistics=0)
            x = _run_block(block, x, rows)
            sent.append(dict(rows.sent))
        total = _Sum.apply(model.norm(x).sum(dim=(1, 2), dtype=accumulator_dtype(x.device)), rows)
        mean = (total / (rows.height * x.shape[2])).to(x.dtype)
        # Each process answers for its share of the loss, which all of them compute: then every sum is a plain sum.
        return _ShareGradient.apply(model.forward_head(mean[:, None, None]), dist.get_world_size(rows.group)), sent


def _run_block(block: nn.Module, x: Tensor, rows: Rows) -> Tensor:
    """`weightformer.layers.Block` on some rows of the grid."""
    assert isinstance(block, Block)
    conv: Any = block.conv
    x = block.norm1(x)
    window = _Halo.apply(x, rows)
    if block.dynamic:
        averaged = x
        if conv.predictor == "conv":
            hidden = F.gelu(conv.proj1(window)[:, 1:-1])
            averaged = conv.proj2(_Halo.apply(hidden, rows))[:, 1:-1]
        sums = kernel_sums(conv, averaged, rows.start, rows.height, accumulator_dtype(x.device))
        kernel = conv.kernel(*kernel_means(conv, _Sum.apply(sums, rows), rows.height, x.shape[2]))
        mixed = ops.dynamic_depthwise_conv2d(window, kernel.to(x.dtype), conv.bias)
    else:
        mixed = conv(window)
    x = x + mixed[:, 1:-1]
    return x + block.drop_path(block.fc2(block.act(_first_layer(block, block.norm2(x), rows))))


def _first_layer(block: Block, x: Tensor, rows: Rows) -> Tensor:
    fc1: Any = block.fc1
    if not block.dynamic:
        return fc1(x)
    dtype = accumulator_dtype(x.device)
    if fc1.regions:
        sums = region_sums(x, rows.start, rows.height, dtype, fc1.regions)
    else:
        sums = gram(*fc1.factors(x)).to(dtype)
    weight = predicted_weight(block, _Sum.apply(sums, rows), rows.height, x.shape[2])
    y = torch.baddbmm(fc1.bias.to(x.dtype), x.flatten(1, 2), weight.to(x.dtype))
    return y.unflatten(1, x.shape[1:3])


class _Halo(torch.autograd.Function):
    """Tokens (B, n, W, C) to (B, n + 2, W, C): the neighbours' adjoining rows around them, zero at the border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        above, below = rows.neighbours(x[:, :1], x[:, -1:])
        zero = torch.zeros_like(x[:, :1])
        return torch.cat([zero if above is None else above, x, zero if below is None else below], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        above, below = ctx.rows.neighbours(grad[:, :1], grad[:, -1:])
        inner = grad[:, 1:-1].clone()
        if above is not None:
            inner[:, :1] += above
        if below is not None:
            inner[:, -1:] += below
        return inner, None


class _Sum(torch.autograd.Function):
    """The sum of all processes' tensors; each one's gradient is the sum of what all of them find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sum(grad.clone()), None


class _SumGradients(torch.autograd.Function):
    """The identity; its gradient is the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.sum(grad.clone()), None


class _ShareGradient(torch.autograd.Function):
    """The identity; its gradient is one part of ``parts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None
