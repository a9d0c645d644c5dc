"""Architectures, one readable file each, and the checkpoint layouts they read and write."""

from weightformer.models.convnext_isotropic import ConvNeXtIsotropic
from weightformer.models.pvt import PyramidVisionTransformer
from weightformer.models.weightformer import WeightFormer

__all__ = ["ConvNeXtIsotropic", "PyramidVisionTransformer", "WeightFormer"]
