"""ViTDet's windowed attention, for timm's vision transformers: what makes DeiT affordable at 1024 px.

Paper: ViTDet (arXiv 2203.16527), section 3. Attention is confined to windows of the token grid, except in the blocks
that end the four quarters of the depth, which carry information between windows.

B images, H x W tokens, C channels, M the side of a window in tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["check_windows", "windowed_map"]


def check_windows(model: nn.Module, name: str) -> None:
    """Prepare a ViT for `windowed_map`: class and register tokens, which no window would hold, are removed.

    Raises:
        ValueError: a model whose blocks are not those of timm's plain ViT.
    """
    if not isinstance(model, VisionTransformer) or not all(isinstance(block, Block) for block in model.blocks):
        raise ValueError(f"head.window is for plain vision transformers such as deit_tiny_patch16_224, not for {name}")
    model.cls_token = model.reg_token = None


def windowed_map(vit: Any, images: Tensor, window: int) -> Tensor:
    """The last map (B, C, H, W) of a ViT, without its final norm, for images whose sides are multiples of its patch.

    Args:
        vit: a model that went through `check_windows`.
        images: (B, in_chans, height, width).
        window: M.
    """
    x = vit.patch_embed(images)
    x = vit.norm_pre(vit.pos_drop(x + _position_embedding(vit, x)))
    last_of_quarters = {len(vit.blocks) * quarter // 4 - 1 for quarter in (1, 2, 3, 4)}
    for i, block in enumerate(vit.blocks):
        side = 0 if i in last_of_quarters else window
        if vit.grad_checkpointing and torch.is_grad_enabled():
            x = checkpoint(_run_block, block, x, side, use_reentrant=False)
        else:
            x = _run_block(block, x, side)
    return x.permute(0, 3, 1, 2)


def _position_embedding(vit: Any, x: Tensor) -> Tensor:
    """(1, H, W, C): the model's own, interpolated to the grid of x (B, H, W, C)."""
    height, width = x.shape[1:3]
    prefix = vit.pos_embed.shape[1] - vit.patch_embed.num_patches
    grid = resample_abs_pos_embed(
        vit.pos_embed[:, prefix:], [height, width], list(vit.patch_embed.grid_size), num_prefix_tokens=0
    )
    return grid.reshape(1, height, width, -1)


def _run_block(block: Any, x: Tensor, window: int) -> Tensor:
    """A block on x (B, H, W, C), its attention within windows, or global for ``window`` 0."""
    attended = _attend(block.attn, block.norm1(x), window)
    x = x + block.drop_path1(block.ls1(attended))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def _attend(attention: nn.Module, x: Tensor, window: int) -> Tensor:
    batch, height, width, channels = x.shape
    if not window:
        return attention(x.reshape(batch, height * width, channels)).reshape(x.shape)
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    rows, columns = x.shape[1] // window, x.shape[2] // window
    x = x.reshape(batch, rows, window, columns, window, channels).transpose(2, 3)
    x = attention(x.reshape(-1, window * window, channels)).reshape(batch, rows, columns, window, window, channels)
    x = x.transpose(2, 3).reshape(batch, rows * window, columns * window, channels)
    return x[:, :height, :width]
