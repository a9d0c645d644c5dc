"""Images of any size at their own resolution, streamed: their classes, logits, pooled or dense features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from weightformer.streaming import stream_files
from weightformer.streaming.job import StreamOptions, show_saved
from weightformer.streaming.rows import launched
from weightformer.tasks.classification.config import ClassificationConfig
from weightformer.tasks.classification.predict import Prediction, load_model, ranked, write_predictions

__all__ = ["LargeClassifier", "LargeOptions", "predict_large"]


@dataclass
class LargeOptions(StreamOptions):
    """What is wanted of streamed images."""

    RESULTS: ClassVar = {
        "classes": ("", ".csv", ".json"),
        "logits": (".csv", ".json"),
        "pooled": (".csv", ".json"),
        "features": (".npy", ".zarr"),
    }
    result: str = "classes"
    """classes, logits, pooled (the mean token) or features (every final token, to a file)."""
    top_k: int = 5
    """Classes to report for an image."""


class LargeClassifier:
    """Streams image after image through a trained model.

    Args:
        config: names the model.
        weights: a checkpoint or weight file that fits the model exactly.
        class_names: in the order of the model's outputs.
        options: what is wanted.
    """

    def __init__(
        self, config: ClassificationConfig, weights: str | Path, class_names: Sequence[str], options: LargeOptions
    ) -> None:
        self.model: Any = load_model(config, weights, class_names)
        self.options, self._class_names = options, list(class_names)

    def __call__(
        self, images: Mapping[str, Path], *, progress: bool = True, group: dist.ProcessGroup | None = None
    ) -> Iterator[Prediction]:
        """One prediction an image, in order; one that failed carries its error."""
        options = self.options
        for found in stream_files(
            self.model,
            images,
            output="logits" if options.result == "classes" else options.result,
            out=options.save if options.result == "features" else None,
            strip_rows=options.strip_rows,
            memory=options.memory,
            workspace=options.workspace,
            progress=progress,
            group=group,
        ):
            row = Prediction(str(found.path), error=found.error)
            if isinstance(found.value, Path):
                row.saved = str(found.value)
            elif isinstance(found.value, Tensor) and options.result == "classes":
                row.classes = ranked(found.value, self._class_names, options.top_k)[0]
            elif isinstance(found.value, Tensor):
                row.values = found.value[0].tolist()
            yield row

    @property
    def columns(self) -> list[str]:
        """What each number of `Prediction.values` stands for."""
        return self._class_names if self.options.result == "logits" else list(map(str, range(self.model.embed_dim)))


def predict_large(
    config: ClassificationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    images: Sequence[str | Path],
    options: LargeOptions,
) -> int:
    """Stream files and folders of images and write what was found; under ``torchrun``, each image over all processes.

    Returns:
        The number of images that failed; they are named in the result.

    Raises:
        FileNotFoundError: a path that does not exist, or folders without any image.
        ValueError: a model that cannot be streamed, or an option that does not fit.
    """
    found = options.find(images)
    classify = LargeClassifier(config, weights, class_names, options)
    with launched() as (group, rank):
        rows = classify(found, progress=rank == 0, group=group)
        if rank:
            return sum(bool(row.error) for row in rows)
        if options.result == "features":
            return show_saved((row.path, row.saved, row.error) for row in rows)
        columns = classify.columns if options.result in ("logits", "pooled") else None
        return write_predictions(rows, options.save, columns=columns, progress=False)
