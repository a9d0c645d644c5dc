"""Architectures, one readable file each, and the checkpoint layouts they read and write."""

from weightformer.models.weightformer import WeightFormer

__all__ = ["WeightFormer"]
