"""Class-conditional generation: what the command line calls for ``task: generation``."""

from weightformer.tasks.generation.config import GenerationConfig as Config
from weightformer.tasks.generation.pipeline import WeightFormerPipeline, create_scheduler
from weightformer.tasks.generation.run import PREDICT_ARGUMENTS, evaluate, predict, read_checkpoint, train
from weightformer.tasks.generation.sample import sample

__all__ = [
    "PREDICT_ARGUMENTS",
    "Config",
    "WeightFormerPipeline",
    "create_scheduler",
    "evaluate",
    "predict",
    "read_checkpoint",
    "sample",
    "train",
]
