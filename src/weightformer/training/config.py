"""The parts of a configuration that every task shares; a task adds its data and its own options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ModelConfig", "OptimConfig", "TrainerConfig"]


@dataclass
class ModelConfig:
    """Which model is trained; any name that timm knows."""

    name: str = "weightformer_micro"
    """A timm model name, ours included."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor, e.g. ``{drop_path_rate: 0.2}``."""
    in_chans: int = 3
    """Channels of the images."""
    mean: list[float] | None = None
    """Mean per channel that images are normalised with; by default the model's own."""
    std: list[float] | None = None
    """Standard deviation per channel, likewise."""
    weights: str | None = None
    """A weight file to start from (fine-tuning): ours, the released layout or a training checkpoint."""
    pretrained: bool = False
    """Start from the weights that the model's author released on the Hub."""
    grad_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Run the model through torch.compile."""


@dataclass
class OptimConfig:
    """AdamW with a linear warm-up and a decay, both counted in optimiser steps from step 0."""

    lr: float = 5e-4
    """Peak learning rate for ``lr_batch`` images a step; the rate used is scaled by the global batch."""
    warmup_lr: float = 5e-7
    """Rate of the first step, scaled likewise."""
    min_lr: float = 5e-6
    """Rate that the decay ends on, scaled likewise."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the rate falls after the warm-up: along a cosine, or a straight line (``poly`` of power 1)."""
    lr_batch: int = 512
    """Global batch that the three rates are given for; 0 uses them as they are."""
    warmup_epochs: float = 20
    """Length of the warm-up, inside the decay's length."""
    weight_decay: float = 0.05
    """Decay of every parameter but biases and other one-dimensional ones."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each block to the one below it; 1 gives all the same."""
    clip_norm: float = 5.0
    """Largest norm of the gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optim.lr must be positive, got {self.lr}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optim.layer_decay must be in (0, 1], got {self.layer_decay}")
        if min(self.warmup_lr, self.min_lr, self.warmup_epochs, self.weight_decay, self.clip_norm, self.lr_batch) < 0:
            raise ValueError("optim: rates, warmup_epochs, weight_decay, lr_batch and clip_norm must not be negative")


@dataclass
class TrainerConfig:
    """How long and on what a model is trained."""

    epochs: int = 300
    """Passes over the training images."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    """Lightning's name of the arithmetic."""
    accelerator: str = "auto"
    """``cpu``, ``gpu``, ``mps`` or ``auto``."""
    devices: int = 1
    """Processes a machine; under torchrun, what it was started with."""
    nodes: int = 1
    """Machines; under torchrun, what it was started with."""
    accumulate: int = 1
    """Batches whose gradients are summed before a step."""
    ema_decay: float = 0.0
    """Decay of the averaged weights that are evaluated and saved as the result; 0 keeps none."""
    val_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: int = 1000
    """Optimiser steps between checkpoints; one is also written after every epoch."""
    log_every: int = 50
    """Optimiser steps between log lines."""
    deterministic: bool = False
    """Ask PyTorch for deterministic algorithms."""

    def __post_init__(self) -> None:
        for name in ("epochs", "devices", "nodes", "accumulate", "val_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"trainer.ema_decay must be in [0, 1), got {self.ema_decay}")
