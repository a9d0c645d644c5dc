"""Fit and evaluate a Lightning module so that a killed run, started again, ends exactly where it would have."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from weightformer.config import read_yaml
from weightformer.training.callbacks import EpochSummary, ExponentialMovingAverage, NonFiniteGuard, ProgressBar
from weightformer.training.checkpoint_io import AtomicCheckpointIO
from weightformer.training.config import TrainerConfig
from weightformer.training.loader import derive_seed
from weightformer.training.log import JSONLinesLogger

__all__ = ["build_trainer", "claim_output", "last_checkpoint", "seed_step"]


def seed_step(seed: int, epoch: int, batch: int, rank: int) -> None:
    """Seed drop-path, dropout and mixing for one batch, as a function of its place in the run alone.

    Lightning does not restore random states, so a resumed run could not be exact if they carried over from batch to
    batch.
    """
    torch.manual_seed(derive_seed(seed, epoch, batch, rank))


def claim_output(folder: str | Path, config: Mapping[str, Any]) -> Path:
    """Make the output folder and write the resolved configuration beside the outputs.

    Raises:
        ValueError: the folder holds a run with another configuration, which must be neither resumed nor overwritten.
    """
    folder = Path(folder)
    record = folder / "config.yaml"
    text = yaml.safe_dump(dict(config), sort_keys=False)
    if record.exists():
        before = read_yaml(record)
        changed = [key for key in _differences(before, yaml.safe_load(text)) if not _may_change(key)]
        if changed:
            raise ValueError(
                f"{folder} holds a run with other settings ({', '.join(changed[:5])}); choose another `output`, or "
                "restore those settings to resume it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    changed_or_new = not record.exists() or record.read_text(encoding="utf-8") != text
    first = getattr(rank_zero_only, "rank", 0) == 0  # two processes would take each other's half-written file away
    if changed_or_new and first:
        partial = record.with_suffix(".partial")  # half a record would lock the run out of its own folder
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, record)
    return folder


# What a run may be resumed with in another form, since no weight depends on it.
_MAY_CHANGE = {
    *("trainer.checkpoint_every", "trainer.log_every", "trainer.val_every", "dynamics_every"),
    *("data.num_workers", "data.root", "data.val_batch_size"),
    *("infer", "sampling", "score"),  # whole sections
}


def _may_change(key: str) -> bool:
    return not _MAY_CHANGE.isdisjoint((key, key.split(".")[0]))


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Dotted keys under which two nested mappings differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [*a, *(k for k in b if k not in a)]
        return [d for k in keys for d in _differences(a.get(k), b.get(k), f"{prefix}.{k}" if prefix else str(k))]
    return [] if a == b else [prefix]


def last_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint that a run in this folder resumes from, if it got that far."""
    path = Path(folder) / "checkpoints" / "last.ckpt"
    return str(path) if path.exists() else None


def build_trainer(
    config: TrainerConfig,
    *,
    folder: str | Path | None = None,
    clip_norm: float = 0.0,
    monitor: str | None = None,
    callbacks: list[Callback] | None = None,
) -> L.Trainer:
    """A Lightning trainer with this package's checkpoints, logs and guards.

    Args:
        config: how long and on what.
        folder: where checkpoints and logs go; without one (evaluation) nothing is written.
        clip_norm: largest norm of the gradient; 0 does not clip.
        monitor: metric that decides which checkpoint is the best; larger is better.
        callbacks: further ones of the task.
    """
    callbacks = [*(callbacks or []), ProgressBar()]
    loggers: list[Any] = []
    if folder is not None:
        folder = Path(folder)
        checkpoints = folder / "checkpoints"
        common: dict[str, Any] = {"dirpath": checkpoints, "enable_version_counter": False}
        callbacks += [
            NonFiniteGuard(),
            EpochSummary(),
            ModelCheckpoint(filename="last", every_n_train_steps=config.checkpoint_every, **common),
            ModelCheckpoint(filename="last", every_n_epochs=1, save_on_train_epoch_end=True, **common),
        ]
        if monitor:
            callbacks.append(ModelCheckpoint(filename="best", monitor=monitor, mode="max", **common))
        if config.ema_decay:
            callbacks.append(ExponentialMovingAverage(config.ema_decay))
        loggers = [
            JSONLinesLogger(folder / "log.jsonl"),
            TensorBoardLogger(str(folder), name="", version="tensorboard"),
        ]
    return L.Trainer(
        max_epochs=config.epochs,
        precision=config.precision,
        accelerator=config.accelerator,
        devices=config.devices,
        num_nodes=config.nodes,
        strategy="ddp" if config.devices * config.nodes > 1 else "auto",
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=clip_norm or None,
        check_val_every_n_epoch=config.val_every,
        log_every_n_steps=config.log_every,
        deterministic=config.deterministic,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
        callbacks=callbacks,
        logger=loggers or False,
        enable_checkpointing=folder is not None,
        enable_model_summary=False,
    )


@atexit.register
def _leave_group() -> None:
    """Lightning leaves the process group open; its threads must not outlive the interpreter."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
