"""Modules over `weightformer.ops`, on channels-last tokens (B, H, W, C)."""

from weightformer.layers.block import Block
from weightformer.layers.depthwise import CONV_PREDICTORS, DepthwiseConv2d, DynamicDepthwiseConv2d
from weightformer.layers.dynamic_linear import LINEAR_PREDICTORS, POOLS, DynamicLinear

__all__ = [
    "CONV_PREDICTORS",
    "LINEAR_PREDICTORS",
    "POOLS",
    "Block",
    "DepthwiseConv2d",
    "DynamicDepthwiseConv2d",
    "DynamicLinear",
]
