"""Object detection and instance segmentation: what the command line calls for ``task: detection``."""

from weightformer.tasks.detection.config import DetectionConfig as Config
from weightformer.tasks.detection.predict import PREDICT_ARGUMENTS, predict
from weightformer.tasks.detection.run import evaluate, read_checkpoint, train

__all__ = ["PREDICT_ARGUMENTS", "Config", "evaluate", "predict", "read_checkpoint", "train"]
