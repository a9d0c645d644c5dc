"""Label the pixels of images of any size at their own resolution, streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weightformer.models.checkpoint import load_weights
from weightformer.streaming import stream_files
from weightformer.streaming.job import StreamOptions, show_saved
from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.module import SegmentationModule
from weightformer.training.runs import inference_device, normalization, without_start_weights

__all__ = ["LargeOptions", "predict_large"]


@dataclass
class LargeOptions(StreamOptions):
    """What is wanted of streamed images."""

    RESULTS: ClassVar = {"segmentation": (".npy", ".zarr"), "logits": (".npy", ".zarr")}
    result: str = "segmentation"
    """segmentation (the class of every pixel, counted from 0) or logits."""


def predict_large(
    config: SegmentationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    images: Sequence[str | Path],
    options: LargeOptions,
) -> int:
    """Stream files and folders of images and write an array (height, width) or (height, width, K) for each.

    Returns:
        The number of images that failed; they are named on the terminal.

    Raises:
        FileNotFoundError: a path that does not exist, or folders without any image.
        ValueError: a model that cannot be streamed, or an option that does not fit.
    """
    found = options.find(images)
    module = SegmentationModule(without_start_weights(config), list(class_names))
    load_weights(module.model, weights)
    backbone: Any = module.model.backbone
    mean, std = normalization(config.model)
    backbone.pretrained_cfg = {**(backbone.pretrained_cfg or {}), "mean": tuple(mean), "std": tuple(std)}
    device = inference_device(config.trainer.accelerator)
    results = stream_files(
        module.model.to(device).eval(),
        found,
        output=options.result,
        out=options.save,
        strip_rows=options.strip_rows,
        memory=options.memory,
        workspace=options.workspace,
    )
    return show_saved((str(result.path), str(result.value or ""), result.error) for result in results)
