"""The configuration of a classification run."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightformer.tasks.classification.data import DataConfig
from weightformer.training.config import ModelConfig, OptimConfig, TrainerConfig

__all__ = ["ClassificationConfig", "MixConfig"]


@dataclass
class MixConfig:
    """Mixing of pairs of training images, and softening of their labels."""

    mixup: float = 0.0
    """Alpha of MixUp's Beta distribution; 0 turns it off."""
    cutmix: float = 0.0
    """Alpha of CutMix's Beta distribution; 0 turns it off."""
    prob: float = 1.0
    """Share of batches that are mixed."""
    switch_prob: float = 0.5
    """Share of mixed batches that use CutMix, where both are on."""
    smoothing: float = 0.0
    """Label smoothing."""

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise ValueError("mix.mixup and mix.cutmix must not be negative")
        for name in ("prob", "switch_prob", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"mix.{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass
class ClassificationConfig:
    """A classification run: what ``weightformer train`` does and ``weightformer eval`` reads back."""

    output: str = "runs/classification"
    """Folder for checkpoints, logs and the resolved configuration; the same command on it resumes."""
    seed: int = 0
    """Seeds initialisation, order and augmentation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images."""
    mix: MixConfig = field(default_factory=MixConfig)
    """MixUp, CutMix and label smoothing."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long and on what."""
    dynamics_every: int = 0
    """Optimiser steps between records of what training does to predicted weights; 0 records nothing."""
    task: str = "classification"
    """Which task this configuration is for."""

    def __post_init__(self) -> None:
        if self.task != "classification":
            raise ValueError(f"this is a classification configuration, not one for task {self.task!r}")
        if self.dynamics_every < 0:
            raise ValueError(f"dynamics_every must not be negative, got {self.dynamics_every}")
