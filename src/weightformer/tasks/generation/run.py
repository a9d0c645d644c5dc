"""Train and evaluate: what the command line calls."""

from __future__ import annotations

import dataclasses
import datetime
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from weightformer.tasks.generation.config import GenerationConfig, ScoreConfig
from weightformer.tasks.generation.data import DataConfig, GenerationData
from weightformer.tasks.generation.metrics import (
    Features,
    classifier_features,
    extract,
    inception_features,
    score,
    spread,
)
from weightformer.tasks.generation.module import GenerationModule
from weightformer.tasks.generation.sample import (
    build_pipeline,
    digest,
    process_rank,
    read_samples,
    sample_images,
    sample_size,
)
from weightformer.training.engine import build_trainer, claim_output
from weightformer.training.loader import as_collated
from weightformer.training.runs import fit, inference_device, read_stored, report_skipped, schedule_counts

__all__ = ["PREDICT_ARGUMENTS", "evaluate", "predict", "read_checkpoint", "train"]

PREDICT_ARGUMENTS: list[Any] = []


def train(config: GenerationConfig) -> dict[str, float]:
    """Train as configured; run again on the same output folder, it resumes where the last checkpoint stands.

    Beside the checkpoints it writes ``pipeline/``, a folder that ``WeightFormerPipeline.from_pretrained`` reads.

    Returns:
        The last evaluation's ``loss``, ``mse`` and ``vb``, and its count ``samples``; without validation samples, the
        last epoch's ``train_loss``.

    Raises:
        ValueError: the output folder holds another run, or the data do not fit the configuration.
        FloatingPointError: the loss or a gradient is not finite; names the step and the layer.
    """
    folder = claim_output(config.output, dataclasses.asdict(config))
    L.seed_everything(config.seed, verbose=False)
    trainer = build_trainer(config.trainer, folder=folder, clip_norm=config.optim.clip_norm)
    data = GenerationData(config.data, seed=config.seed, rank=trainer.global_rank, world_size=trainer.world_size)
    train_loader, val_loader = data.train_loader(), data.val_loader()
    module = GenerationModule(
        config,
        data.class_names,
        channels=data.channels,
        size=data.size,
        vae=data.vae,
        **schedule_counts(config, trainer, train_loader),
    )
    fit(trainer, module, train_loader, val_loader, folder)
    if trainer.is_global_zero:
        _export(module, folder / "pipeline")
    report_skipped(data.skipped)
    if val_loader:
        return module.result
    last = trainer.callback_metrics.get("train/loss")  # none where the run was complete already
    return {} if last is None else {"train_loss": float(last)}


def evaluate(config: GenerationConfig, weights: str | Path, class_names: Sequence[str] | None = None) -> dict[str, Any]:
    """Draw samples of every class, and score them beside real images.

    The samples stay in ``samples/`` beside the checkpoint's folder, with ``scores.json``: run again, or after an
    interruption, only missing ones are drawn. Under torchrun every process draws a share and the first scores all.

    Args:
        config: ``sampling`` and ``score`` say how.
        weights: a training checkpoint, or a weight file that fits the denoiser exactly.
        class_names: the classes that the weights were trained for; by default those of the data.

    Returns:
        The scores of `weightformer.tasks.generation.metrics.score` and what they were taken of; with a classifier of
        the same classes also its ``accuracy`` on the samples and that of the worst class. Nothing on other processes
        than the first.

    Raises:
        ValueError: too few reference images, or settings that do not go together.
    """
    rank, world = process_rank()
    device = inference_device(config.trainer.accelerator)
    # First, so that what is wrong with it comes to light before hours of sampling.
    features = _features(config.score, device) if rank == 0 else None
    pipeline = build_pipeline(config, weights, class_names).to(device)
    sampling, num = config.sampling, config.score.num_samples
    name = f"{digest(weights)}-{sampling.scheduler}-{sampling.steps}-guidance-{sampling.guidance:g}-seed-{config.seed}"
    folder = Path(weights).parent.parent / "samples" / f"{name}-{num}"
    labels = range(pipeline.num_classes)
    sample_images(pipeline, labels, num, folder, sampling, seed=config.seed, weights=weights)
    if world > 1:
        _wait_for_all(rank, world)
    if features is None:
        return {}
    images, drawn = read_samples(folder, num)
    fake, logits = extract(features, images)
    size = sample_size(folder)
    reference, described = _reference(config, sampling.batch_size, size)
    real, _ = extract(features, reference)
    result: dict[str, Any] = score(real, fake, logits, seed=config.seed)
    names = [str(n) for n in pipeline.config.class_names or ()]
    if features.class_names == names:
        right = logits.argmax(dim=1) == drawn
        each = {n: float(right[drawn == i].double().mean()) for i, n in enumerate(names) if (drawn == i).any()}
        worst = min(each, key=lambda n: each[n])
        result |= {"accuracy": float(right.double().mean()), "accuracy_worst": each[worst], "worst_class": worst}
        (folder / "accuracy.json").write_text(json.dumps(each, indent=1))
    result |= {
        "samples": num,
        "sampled": f"{sampling.scheduler}, {sampling.steps} steps, guidance {sampling.guidance:g}",
        "reference": f"{len(real)} images of {described}",
        "features": f"{fake.shape[1]} of {features.description}",
        "values": "uint8, samples rounded from [-1, 1]",
    }
    (folder / "scores.json").write_text(json.dumps(result, indent=1))
    return result


def predict(*_: Any, **__: Any) -> int:
    """There is nothing to predict.

    Raises:
        ValueError: always; it names the verb that draws images.
    """
    raise ValueError("a generator predicts nothing of images; draw some with: weightformer sample CHECKPOINT")


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], list[str]]:
    """The configuration (as a mapping) and the class names stored in a training checkpoint.

    Raises:
        ValueError: the file is no training checkpoint of this package, or one of another task.
    """
    config, class_names, _ = read_stored(path, class_names=list, samples=dict)
    return config, [str(name) for name in class_names]


def _features(config: ScoreConfig, device: torch.device) -> Features:
    if config.features == "inception":
        return inception_features(config.inception_weights, device)
    return classifier_features(config.features, device)


def _reference(config: GenerationConfig, batch_size: int, size: tuple[int, int]) -> tuple[Iterator[Tensor], str]:
    """Real images as uint8 batches of the samples' size, and their description."""
    data, split = config.data, config.score.reference
    if data.source == "latents":
        if not config.score.reference_root:
            raise ValueError("a run on latents is scored beside images: give their folder as score.reference_root")
        data = DataConfig(source="folder", root=config.score.reference_root, on_bad_image=data.on_bad_image)
    data = dataclasses.replace(data, image_size=size[0])
    samples = GenerationData(data, seed=config.seed).real_images(split)
    places = spread(len(samples), config.score.num_reference).tolist()
    keys = [[(0, place) for place in places[i : i + batch_size]] for i in range(0, len(places), batch_size)]
    loader = torch.utils.data.DataLoader(
        samples, batch_sampler=keys, num_workers=data.num_workers, collate_fn=as_collated
    )

    def batches() -> Iterator[Tensor]:
        for batch in loader:
            if isinstance(batch, Exception):
                raise batch
            yield ((batch[0] + 1) * 127.5).round().to(torch.uint8)

    place = data.root or data.source
    return batches(), f"{place} {split} (of {len(samples)}), {size[1]} x {size[0]} px"


def _wait_for_all(rank: int, world: int) -> None:
    """Until every process has drawn its share, however long the slowest takes."""
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=7), rank=rank, world_size=world)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _export(module: GenerationModule, folder: Path) -> None:
    try:
        pipeline = module.pipeline()
    except ValueError as error:
        warnings.warn(f"{folder} is written without its VAE: {error}", stacklevel=3)
        pipeline = module.pipeline(with_vae=False)
    pipeline.save_pretrained(folder)
