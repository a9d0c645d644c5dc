"""WeightFormer, the image backbone.

Paper: "Linear-Time Global Visual Modeling without Explicit Attention" (arXiv 2605.01711). Tokens see the whole image
only through predicted weights, whose size does not depend on their number; there is no attention, no position
embedding and no class token, so any height and width of at least one patch is accepted.

Differs from the released code in form only (outputs are equal): tokens stay channels-last (B, H, W, C) throughout,
grids may be rectangular or odd, and sides that are no multiple of the patch are zero-padded at the right and bottom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weightformer.layers import Block, DynamicDepthwiseConv2d, DynamicLinear
from weightformer.layers.block import untouched
from weightformer.models.checkpoint import unwrap
from weightformer.ops.dispatch import capturing

__all__ = ["PatchEmbed", "WeightFormer", "feature_indices"]


register_notrace_module(Block)


@register_notrace_module  # branches on the size of the image, which torch.fx cannot follow
class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens, by a convolution whose kernel equals its stride.

    Sides that are no multiple of the patch are zero-padded at the right and bottom, so no pixel is dropped.
    """

    def __init__(
        self,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size, device=device, dtype=dtype)

    def forward(self, image: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to tokens (B, H, W, C), H and W rounded up.

        Raises:
            ValueError: a side is smaller than one patch.
        """
        height, width = image.shape[-2:]
        patch = self.patch_size
        if height < patch or width < patch:
            raise ValueError(f"an image of {height} x {width} px is smaller than one patch of {patch} x {patch} px")
        if capturing() or height % patch or width % patch:  # a graph with free sizes holds both kinds
            # No modulo of a negative size here: torch.compile's backend of torch 2.14 fails on one.
            rows, cols = ((side + patch - 1) // patch for side in (height, width))
            image = F.pad(image, (0, cols * patch - width, 0, rows * patch - height))
        # Contiguous already here, so that the convolution's own layout is freed at once.
        return self.proj(image).permute(0, 2, 3, 1).contiguous()


class WeightFormer(nn.Module):
    """Backbone and classifier under timm's contract (paper, section 4).

    Args:
        in_chans: channels of the image.
        num_classes: width of the head; 0 returns pooled features.
        global_pool: ``"avg"`` (mean over tokens) or ``""`` (no pooling; the head acts on every token).
        patch_size: pixels a side of a patch.
        embed_dim: C; a multiple of 4.
        depth: number of blocks.
        mlp_ratio: hidden width of each MLP over C.
        dynamic_every: block i is dynamic when ``(i + dynamic_every - 1) % dynamic_every == 0``, so 3 makes blocks
            1, 4, 7, ... dynamic; 0 makes every block static.
        linear_predictor: how dynamic blocks predict the weight of their linear layer: ``"gap"``, ``"linear"``,
            ``"nonlinear"``, ``"deep"`` or ``"bilateral"`` (released); see `weightformer.layers.DynamicLinear`.
        conv_predictor: likewise for their convolution: ``"gap"``, ``"adaptive"`` (released), ``"amp_dir"`` or
            ``"conv"``; see `weightformer.layers.DynamicDepthwiseConv2d`.
        static_weight: whether a predicted weight is added to a static one (ablation).
        normalize: whether predicted weights are normalised before that (ablation).
        pool: how tokens are pooled for the linear predictor: 2, 1 or ``"7x7"`` (ablation); see
            `weightformer.layers.DynamicLinear`.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 in the first.

    Raises:
        ValueError: an argument out of range or an unknown name.
    """

    output_fmt = "NHWC"

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        global_pool: str = "avg",
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 17,
        mlp_ratio: float = 4.0,
        dynamic_every: int = 3,
        linear_predictor: str = "bilateral",
        conv_predictor: str = "adaptive",
        static_weight: bool = True,
        normalize: bool = True,
        pool: int | str = 2,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_global_pool(global_pool)
        if dynamic_every < 0:
            raise ValueError(f"dynamic_every must be 0 (all static) or more, got {dynamic_every}")
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.global_pool = num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(patch_size, in_chans, embed_dim, **dd)
        self.embed_norm = nn.LayerNorm(embed_dim, eps=1e-6, **dd)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                mlp_ratio=mlp_ratio,
                dynamic=dynamic_every > 0 and (i + dynamic_every - 1) % dynamic_every == 0,
                linear_predictor=linear_predictor,
                conv_predictor=conv_predictor,
                static_weight=static_weight,
                normalize=normalize,
                pool=pool,
                drop_path=drop_path_rate * i / max(depth - 1, 1),
                **dd,
            )
            for i in range(depth)
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
        """The released initialisation, of every parameter (so also after ``to_empty`` of a model built on meta).

        nn.Linear: truncated normal 0.02, bias 0. Convolutions and norms: PyTorch's default. Dynamic layers: static
        weights *and biases* truncated normal 0.02, the rest as above. So a generated linear weight equals its static
        part to within a thousandth at step 0, while a generated kernel is mostly predicted: that part is two to four
        times the static one. The other predictors start likewise: at most a tenth of the static linear weight, and
        kernels shorter than half the identity that the residual adds to them (a test measures all of this).
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv2d, nn.LayerNorm, DynamicLinear, DynamicDepthwiseConv2d)):
                module.reset_parameters()

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to normalised tokens (B, H, W, C)."""
        x = self.embed_norm(self.patch_embed(x))
        # A block may overwrite tokens that nothing else sees: a hook might keep them, or a graph that torch.fx traces.
        unseen = isinstance(x, Tensor) and untouched(
            {self.embed_norm: nn.LayerNorm, **dict.fromkeys(self.blocks, Block)}
        )
        for block in self.blocks:
            x = self._run_block(block, x, overwrite_x=unseen)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, H, W, C) to logits (B, num_classes), or to pooled features (B, C) with ``pre_logits``."""
        if self.global_pool == "avg":
            x = x.mean(dim=(1, 2))
        x = self.head_drop(x)
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
        """Feature maps after chosen blocks, in timm's form.

        Args:
            x: images (B, in_chans, height, width).
            indices: blocks to take, negative from the end; an int takes the last n, ``None`` all.
            norm: apply the final norm to every map.
            stop_early: stop after the last block taken.
            output_fmt: ``"NCHW"`` or ``"NHWC"``.
            intermediates_only: return only the maps, without the final tokens.

        Returns:
            The maps in the order of the blocks, or (tokens (B, H, W, C), maps). The tokens went through the final norm
            if all blocks ran.

        Raises:
            ValueError: an unknown ``output_fmt`` or an index out of range.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take = feature_indices(indices, len(self.blocks))
        intermediates = []
        x = self.embed_norm(self.patch_embed(x))
        blocks = self.blocks[: max(take) + 1] if stop_early else self.blocks
        for i, block in enumerate(blocks):
            x = self._run_block(block, x)
            if i in take:
                feature = self.norm(x) if norm else x
                intermediates.append(feature.permute(0, 3, 1, 2) if output_fmt == "NCHW" else feature)
        if intermediates_only:
            return intermediates
        if len(blocks) == len(self.blocks):
            x = self.norm(x)
        return x, intermediates

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what `forward_intermediates` does not need for these indices; returns them as positive numbers."""
        take = feature_indices(indices, len(self.blocks))
        self.blocks = self.blocks[: max(take) + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one (none for ``num_classes`` 0) and, if given, the pooling."""
        if global_pool is not None:
            _check_global_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        weight = self.norm.weight if isinstance(self.norm, nn.LayerNorm) else self.patch_embed.proj.weight
        self.head = nn.Identity()
        if num_classes:
            self.head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
            nn.init.trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping what it saved."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups by depth, for layer-wise learning-rate decay."""
        return {
            "stem": r"^patch_embed|^embed_norm",
            "blocks": r"^blocks\.(\d+)" if coarse else [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def no_weight_decay(self) -> set[str]:
        """Nothing beyond what optimisers exempt anyway: one-dimensional parameters and biases."""
        return set()

    def _run_block(self, block: nn.Module, x: Tensor, overwrite_x: bool = False) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False)
        return block(x, overwrite_x=True) if overwrite_x else block(x)


def feature_indices(indices: int | Sequence[int] | None, count: int, parts: str = "blocks") -> list[int]:
    """Which of a model's parts `forward_intermediates` is to return, as positive numbers.

    Args:
        indices: numbers, negative ones counted from the end; how many of the last; None for all.
        count: how many parts there are.
        parts: what they are called.

    Raises:
        ValueError: none wanted, or one that does not exist.
    """
    if indices is None:
        return list(range(count))
    wanted = range(-indices, 0) if isinstance(indices, int) else indices
    take = [i + count if i < 0 else i for i in wanted]
    if not take or any(not 0 <= i < count for i in take):
        raise ValueError(f"feature indices {indices!r} are out of range for {count} {parts}")
    return take


def _check_global_pool(global_pool: str) -> None:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool must be 'avg' or '', got {global_pool!r}")


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": False,
        "crop_pct": 0.875,
        "crop_mode": "squash",  # the released evaluation resizes to a square, whatever the aspect ratio
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2605.01711",
        "paper_name": "Linear-Time Global Visual Modeling without Explicit Attention",
        "origin_url": "https://github.com/LeapLabTHU/WeightFormer",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "weightformer_micro.untrained": _cfg(input_size=(3, 32, 32), num_classes=10),
        "weightformer_tiny.in1k": _cfg(hf_hub_id="RuizeHe/weightformer-t"),
        "weightformer_small.in1k": _cfg(hf_hub_id="RuizeHe/weightformer-s"),
        "weightformer_base.in1k": _cfg(hf_hub_id="RuizeHe/weightformer-b", input_size=(3, 448, 448)),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> WeightFormer:
    out_indices = kwargs.pop("out_indices", 3)
    try:
        return build_model_with_cfg(
            WeightFormer,
            variant,
            pretrained,
            pretrained_filter_fn=lambda content, model: unwrap(content, model.state_dict()),
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **kwargs,
        )
    except Exception as error:
        if not pretrained or type(error) in (TypeError, ValueError):  # a wrong argument, not a failed download
            raise
        raise RuntimeError(
            f"could not load pretrained weights for {variant} ({error}). If this machine has no network, build the "
            "model with pretrained=False and read a file with weightformer.models.checkpoint.load_weights(model, path)"
        ) from error


@register_model
def weightformer_micro(pretrained: bool = False, **kwargs: Any) -> WeightFormer:
    """C = 64, 8 blocks, patch 4: the model of the tests, the docs and the demo."""
    return _create("weightformer_micro", pretrained, **({"patch_size": 4, "embed_dim": 64, "depth": 8} | kwargs))


@register_model
def weightformer_tiny(pretrained: bool = False, **kwargs: Any) -> WeightFormer:
    """WeightFormer-T: C = 192, 17 blocks, 224 px."""
    return _create("weightformer_tiny", pretrained, **({"embed_dim": 192, "depth": 17} | kwargs))


@register_model
def weightformer_small(pretrained: bool = False, **kwargs: Any) -> WeightFormer:
    """WeightFormer-S: C = 384, 17 blocks, 224 px."""
    return _create("weightformer_small", pretrained, **({"embed_dim": 384, "depth": 17} | kwargs))


@register_model
def weightformer_base(pretrained: bool = False, **kwargs: Any) -> WeightFormer:
    """WeightFormer-B: the small model trained and evaluated at 448 px."""
    return _create("weightformer_base", pretrained, **({"embed_dim": 384, "depth": 17} | kwargs))
