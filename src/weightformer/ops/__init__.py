"""Pure tensor functions without parameters; a readable reference stands beside each fast form."""

from weightformer.ops.dispatch import IMPLEMENTATIONS, implementation
from weightformer.ops.dynamic_depthwise import dynamic_depthwise_conv2d
from weightformer.ops.dynamic_linear import dynamic_linear, linear_weight
from weightformer.ops.linear_gelu import linear_gelu
from weightformer.ops.pooling import pool_2x2, region_mean
from weightformer.ops.precision import normalize_update, wide
from weightformer.ops.residual_depthwise_norm import residual_depthwise_norm

__all__ = [
    "IMPLEMENTATIONS",
    "dynamic_depthwise_conv2d",
    "dynamic_linear",
    "implementation",
    "linear_gelu",
    "linear_weight",
    "normalize_update",
    "pool_2x2",
    "region_mean",
    "residual_depthwise_norm",
    "wide",
]
