"""WeightFormer as a class-conditional denoiser, in the form of DiT and as a model of diffusers.

Paper: "Linear-Time Global Visual Modeling without Explicit Attention" (arXiv 2605.01711), on DiT's scheme (arXiv
2212.09748): positions, time step and class enter as there, and the attention of a block gives way to a depthwise
convolution. Convolution and first MLP layer are dynamic in every third block, as in the backbone.

Differs from the released code in form only (outputs are equal): tokens stay channels-last (B, H, W, C), grids may have
any height and width, and sides that are no multiple of the patch are zero-padded and cropped again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from weightformer import ops
from weightformer.layers import DepthwiseConv2d, DynamicDepthwiseConv2d, DynamicLinear
from weightformer.layers.block import untouched
from weightformer.models.weightformer import PatchEmbed
from weightformer.ops.dispatch import capturing

__all__ = [
    "DENOISERS",
    "ConditionalDenoiser",
    "DenoiserBlock",
    "WeightFormerDenoiser",
    "create_denoiser",
    "sincos_positions",
]

_TIME_FEATURES = 256

DENOISERS: dict[str, dict[str, Any]] = {
    "denoiser_micro": {"hidden_size": 64, "depth": 5, "patch_size": 2, "sample_size": 8, "num_classes": 10},
    **{
        f"denoiser_{size}_{patch}": {"hidden_size": width, "depth": 15, "patch_size": patch}
        for size, width in (("s", 384), ("b", 768))
        for patch in (2, 4, 8)
    },
}


def create_denoiser(name: str, **kwargs: Any) -> ConditionalDenoiser:
    """A denoiser of one of the paper's sizes, or the baseline DiG.

    Args:
        name: a key of `DENOISERS`: ``denoiser_s_2`` is size S with patch 2; ``denoiser_micro`` serves tests. Or one of
            `weightformer.models.dig.DIG`: ``dig_s_2``, ``dig_b_2``, ``dig_micro``.
        **kwargs: for `WeightFormerDenoiser` or `weightformer.models.DiG`; they go before the named size's own.

    Raises:
        ValueError: an unknown name or an argument out of range.
    """
    from weightformer.models.dig import DIG, DiG  # which builds on this module

    if name in DIG:
        return DiG(**(DIG[name] | kwargs))
    if name not in DENOISERS:
        raise ValueError(f"no denoiser {name!r}; choose one of {', '.join((*DENOISERS, *DIG))}")
    return WeightFormerDenoiser(**(DENOISERS[name] | kwargs))


class DenoiserBlock(nn.Module):
    """A block in which the condition shifts, scales and gates both branches (DiT's adaLN-Zero).

    ``x = norm1(x); x = x + gate1 * conv(modulate(x)); x = x + gate2 * fc2(gelu(fc1(modulate(norm2(x)))))`` with
    ``modulate(x) = x * (1 + scale) + shift``. norm1 *replaces* the residual stream, in every block; neither norm has
    parameters; the GELU is the tanh one.

    Args:
        dim: C.
        mlp_ratio: hidden width of the MLP over C.
        dynamic: whether the convolution and fc1 predict their weights.
        linear_predictor: see `weightformer.layers.DynamicLinear`.
        conv_predictor: see `weightformer.layers.DynamicDepthwiseConv2d`.
        static_weight: see both; likewise the next.
        normalize: see both.
        pool: see `weightformer.layers.DynamicLinear`.
    """

    def __init__(
        self,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        dynamic: bool = False,
        linear_predictor: str = "bilateral",
        conv_predictor: str = "adaptive",
        static_weight: bool = True,
        normalize: bool = True,
        pool: int | str = 2,
    ) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        parts: dict[str, Any] = {"static_weight": static_weight, "normalize": normalize}
        self.dynamic = dynamic
        self.conv: nn.Module
        self.fc1: nn.Module
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        if dynamic:
            self.conv = DynamicDepthwiseConv2d(dim, predictor=conv_predictor, **parts)
            self.fc1 = DynamicLinear(dim, hidden, predictor=linear_predictor, pool=pool, **parts)
        else:
            self.conv = DepthwiseConv2d(dim)
            self.fc1 = nn.Linear(dim, hidden)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.act = nn.GELU("tanh")
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens (B, H, W, C), same size out; the condition (B, C) has been activated."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None, None].chunk(6, dim=-1)
        x = self.norm1(x)
        x = x + gate1 * self.conv(x * (1 + scale1) + shift1)
        y = self.norm2(x) * (1 + scale2) + shift2
        fc1: Any = self.fc1
        if untouched({fc1: DynamicLinear if self.dynamic else nn.Linear, self.act: nn.GELU, self.fc2: nn.Linear}):
            weight = fc1.predict(y, y.dtype) if self.dynamic else fc1.weight
            return ops.mlp(
                x,
                y,
                weight,
                fc1.bias,
                self.fc2.weight,
                self.fc2.bias,
                gate=gate2,
                approximate=self.act.approximate,
                overwrite_y=True,
            )
        return x + gate2 * self.fc2(self.act(fc1(y)))


class ConditionalDenoiser(ModelMixin, ConfigMixin):
    """DiT's scheme around a stack of blocks: what denoisers of different blocks share.

    A subclass names its arguments in a constructor of its own, under ``register_to_config``, and passes on these:

    Args:
        make_block: block number i, a module of tokens (B, H, W, C) and the activated condition (B, C).
        depth: number of blocks.
        sample_size: see `WeightFormerDenoiser`, likewise all others.
        patch_size: see there.
        in_channels: see there.
        out_channels: see there.
        hidden_size: see there.
        num_classes: see there.
        learn_sigma: see there.
        class_dropout_prob: see there.

    Raises:
        ValueError: an argument out of range.
    """

    _supports_gradient_checkpointing = True

    def __init__(
        self,
        make_block: Callable[[int], nn.Module],
        *,
        depth: int,
        sample_size: int | tuple[int, int],
        patch_size: int,
        in_channels: int,
        out_channels: int | None,
        hidden_size: int,
        num_classes: int,
        learn_sigma: bool,
        class_dropout_prob: float,
    ) -> None:
        super().__init__()
        if depth < 1 or num_classes < 1:
            raise ValueError(f"depth and num_classes must be at least 1, got {depth} and {num_classes}")
        if hidden_size % 4:
            raise ValueError(f"hidden_size must be a multiple of 4, got {hidden_size}")
        if not 0 <= class_dropout_prob <= 1:
            raise ValueError(f"class_dropout_prob must be between 0 and 1, got {class_dropout_prob}")
        predicted = in_channels * (2 if learn_sigma else 1)
        if out_channels not in (None, predicted):
            raise ValueError(
                f"{in_channels} channels {'with' if learn_sigma else 'without'} learned sigma need out_channels="
                f"{predicted}, got {out_channels}"
            )
        self.register_to_config(out_channels=predicted)
        self.gradient_checkpointing = False
        self.label_dropout = class_dropout_prob
        """Share of labels dropped in training; 0 where the caller drops them itself."""
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        self.grid = (-(-height // patch_size), -(-width // patch_size))

        self.input_embed = PatchEmbed(patch_size, in_channels, hidden_size)
        # In the dtype the model is built in, by which diffusers tells what it is loading weights into.
        positions = sincos_positions(*self.grid, hidden_size).flatten(1, 2).to(torch.get_default_dtype())
        self.register_buffer("pos_embed", positions)
        self.time_features = Timesteps(_TIME_FEATURES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time_embed = TimestepEmbedding(_TIME_FEATURES, hidden_size)
        self.label_embed = nn.Embedding(num_classes + (class_dropout_prob > 0), hidden_size)
        self.act = nn.SiLU()
        self.blocks = nn.ModuleList(make_block(i) for i in range(depth))
        self.out_norm = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.out_modulation = nn.Linear(hidden_size, 2 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, patch_size * patch_size * predicted)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """The released initialisation, of every parameter and of the positions.

        nn.Linear, the patch embedding as one too: xavier-uniform, bias 0. Time and label embedding: normal 0.02.
        Dynamic layers and convolutions: as in the backbone. Every modulation and the last layer: zero, so that a
        block starts without its branches and the model predicts zero.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv2d, DynamicLinear, DynamicDepthwiseConv2d)):
                module.reset_parameters()
        patches: Any = self.input_embed.proj
        nn.init.xavier_uniform_(patches.weight.flatten(1))
        nn.init.zeros_(patches.bias)
        for embedding in (self.time_embed.linear_1, self.time_embed.linear_2, self.label_embed):
            nn.init.normal_(embedding.weight, std=0.02)
        for name, module in self.named_modules():
            if name.endswith("modulation") or module is self.out_proj:
                nn.init.zeros_(module.weight)
        self.pos_embed.copy_(sincos_positions(*self.grid, self.config.hidden_size).flatten(1, 2))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | float,
        class_labels: Tensor,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the noise in noisy latents, and with learned sigma the variance in as many channels behind it.

        Args:
            hidden_states: noisy latents (B, in_channels, height, width).
            timestep: of the training schedule, one for all or one a sample (B,).
            class_labels: (B,), from 0 to ``num_classes``, the null class.
            return_dict: return an object with the prediction as its ``sample``, else a tuple with it alone.

        Returns:
            The prediction (B, out_channels, height, width).

        Raises:
            ValueError: a side is smaller than one patch; on a CPU, also a label out of range.
        """
        batch, _, height, width = hidden_states.shape
        x = self.input_embed(hidden_states)  # (B, H, W, C)
        x = x + self._positions(x)
        condition = self.act(self._time(timestep, hidden_states) + self._label(class_labels, batch))  # (B, C)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = self._gradient_checkpointing_func(block, x, condition)
            else:
                x = block(x, condition)
        shift, scale = self.out_modulation(condition)[:, None, None].chunk(2, dim=-1)
        x = self.out_proj(self.out_norm(x) * (1 + scale) + shift)  # (B, H, W, patch * patch * out_channels)
        sample = self._unpatchify(x)[..., :height, :width]
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _positions(self, x: Tensor) -> Tensor:
        """Position embeddings (1, H, W, C): those of the training grid are stored, as in the released files."""
        _, height, width, dim = x.shape
        if (height, width) == self.grid:
            return self.pos_embed.unflatten(1, self.grid).to(x.dtype)
        return sincos_positions(height, width, dim, device=x.device).to(x.dtype)

    def _time(self, timestep: Tensor | float, x: Tensor) -> Tensor:
        timestep = torch.as_tensor(timestep, device=x.device).expand(len(x))
        return self.time_embed(self.time_features(timestep).to(x.dtype))

    def _label(self, labels: Tensor, batch: int) -> Tensor:
        rows, null = self.label_embed.num_embeddings, self.config.num_classes
        # Looking at the values would make a GPU wait; it refuses them too, in its own words.
        if labels.device.type == "cpu" and not capturing() and ((labels < 0) | (labels >= rows)).any():
            raise ValueError(
                f"class labels {labels.tolist()} are not all between 0 and {rows - 1}"
                + (f" ({null} is the null class)" if rows > null else "; this model has no null class")
            )
        if self.training and self.label_dropout > 0:
            dropped = torch.rand(len(labels), device=labels.device) < self.label_dropout
            labels = labels.masked_fill(dropped, null)
        return self.label_embed(labels).expand(batch, -1)

    def _unpatchify(self, x: Tensor) -> Tensor:
        """Tokens (B, H, W, patch * patch * out_channels) to maps (B, out_channels, H * patch, W * patch)."""
        patch = self.config.patch_size
        x = x.unflatten(-1, (patch, patch, -1)).permute(0, 5, 1, 3, 2, 4)  # (B, out_channels, H, patch, W, patch)
        return x.flatten(4, 5).flatten(2, 3)


class WeightFormerDenoiser(ConditionalDenoiser):
    """Predicts the noise in a latent or an image, and the variance of the step, given its time step and class.

    Args:
        sample_size: side of the latents it is trained on, or (height, width). Others are accepted too: positions are
            counted from the top left corner, one a token.
        patch_size: latent pixels a side of a patch.
        in_channels: channels of the latent.
        out_channels: follows from ``in_channels`` and ``learn_sigma``; stored for pipelines that read it.
        hidden_size: C; a multiple of 4.
        depth: number of blocks.
        num_classes: classes; the null class of guidance comes after them, as number ``num_classes``.
        learn_sigma: predict the variance too, in as many channels more.
        class_dropout_prob: how often, in training, a sample's class is replaced by the null class. With 0 there is no
            null class, so that the model cannot be guided.
        mlp_ratio: hidden width of each MLP over C.
        dynamic_every: block i is dynamic when ``(i + dynamic_every - 1) % dynamic_every == 0``, so 3 makes blocks
            1, 4, 7, ... dynamic; 0 makes every block static.
        linear_predictor: see `weightformer.layers.DynamicLinear`.
        conv_predictor: see `weightformer.layers.DynamicDepthwiseConv2d`.
        static_weight: see both; likewise the next.
        normalize: see both.
        pool: see `weightformer.layers.DynamicLinear`.

    Raises:
        ValueError: an argument out of range or an unknown name.
    """

    # A saved pipeline names this module, which `import weightformer` brings and which imports this file when asked:
    # diffusers resolves a class only in modules that are already imported.
    __module__ = "weightformer.models"

    _no_split_modules = ["DenoiserBlock"]  # noqa: RUF012 - diffusers declares them so
    _repeated_blocks = ["DenoiserBlock"]  # noqa: RUF012
    _skip_layerwise_casting_patterns = [r"conv\.proj"]  # noqa: RUF012 - what enters them is cast to their weight's dtype

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        out_channels: int | None = None,
        hidden_size: int = 384,
        depth: int = 15,
        num_classes: int = 1000,
        learn_sigma: bool = True,
        class_dropout_prob: float = 0.1,
        mlp_ratio: float = 4.0,
        dynamic_every: int = 3,
        linear_predictor: str = "bilateral",
        conv_predictor: str = "adaptive",
        static_weight: bool = True,
        normalize: bool = True,
        pool: int | str = 2,
    ) -> None:
        if dynamic_every < 0:
            raise ValueError(f"dynamic_every must be 0 (all static) or more, got {dynamic_every}")

        def make_block(i: int) -> DenoiserBlock:
            return DenoiserBlock(
                hidden_size,
                mlp_ratio=mlp_ratio,
                dynamic=dynamic_every > 0 and (i + dynamic_every - 1) % dynamic_every == 0,
                linear_predictor=linear_predictor,
                conv_predictor=conv_predictor,
                static_weight=static_weight,
                normalize=normalize,
                pool=pool,
            )

        super().__init__(
            make_block,
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


def sincos_positions(height: int, width: int, dim: int, device: torch.device | str | None = None) -> Tensor:
    """Sine-cosine position embeddings of a grid (1, H, W, C), in DiT's order: columns, then rows; sine, then cosine.

    Args:
        height: H.
        width: W.
        dim: C; a multiple of 4.
        device: where to compute them.
    """
    device = torch.empty(0, device=device).device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs lack
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=dtype, device=device) / (dim // 4))
    angles = [torch.arange(side, dtype=dtype, device=device)[:, None] * frequency for side in (height, width)]
    rows, columns = (torch.cat((angle.sin(), angle.cos()), dim=-1) for angle in angles)
    shape = (height, width, dim // 2)
    return torch.cat((columns[None].expand(shape), rows[:, None].expand(shape)), dim=-1)[None].float()
