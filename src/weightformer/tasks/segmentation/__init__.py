"""Semantic segmentation: what the command line calls for ``task: segmentation``."""

from weightformer.tasks.segmentation.config import SegmentationConfig as Config
from weightformer.tasks.segmentation.large import LargeOptions, predict_large
from weightformer.tasks.segmentation.predict import PREDICT_ARGUMENTS, predict
from weightformer.tasks.segmentation.run import evaluate, train
from weightformer.training.runs import read_checkpoint

__all__ = [
    "PREDICT_ARGUMENTS",
    "Config",
    "LargeOptions",
    "evaluate",
    "predict",
    "predict_large",
    "read_checkpoint",
    "train",
]
