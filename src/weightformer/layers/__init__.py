"""Modules over `weightformer.ops`, on channels-last tokens (B, H, W, C)."""

from weightformer.layers.attention import AttentionMLP, attention_mlp
from weightformer.layers.block import Block
from weightformer.layers.depthwise import CONV_PREDICTORS, DepthwiseConv2d, DynamicDepthwiseConv2d
from weightformer.layers.dynamic_linear import LINEAR_PREDICTORS, POOLS, DynamicLinear

__all__ = [
    "CONV_PREDICTORS",
    "LINEAR_PREDICTORS",
    "POOLS",
    "AttentionMLP",
    "Block",
    "DepthwiseConv2d",
    "DynamicDepthwiseConv2d",
    "DynamicLinear",
    "attention_mlp",
]
