"""Class-conditional generation of images."""

from weightformer.tasks.generation.pipeline import WeightFormerPipeline, create_scheduler

__all__ = ["WeightFormerPipeline", "create_scheduler"]
