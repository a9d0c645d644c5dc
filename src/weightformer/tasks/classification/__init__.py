"""Image classification: what the command line calls for ``task: classification``."""

from weightformer.tasks.classification.config import ClassificationConfig as Config
from weightformer.tasks.classification.predict import PREDICT_ARGUMENTS, predict
from weightformer.tasks.classification.run import evaluate, train
from weightformer.training.runs import read_checkpoint

__all__ = ["PREDICT_ARGUMENTS", "Config", "evaluate", "predict", "read_checkpoint", "train"]
