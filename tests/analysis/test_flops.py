"""Published counts, the same whichever implementation is chosen, linear in pixels."""

from __future__ import annotations

import pytest
import timm
import torch

from weightformer import ops
from weightformer.analysis.flops import multiply_adds
from weightformer.analysis.info import describe
from weightformer.models import create_denoiser

PUBLISHED = [("tiny", 224, 1.124e9), ("small", 224, 4.428e9), ("base", 448, 17.66e9)]
DENOISERS = {"s_8": 0.34e9, "s_4": 1.28e9, "s_2": 5.04e9, "b_8": 1.37e9, "b_4": 5.11e9, "b_2": 20.08e9}


def denoiser_multiply_adds(name: str, height: int, width: int) -> int:
    with torch.device("meta"):
        model = create_denoiser(f"denoiser_{name}")
    return multiply_adds(model, 4, height, width, torch.tensor([0]), torch.tensor([0]))


@pytest.mark.parametrize(("name", "size", "expected"), PUBLISHED)
def test_published_counts(name: str, size: int, expected: float) -> None:
    model = timm.create_model(f"weightformer_{name}", device="meta")
    assert multiply_adds(model, 3, size, size) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("implementation", ["auto", "reference", "eager"])
def test_the_same_whichever_implementation_runs(implementation: str) -> None:
    model = timm.create_model("weightformer_micro")
    counts = {multiply_adds(model, 3, 224, 224)}
    with ops.implementation(implementation):
        counts.add(multiply_adds(model, 3, 224, 224))
    assert len(counts) == 1


def test_linear_in_pixels_and_rectangular() -> None:
    model = timm.create_model("weightformer_tiny", device="meta")
    assert 3.8 < multiply_adds(model, 3, 448, 448) / multiply_adds(model, 3, 224, 224) < 4.05
    assert multiply_adds(model, 3, 160, 320) == multiply_adds(model, 3, 320, 160)


@pytest.mark.parametrize("name", DENOISERS)
def test_denoisers_cost_what_the_paper_says_and_grow_linearly(name: str) -> None:
    # the published figures have two decimals
    assert denoiser_multiply_adds(name, 32, 32) == pytest.approx(DENOISERS[name], rel=0.01, abs=0.005e9)
    assert 3.9 < denoiser_multiply_adds(name, 128, 128) / denoiser_multiply_adds(name, 64, 64) < 4.05
    assert denoiser_multiply_adds(name, 32, 64) == denoiser_multiply_adds(name, 64, 32)


def test_the_model_is_left_alone() -> None:
    model = timm.create_model("weightformer_micro").train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    multiply_adds(model, 3, 64, 64)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_another_model_is_counted_too() -> None:
    assert multiply_adds(timm.create_model("deit_tiny_patch16_224"), 3, 224, 224) == pytest.approx(1.25e9, rel=0.01)


def test_describe() -> None:
    text = describe("weightformer_tiny", [1248, 640])
    assert "1248 x 640 px" in text
    assert "7,074,184" in text
    assert "1, 4, 7, 10, 13, 16 of 17" in text
    assert "FLOPs are twice that" in text
    assert "224 x 224" in describe("weightformer_tiny", [])
    assert "dynamic" not in describe("weightformer_micro", [32], dynamic_every=0)


def test_describe_a_denoiser() -> None:
    text = describe("denoiser_s_2")
    assert "denoiser_s_2 at 32 x 32 px, 4 channel(s)" in text
    assert "37,566,080" in text
    assert "multiply-adds   5.02" in text
    assert "1, 4, 7, 10, 13 of 15" in text
    assert "at 12 x 20 px, 1 channel(s)" in describe("denoiser_micro", [12, 20], in_chans=1)
    assert "at 8 x 6 px" in describe("denoiser_micro", sample_size=(8, 6))
    with pytest.raises(ValueError, match="no denoiser 'denoiser_l_2'; choose one of denoiser_micro, denoiser_s_2"):
        describe("denoiser_l_2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("weightformer_huge",), "knows no model"),
        (("denoiser_micro", [8, 0]), "--size"),
        (("weightformer_micro", [1, 2, 3]), "--size"),
        (("weightformer_micro", [0]), "--size"),
    ],
)
def test_describe_refuses(arguments: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        describe(*arguments)
    with pytest.raises(ValueError, match="does not take"):
        describe("weightformer_micro", wings=2)
