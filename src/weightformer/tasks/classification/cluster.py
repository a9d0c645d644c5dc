"""Prediction over a Ray cluster: every worker takes image after image, results go to Parquet as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightformer.streaming import find_sources
from weightformer.streaming.sources import import_reader
from weightformer.tasks.classification.config import ClassificationConfig
from weightformer.tasks.classification.data import find_images
from weightformer.tasks.classification.large import LargeClassifier, LargeOptions
from weightformer.tasks.classification.predict import Classifier, Prediction

__all__ = ["predict_on_cluster"]


def predict_on_cluster(
    config: ClassificationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    images: Sequence[str | Path],
    folder: str | Path,
    *,
    address: str | None = None,
    large: LargeOptions | None = None,
    top_k: int = 5,
) -> int:
    """Predict files and folders of images with Ray Data and write Parquet files, a row an image.

    Columns: ``path``, ``classes`` and ``probabilities`` (best first), ``values`` (logits or pooled features), ``saved``
    (where dense features are: ``.npy`` files in the same folder) and ``error``. Run again on the same folder, it
    predicts what is missing or had failed.

    Args:
        config: names the model.
        weights: a checkpoint that fits it; like the images, at a path that every machine can read.
        class_names: in the order of the model's outputs.
        images: files and folders.
        folder: for the Parquet files.
        address: of a Ray cluster (``auto``, ``ray://host:10001``); by default one is started on this machine.
        large: stream images at their own resolution; by default they are resized as in evaluation.
        top_k: classes to report for an image.

    Returns:
        The number of images that failed; their rows say why.

    Raises:
        ImportError: Ray is not installed.
        FileNotFoundError: a path that does not exist, or folders without any image.
        ValueError: the model cannot be streamed, or an option does not fit.
    """
    ray, data = import_reader("ray", "ray"), import_reader("ray.data", "ray")
    folder = Path(folder).resolve()
    found = find_sources(images, tiles=large.tiles) if large else {str(path): path for path in find_images(images)}
    items = [{"name": name, "path": str(path.resolve())} for name, path in found.items()]
    _claim(folder, {"weights": _stamp(weights), "large": large and dataclasses.asdict(large), "top_k": top_k})
    done = _finished(folder)
    if items := [item for item in items if item["path"] not in done]:
        started = not ray.is_initialized()
        if started:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        try:
            available = ray.cluster_resources()
            gpus = int(available.get("GPU", 0))
            workers = max(min(gpus or int(available["CPU"]), len(items)), 1)
            if large and large.result == "features":
                large = dataclasses.replace(large, save=str(folder / "{name}.npy"))
            if large and large.memory is None:
                large = dataclasses.replace(large, memory=str(int(available["memory"] / (2 * workers))))
            settings = (config, str(Path(weights).resolve()), list(class_names), large, top_k)
            _Worker(*settings)  # whatever is wrong with the model shows here, not in a log on another machine
            batch = 1 if large else config.data.batch_size
            rows = data.from_items(items, override_num_blocks=-(-len(items) // batch)).map_batches(
                _Worker,
                fn_constructor_args=settings,
                batch_size=batch,
                batch_format="pyarrow",
                concurrency=(1, workers),
                num_gpus=1 if gpus else 0,
            )
            rows.write_parquet(str(folder))
        finally:
            if started:
                ray.shutdown()
    return sum(bool(error) for error in _read(folder).column("error").to_pylist())


class _Worker:
    """The model on one worker; takes Arrow tables of images, gives tables of results."""

    def __init__(
        self,
        config: ClassificationConfig,
        weights: str,
        class_names: list[str],
        large: LargeOptions | None,
        top_k: int,
    ) -> None:
        self._classify: Any = (
            LargeClassifier(config, weights, class_names, large)
            if large
            else Classifier(config, weights, class_names, top_k)
        )
        self._large = large is not None

    def __call__(self, batch: Any) -> Any:
        names, paths = batch.column("name").to_pylist(), batch.column("path").to_pylist()
        if self._large:
            rows = list(self._classify(dict(zip(names, map(Path, paths), strict=True)), progress=False))
        else:
            rows = self._classify(paths)
        return _table(rows)


def _schema() -> Any:
    arrow = import_reader("pyarrow", "ray")
    texts, numbers = arrow.list_(arrow.string()), arrow.list_(arrow.float64())
    return arrow.schema(
        {
            "path": arrow.string(),
            "classes": texts,
            "probabilities": numbers,
            "values": numbers,
            "saved": arrow.string(),
            "error": arrow.string(),
        }
    )


def _table(rows: list[Prediction]) -> Any:
    records = [
        {
            "path": row.path,
            "classes": [name for name, _ in row.classes],
            "probabilities": [p for _, p in row.classes],
            "values": row.values,
            "saved": row.saved,
            "error": row.error,
        }
        for row in rows
    ]
    return import_reader("pyarrow", "ray").Table.from_pylist(records, _schema())


def _read(folder: Path) -> Any:
    """All results in a folder; a file that a killed run left half-written counts for nothing."""
    arrow, parquet = import_reader("pyarrow", "ray"), import_reader("pyarrow.parquet", "ray")
    tables = [_schema().empty_table()]
    for path in sorted(folder.glob("*.parquet")):
        with contextlib.suppress(arrow.ArrowInvalid):
            tables.append(parquet.read_table(path).cast(_schema()))
    return arrow.concat_tables(tables)


def _finished(folder: Path) -> set[str]:
    """Images that an earlier run predicted; the rows of those that failed, and damaged files, leave the folder."""
    compute, parquet = import_reader("pyarrow.compute", "ray"), import_reader("pyarrow.parquet", "ray")
    rows = _read(folder)
    good = rows.filter(compute.equal(rows.column("error"), ""))
    if old := sorted(folder.glob("*.parquet")):
        parquet.write_table(good, folder / "finished.partial")
        (folder / "finished.partial").replace(folder / "finished.parquet")
        for path in old:
            if path.name != "finished.parquet":
                path.unlink()
    return set(good.column("path").to_pylist())


def _claim(folder: Path, run: dict[str, Any]) -> None:
    """Refuse a folder that holds the results of another model or of other options."""
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / "run.json", json.dumps(run, indent=1)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{folder} holds predictions of another model or with other options; name another folder")
    path.write_text(text)


def _stamp(weights: str | Path) -> str:
    stat = Path(weights).stat()
    return f"{Path(weights).resolve()} {stat.st_size} bytes, modified {stat.st_mtime_ns}"
