"""Image classification: what the command line calls for ``task: classification``."""

from weightformer.tasks.classification.cluster import predict_on_cluster
from weightformer.tasks.classification.config import ClassificationConfig as Config
from weightformer.tasks.classification.large import LargeOptions, predict_large
from weightformer.tasks.classification.predict import PREDICT_ARGUMENTS, predict
from weightformer.tasks.classification.run import evaluate, train
from weightformer.training.runs import read_checkpoint

__all__ = [
    "PREDICT_ARGUMENTS",
    "Config",
    "LargeOptions",
    "evaluate",
    "predict",
    "predict_large",
    "predict_on_cluster",
    "read_checkpoint",
    "train",
]
