"""Label the pixels of images of any size at their own resolution, streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightformer.models.checkpoint import load_weights
from weightformer.streaming import find_sources, stream_files
from weightformer.streaming.job import check_save, show_saved
from weightformer.streaming.workspace import as_bytes
from weightformer.tasks.segmentation.config import SegmentationConfig
from weightformer.tasks.segmentation.module import SegmentationModule
from weightformer.training.runs import inference_device, normalization, without_start_weights

__all__ = ["RESULTS", "LargeOptions", "predict_large"]

RESULTS = {"segmentation": (".npy", ".zarr"), "logits": (".npy", ".zarr")}


@dataclass
class LargeOptions:
    """How images are streamed and what is wanted of them."""

    result: str = "segmentation"
    """segmentation (the class of every pixel, counted from 0) or logits."""
    save: str | None = None
    """A .npy or .zarr path, with {name} in it for several images."""
    strip_rows: int = 16
    """Token rows computed together."""
    memory: str | None = None
    """Tokens that exceed so many bytes (such as 2GiB) go to disk; by default half of the memory."""
    workspace: str | None = None
    """Folder from which the same command resumes after a kill."""
    tiles: bool = False
    """Whether a folder given is one image, cut into tiles."""

    def __post_init__(self) -> None:
        if self.result not in RESULTS:
            raise ValueError(f"the result must be one of {', '.join(RESULTS)}, got {self.result!r}")
        if self.memory is not None:
            as_bytes(self.memory)


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
    check_save(options.result, RESULTS[options.result], options.save)
    found = find_sources(images, tiles=options.tiles)
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
