"""DiG, the denoiser with gated linear attention: a baseline whose cost is linear in tokens too.

Paper: "DiG: Scalable and Efficient Diffusion Models with Gated Linear Attention" (arXiv 2405.18428), the plain form. It
is DiT with another mixer: gated linear attention in one direction a block, four directions in turn, and after each
block a depthwise convolution that starts as the identity; the MLP is gated (SwiGLU), its width that of the
authors' code.

Multiply-adds at 32 x 32 latents: 5.57 G (S/2) and 22.0 G (B/2). The paper prints 4.30 and 17.07: what its counter sees
when the MLP's last layer is inside a fused function and the recurrence inside a kernel (a test checks this).

Differs from that code in form only: every block turns the grid to its direction and back, where there the tokens stay
turned for the next one; grids may have any height and width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import register_to_config
from timm.layers import GluMlp
from torch import Tensor, nn

from weightformer import ops
from weightformer.layers import DepthwiseConv2d
from weightformer.models.denoiser import ConditionalDenoiser

__all__ = ["DIG", "DiG", "DiGBlock", "GatedLinearAttention"]

DIG: dict[str, dict[str, Any]] = {
    "dig_micro": {"hidden_size": 64, "depth": 4, "num_heads": 2, "sample_size": 8, "num_classes": 10},
    "dig_s_2": {"hidden_size": 384, "num_heads": 6},
    "dig_b_2": {"hidden_size": 768, "num_heads": 12},
}

_GATE_RANK = 16
_GATE_SHARPNESS = 16  # divides the log-decay, so that memory is long at first


class GatedLinearAttention(nn.Module):
    """Multi-head gated linear attention over a sequence, with a gate on its output (arXiv 2312.06635).

    Args:
        dim: C; queries and keys have C / 2 channels, values C.
        num_heads: heads that share them.

    Raises:
        ValueError: the heads cannot share the channels.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise ValueError(f"{num_heads} heads cannot share queries of {dim} / 2 channels")
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim // 2, bias=False)
        self.key = nn.Linear(dim, dim // 2, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.decay = nn.Sequential(nn.Linear(dim, _GATE_RANK, bias=False), nn.Linear(_GATE_RANK, dim // 2))
        self.gate = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim // num_heads, eps=1e-6)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) in the order in which they are read, same size out."""
        log_decay = F.logsigmoid(ops.wide(self.decay(x))) / _GATE_SHARPNESS
        heads = [self._split(t) for t in (self.query(x), self.key(x), self.value(x), log_decay)]
        y = ops.gated_linear_attention(*heads).transpose(1, 2)
        y = self.norm(y.to(self.norm.weight.dtype)).flatten(2)
        return self.proj(y * F.silu(self.gate(x)))

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, channels) to (B, heads, N, channels / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class DiGBlock(nn.Module):
    """Attention and MLP under DiT's adaLN-Zero, then a depthwise convolution, all on the grid as this block reads it.

    Args:
        dim: C.
        num_heads: heads of the attention.
        index: of the block: odd ones read the tokens backwards, and the last two of every four by columns.
    """

    def __init__(self, dim: int, num_heads: int, index: int) -> None:
        super().__init__()
        self.backwards, self.by_columns = index % 2 == 1, index // 2 % 2 == 1
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.attn = GatedLinearAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        hidden = -(-int(4 * dim * 2 / 3) // 256) * 256  # as large as a plain MLP of ratio 4, up to a multiple of 256
        self.mlp = GluMlp(dim, 2 * hidden, act_layer=nn.SiLU, gate_last=False, bias=False)
        self.conv = DepthwiseConv2d(dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out; the condition (B, C) has been activated."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None, None].chunk(6, dim=-1)
        x = self._turn(x)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn(y.flatten(1, 2)).view(x.shape)
        x = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return self._turn(self.conv(x))

    def _turn(self, x: Tensor) -> Tensor:
        """The grid as this block reads it, and as it was when turned again."""
        x = x.transpose(1, 2) if self.by_columns else x
        return x.flip(1, 2) if self.backwards else x


class DiG(ConditionalDenoiser):
    """Predicts the noise in a latent or an image, and the variance of the step, given its time step and class.

    Args:
        sample_size: side of the latents it is trained on, or (height, width); others are accepted too.
        patch_size: latent pixels a side of a patch.
        in_channels: channels of the latent.
        out_channels: follows from ``in_channels`` and ``learn_sigma``; stored for pipelines that read it.
        hidden_size: C; a multiple of 4.
        depth: number of blocks.
        num_heads: heads of each block's attention.
        num_classes: classes; the null class of guidance comes after them, as number ``num_classes``.
        learn_sigma: predict the variance too, in as many channels more.
        class_dropout_prob: how often, in training, a sample's class is replaced by the null class.

    Raises:
        ValueError: an argument out of range.
    """

    __module__ = "weightformer.models"  # see `WeightFormerDenoiser`

    _no_split_modules = ["DiGBlock"]  # noqa: RUF012 - diffusers declares them so
    _repeated_blocks = ["DiGBlock"]  # noqa: RUF012

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        out_channels: int | None = None,
        hidden_size: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        num_classes: int = 1000,
        learn_sigma: bool = True,
        class_dropout_prob: float = 0.1,
    ) -> None:
        super().__init__(
            lambda i: DiGBlock(hidden_size, num_heads, i),
            depth=depth,
            sample_size=sample_size,
            patch_size=patch_size,
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_size=hidden_size,
            num_classes=num_classes,
            learn_sigma=learn_sigma,
            class_dropout_prob=class_dropout_prob,
        )

    @torch.no_grad()
    def init_weights(self) -> None:
        """DiT's initialisation; linear layers of the attention smaller, and every convolution the identity."""
        super().init_weights()
        for module in self.modules():
            if isinstance(module, GatedLinearAttention):
                for layer in module.modules():
                    if isinstance(layer, nn.Linear):
                        nn.init.xavier_uniform_(layer.weight, gain=2**-2.5)
                module.norm.reset_parameters()
            elif isinstance(module, DepthwiseConv2d):
                nn.init.dirac_(module.weight, groups=len(module.weight))
                assert module.bias is not None
                nn.init.zeros_(module.bias)
