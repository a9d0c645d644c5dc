"""The recorded quantities are what they say, recording changes nothing, and warnings come when they should."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightformer.config import parse_config
from weightformer.layers import DynamicLinear
from weightformer.models import WeightFormer
from weightformer.models.checkpoint import read_state_dict
from weightformer.tasks.classification import Config, train
from weightformer.training.dynamics import Thresholds, early_warnings, gradient_norms, predicted_statistics


class OneLayer(nn.Module):
    """Tokens (B, H, W, C) through one dynamic layer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.layer = DynamicLinear(8, 16, **kwargs)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_statistics_of_a_linear_layer() -> None:
    model, x = OneLayer(), torch.randn(5, 4, 4, 8)
    values = predicted_statistics(model, x)
    weight = model.layer.predict(x).detach()
    predicted = weight - model.layer.weight
    expected = {
        "largest": weight.abs().max(),
        "ratio": predicted.flatten(1).norm(dim=1).mean() / model.layer.weight.norm(),
        "saturation": predicted.norm(dim=1).mean(),
        "variation": (predicted - predicted.mean(0)).norm() / predicted.norm(),
    }
    for name, value in expected.items():
        assert values[f"layer/{name}"] == pytest.approx(float(value), rel=1e-5)
    shares = torch.linalg.svdvals((predicted - predicted.mean(0)).flatten(1).double()) ** 2
    shares = shares / shares.sum()
    entropy = -float((shares * shares.clamp_min(1e-300).log()).sum())
    assert values["layer/rank"] == pytest.approx(math.exp(entropy), rel=1e-4)
    assert 1 < values["layer/rank"] < 4


def test_rank_counts_directions() -> None:
    model = OneLayer()
    a, b = torch.randn(2, 1, 4, 4, 8)
    assert predicted_statistics(model, torch.cat([a, a, a]))["layer/rank"] == 0
    assert predicted_statistics(model, torch.cat([a, a, a]))["layer/variation"] == pytest.approx(0, abs=1e-6)
    assert predicted_statistics(model, torch.cat([a, a, b, b]))["layer/rank"] == pytest.approx(1, abs=1e-6)


def test_what_has_no_static_part_or_norm_has_no_ratio_or_saturation() -> None:
    x = torch.randn(2, 4, 4, 8)
    assert "layer/ratio" not in predicted_statistics(OneLayer(static_weight=False), x)
    assert "layer/saturation" not in predicted_statistics(OneLayer(normalize=False), x)


def test_the_model_is_left_alone() -> None:
    model = WeightFormer(1, 3, patch_size=4, embed_dim=8, depth=3, drop_path_rate=0.5).train()
    model.norm.eval()
    images = torch.randn(2, 1, 16, 16)
    state = torch.get_rng_state()
    values = predicted_statistics(model, images)
    assert {name.rpartition("/")[0] for name in values} == {"blocks.1.conv", "blocks.1.fc1"}
    assert model.training
    assert model.blocks[1].training
    assert not model.norm.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gradient_norms_by_block() -> None:
    model = WeightFormer(1, 3, patch_size=4, embed_dim=8, depth=2)
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    norms = gradient_norms(model, scale=4.0)
    assert norms.keys() == {"all/grad", "blocks.0/grad", "blocks.1/grad"}
    for key, part in (("all", model), ("blocks.1", model.blocks[1])):
        expected = math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters())) / 4
        assert norms[f"{key}/grad"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"a/ratio": 21.0, "b/ratio": 1.0}, ["ratio"]),
        ({"a/saturation": 0.96}, ["saturation"]),
        ({"a/rank": 1.0, "a/variation": 0.0, "a/largest": 1e9}, []),
        ({"all/grad": 50.0, "blocks.0/grad": 1e9}, ["grad"]),
        ({"a/ratio": 19.0, "a/saturation": 0.9, "a/rank": 1.3, "all/grad": 30.0}, []),
    ],
)
def test_early_warnings(values: dict[str, float], kinds: list[str]) -> None:
    found = early_warnings(values, [2.0] * 5, Thresholds())
    assert [kind for _, kind, _ in found] == kinds
    assert all(layer in sentence and " is " in sentence and ":" in sentence for layer, _, sentence in found)


def test_a_jump_is_judged_by_what_was_before() -> None:
    assert not early_warnings({"all/grad": 1e6}, [1.0] * 4, Thresholds())
    assert early_warnings({"all/grad": 1e6}, [1.0] * 5, Thresholds())


def test_recording_changes_no_weight_and_is_resumed(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    def run(name: str, every: int, epochs: int = 2) -> Path:
        content = tiny_run | {"output": str(tmp_path / name), "dynamics_every": every}
        content["trainer"] = tiny_run["trainer"] | {"epochs": epochs, "accelerator": "cpu"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(parse_config(Config, content))
        return tmp_path / name

    plain, recorded = run("plain", 0), run("recorded", 5)
    weights = [read_state_dict(folder / "checkpoints" / "last.ckpt")["state_dict"] for folder in (plain, recorded)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert "dynamics" not in (plain / "log.jsonl").read_text()
    records = [json.loads(line) for line in (recorded / "log.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "dynamics/blocks.1.fc1/rank" in record]
    assert steps == [0, 5, 10, 15, 20, 25]
    assert steps == [record["step"] for record in records if "dynamics/all/grad" in record]
    assert all(record["cpu"] > 0 for record in records)
    run("recorded", 7)  # the interval is no part of the result: the finished run is accepted


def test_a_warning_names_the_step_once(tiny_run: dict[str, Any], tmp_path: Path) -> None:
    content = tiny_run | {"output": str(tmp_path / "run"), "dynamics_every": 1}
    content["model"] = tiny_run["model"] | {"kwargs": {"embed_dim": 16, "depth": 2, "normalize": False}}
    content["optim"] = tiny_run["optim"] | {"lr": 1.0, "warmup_lr": 1.0, "clip_norm": 1.0}
    content["trainer"] = tiny_run["trainer"] | {"epochs": 1, "accelerator": "cpu"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(parse_config(Config, content))
    sentences = [str(w.message) for w in caught if "ratio of blocks.1.conv" in str(w.message)]
    assert len(sentences) == 1
    assert sentences[0].startswith("step ")
    assert "normalise" in sentences[0]


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamics_every must not be negative"):
        Config(dynamics_every=-1)


# Half precision (a token-summed product would overflow at 4,096 tokens)


@pytest.mark.parametrize("scale", [1, 10, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_finite_at_any_size(dtype: torch.dtype, scale: int) -> None:
    torch.manual_seed(0)
    model = WeightFormer(3, 4, patch_size=16, embed_dim=16, depth=2)
    largest = {}
    for side in (224, 1024):
        image = scale * torch.randn(1, 3, side, side)
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            logits = model(image)
            statistics = predicted_statistics(model, image)
        logits.float().square().sum().backward()
        assert torch.isfinite(logits).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        largest[side] = {name: value for name, value in statistics.items() if name.endswith("largest")}
    for name, value in largest[224].items():
        assert 0.5 < largest[1024][name] / value < 2, name
