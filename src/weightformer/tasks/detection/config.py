"""The configuration of a detection run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weightformer.tasks.detection.data import DataConfig
from weightformer.training.config import ModelConfig, OptimConfig, TrainerConfig

__all__ = ["DetectionConfig", "HeadConfig"]


@dataclass
class HeadConfig:
    """What turns the backbone's last map into boxes and masks; the defaults are ViTDet's."""

    kind: Literal["mask", "cascade"] = "mask"
    """Mask R-CNN, or Cascade Mask R-CNN, whose three box heads refine each other's boxes."""
    strides: list[int] = field(default_factory=lambda: [4, 8, 16, 32])
    """Pixels a side to a cell of each pyramid level: doubling, each a power of two times the backbone's stride."""
    channels: int = 256
    """Channels of the pyramid and of the heads' convolutions."""
    fc_channels: int = 1024
    """Width of the box heads' linear layer."""
    num_convs: int = 4
    """Convolutions of each box head and of the mask head."""
    anchor_scale: float = 8.0
    """Side of a level's square anchor, in strides."""
    proposals: int = 1000
    """Proposals kept of an image."""
    rpn_samples: int = 256
    """Anchors of an image that the proposal network's loss is taken over."""
    roi_samples: int = 512
    """Proposals of an image that the box heads' losses are taken over; a quarter at most are objects."""
    score_threshold: float = 0.05
    """Detections with a lower score are dropped."""
    nms_threshold: float = 0.5
    """Of two detections of a class that overlap by more than this IoU, the one with the lower score is dropped."""
    detections: int = 100
    """Detections kept of an image."""
    window: int = 0
    """For a ViT: tokens a side of the windows that attention is confined to, except in the blocks that end the four
    quarters of the depth (ViTDet has 14); 0 keeps all attention global."""

    def __post_init__(self) -> None:
        if not self.strides or any(b != 2 * a for a, b in zip(self.strides, self.strides[1:], strict=False)):
            raise ValueError(f"head.strides must double from level to level, got {self.strides}")
        for name in ("channels", "fc_channels", "proposals", "rpn_samples", "roi_samples", "detections"):
            if getattr(self, name) < 1:
                raise ValueError(f"head.{name} must be at least 1, got {getattr(self, name)}")
        if self.num_convs < 1 or self.window < 0 or self.anchor_scale <= 0:
            raise ValueError("head.num_convs must be at least 1, head.anchor_scale positive, head.window not negative")
        for name in ("score_threshold", "nms_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"head.{name} must be in [0, 1], got {getattr(self, name)}")


@dataclass
class DetectionConfig:
    """A detection run: what ``weightformer train`` does and ``weightformer eval`` reads back."""

    output: str = "runs/detection"
    """Folder for checkpoints, logs and the resolved configuration; the same command on it resumes."""
    seed: int = 0
    """Seeds initialisation, order and augmentation."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The backbone."""
    head: HeadConfig = field(default_factory=HeadConfig)
    """What turns its last map into boxes and masks."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images and their annotations."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long and on what."""
    task: str = "detection"
    """Which task this configuration is for."""

    def __post_init__(self) -> None:
        if self.task != "detection":
            raise ValueError(f"this is a detection configuration, not one for task {self.task!r}")
