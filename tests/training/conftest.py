"""A training run small enough to be killed and repeated: a two-block model on the digits."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tiny_run() -> dict[str, Any]:
    """A configuration's content: some forty steps of a two-block model with drop-path, mixing, EMA and evaluation."""
    return {
        "model": {
            "name": "weightformer_micro",
            "in_chans": 1,
            "kwargs": {"embed_dim": 16, "depth": 2, "drop_path_rate": 0.3},
            "mean": [0.3],
            "std": [0.4],
        },
        "data": {"source": "digits", "image_size": 16, "batch_size": 100, "pad_crop": 2, "crop_pct": 1.0},
        "mix": {"mixup": 0.5, "cutmix": 0.5, "smoothing": 0.1},
        "optim": {"lr": 2e-3, "lr_batch": 0, "warmup_epochs": 0.5},
        "trainer": {"epochs": 3, "val_every": 2, "checkpoint_every": 2, "ema_decay": 0.95, "log_every": 1},
    }
