"""From class names to images: the denoiser, a noise schedule and, for latents, an autoencoder, as a diffusers pipeline.

Differs from diffusers' DiT pipeline in this: the null class is the model's own, the predicted variance reaches a
schedule that uses it, images may be rectangular, the autoencoder may be missing, and every image has its own random
numbers.
"""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, DPMSolverMultistepScheduler, ImagePipelineOutput
from diffusers.models import AutoencoderKL, DiTTransformer2DModel
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from weightformer.models.denoiser import WeightFormerDenoiser

__all__ = ["GUIDED_CHANNELS", "SCHEDULERS", "WeightFormerPipeline", "create_scheduler", "guide"]

# The released helper guides the first three channels of the noise, whatever their number.
GUIDED_CHANNELS = {"all": None, "released": 3}

_OUTPUTS = ("pil", "np", "pt", "latent")

# Spacings that end where the next step of each schedule begins. DDPM's is DiT's respacing.
SCHEDULERS: dict[str, tuple[type[SchedulerMixin], dict[str, Any]]] = {
    "ddpm": (DDPMScheduler, {"timestep_spacing": "linspace", "clip_sample": False}),
    "ddim": (DDIMScheduler, {"timestep_spacing": "trailing", "clip_sample": False}),
    "dpm++": (DPMSolverMultistepScheduler, {"timestep_spacing": "linspace"}),
}


def create_scheduler(name: str, learn_sigma: bool = True, **kwargs: Any) -> SchedulerMixin:
    """A sampler on the schedule that DiT and the released models were trained with: 1000 steps, linear, 1e-4 to 0.02.

    Args:
        name: ``"ddpm"`` as released (250 steps), ``"ddim"``, or ``"dpm++"`` (DPM-Solver++, 20 steps or so).
        learn_sigma: whether the model predicts the variance; only ``"ddpm"`` uses it.
        **kwargs: for the scheduler; they go before the ones above.

    Raises:
        ValueError: an unknown name.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"unknown scheduler {name!r}; choose one of {', '.join(SCHEDULERS)}")
    scheduler, settings = SCHEDULERS[name]
    if name == "ddpm":
        settings = settings | {"variance_type": "learned_range" if learn_sigma else "fixed_large"}
    return scheduler(
        **({"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"} | settings)
        | kwargs
    )


def guide(output: Tensor, scale: float, channels: int) -> Tensor:
    """Classifier-free guidance: ``unconditional + scale * (conditional - unconditional)``.

    Args:
        output: what the model predicts for a class, then for the null class, (2 B, out_channels, height, width).
        scale: 1 leaves the conditional prediction as it is.
        channels: how many of the first channels are guided; the others, the variance, stay conditional.

    Returns:
        (B, out_channels, height, width).
    """
    conditional, unconditional = output.chunk(2)
    noise = torch.lerp(unconditional[:, :channels], conditional[:, :channels], scale)
    return torch.cat((noise, conditional[:, channels:]), dim=1)


class WeightFormerPipeline(DiffusionPipeline):
    """Images of named classes.

    Args:
        transformer: the denoiser; diffusers' DiT does too.
        scheduler: of `create_scheduler`, or any of diffusers' that samples from a noise prediction.
        vae: decodes latents; without one, the denoiser works on pixels from -1 to 1.
        class_names: one a class, saved with the pipeline; commas may separate synonyms.

    Raises:
        ValueError: there are more or fewer names than classes.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]  # noqa: RUF012 - diffusers declares them so

    def __init__(
        self,
        transformer: WeightFormerDenoiser | DiTTransformer2DModel,
        scheduler: SchedulerMixin,
        vae: AutoencoderKL | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        if class_names is not None and len(class_names) != self.num_classes:
            raise ValueError(f"{len(class_names)} class names for {self.num_classes} classes")
        self.register_to_config(class_names=class_names)

    @property
    def num_classes(self) -> int:
        """Classes of the model, and the number of its null class."""
        config = self.transformer.config
        return config.get("num_classes") or config.num_embeds_ada_norm

    @property
    def labels(self) -> dict[str, list[int]]:
        """Every class name and synonym, with the numbers of the classes that it names."""
        labels: dict[str, list[int]] = {}
        for number, name in enumerate(self.config.class_names or ()):
            for synonym in dict.fromkeys([name, *(part.strip() for part in name.split(","))]):
                labels.setdefault(synonym, []).append(number)
        return labels

    def get_label_ids(self, label: str | int | Sequence[str | int]) -> list[int]:
        """The numbers of classes given by name or number.

        Args:
            label: one or several.

        Raises:
            ValueError: an unknown or ambiguous name, or a number out of range.
        """
        several = [label] if isinstance(label, (str, int)) else label
        if not len(several):
            raise ValueError("no class given")
        labels = self.labels
        return [self._label_id(item, labels) for item in several]

    def _label_id(self, label: str | int, labels: dict[str, list[int]]) -> int:
        count = self.num_classes
        if not isinstance(label, str):
            if not 0 <= (number := operator.index(label)) < count:
                raise ValueError(f"class {number} is out of range; this model has classes 0 to {count - 1}")
            return number
        numbers = labels.get(label, [])
        if len(numbers) == 1:
            return numbers[0]
        if numbers:
            raise ValueError(f"{label!r} names classes {', '.join(map(str, numbers))}; give the number")
        if not labels:
            raise ValueError(f"no class {label!r}: this pipeline knows no class names, only numbers 0 to {count - 1}")
        near = difflib.get_close_matches(label, labels, cutoff=0)
        raise ValueError(f"no class {label!r}; the nearest names are {', '.join(map(repr, near))}")

    @torch.no_grad()
    def __call__(
        self,
        class_labels: str | int | Sequence[str | int],
        *,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 250,
        guidance_scale: float = 4.0,
        guidance_channels: str = "all",
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Draw one image for each class given.

        Args:
            class_labels: class names or numbers, one an image.
            height: of the images in pixels; by default that of the training images.
            width: likewise.
            num_inference_steps: denoising steps.
            guidance_scale: see `guide`; 1 samples without guidance, at half the cost.
            guidance_channels: ``"all"`` guides every channel of the noise; ``"released"`` the first three only, as the
                released code does.
            generator: one an image; or one from which a seed is drawn for each image (by default PyTorch's own). So an
                image depends neither on its batch nor on the device.
            output_type: ``"pil"``; ``"np"``, (B, height, width, channels) from 0 to 1; ``"pt"``, (B, channels, height,
                width) from 0 to 1; or ``"latent"``, before decoding.
            return_dict: return an object with the images as its ``images``, else a tuple with them alone.

        Raises:
            ValueError: an unknown class or option, a size that the autoencoder cannot make, guidance of a model that
                was trained without, or a scheduler that does not fit the model.
        """
        labels = self.get_label_ids(class_labels)
        guided = guidance_scale != 1
        self._check(guided, guidance_channels, output_type)
        config, device = self.transformer.config, self._execution_device
        scheduler = self._scheduler()
        generators = _one_an_image(generator, len(labels))
        step_options = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}

        scheduler.set_timesteps(num_inference_steps, device=device)
        shape = (len(labels), config.in_channels, *self._latent_size(height, width))
        latents = randn_tensor(shape, generator=generators, device=device) * scheduler.init_noise_sigma
        classes = torch.tensor(labels + [self.num_classes] * len(labels) if guided else labels, device=device)
        with _evaluating(self.transformer):
            for t in self.progress_bar(scheduler.timesteps):
                inputs = scheduler.scale_model_input(latents, t)
                inputs = (torch.cat((inputs, inputs)) if guided else inputs).to(self.transformer.dtype)
                output = self.transformer(inputs, t.expand(len(inputs)), classes, return_dict=False)[0].float()
                if guided:
                    output = guide(output, guidance_scale, GUIDED_CHANNELS[guidance_channels] or config.in_channels)
                if not _uses_variance(scheduler):
                    output = output[:, : config.in_channels]
                latents = scheduler.step(output, t, latents, **step_options, return_dict=False)[0]

        images = latents if output_type == "latent" else self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _check(self, guided: bool, guidance_channels: str, output_type: str) -> None:
        config = self.transformer.config
        if guidance_channels not in GUIDED_CHANNELS:
            raise ValueError(
                f"guidance_channels must be one of {', '.join(GUIDED_CHANNELS)}, got {guidance_channels!r}"
            )
        if output_type not in _OUTPUTS:
            raise ValueError(f"output_type must be one of {', '.join(_OUTPUTS)}, got {output_type!r}")
        if guided and config.get("class_dropout_prob") == 0:
            raise ValueError(
                "this model was trained with class_dropout_prob=0, so it has no null class to guide with; "
                "use guidance_scale=1"
            )
        if self.vae is None and output_type == "pil" and config.in_channels not in (1, 3):
            raise ValueError(
                f"without a vae, {config.in_channels} channels are no picture; give the vae, or another output_type"
            )
        if not hasattr(self.scheduler, "scale_model_input"):
            raise ValueError(
                f"{type(self.scheduler).__name__} does not sample from predicted noise; use create_scheduler"
            )
        if _uses_variance(self.scheduler) and config.out_channels != 2 * config.in_channels:
            raise ValueError(
                "the scheduler expects the variance, which this model does not predict; use create_scheduler"
            )

    def _scheduler(self) -> SchedulerMixin:
        """The scheduler; one made from DDPM's settings would remove the variance again, by keeping three channels."""
        scheduler = self.scheduler
        if not _uses_variance(scheduler) and scheduler.config.get("variance_type") in ("learned", "learned_range"):
            return type(scheduler).from_config(scheduler.config, variance_type=None)
        return scheduler

    def _latent_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        size = self.transformer.config.sample_size
        own = (size, size) if isinstance(size, int) else tuple(size)
        factor = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        wanted = [o * factor if s is None else s for s, o in zip((height, width), own, strict=True)]
        if any(side < 1 or side % factor for side in wanted):
            raise ValueError(f"height and width must be multiples of {factor}, got {wanted[0]} x {wanted[1]}")
        return wanted[0] // factor, wanted[1] // factor

    def _decode(self, latents: Tensor, output_type: str) -> Any:
        if self.vae is not None:
            config = self.vae.config
            latents = latents / config.scaling_factor + (config.get("shift_factor") or 0)
            latents = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0].float()
        images = (latents / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        array = images.permute(0, 2, 3, 1).cpu().numpy()
        return self.numpy_to_pil(array) if output_type == "pil" else array


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode: one in training would replace some classes by the null class."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _uses_variance(scheduler: SchedulerMixin) -> bool:
    return isinstance(scheduler, DDPMScheduler) and scheduler.config.variance_type in ("learned", "learned_range")


def _one_an_image(generator: torch.Generator | Sequence[torch.Generator] | None, count: int) -> list[torch.Generator]:
    if generator is None or isinstance(generator, torch.Generator):
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**63 - 1, (count,), generator=generator, device=device).tolist()
        return [torch.Generator().manual_seed(seed) for seed in seeds]
    if len(generator) != count:
        raise ValueError(f"{len(generator)} generators for {count} images")
    return list(generator)
