"""What the Triton kernels share: the launch, and the pieces used by more than one of them.

This is the only module besides the kernels' own that imports triton, so nothing here is imported until a kernel is
asked for. With TRITON_INTERPRET=1 set before the start, the kernels run on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["INTERPRETED", "check", "dot", "launch", "pad_channels", "precision", "tile_of", "token_offset"]

INTERPRETED = bool(triton.knobs.runtime.interpret)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_PROGRAMS = 2**31 - 1  # of the first grid axis; the other two end at 65,535 and are not used


def check(*tensors: Tensor) -> None:
    """Refuse what the kernels cannot read.

    Raises:
        RuntimeError: a tensor is not on a GPU (outside the interpreter), or is no float of 32 or 16 bits.
    """
    for tensor in tensors:
        if not (tensor.is_cuda or INTERPRETED):
            raise RuntimeError(
                f"the Triton kernels need CUDA tensors, got one on {tensor.device}: move the model and its input "
                "to the GPU, or use implementation('auto')"
            )
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(
                f"the Triton kernels take float32, bfloat16 and float16, got {tensor.dtype}: use "
                "implementation('eager')"
            )


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Run ``programs`` instances of a kernel on the device of its first argument, whatever the current device is.

    Raises:
        RuntimeError: more programs than one grid axis can hold.
    """
    if programs > _MAX_PROGRAMS:
        raise RuntimeError(f"{programs} programs exceed a launch's {_MAX_PROGRAMS}: split the batch")
    if programs:
        with torch.cuda.device_of(args[0]):
            kernel[(programs,)](*args, **constants)


def pad_channels(channels: int) -> int:
    """The block that holds all channels: a power of two, and 16 at least."""
    return max(16, triton.next_power_of_2(channels))


def precision(dtype: torch.dtype) -> str:
    """How float32 operands are multiplied for a result of ``dtype``: in full, or with 10 bits if it keeps fewer."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """``acc + a @ b`` in float32; the interpreter multiplies bfloat16 wrongly, so there the operands are widened."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tile_of(tile, height, width, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    """Image, rows and columns of the TILE_H x TILE_W tokens of a tile; tiles count along the width first."""
    tiles_w = tl.cdiv(width, TILE_W)
    tiles_h = tl.cdiv(height, TILE_H)
    image = tile // (tiles_h * tiles_w)
    within = tile % (tiles_h * tiles_w)
    token = tl.arange(0, TILE_H * TILE_W)
    rows = within // tiles_w * TILE_H + token // TILE_W
    cols = within % tiles_w * TILE_W + token % TILE_W
    return image, rows, cols


@triton.jit
def token_offset(image, row, col, height, width, C: tl.constexpr):
    """Offset of a token's first channel, in 64 bits: a large batch passes 2^31 elements."""
    return ((image.to(tl.int64) * height + row) * width + col) * C
