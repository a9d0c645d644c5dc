"""Pure tensor functions without parameters; a readable reference stands beside each fast form."""

from weightformer.ops import native
from weightformer.ops.depthwise_norm import depthwise_norm
from weightformer.ops.dispatch import IMPLEMENTATIONS, implementation
from weightformer.ops.dynamic_depthwise import dynamic_depthwise_conv2d
from weightformer.ops.dynamic_linear import dynamic_linear, linear_weight
from weightformer.ops.gated_linear_attention import gated_linear_attention
from weightformer.ops.mlp import mlp
from weightformer.ops.pooling import pool_2x2, region_mean
from weightformer.ops.precision import normalize_update, wide

__all__ = [
    "IMPLEMENTATIONS",
    "depthwise_norm",
    "dynamic_depthwise_conv2d",
    "dynamic_linear",
    "gated_linear_attention",
    "implementation",
    "linear_weight",
    "mlp",
    "native",
    "normalize_update",
    "pool_2x2",
    "region_mean",
    "wide",
]
