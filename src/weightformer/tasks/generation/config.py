"""The configuration of a generation run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from weightformer.tasks.generation.data import DataConfig
from weightformer.training.config import OptimConfig, TrainerConfig

__all__ = ["DenoiserConfig", "GenerationConfig", "SamplingConfig", "ScoreConfig"]


@dataclass
class DenoiserConfig:
    """Which denoiser is trained."""

    name: str = "denoiser_micro"
    """A size of ours (``denoiser_s_2``); or a baseline: ``dig_s_2`` and the like, or ``dit``, diffusers' DiT."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its constructor; ``dit`` takes patch_size, hidden_size, depth and num_heads."""
    weights: str | None = None
    """A weight file to start from: ours, the released layout or a training checkpoint."""
    grad_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Run the denoiser through torch.compile."""


@dataclass
class SamplingConfig:
    """How samples are drawn from the trained denoiser."""

    scheduler: Literal["ddpm", "ddim", "dpm++"] = "ddpm"
    """DDPM with the learned variance, DDIM, or DPM-Solver++ (20 to 50 steps suffice)."""
    steps: int = 250
    """Denoising steps."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is none."""
    batch_size: int = 64
    """Samples drawn at once, by each process."""

    def __post_init__(self) -> None:
        for name, low in (("steps", 1), ("guidance", 0), ("batch_size", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"sampling.{name} must be at least {low}, got {getattr(self, name)}")


@dataclass
class ScoreConfig:
    """What ``weightformer eval`` compares samples with, and through whose features."""

    num_samples: int = 50_000
    """Samples drawn, equally many of each class."""
    features: str = "inception"
    """``inception``, or a training checkpoint of a classifier of ours: for images that Inception was not made for."""
    inception_weights: str | None = None
    """File of the weights that torch-fidelity publishes; without one they are downloaded."""
    reference: Literal["train", "val"] = "train"
    """The split of the images that samples are compared with."""
    num_reference: int = 50_000
    """Images of it that are used, evenly spread over its classes."""
    reference_root: str | None = None
    """Their folder (train/<class>/<image>), where the run was trained on latents."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_reference"):
            if getattr(self, name) < 2:
                raise ValueError(f"score.{name} must be at least 2, got {getattr(self, name)}")


@dataclass
class GenerationConfig:
    """A generation run: what ``weightformer train`` does and ``weightformer eval`` and ``sample`` read back."""

    output: str = "runs/generation"
    """Folder for checkpoints, logs and the resolved configuration; the same command on it resumes."""
    seed: int = 0
    """Seeds initialisation, order, noise, time steps and dropped labels."""
    model: DenoiserConfig = field(default_factory=DenoiserConfig)
    """The denoiser."""
    data: DataConfig = field(default_factory=DataConfig)
    """The images or latents."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """How long and on what."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How samples are drawn."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    """How samples are scored."""
    task: str = "generation"
    """Which task this configuration is for."""

    def __post_init__(self) -> None:
        if self.task != "generation":
            raise ValueError(f"this is a generation configuration, not one for task {self.task!r}")
        if self.sampling.guidance != 1 and not self.data.label_dropout:
            raise ValueError(
                f"sampling.guidance {self.sampling.guidance} needs a null class, which data.label_dropout: 0 does not "
                "train; train with label dropout, or sample with guidance 1"
            )
