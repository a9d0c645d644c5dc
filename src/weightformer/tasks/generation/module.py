"""The training task: a denoiser and the hybrid loss, as a Lightning module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import LabelEmbedding
from torch import Tensor, nn

from weightformer.models.checkpoint import load_weights
from weightformer.models.denoiser import DENOISERS, create_denoiser
from weightformer.models.dig import DIG
from weightformer.tasks.generation.config import DenoiserConfig, GenerationConfig
from weightformer.tasks.generation.data import Batch
from weightformer.tasks.generation.diffusion import HybridLoss
from weightformer.tasks.generation.latents import load_vae
from weightformer.tasks.generation.metrics import MeanLosses
from weightformer.tasks.generation.pipeline import WeightFormerPipeline, create_scheduler
from weightformer.training.module import TaskModule, as_config

__all__ = ["GenerationModule", "build_denoiser", "create_dit", "leave_labels"]


def build_denoiser(
    config: DenoiserConfig, *, channels: int, size: Sequence[int], num_classes: int, label_dropout: float
) -> nn.Module:
    """The denoiser that a configuration names, with the weights to start from where it asks for them.

    Args:
        config: which one.
        channels: of the samples.
        size: their height and width.
        num_classes: the null class comes after them.
        label_dropout: share of labels that training replaces by the null class; with 0 ours has none.

    Raises:
        ValueError: an unknown name, or an argument that the constructor refuses.
    """
    height, width = size
    shape: dict[str, Any] = {"in_channels": channels, "num_classes": num_classes}
    shape["sample_size"] = height if height == width else (height, width)
    try:
        if config.name == "dit":
            model: Any = create_dit(**shape, **config.kwargs)
        elif config.name in (*DENOISERS, *DIG):
            model = create_denoiser(config.name, **shape, class_dropout_prob=label_dropout, **config.kwargs)
        else:
            raise ValueError(f"no denoiser {config.name!r}; choose one of {', '.join((*DENOISERS, *DIG, 'dit'))}")
    except TypeError as error:
        raise ValueError(f"model.kwargs {config.kwargs} do not fit {config.name}: {error}") from error
    if config.weights:
        load_weights(model, config.weights, strict=False)
    if config.grad_checkpointing:
        model.enable_gradient_checkpointing()
    if config.compile:
        model.compile()
    return model


def create_dit(
    *,
    sample_size: int | tuple[int, int],
    in_channels: int,
    num_classes: int,
    patch_size: int = 2,
    hidden_size: int = 384,
    depth: int = 12,
    num_heads: int | None = None,
) -> DiTTransformer2DModel:
    """The DiT of diffusers with learned variance, initialised as in its paper (diffusers leaves PyTorch's defaults).

    Args:
        sample_size: side of the samples; squares only.
        in_channels: of the samples.
        num_classes: the null class comes after them.
        patch_size: sample pixels a side of a patch.
        hidden_size: width.
        depth: number of blocks.
        num_heads: of the attention; by default one every 64 channels.

    Raises:
        ValueError: a rectangle, or a width that the heads do not divide.
    """
    if not isinstance(sample_size, int):
        raise ValueError(f"diffusers' DiT takes squares only, not {sample_size}")
    num_heads = num_heads or max(1, hidden_size // 64)
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}")
    model = DiTTransformer2DModel(
        num_attention_heads=num_heads,
        attention_head_dim=hidden_size // num_heads,
        in_channels=in_channels,
        out_channels=2 * in_channels,
        num_layers=depth,
        sample_size=sample_size,
        patch_size=patch_size,
        num_embeds_ada_norm=num_classes,
        norm_eps=1e-6,
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    patches: Any = model.pos_embed.proj
    nn.init.xavier_uniform_(patches.weight.flatten(1))
    nn.init.zeros_(patches.bias)
    for block in model.transformer_blocks:
        embed = block.norm1.emb
        time = embed.timestep_embedder
        for layer in (time.linear_1, time.linear_2, embed.class_embedder.embedding_table):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(block.norm1.linear.weight)
    for layer in (model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)
    return model


class GenerationModule(TaskModule):
    """Trains one denoiser.

    Args:
        config: the run's configuration, or its dictionary as a checkpoint stores it.
        class_names: in the order of the labels; stored in every checkpoint.
        channels: of the samples; stored in every checkpoint, as are the next two.
        size: height and width of the samples.
        vae: what the samples are latents of: ``name`` (a folder or a name on the Hub), ``scaling_factor`` and
            ``shift_factor``; None for pixels.
        total_steps: optimiser steps of the whole run (training only).
        steps_per_epoch: optimiser steps of one epoch (training only).
        global_batch: samples a step over all processes (training only).
    """

    def __init__(
        self,
        config: GenerationConfig | Mapping[str, Any],
        class_names: Sequence[str],
        *,
        channels: int,
        size: Sequence[int],
        vae: Mapping[str, Any] | None = None,
        total_steps: int = 1,
        steps_per_epoch: int = 1,
        global_batch: int = 1,
    ) -> None:
        config = as_config(GenerationConfig, config)
        super().__init__(config, total_steps=total_steps, steps_per_epoch=steps_per_epoch, global_batch=global_batch)
        self.save_hyperparameters(
            {
                "config": dataclasses.asdict(config),
                "class_names": list(class_names),
                "samples": {"channels": channels, "size": list(size), "vae": dict(vae) if vae else None},
            }
        )
        self.class_names = list(class_names)
        self.channels, self.size, self.vae = channels, list(size), vae
        self.model = build_denoiser(
            config.model,
            channels=channels,
            size=size,
            num_classes=len(class_names),
            label_dropout=config.data.label_dropout,
        )
        leave_labels(self.model)
        self.diffusion = HybridLoss()
        self.losses = MeanLosses()

    def forward(self, noisy: Tensor, step: Tensor, labels: Tensor) -> Tensor:
        """Noisy samples (B, C, H, W), steps (B,) and labels (B,) to noise, and variance behind it."""
        return self.model(noisy, timestep=step, class_labels=labels).sample

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The hybrid loss; everything random came with the batch."""
        losses = {name: value.mean() for name, value in self._losses(batch).items()}
        loss = losses["loss"]
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]), prog_bar=True)
        self.log_dict({f"train/{k}": v for k, v in losses.items() if k != "loss"}, batch_size=len(batch[0]))
        self.log("lr", self.trainer.optimizers[0].param_groups[-1]["lr"], on_step=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Sum; nothing is averaged over batches."""
        self.losses.update(self._losses(batch))

    def on_validation_epoch_end(self) -> None:
        """Log the means over all processes."""
        values = self.losses.compute()
        self.log_dict({f"val/{k}": v.float() for k, v in values.items() if k != "samples"}, rank_zero_only=False)
        self.result = {k: int(v) if k == "samples" else float(v) for k, v in values.items()}
        self.losses.reset()

    def pipeline(self, with_vae: bool = True) -> WeightFormerPipeline:
        """The denoiser with the scheduler, the VAE and the class names of the configuration, ready to sample.

        Args:
            with_vae: read the VAE, where the samples are latents.

        Raises:
            ValueError: the VAE cannot be read, or scales latents in another way than the one that training used.
        """
        model: Any = self.model
        learn_sigma = model.config.out_channels == 2 * model.config.in_channels
        vae = None
        if self.vae and with_vae:
            vae, name, factor = load_vae(self.vae["name"]), self.vae["name"], self.vae["scaling_factor"]
            if vae.config.scaling_factor != factor:
                raise ValueError(
                    f"the VAE {name} has scaling_factor {vae.config.scaling_factor}; the latents of this run were made "
                    f"with {factor}"
                )
        return WeightFormerPipeline(
            model, create_scheduler(self.config.sampling.scheduler, learn_sigma), vae, self.class_names
        )

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        clean, labels, noise, step = batch
        noisy = self.diffusion.add_noise(clean, noise, step)
        return self.diffusion(self(noisy, step, labels), clean, noise, step)


def leave_labels(model: Any) -> None:
    """Make a denoiser take labels as they are: the data drop them, and DiT would drop others in each of its blocks."""
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0
    if hasattr(model, "label_dropout"):
        model.label_dropout = 0.0
