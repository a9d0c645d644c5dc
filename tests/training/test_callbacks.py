"""The guard names step and layer, averaging follows its formula, the log is only appended to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from weightformer.training.callbacks import ExponentialMovingAverage, NonFiniteGuard, first_non_finite
from weightformer.training.checkpoint_io import AtomicCheckpointIO
from weightformer.training.log import JSONLinesLogger


class Regression(L.LightningModule):
    """Fits noise; ``poison`` names what goes wrong at step 3."""

    def __init__(self, poison: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.poison = poison

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 3 and self.poison == "second":
            with torch.no_grad():
                self.second.weight.fill_(torch.inf)
        hidden = self.first(batch)
        loss = self.second(hidden).square().mean()
        if self.global_step == 3 and self.poison == "gradient":
            hidden.register_hook(lambda grad: grad * torch.nan)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: L.LightningModule, *callbacks: L.Callback, steps: int = 6, **kwargs: Any) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False, callbacks=list(callbacks), **kwargs,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4))
    return trainer


def test_guard_names_the_step_and_the_layer() -> None:
    with pytest.raises(FloatingPointError, match=r"step 3 \(epoch 0, batch 3\).* comes from second"):
        fit(Regression("second"), NonFiniteGuard())


def test_guard_names_the_gradient_before_it_is_applied() -> None:
    module = Regression("gradient")
    with pytest.raises(FloatingPointError, match=r"gradient of first.\w+ is not finite at step 3"):
        fit(module, NonFiniteGuard())
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_guard_lets_a_healthy_run_pass() -> None:
    module = Regression()
    assert fit(module, NonFiniteGuard()).global_step == 6
    assert first_non_finite(module, torch.randn(2, 4)) is None


def test_averaging_follows_its_formula() -> None:
    raw: list[Tensor] = []

    class Record(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            raw.append(module.second.weight.detach().clone())

    module = Regression()
    fit(module, Record(), ExponentialMovingAverage(0.3))
    average = raw[0]
    for n, weight in enumerate(raw[1:], start=1):
        decay = min(0.3, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight
    assert len(raw) == 6
    torch.testing.assert_close(module.second.weight.detach(), average)


def test_log_is_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        logger = JSONLinesLogger(tmp_path / "log.jsonl")
        logger.log_hyperparams({})
        logger.log_metrics({"loss": 0.5}, step=3)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.get("step", line.get("event")) for line in lines] == ["start", 3, "start", 3]
    assert lines[1]["loss"] == 0.5


def test_checkpoint_is_plain(tmp_path: Path) -> None:
    trainer = fit(Regression(), steps=1, plugins=[AtomicCheckpointIO()])
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    assert torch.load(tmp_path / "plain.ckpt", weights_only=True)["global_step"] == 1
