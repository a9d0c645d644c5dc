"""`stream` against the untiled forward."""

from __future__ import annotations

import random

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from weightformer.streaming import stream


def relative(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    return ((got - expected).abs().max() / expected.abs().max()).item()


def untiled(model, image: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        features = model.forward_features(image)
        return features, model.forward_head(features)


SIZES = [(4, 57), (4, 4), (55, 4), (37, 42), (16, 90), (89, 31), (64, 64), (13, 21), (92, 66)]


@pytest.mark.parametrize("dynamic_every", [0, 1, 2, 3])
@pytest.mark.parametrize("strip_rows", [1, 2, 3, 16, 64])
def test_float64_equals_the_untiled_forward(lively, dynamic_every: int, strip_rows: int) -> None:
    model = lively(dynamic_every=dynamic_every).double()
    for height, width in SIZES:
        image = torch.randn(1, 3, height, width, dtype=torch.float64)
        features, logits = untiled(model, image)
        kwargs = {"strip_rows": strip_rows, "progress": False}
        assert relative(stream(model, image, output="features", **kwargs), features) < 1e-10, (height, width)
        assert relative(stream(model, image, **kwargs), logits) < 1e-10, (height, width)
        assert relative(stream(model, image[0], output="pooled", **kwargs), features.mean((1, 2))) < 1e-10


STRATEGIES = [
    {"linear_predictor": "gap", "conv_predictor": "conv"},
    {"linear_predictor": "linear", "conv_predictor": "gap"},
    {"linear_predictor": "nonlinear", "conv_predictor": "amp_dir"},
    {"linear_predictor": "deep", "conv_predictor": "conv", "pool": 1},
    {"linear_predictor": "nonlinear", "pool": "7x7"},
    {"static_weight": False, "normalize": False},
]


@pytest.mark.parametrize("dynamic_every", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: "-".join(map(str, strategy.values())))
def test_every_strategy_streams_exactly(lively, strategy: dict, dynamic_every: int) -> None:
    model = lively(dynamic_every=dynamic_every, **strategy).double()
    for height, width in [(4, 57), (4, 4), (37, 42), (89, 31), (13, 21)]:
        image = torch.randn(1, 3, height, width, dtype=torch.float64)
        features, logits = untiled(model, image)
        for strip_rows in (1, 3, 16):
            kwargs = {"strip_rows": strip_rows, "progress": False}
            assert relative(stream(model, image, output="features", **kwargs), features) < 1e-10, (height, width)
            assert relative(stream(model, image, **kwargs), logits) < 1e-10, (height, width)


@pytest.mark.parametrize("name", ["weightformer_micro", "weightformer_tiny"])
@pytest.mark.parametrize("dynamic_every", [1, 3])
def test_registered_models_in_both_precisions(name: str, dynamic_every: int) -> None:
    rng = random.Random(f"{name} {dynamic_every}")
    torch.manual_seed(0)
    model = timm.create_model(name, dynamic_every=dynamic_every, num_classes=10).eval()
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        model = model.to(dtype)
        for side in (80, 400):
            patch = model.patch_embed.patch_size
            image = torch.randn(
                1, 3, rng.randint(patch, side * patch // 16), rng.randint(patch, side * patch // 16), dtype=dtype
            )
            features, logits = untiled(model, image)
            kwargs = {"strip_rows": rng.randint(1, 64), "progress": False}
            assert relative(stream(model, image, output="features", **kwargs), features) < tolerance
            assert relative(stream(model, image, **kwargs), logits) < tolerance


@pytest.mark.parametrize(("name", "longest"), [("weightformer_micro", 300), ("weightformer_tiny", 600)])
def test_a_spread_of_sizes(name: str, longest: int) -> None:
    """The complete list, up to 3000 x 2000 px in both precisions, is benchmarks/streaming_equality.py."""
    rng = random.Random(name)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    for _ in range(6):
        height, width = (round(16 * (longest / 16) ** rng.random()) for _ in range(2))
        image = torch.randn(1, 3, height, width)
        features, logits = untiled(model, image)
        kwargs = {"strip_rows": rng.randint(1, 64), "progress": False}
        assert relative(stream(model, image, output="features", **kwargs), features) < 1e-4, (height, width)
        assert relative(stream(model, image, **kwargs), logits) < 1e-4, (height, width)


def test_a_large_image() -> None:
    model = timm.create_model("weightformer_micro").eval()
    image = torch.randn(1, 3, 3000, 2000)
    with torch.inference_mode():
        expected = model(image)
    assert relative(stream(model, image, progress=False), expected) < 1e-4


def test_every_part_of_the_image_is_global(model) -> None:
    """A changed corner moves the opposite corner's features by the same amount as untiled: the sums do carry."""
    image = torch.randn(1, 3, 80, 120)
    changed = image.clone()
    changed[..., :20, :20] *= -3
    with torch.inference_mode():
        expected = (model.forward_features(changed) - model.forward_features(image))[:, -1, -1]
    got = [stream(model, x, output="features", progress=False)[:, -1, -1] for x in (changed, image)]
    assert expected.abs().max() > 1e-2
    assert relative(got[0] - got[1], expected) < 1e-3


def test_one_feature_map_without_pooling(lively, model) -> None:
    dense = lively(global_pool="")
    image = torch.randn(1, 3, 30, 50)
    with torch.inference_mode():
        expected = dense(image)
    assert relative(stream(dense, image, progress=False), expected) < 1e-5


def test_a_head_of_ones_own_is_applied_to_every_token(model) -> None:
    image = torch.randn(1, 3, 30, 50)
    classes = stream(model, image, output=lambda x: model.head(x).argmax(-1, keepdim=True), progress=False)
    with torch.inference_mode():
        assert (classes == model.head(model.forward_features(image)).argmax(-1, keepdim=True)).all()
    assert classes.dtype == torch.int64


def test_training_mode_does_not_change_the_result(lively) -> None:
    model = lively(drop_path_rate=0.5, drop_rate=0.5)
    image = torch.randn(1, 3, 30, 50)
    expected = stream(model, image, progress=False)
    assert (stream(model.train(), image, progress=False) == expected).all()
    assert model.training


def test_bfloat16_runs_close_to_its_untiled_forward() -> None:
    model = timm.create_model("weightformer_micro").eval().bfloat16()
    image = torch.randn(1, 3, 70, 50)
    with torch.inference_mode():
        expected = model(image.bfloat16())
    got = stream(model, image, progress=False, memory=0)
    assert got.dtype == torch.bfloat16
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_integer_pixels_are_normalised_as_the_model_was_trained(dtype: torch.dtype) -> None:
    model = timm.create_model("weightformer_micro").eval()
    cfg, top = model.pretrained_cfg, torch.iinfo(dtype).max
    pixels = torch.randint(0, top, (3, 37, 50)).to(dtype)
    mean, std = (torch.tensor(cfg[key])[:, None, None] for key in ("mean", "std"))
    assert (
        relative(stream(model, pixels, progress=False), untiled(model, ((pixels / top - mean) / std)[None])[1]) < 1e-5
    )


def test_grey_images_serve_colour_models_and_alpha_is_dropped(model) -> None:
    grey = torch.randint(0, 256, (40, 50), dtype=torch.uint8)
    expected = stream(model, grey.expand(3, -1, -1), progress=False)
    assert (stream(model, grey, progress=False) == expected).all()
    assert (stream(model, torch.cat([grey.expand(3, -1, -1), grey[None] // 2]), progress=False) == expected).all()


def test_a_grey_model_takes_the_luma_of_colours(lively, photograph) -> None:
    grey = lively(in_chans=1)
    expected = stream(grey, np.asarray(Image.fromarray(photograph).convert("L")), progress=False)
    for pixels in (photograph, np.concatenate([photograph, photograph[..., :1] // 2], axis=2)):
        assert (stream(grey, pixels, progress=False) == expected).all()
    assert relative(stream(grey, photograph.astype(np.uint16) * 257, progress=False), expected) < 1e-2
    own = torch.randn(3, 30, 50)  # the model's own input
    expected = stream(grey, (0.299 * own[:1] + 0.587 * own[1:2] + 0.114 * own[2:]), progress=False)
    assert relative(stream(grey, own, progress=False), expected) < 1e-4


def test_a_model_of_two_channels(lively) -> None:
    model = lively(in_chans=2)
    image = torch.randn(1, 2, 30, 50)
    assert relative(stream(model, image, progress=False), untiled(model, image)[1]) < 1e-5
    pixels = torch.randint(0, 256, (2, 30, 50), dtype=torch.uint8)
    expected = untiled(model, ((pixels / 255 - 0.449) / 0.226)[None])[1]
    assert relative(stream(model, pixels, progress=False), expected) < 1e-2


def test_progress_counts_all_work_once(lively, model) -> None:
    for dynamic_every, passes in ((0, 1), (3, 5)):
        seen: list[float] = []
        stream(lively(dynamic_every=dynamic_every), torch.randn(3, 40, 50), strip_rows=1, progress=seen.append)
        assert seen[0] == 0
        assert seen[-1] == 1
        assert seen == sorted(seen)
        assert len(seen) == 1 + 10 * passes


def test_the_bar_is_drawn_on_the_error_stream(model, capsys) -> None:
    stream(model, torch.randn(3, 40, 50))
    captured = capsys.readouterr()
    assert "100%" in captured.err
    assert "0:00:00 left" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strip_rows": 0}, "strip_rows must be at least 1"),
        ({"output": "heatmap"}, "'heatmap'"),
        ({"out": "x.npy"}, "out is for dense outputs"),
        ({"output": "features", "out": "x.csv"}, r"\.npy or \.zarr"),
        ({"memory": "lots"}, "'lots' is no size"),
    ],
)
def test_wrong_arguments(model, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(model, torch.randn(3, 40, 50), progress=False, **kwargs)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 3, 50), "smaller than one patch"),
        ((5, 40, 50), "5 channels, the model takes 3"),
        ((2, 3, 8, 8), "one image"),
    ],
)
def test_images_that_do_not_fit(model, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(model, torch.randn(shape), progress=False)


def test_other_models_are_refused(lively) -> None:
    with pytest.raises(ValueError, match="Linear"):
        stream(torch.nn.Linear(3, 3), torch.randn(3, 40, 50))
    changed = lively()
    changed.blocks[2].act = torch.nn.ReLU()
    with pytest.raises(ValueError, match="block 2 has the activation ReLU"):
        stream(changed, torch.randn(3, 40, 50))
