"""The schedule against the closed form, and parameter groups over every parameter."""

from __future__ import annotations

import math

import pytest
import timm
import torch

from weightformer.training.config import OptimConfig
from weightformer.training.optim import build_optimizer, cosine_lr, linear_lr

RELEASED = {"total": 187_500, "warmup": 12_500, "peak": 2e-3, "start": 2e-6, "floor": 2e-5}


def test_cosine_is_counted_from_step_zero() -> None:
    assert cosine_lr(0, **RELEASED) == pytest.approx(2e-6)
    assert cosine_lr(12_499, **RELEASED) == pytest.approx(2e-3, rel=1e-3)
    assert cosine_lr(12_500, **RELEASED) == pytest.approx(1.978e-3, rel=1e-3), "the released drop after the warm-up"
    assert cosine_lr(187_500, **RELEASED) == pytest.approx(2e-5)
    assert cosine_lr(93_750, **RELEASED) == pytest.approx((2e-3 + 2e-5) / 2)


def test_line_is_counted_from_step_zero() -> None:
    rates = {
        step: linear_lr(step, total=100, warmup=10, peak=2.0, start=0.2, floor=0.1) for step in (0, 5, 10, 50, 100)
    }
    assert rates == pytest.approx({0: 0.2, 5: 1.1, 10: 1.81, 50: 1.05, 100: 0.1})


def test_rates_scale_with_the_global_batch() -> None:
    model = timm.create_model("weightformer_micro")
    scaled, _ = build_optimizer(model, OptimConfig(), global_batch=2048, total_steps=100, steps_per_epoch=10)
    plain, _ = build_optimizer(model, OptimConfig(lr_batch=0), global_batch=2048, total_steps=100, steps_per_epoch=10)
    assert scaled.defaults["lr"] == pytest.approx(4 * plain.defaults["lr"])


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
def test_every_parameter_is_in_one_group_and_vectors_do_not_decay(layer_decay: float) -> None:
    model = timm.create_model("weightformer_micro")
    config = OptimConfig(layer_decay=layer_decay, lr_batch=0, warmup_epochs=0)
    optimizer, _ = build_optimizer(model, config, global_batch=1, total_steps=100, steps_per_epoch=10)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.05 if parameter.ndim > 1 else 0.0)


def test_layer_decay_reaches_the_learning_rates_under_the_schedule() -> None:
    model = timm.create_model("weightformer_micro")
    config = OptimConfig(layer_decay=0.5, lr=1.0, lr_batch=0, warmup_epochs=0, min_lr=0.0)
    optimizer, schedule = build_optimizer(model, config, global_batch=1, total_steps=4, steps_per_epoch=1)
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rate[id(model.head.weight)] == 1.0
    assert rate[id(model.blocks[3].fc2.weight)] == pytest.approx(0.5 * rate[id(model.blocks[4].fc2.weight)])
    assert rate[id(model.patch_embed.proj.weight)] == min(rate.values()) < rate[id(model.blocks[0].fc2.weight)]
    before = [g["lr"] for g in optimizer.param_groups]
    optimizer.step()
    schedule.step()
    factor = (1 + math.cos(math.pi / 4)) / 2
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([lr * factor for lr in before])


@pytest.mark.parametrize("field", [{"lr": 0}, {"lr": -1}, {"layer_decay": 0}, {"layer_decay": 1.5}, {"clip_norm": -1}])
def test_values_out_of_range(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        OptimConfig(**field)


def test_every_option_changes_the_optimiser() -> None:
    model = torch.nn.Linear(2, 2)

    def rates(**options: object) -> tuple[object, ...]:
        config = OptimConfig(**options)
        optimizer, schedule = build_optimizer(model, config, global_batch=4, total_steps=50, steps_per_epoch=10)
        course = []
        for _ in range(50):
            course.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        groups = [(g["weight_decay"], g["betas"], g["eps"]) for g in optimizer.param_groups]
        return (*course, *groups)

    changed = {
        "lr": 1e-2, "warmup_lr": 1e-5, "min_lr": 1e-5, "lr_batch": 0, "warmup_epochs": 1, "weight_decay": 0.1,
        "betas": (0.8, 0.9), "eps": 1e-6, "schedule": "linear",
    }  # fmt: skip
    base = rates(warmup_epochs=2)
    for name, value in changed.items():
        assert rates(**{"warmup_epochs": 2, name: value}) != base, name
