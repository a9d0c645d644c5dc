"""ConvNeXt of one resolution throughout: a baseline that timm lacks (it has the pyramid).

Paper: "A ConvNet for the 2020s" (arXiv 2201.03545), section 3.3: patches of 16 px as in a vision transformer, 18 blocks
without layer scale, mean token, norm, linear head. The blocks are timm's; any height and width of at least one patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.convnext import ConvNeXtBlock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weightformer.models.weightformer import PatchEmbed, feature_indices

__all__ = ["ConvNeXtIsotropic"]


class ConvNeXtIsotropic(nn.Module):
    """Backbone and classifier under timm's contract.

    Args:
        in_chans: channels of the image.
        num_classes: width of the head; 0 returns pooled features.
        patch_size: pixels a side of a patch.
        embed_dim: C.
        depth: number of blocks.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 in the first.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        patch_size: int = 16,
        embed_dim: int = 384,
        depth: int = 18,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = embed_dim
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **dd)
        rates = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(
            ConvNeXtBlock(embed_dim, ls_init_value=None, drop_path=rate, **dd) for rate in rates
        )
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.norm: nn.Module = nn.LayerNorm(embed_dim, eps=1e-6, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head: nn.Module = nn.Linear(embed_dim, num_classes, **dd) if num_classes else nn.Identity()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Truncated normal 0.02 for convolutions and linear layers, biases 0."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to the map (B, C, H, W) of the last block."""
        return self._run(x, len(self.blocks))[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """A map to logits (B, num_classes), or with ``pre_logits`` to its normalised mean (B, C)."""
        x = self.head_drop(self.norm(x.mean(dim=(2, 3))))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to logits (B, num_classes)."""
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
        """Feature maps (B, C, H, W) after chosen blocks, in timm's form.

        Args:
            x: images (B, in_chans, height, width).
            indices: blocks to take, negative from the end; an int takes the last n, ``None`` all.
            norm: apply the final norm, which acts on channels, to every map.
            stop_early: stop after the last block taken.
            output_fmt: ``"NCHW"``.
            intermediates_only: return only the maps, without the last one beside them.

        Raises:
            ValueError: another ``output_fmt`` or an index out of range.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take = feature_indices(indices, len(self.blocks))
        maps = self._run(x, max(take) + 1 if stop_early else len(self.blocks))
        taken = [self.norm(m.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if norm else m for m in (maps[i] for i in take)]
        return taken if intermediates_only else (maps[-1], taken)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what `forward_intermediates` does not need for these indices; returns them as positive numbers."""
        take = feature_indices(indices, len(self.blocks))
        self.blocks = self.blocks[: max(take) + 1]
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
        if global_pool not in (None, "avg"):
            raise ValueError(f"this model averages its tokens; got global_pool={global_pool!r}")
        self.num_classes = num_classes
        weight = self.patch_embed.proj.weight
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping what it saved."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth, for layer-wise learning-rate decay."""
        return {
            "stem": r"^patch_embed",
            "blocks": r"^blocks\.(\d+)" if coarse else [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        """Nothing beyond what optimisers exempt anyway."""
        return set()

    def _run(self, x: Tensor, blocks: int) -> list[Tensor]:
        """The maps after each of the first blocks."""
        x = self.patch_embed(x).permute(0, 3, 1, 2)
        maps: list[Tensor] = []
        for block in self.blocks[:blocks]:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
            maps.append(x)
        return maps


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
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "paper_ids": "arXiv:2201.03545",
        "paper_name": "A ConvNet for the 2020s",
        "origin_url": "https://github.com/facebookresearch/ConvNeXt",
        **kwargs,
    }


default_cfgs = generate_default_cfgs({f"convnext_isotropic_{size}.untrained": _cfg() for size in ("small", "base")})


def _create(variant: str, pretrained: bool, **kwargs: Any) -> ConvNeXtIsotropic:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        ConvNeXtIsotropic,
        variant,
        pretrained,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def convnext_isotropic_small(pretrained: bool = False, **kwargs: Any) -> ConvNeXtIsotropic:
    """ConvNeXt-S (iso.): C = 384, 18 blocks."""
    return _create("convnext_isotropic_small", pretrained, **({"embed_dim": 384} | kwargs))


@register_model
def convnext_isotropic_base(pretrained: bool = False, **kwargs: Any) -> ConvNeXtIsotropic:
    """ConvNeXt-B (iso.): C = 768, 18 blocks."""
    return _create("convnext_isotropic_base", pretrained, **({"embed_dim": 768} | kwargs))
