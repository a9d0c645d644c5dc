"""The configuration of a segmentation run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weightformer.tasks.segmentation.data import DataConfig
from weightformer.tasks.segmentation.inference import InferenceConfig
from weightformer.training.config import ModelConfig, OptimConfig, TrainerConfig

__all__ = ["HeadConfig", "SegmentationConfig"]


@dataclass
class HeadConfig:
    """UperNet's head on the backbone."""

    channels: int = 512
    """Width of the decode head."""
    indices: list[int] | None = None
    """Feature maps of the backbone to take; by default the last four stages, or the ends of the four quarters of an
    isotropic model."""
    norm: Literal["batch", "sync_batch", "group"] = "batch"
    """``batch`` takes statistics over a process's images, ``sync_batch`` over those of all (on GPUs), ``group`` over
    each image alone, and so also works on one image a process."""
    dropout: float = 0.1
    """Share of channels dropped before the classifiers."""
    aux_channels: int = 256
    """Width of the auxiliary head."""
    aux_weight: float = 0.4
    """Weight of the auxiliary head's loss; 0 does without that head."""

    def __post_init__(self) -> None:
        if min(self.channels, self.aux_channels) < 1:
            raise ValueError("head.channels and head.aux_channels must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"head.dropout must be in [0, 1), got {self.dropout}")
        if self.aux_weight < 0:
            raise ValueError(f"head.aux_weight must not be negative, got {self.aux_weight}")


@dataclass
class SegmentationConfig:
    """A segmentation run: what ``weightformer train`` does and ``weightformer eval`` reads back."""

    output: str = "runs/segmentation"
    """Folder for checkpoints, logs and the resolved configuration; the same command on it resumes."""
    seed: int = 0
    """Seeds initialisation, order and augmentation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The backbone."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """What turns its features into classes."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images and masks."""
    infer: InferenceConfig = field(default_factory=InferenceConfig)
    """How evaluation and prediction run over an image."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long and on what."""
    task: str = "segmentation"
    """Which task this configuration is for."""

    def __post_init__(self) -> None:
        if self.task != "segmentation":
            raise ValueError(f"this is a segmentation configuration, not one for task {self.task!r}")
