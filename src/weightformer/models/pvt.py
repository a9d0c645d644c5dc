"""PVT, the Pyramid Vision Transformer of the first paper: a baseline that timm lacks (it has the second version).

Paper: "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions" (arXiv 2102.12122).
Four stages, each with patches embedded by a convolution, learned positions, and blocks whose attention sees keys and
values reduced by a strided convolution; a class token in the last stage.

Differs from the authors' code in form only: sides that are no multiple of the patch are zero-padded, positions are
interpolated to the grid, and the class token has no position of its own, which would only add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, Mlp, resample_abs_pos_embed_nhwc, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.pvt_v2 import Attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weightformer.models.weightformer import PatchEmbed, feature_indices

__all__ = ["PyramidVisionTransformer"]

# Of each stage: channels, patch, heads, hidden width of the MLP over channels, reduction of keys and values a side.
_STAGES = ((64, 4, 1, 8, 8), (128, 2, 2, 8, 4), (320, 2, 5, 4, 2), (512, 2, 8, 4, 1))


class _Block(nn.Module):
    """Attention over reduced keys and values, then an MLP; both residual, with a norm in front."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: int, reduction: int, drop_path: float, dd: dict[str, Any]
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.attn = Attention(dim, num_heads, sr_ratio=reduction, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mlp = Mlp(dim, dim * mlp_ratio, **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C) of a grid of this size."""
        x = x + self.drop_path(self.attn(self.norm1(x), size))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class _Stage(nn.Module):
    """Tokens (B, C, H, W) of one resolution to those of the next, as (B, N, C) with the size of their grid."""

    def __init__(
        self, in_chans: int, dim: int, patch_size: int, grid: tuple[int, int], blocks: list[_Block], dd: dict[str, Any]
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch_size, in_chans, dim, **dd)
        self.norm = nn.LayerNorm(dim, **dd)
        self.pos_embed = nn.Parameter(torch.empty(1, *grid, dim, **dd))
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, cls_token: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        """The class token, if there is one, comes first."""
        x = self.norm(self.patch_embed(x))
        size = (x.shape[1], x.shape[2])
        x = (x + resample_abs_pos_embed_nhwc(self.pos_embed, list(size))).flatten(1, 2)
        if cls_token is not None:
            x = torch.cat([cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, size, use_reentrant=False)
            else:
                x = block(x, size)
        return x, size


class PyramidVisionTransformer(nn.Module):
    """Backbone and classifier under timm's contract.

    Args:
        in_chans: channels of the image.
        num_classes: width of the head; 0 returns the class token.
        img_size: side, or height and width, that the learned positions are made for; other sizes interpolate them.
        depths: blocks in each of the four stages.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 in the first.

    Raises:
        ValueError: there are not four depths.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        img_size: int | tuple[int, int] = 224,
        depths: Sequence[int] = (2, 2, 2, 2),
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = _STAGES[-1][0]
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        if len(depths) != len(_STAGES):
            raise ValueError(f"depths must have {len(_STAGES)} numbers, one a stage, got {tuple(depths)}")
        last = max(sum(depths) - 1, 1)

        self.stages = nn.ModuleList()
        self.feature_info: list[dict[str, Any]] = []
        stride, channels = 1, in_chans
        for i, (dim, patch, heads, mlp_ratio, reduction) in enumerate(_STAGES):
            stride *= patch
            rates = [drop_path_rate * n / last for n in range(sum(depths[:i]), sum(depths[: i + 1]))]
            blocks = [_Block(dim, heads, mlp_ratio, reduction, rate, dd) for rate in rates]
            grid = (-(-height // stride), -(-width // stride))
            self.stages.append(_Stage(channels, dim, patch, grid, blocks, dd))
            self.feature_info.append({"module": f"stages.{i}", "num_chs": dim, "reduction": stride})
            channels = dim
        self.cls_token: nn.Parameter | None = nn.Parameter(torch.empty(1, 1, self.num_features, **dd))
        self.norm: nn.Module = nn.LayerNorm(self.num_features, eps=1e-6, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(self.num_features, num_classes, **dd) if num_classes else nn.Identity()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """The authors': truncated normal 0.02 for linear layers, positions and the class token, else PyTorch's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv2d, nn.LayerNorm)):
                module.reset_parameters()
            elif isinstance(module, _Stage):
                trunc_normal_(module.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to the normalised tokens (B, 1 + N, C) of the last stage."""
        return self.norm(self._run(x, len(self.stages))[0])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens to logits (B, num_classes), or with ``pre_logits`` to the class token (B, C)."""
        x = self.head_drop(x[:, 0])
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width), 32 px a side or more, to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps (B, C, H, W) of chosen stages, without the class token, in timm's form.

        Args:
            x: images (B, in_chans, height, width).
            indices: stages to take, negative from the end; an int takes the last n, ``None`` all.
            norm: apply the final norm to the last stage's map.
            stop_early: stop after the last stage taken.
            output_fmt: ``"NCHW"``.
            intermediates_only: return only the maps, without the final tokens.

        Raises:
            ValueError: another ``output_fmt`` or an index out of range.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take = feature_indices(indices, len(self.stages), "stages")
        tokens, maps = self._run(x, max(take) + 1 if stop_early else len(self.stages), norm)
        intermediates = [maps[i] for i in take]
        if intermediates_only:
            return intermediates
        return (self.norm(tokens) if len(maps) == len(self.stages) else tokens), intermediates

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what `forward_intermediates` does not need for these indices; returns them as positive numbers."""
        take = feature_indices(indices, len(self.stages), "stages")
        if max(take) + 1 < len(self.stages):
            self.stages, self.cls_token = self.stages[: max(take) + 1], None
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one, or by none for ``num_classes`` 0."""
        if global_pool not in (None, "token"):
            raise ValueError(f"this model pools by its class token; got global_pool={global_pool!r}")
        self.num_classes = num_classes
        weight = self.stages[0].pos_embed
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping what it saved."""
        for stage in self.stages:
            assert isinstance(stage, _Stage)
            stage.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth, for layer-wise learning-rate decay."""
        stem = r"(?:patch_embed|norm|pos_embed)"
        fine = [
            (rf"^stages\.(\d+)\.{stem}", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^cls_token|^norm", (99999,)),
        ]
        return {"stem": rf"^stages\.0\.{stem}", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def no_weight_decay(self) -> set[str]:
        """Positions and the class token."""
        return {"cls_token", *(f"stages.{i}.pos_embed" for i in range(len(self.stages)))}

    def _run(self, x: Tensor, stages: int, norm: bool = False) -> tuple[Tensor, list[Tensor]]:
        """The last tokens (B, N, C) after so many stages, and the map (B, C, H, W) of each."""
        if min(x.shape[-2:]) < 32:  # keys and values of the first stage are reduced by 4 x 8
            raise ValueError(f"PVT needs images of at least 32 px a side, got {x.shape[-2]} x {x.shape[-1]} px")
        maps: list[Tensor] = []
        tokens = x
        for i, stage in enumerate(self.stages[:stages]):
            last = i + 1 == len(_STAGES)
            tokens, size = stage(x, self.cls_token if last else None)
            grid = self.norm(tokens) if last and norm else tokens
            x = (grid[:, 1:] if last else grid).transpose(1, 2).unflatten(2, size)
            maps.append(x)
        return tokens, maps


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": False,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stages.0.patch_embed.proj",
        "classifier": "head",
        "paper_ids": "arXiv:2102.12122",
        "paper_name": "Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions",
        "origin_url": "https://github.com/whai362/PVT",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {f"pvt_v1_{size}.untrained": _cfg() for size in ("tiny", "small", "medium", "large")}
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> PyramidVisionTransformer:
    out_indices = kwargs.pop("out_indices", 4)
    return build_model_with_cfg(
        PyramidVisionTransformer,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def pvt_v1_tiny(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    """PVT-Tiny."""
    return _create("pvt_v1_tiny", pretrained, **({"depths": (2, 2, 2, 2)} | kwargs))


@register_model
def pvt_v1_small(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    """PVT-Small."""
    return _create("pvt_v1_small", pretrained, **({"depths": (3, 4, 6, 3)} | kwargs))


@register_model
def pvt_v1_medium(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    """PVT-Medium."""
    return _create("pvt_v1_medium", pretrained, **({"depths": (3, 4, 18, 3)} | kwargs))


@register_model
def pvt_v1_large(pretrained: bool = False, **kwargs: Any) -> PyramidVisionTransformer:
    """PVT-Large."""
    return _create("pvt_v1_large", pretrained, **({"depths": (3, 8, 27, 3)} | kwargs))
