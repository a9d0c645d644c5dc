from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image
from torch import Tensor, nn

from parity import assert_close
from weightformer.models import create_denoiser
from weightformer.tasks.generation import WeightFormerPipeline, create_scheduler
from weightformer.tasks.generation.pipeline import SCHEDULERS, guide

NAMES = ["tench, Tinca tinca", "goldfish", "shark", "ray", "crane", "hen", "crane", "jay", "magpie", "chickadee"]


def pipeline(model: nn.Module, scheduler: str = "ddpm", **kwargs: Any) -> WeightFormerPipeline:
    built = WeightFormerPipeline(model, create_scheduler(scheduler), **({"class_names": NAMES} | kwargs))
    built.set_progress_bar_config(disable=True)
    return built


def pixel_model(channels: int = 3, **kwargs: Any) -> nn.Module:
    """A micro model of pixels, without the zeros of its initialisation."""
    model = create_denoiser("denoiser_micro", in_channels=channels, depth=2, **kwargs).eval()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model


def autoencoder(**kwargs: Any) -> AutoencoderKL:
    """A tiny one with random weights: 4 latent channels, half the side."""
    blocks = {
        f"{way}_block_types": (f"{way.capitalize()}{kind}Block2D",) * 2
        for way, kind in [("down", "Encoder"), ("up", "Decoder")]
    }
    settings = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4, **blocks}
    return AutoencoderKL(**(settings | kwargs)).eval()


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def dit_timesteps(count: int) -> list[int]:
    """DiT's respacing of 1000 steps: equal fractional strides, each position rounded."""
    stride, position, steps = 999 / (count - 1), 0.0, []
    for _ in range(count):
        steps.append(round(position))
        position += stride
    return steps


@pytest.mark.parametrize("count", [2, 10, 25, 50, 100, 250, 500, 1000])
def test_ddpm_visits_the_steps_of_dits_respacing(count: int) -> None:
    scheduler = create_scheduler("ddpm")
    scheduler.set_timesteps(count)
    assert scheduler.timesteps.tolist() == dit_timesteps(count)[::-1]


def dit_sample(model: nn.Module, noises: list[Tensor], labels: Tensor, scale: float, channels: int) -> Tensor:
    """Ancestral sampling as DiT does it, on the respaced chain's own betas (Nichol and Dhariwal 2021, equation 15)."""
    steps = dit_timesteps(len(noises))
    betas = np.linspace(1e-4, 0.02, 1000)
    kept = np.cumprod(1 - betas)[steps]
    before = np.append(1.0, kept[:-1])
    beta = 1 - kept / before
    posterior = beta * (1 - before) / (1 - kept)
    x = noises[0].double()
    for i in reversed(range(len(steps))):
        both = torch.cat((x, x)).float()
        out = model(both, torch.full((len(both),), steps[i]), torch.cat((labels, torch.full_like(labels, 10)))).sample
        noise, fraction = out.double().chunk(2, dim=1)
        conditional, unconditional = noise.chunk(2)
        guided = unconditional + scale * (conditional - unconditional)
        noise = torch.cat((guided[:, :channels], conditional[:, channels:]), dim=1)
        fraction = (fraction[: len(x)] + 1) / 2
        start = x / kept[i] ** 0.5 - (1 / kept[i] - 1) ** 0.5 * noise
        mean = before[i] ** 0.5 * beta[i] / (1 - kept[i]) * start
        mean = mean + (1 - before[i]) * (1 - beta[i]) ** 0.5 / (1 - kept[i]) * x
        if i == 0:
            return mean
        log_variance = fraction * np.log(beta[i]) + (1 - fraction) * np.log(posterior[i])
        x = mean + (log_variance / 2).exp() * noises[len(steps) - i].double()
    raise AssertionError


@pytest.mark.parametrize(("rule", "channels"), [("all", 4), ("released", 3)])
def test_ddpm_is_dits_sampling(denoiser: nn.Module, rule: str, channels: int) -> None:
    steps, labels = 12, [3, 9]
    generators = seeded(1, 2)
    draws = [torch.cat([torch.randn(1, 4, 16, 16, generator=g) for g in generators]) for _ in range(steps)]
    with torch.no_grad():
        expected = dit_sample(denoiser, draws, torch.tensor(labels), 4.0, channels)
    options = {"num_inference_steps": steps, "guidance_channels": rule, "output_type": "latent"}
    images = pipeline(denoiser)(labels, generator=seeded(1, 2), **options).images
    assert_close(images, expected, 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-4)], ids=["64", "32"])
def test_released_guidance_equals_the_released_model(
    denoiser: nn.Module, golden_denoiser: dict[str, Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    golden = golden_denoiser
    latents, steps = (torch.cat((golden[k], golden[k])) for k in ("input", "timestep"))
    labels = torch.cat((golden["class_labels"], torch.full((2,), 10)))
    with torch.no_grad():
        output = denoiser.to(dtype)(latents.to(dtype), steps, labels).sample
    expected = golden["output_cfg4"]
    assert_close(guide(output, 4.0, 3), expected[:2], tolerance)
    assert_close(output[2:, 3:], expected[2:, 3:], tolerance)  # the released helper returns the null half too
    assert not torch.allclose(guide(output, 4.0, 4), expected[:2].to(dtype), atol=1e-3)


@pytest.mark.parametrize("channels", [1, 3, 4, 16])
def test_guidance_of_every_noise_channel(channels: int) -> None:
    output = torch.randn(4, 2 * channels, 3, 5)
    guided = guide(output, 4.0, channels)
    for image, channel in itertools.product(range(2), range(2 * channels)):
        conditional, null = output[image, channel], output[image + 2, channel]
        expected = null + 4 * (conditional - null) if channel < channels else conditional
        torch.testing.assert_close(guided[image, channel], expected)
    assert torch.equal(guide(output, 1.0, channels), output[:2])


def test_scale_one_is_the_plain_conditional_model() -> None:
    model, calls = pixel_model(), []
    model.register_forward_pre_hook(lambda _, args: calls.append((len(args[0]), args[2].tolist())))
    options = {"num_inference_steps": 3, "output_type": "pt"}
    plain = pipeline(model)([1, 2], guidance_scale=1.0, generator=seeded(0, 1), **options).images
    assert calls == [(2, [1, 2])] * 3
    calls.clear()
    guided = pipeline(model)([1, 2], guidance_scale=1.0 + 1e-6, generator=seeded(0, 1), **options).images
    assert calls == [(4, [1, 2, 10, 10])] * 3
    torch.testing.assert_close(guided, plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("one", [True, False], ids=["one-generator", "a-generator-an-image"])
def test_an_image_does_not_depend_on_its_batch(denoiser: nn.Module, scheduler: str, one: bool) -> None:
    pipe, options = pipeline(denoiser, scheduler), {"num_inference_steps": 6, "output_type": "latent"}
    images = pipe([4, 1, 8], generator=seeded(5)[0] if one else seeded(5, 6, 7), **options).images
    alone = pipe([4], generator=seeded(5)[0] if one else seeded(5), **options).images
    assert_close(alone[0], images[0], 1e-5)
    if not one:
        assert_close(pipe([8], generator=seeded(7), **options).images[0], images[2], 1e-5)
    same = pipe([4, 4], generator=seeded(5)[0] if one else seeded(5, 6), **options).images
    assert not torch.allclose(same[0], same[1], atol=0.1)


def test_pytorchs_own_seed_is_the_default() -> None:
    pipe, options = pipeline(pixel_model()), {"num_inference_steps": 2, "output_type": "pt"}
    images = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        images.append(pipe([1], **options).images)
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_find_the_only_image_there_is(scheduler: str) -> None:
    """A model that knows the noise of one image leads every sampler to that image."""
    model, image = pixel_model(), torch.rand(3, 8, 8) * 2 - 1
    kept = create_scheduler("ddpm").alphas_cumprod

    def perfect(latents: Tensor, t: Tensor, labels: Tensor, return_dict: bool) -> tuple[Tensor]:
        a = kept[t.long()][:, None, None, None]
        noise = (latents - a.sqrt() * image) / (1 - a).sqrt()
        return (torch.cat((noise, torch.zeros_like(noise)), dim=1),)

    model.forward = perfect
    out = pipeline(model, scheduler)([0], num_inference_steps=20, output_type="pt").images[0]
    torch.testing.assert_close(out, image / 2 + 0.5, atol=2e-2, rtol=0)


def test_a_scheduler_made_from_another_ones_settings_works(denoiser: nn.Module) -> None:
    pipe, options = pipeline(denoiser), {"num_inference_steps": 4, "output_type": "latent", "generator": seeded(0)}
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    images = pipe([1], **options).images
    options["generator"] = seeded(0)
    assert_close(images, pipeline(denoiser, "dpm++")([1], **options).images, 1e-6)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    assert pipe([1], **options).images.isfinite().all()


def test_a_model_without_learned_sigma() -> None:
    model = pixel_model(learn_sigma=False)
    pipe = pipeline(model)
    with pytest.raises(ValueError, match="expects the variance, which this model does not predict"):
        pipe([1])
    for name in SCHEDULERS:
        pipe.scheduler = create_scheduler(name, learn_sigma=False)
        assert pipe([1], num_inference_steps=2, output_type="pt").images.shape == (1, 3, 8, 8)
    assert create_scheduler("ddpm", learn_sigma=False).config.variance_type == "fixed_large"


def test_scheduler_names_and_arguments() -> None:
    with pytest.raises(ValueError, match=r"unknown scheduler 'euler'; choose one of ddpm, ddim, dpm\+\+"):
        create_scheduler("euler")
    for name in SCHEDULERS:
        config = create_scheduler(name, beta_end=0.03).config
        assert (config.num_train_timesteps, config.beta_start, config.beta_end) == (1000, 1e-4, 0.03)
        assert config.beta_schedule == "linear"
        scheduler = create_scheduler(name)
        scheduler.set_timesteps(20)
        assert scheduler.timesteps[0] == 999


def test_names_and_numbers() -> None:
    pipe = pipeline(pixel_model())
    assert pipe.get_label_ids("shark") == [2]
    assert pipe.get_label_ids(["Tinca tinca", "tench", "tench, Tinca tinca", 7, np.int64(9)]) == [0, 0, 0, 7, 9]
    assert pipe.get_label_ids(torch.tensor([3, 1])) == [3, 1]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ("goldfsih", "no class 'goldfsih'; the nearest names are 'goldfish'"),
        ("crane", "'crane' names classes 4, 6; give the number"),
        ([0, 10], "class 10 is out of range; this model has classes 0 to 9"),
        (-1, "class -1 is out of range"),
        ([], "no class given"),
    ],
)
def test_labels_that_name_no_class(labels: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        pipeline(pixel_model())(labels)


def test_a_pipeline_without_names() -> None:
    pipe = pipeline(pixel_model(), class_names=None)
    assert pipe.get_label_ids(3) == [3]
    with pytest.raises(ValueError, match="knows no class names, only numbers 0 to 9"):
        pipe("shark")
    with pytest.raises(ValueError, match="2 class names for 10 classes"):
        pipeline(pixel_model(), class_names=["a", "b"])


def test_options_that_cannot_work_are_refused_before_sampling() -> None:
    model = pixel_model(channels=4)
    model.register_forward_pre_hook(lambda *_: pytest.fail("sampled"))
    for options, sentence in (
        ({"guidance_channels": "three"}, "guidance_channels must be one of all, released"),
        ({"output_type": "png"}, "output_type must be one of pil, np, pt, latent"),
        ({"output_type": "pil"}, "4 channels are no picture"),
        ({"output_type": "pt", "generator": seeded(0, 1)}, "2 generators for 1 images"),
        ({"output_type": "pt", "height": 0}, "multiples of 1, got 0 x 8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pipeline(model)([1], **options)
    with pytest.raises(ValueError, match="multiples of 2, got 16 x 17"):
        pipeline(model, vae=autoencoder())([1], width=17)
    pipe = pipeline(model)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler does not sample from predicted noise"):
        pipe([1], output_type="pt")


def test_a_model_without_null_class_cannot_be_guided() -> None:
    pipe = pipeline(pixel_model(class_dropout_prob=0.0))
    with pytest.raises(ValueError, match="no null class to guide with; use guidance_scale=1"):
        pipe([1])
    assert len(pipe([1], guidance_scale=1, num_inference_steps=1).images) == 1


def test_a_model_in_training_is_sampled_without_label_dropout() -> None:
    model = pixel_model(class_dropout_prob=1.0)
    options = {"num_inference_steps": 2, "output_type": "pt", "guidance_scale": 1}
    expected = pipeline(model)([1], generator=seeded(0), **options).images
    model.train()
    assert torch.equal(pipeline(model)([1], generator=seeded(0), **options).images, expected)
    assert model.training
    with pytest.raises(ValueError, match="smaller than one patch"):
        pipeline(model)([1], height=1, **options)
    assert model.training


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pixels_need_no_autoencoder(channels: int, mode: str) -> None:
    pipe, options = pipeline(pixel_model(channels)), {"num_inference_steps": 3, "height": 10, "width": 6}
    images = {
        kind: pipe([1, 2], generator=seeded(1, 2), output_type=kind, **options).images
        for kind in ("pt", "np", "pil", "latent")
    }
    assert images["pt"].shape == (2, channels, 10, 6)
    np.testing.assert_array_equal(images["np"], images["pt"].permute(0, 2, 3, 1))
    torch.testing.assert_close(images["pt"], (images["latent"] / 2 + 0.5).clamp(0, 1))
    for picture, array in zip(images["pil"], images["np"], strict=True):
        assert isinstance(picture, Image.Image)
        assert (picture.mode, picture.size) == (mode, (6, 10))
        np.testing.assert_array_equal(np.asarray(picture).reshape(array.shape), (array * 255).round())
    assert len(pipe([1], return_dict=False, **options)[0]) == 1


def test_the_autoencoders_own_scale_and_shift_are_used() -> None:
    for settings in ({"scaling_factor": 0.3, "shift_factor": 0.7}, {"scaling_factor": 1.7}):
        vae = autoencoder(**settings)
        pipe, options = pipeline(pixel_model(channels=4), vae=vae), {"num_inference_steps": 3, "width": 20}
        latents = pipe([1], generator=seeded(1), output_type="latent", **options).images
        assert latents.shape == (1, 4, 8, 10)
        with torch.no_grad():
            decoded = vae.decode(latents / settings["scaling_factor"] + settings.get("shift_factor", 0)).sample
        images = pipe([1], generator=seeded(1), output_type="pt", **options).images
        torch.testing.assert_close(images, (decoded / 2 + 0.5).clamp(0, 1))
        assert images.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loaded", [False, True], ids=["to", "loaded"])
def test_half_precision(tmp_path: Path, dtype: torch.dtype, loaded: bool) -> None:
    pipe, options = (
        pipeline(pixel_model(channels=4), vae=autoencoder()),
        {"num_inference_steps": 5, "output_type": "pt"},
    )
    expected = pipe([1, 2], generator=seeded(0, 1), **options).images
    if loaded:
        pipe.save_pretrained(tmp_path)
        pipe = WeightFormerPipeline.from_pretrained(tmp_path, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
    else:
        pipe.to(dtype)
    assert pipe.transformer.dtype == pipe.vae.dtype == dtype
    step, seen = pipe.scheduler.step, set()

    @functools.wraps(step)
    def watched(output: Tensor, t: Tensor, sample: Tensor, **kwargs: Any) -> Any:
        seen.update((output.dtype, sample.dtype))
        return step(output, t, sample, **kwargs)

    pipe.scheduler.step = watched
    images = pipe([1, 2], generator=seeded(0, 1), **options).images
    assert seen == {images.dtype} == {torch.float32}
    assert (images - expected).abs().mean() < 0.02


def test_save_and_load(tmp_path: Path) -> None:
    pipe, options = pipeline(pixel_model(channels=4), vae=autoencoder(scaling_factor=0.3)), {"num_inference_steps": 4}
    pipe.save_pretrained(tmp_path)
    loaded = WeightFormerPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert loaded.config.class_names == NAMES
    assert loaded.vae.config.scaling_factor == 0.3
    assert isinstance(loaded.scheduler, DDPMScheduler)
    assert loaded.scheduler.config.timestep_spacing == "linspace"
    assert loaded.scheduler.config.variance_type == "learned_range"
    options |= {"output_type": "pt"}
    images = (p(["shark", "jay"], generator=seeded(0, 1), **options).images for p in (pipe, loaded))
    assert torch.equal(*images)
    pipeline(pixel_model()).save_pretrained(tmp_path / "pixels")
    assert WeightFormerPipeline.from_pretrained(tmp_path / "pixels").vae is None


def test_a_saved_pipeline_loads_in_a_fresh_process(tmp_path: Path) -> None:
    pipeline(pixel_model(channels=4), vae=autoencoder()).save_pretrained(tmp_path)
    code = f"""
import weightformer
from diffusers import DiTPipeline
pipe = DiTPipeline.from_pretrained({str(tmp_path)!r})
print(type(pipe.transformer).__name__, len(pipe.transformer.blocks))
from weightformer.tasks.generation import WeightFormerPipeline
print(WeightFormerPipeline.from_pretrained({str(tmp_path)!r}).get_label_ids("jay"))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.stdout.splitlines() == ["WeightFormerDenoiser 2", "[7]"], result.stderr


def test_diffusers_dit_is_sampled_too() -> None:
    dit = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=6,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=10,
    ).eval()
    pipe = pipeline(dit)
    assert pipe("shark", num_inference_steps=3, output_type="pt").images.shape == (1, 3, 8, 8)
    with pytest.raises(ValueError, match="classes 0 to 9"):
        pipe(10)


def test_the_progress_bar_can_be_turned_off(capfd: pytest.CaptureFixture[str]) -> None:
    pipe = pipeline(pixel_model())
    pipe([1], num_inference_steps=2)
    assert capfd.readouterr().err == ""
    pipe.set_progress_bar_config(disable=False)
    pipe([1], num_inference_steps=2)
    assert "2/2" in capfd.readouterr().err
