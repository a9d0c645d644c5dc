"""Effective receptive fields: which pixels one central token depends on, and by how much (paper, figure 3).

The map of an image is the positive part of the gradient of ``sum(relu(f))`` with respect to the pixels, summed over
channels, f being the features of the central token after the final norm; maps are averaged over images. That is the
custom of RepLKNet and VMamba, whose script made the paper's figure at 1024 x 1024 px. Pictures show ``map ** 0.2`` over
its largest value; numbers are taken from the map itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import yaml
from PIL import Image
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from weightformer.layers import Block
from weightformer.training.dynamics import evaluation_mode

__all__ = ["Panel", "ReceptiveField", "erf", "local_reach", "panels", "receptive_field"]


@dataclass(frozen=True)
class ReceptiveField:
    """What the central token of a model sees."""

    label: str
    """What the model is called."""
    note: str
    """Whether its weights are trained."""
    map: Tensor
    """Mean contribution of each pixel (H, W), float64, not negative."""
    centre_px: tuple[int, int, int, int]
    """The central token: top, left, bottom, right, in pixels; the last two are the first outside."""
    reach: int
    """How far the local window extends beyond it, in pixels."""
    num_images: int
    """Images it was averaged over."""

    @property
    def window_px(self) -> tuple[int, int, int, int]:
        """The local window, cut at the image's edges: top, left, bottom, right."""
        return self._around(self.reach)

    @property
    def outside(self) -> float:
        """Share of the contributions that comes from outside the window; 0 where nothing contributes."""
        top, left, bottom, right = self.window_px
        outside = self.map.clone()
        outside[top:bottom, left:right] = 0
        total = float(self.map.sum())
        return float(outside.sum()) / total if total else 0.0

    def side(self, share: float) -> int:
        """Side in pixels of the smallest square around the central token that holds a share of the contributions."""
        wanted = share * float(self.map.sum()) * (1 - 1e-12)  # sums in another order differ in the last digit
        for margin in range(max(self.map.shape)):
            top, left, bottom, right = self._around(margin)
            if float(self.map[top:bottom, left:right].sum()) >= wanted:
                break
        return self.centre_px[2] - self.centre_px[0] + 2 * margin

    def picture(self) -> Tensor:
        """``map ** 0.2`` over its largest value, in [0, 1]; all 0 where nothing contributes."""
        picture = self.map**0.2
        largest = float(picture.max())
        return picture / largest if largest else picture

    def _around(self, margin: int) -> tuple[int, int, int, int]:
        """The central token and what is within so many pixels of it, cut at the image's edges."""
        top, left, bottom, right = self.centre_px
        height, width = self.map.shape
        return max(top - margin, 0), max(left - margin, 0), min(bottom + margin, height), min(right + margin, width)

    def numbers(self) -> dict[str, Any]:
        """What stands beside the picture, for JSON."""
        return {
            "label": self.label,
            "weights": self.note,
            "size": list(self.map.shape),
            "images": self.num_images,
            "reach": self.reach,
            "outside": self.outside,
            "side_50": self.side(0.5),
            "side_99": self.side(0.99),
        }


@dataclass(frozen=True)
class Panel:
    """A model and the images to look at it with."""

    label: str
    """What it is called."""
    note: str
    """Whether its weights are trained."""
    model: nn.Module
    """The model."""
    images: list[Tensor]
    """Normalised images (C, H, W)."""


def receptive_field(
    model: nn.Module, images: Iterable[Tensor], *, label: str = "", note: str = "", reach: int | None = None
) -> ReceptiveField:
    """Measure one model; its mode, its weights and their gradients are left as they were.

    Args:
        model: one of timm's, ours included; frozen weights do no harm.
        images: normalised, (C, H, W) each, all of one size.
        label: what the model is called.
        note: whether its weights are trained.
        reach: of the local window, in pixels beyond the central token: token (H // 2, W // 2) of the last feature map,
            on an even grid the one below and right of the middle. By default `local_reach`.

    Raises:
        ValueError: no image, images of several sizes, a model without a feature map, or a gradient that is not finite.
    """
    total: Tensor | None = None
    count, grid = 0, (1, 1)
    with evaluation_mode(model):
        for image in images:
            found, grid = _contributions(model, image[None])
            if total is not None and found.shape != total.shape:
                raise ValueError(f"images of {tuple(total.shape)} and of {tuple(found.shape)} px cannot share a map")
            total = found if total is None else total + found
            count += 1
    if total is None:
        raise ValueError("a receptive field needs at least one image")
    if not torch.isfinite(total).all():
        raise ValueError(f"{label or 'the model'}: a gradient with respect to the pixels is not finite")
    height, width = total.shape
    stride = _stride(height, grid[0]), _stride(width, grid[1])
    centre = (grid[0] // 2, grid[1] // 2)
    reach = local_reach(model, height, width, grid) if reach is None else reach
    top, left = (c * s for c, s in zip(centre, stride, strict=True))
    centre_px = (top, left, min(top + stride[0], height), min(left + stride[1], width))
    return ReceptiveField(label, note, total / count, centre_px, reach, count)


def local_reach(model: nn.Module, height: int, width: int, grid: tuple[int, int]) -> int:
    """Pixels that the depthwise 3 x 3 convolutions of our model reach: a token a block. Others: a quarter of the image.

    Args:
        model: one of timm's, ours included.
        height: of the image, in pixels.
        width: likewise.
        grid: size of the last feature map.
    """
    blocks = sum(isinstance(module, Block) for module in model.modules())
    return blocks * _stride(height, grid[0]) if blocks else max(height, width) // 4


def _stride(side: int, tokens: int) -> int:
    """Pixels a token; rounded up, since the side may have been padded to whole patches."""
    return -(-side // tokens)


def _contributions(model: Any, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Positive gradient summed over channels (H, W), and the size of the feature map, for one image (1, C, H, W)."""
    image = image.detach().clone().requires_grad_()
    with torch.enable_grad():
        features = _features(model, image)
        rows, cols = features.shape[2:]
        score = features[0, :, rows // 2, cols // 2].relu().sum()
        (gradient,) = torch.autograd.grad(score, image)
    return gradient[0].double().clamp_min(0).sum(0), (rows, cols)


def _features(model: Any, image: Tensor) -> Tensor:
    """The last feature map (1, C, H, W), normalised where the model does so."""
    if hasattr(model, "forward_intermediates"):
        maps = model.forward_intermediates(image, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True)
        return maps[-1]
    features = model.forward_features(image) if hasattr(model, "forward_features") else None
    if not isinstance(features, Tensor) or features.ndim != 4:
        raise ValueError(f"{type(model).__name__} has no feature map (timm's forward_intermediates)")
    return features.permute(0, 3, 1, 2) if getattr(model, "output_fmt", "") == "NHWC" else features


def erf(
    specs: Sequence[str],
    save: str | Path,
    *,
    size: Sequence[int] | None = None,
    images: str | Path | None = None,
    num: int = 8,
    reach: int | None = None,
    before: bool = False,
    pretrained: bool = False,
    console: Console | None = None,
) -> list[ReceptiveField]:
    """Measure some models, draw them in one figure and write the numbers as JSON beside it.

    Args:
        specs: see `panels`.
        save: the picture; its suffix says the format.
        size: side, or height and width, of the images in pixels; by default the model's own.
        images: a folder of images; see `panels` for what is taken otherwise.
        num: images a model.
        reach: of the local window, in pixels beyond the central token, the same for all models. By default that of
            the first model of ours.
        before: show each checkpoint's architecture with random weights as well.
        pretrained: take the weights that the author of a timm model released.
        console: where the table goes.

    Raises:
        ValueError: a mistake in the arguments, all of which are looked at before the first model is measured, or
            models that could not be measured; those that could are drawn first.
    """
    from weightformer.analysis.figures import check_format, erf_figure

    fields: list[ReceptiveField] = []
    failures: list[str] = []
    console = console or Console(highlight=False)
    save = Path(save)
    check_format(save)
    if num < 1:
        raise ValueError(f"--num must be at least 1, got {num}")
    if reach is not None and reach < 0:
        raise ValueError(f"--reach must not be negative, got {reach}")
    for spec in specs:
        _parse(spec)
    save.parent.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        with _recorded(spec, failures):
            for panel in panels([spec], size=size, images=images, num=num, before=before, pretrained=pretrained):
                field = receptive_field(panel.model, panel.images, label=panel.label, note=panel.note, reach=reach)
                fields.append(field)
                if reach is None and any(isinstance(module, Block) for module in panel.model.modules()):
                    reach = field.reach
    if reach is not None:
        fields = [dataclasses.replace(field, reach=reach) for field in fields]
    if not fields:
        raise ValueError("; ".join(failures))
    erf_figure(fields, save)
    numbers = [field.numbers() for field in fields]
    save.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    table = Table(box=SIMPLE)
    for column in ("model", "weights", "image, px", "outside", "50 % in", "99 % in"):
        table.add_column(column, justify="left" if column in ("model", "weights") else "right", overflow="fold")
    for row in numbers:
        table.add_row(
            row["label"],
            row["weights"],
            f"{row['size'][0]} x {row['size'][1]}",
            f"{row['outside']:.2%}",
            f"{row['side_50']} px",
            f"{row['side_99']} px",
        )
    console.print(table)
    if failures:
        raise ValueError(f"{'; '.join(failures)} ({save} shows the others)")
    return fields


@contextlib.contextmanager
def _recorded(spec: str, failures: list[str]) -> Iterator[None]:
    """Add what goes wrong to the failures, so that one model of a figure does not cost the others."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  whatever a model's constructor or its forward pass raises
        sentence = str(error) or type(error).__name__
        failures.append(sentence if spec in sentence else f"{spec}: {sentence}")


def panels(
    specs: Sequence[str],
    *,
    size: Sequence[int] | None = None,
    images: str | Path | None = None,
    num: int = 8,
    before: bool = False,
    pretrained: bool = False,
) -> Iterator[Panel]:
    """Models and their images, one at a time.

    Args:
        specs: each ``[LABEL=]MODEL``, where MODEL is a training checkpoint (.ckpt), which is looked at with its own
            validation images, or a timm name, ours included, with constructor arguments behind it
            (``weightformer_tiny {linear_predictor: deep}``), which is looked at with crops of two photographs.
        size: side, or height and width, in pixels; by default the checkpoint's, or the model's own.
        images: a folder of images to take instead.
        num: images a model.
        before: a checkpoint's architecture with random weights as well, ahead of it.
        pretrained: take released weights for timm names.

    Raises:
        ValueError: an unknown model, or a size that is not one or two positive numbers.
    """
    if size and (len(size) > 2 or min(size) < 1):
        raise ValueError(f"--size takes a side, or height and width, in pixels; got {list(size)}")
    wanted = (size[0], size[-1]) if size else None
    for spec in specs:
        label, name, kwargs = _parse(spec)
        if kwargs is None:
            yield from _checkpoint_panels(name, label, wanted, images, num, before)
        else:
            yield _timm_panel(name, kwargs, label or spec, wanted, images, num, pretrained)


def _parse(spec: str) -> tuple[str | None, str, dict[str, Any] | None]:
    """Label, if any, name, and constructor arguments; None instead of these for a checkpoint."""
    match = re.fullmatch(r"(?:([^={/]+)=)?([^{]+?)\s*(\{.*\})?", spec)
    if match is None:
        raise ValueError(f"{spec!r} is neither a checkpoint nor a model name, possibly with {{arguments}}")
    label, name, arguments = match.groups()
    if name.endswith((".ckpt", ".pt", ".pth", ".safetensors")) or Path(name).is_file():
        if not Path(name).is_file():
            raise FileNotFoundError(f"no weight file at {name}")
        return label, name, None
    if not timm.is_model(name):
        raise ValueError(f"no checkpoint {name!r}, and timm knows no model of that name")
    try:
        return label, name, yaml.safe_load(arguments) if arguments else {}
    except yaml.YAMLError as error:
        raise ValueError(f"{spec!r}: the arguments are not valid YAML: {' '.join(str(error).split())}") from error


def _checkpoint_panels(
    path: str, label: str | None, size: tuple[int, int] | None, folder: str | Path | None, num: int, before: bool
) -> Iterator[Panel]:
    from weightformer.config import parse_config
    from weightformer.models.checkpoint import load_weights
    from weightformer.tasks.classification import Config, read_checkpoint
    from weightformer.tasks.classification.data import ImageData
    from weightformer.tasks.classification.module import build_model
    from weightformer.training.runs import normalization

    content, class_names = read_checkpoint(path)
    if (task := content.get("task", "classification")) != "classification":
        raise ValueError(f"{path} is a checkpoint of {task}; receptive fields are those of classification models")
    config = parse_config(Config, content, where=path)
    if size:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, image_size=size))
    mean, std = normalization(config.model)
    if folder:
        images = _folder_images(folder, config.data.size, config.model.in_chans, mean, std, num)
    else:
        data = ImageData(config.data, in_chans=config.model.in_chans, mean=mean, std=std, seed=0)
        images = []
        for batch, _ in data.val_loader():
            images += list(batch)
            if len(images) >= num:
                break
        images = images[:num]
    label = label or _run_name(Path(path).resolve())
    fresh = dataclasses.replace(config.model, weights=None, pretrained=False)
    for trained in (False, True) if before else (True,):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build_model(fresh, len(class_names), config.data.image_size)
        if trained:
            load_weights(model, path)
        yield Panel(label, "trained" if trained else "random weights", model, images)


def _run_name(path: Path) -> str:
    """The folder of a run, and the one above it where its name is a mere seed, as in a grid."""
    names = path.parts[1:-2] or (path.stem,)
    return "/".join(names[-2:] if names[-1].isdigit() else names[-1:])


def _timm_panel(
    name: str,
    kwargs: dict[str, Any],
    label: str,
    size: tuple[int, int] | None,
    folder: str | Path | None,
    num: int,
    pretrained: bool,
) -> Panel:
    config: Any = timm.models.get_pretrained_cfg(name)
    size = size or tuple(config.input_size[1:])
    channels = kwargs.get("in_chans", 3)
    if config.fixed_input_size:
        kwargs = {"img_size": size} | kwargs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            model = timm.create_model(name, pretrained=pretrained, **kwargs)
        except TypeError as error:
            raise ValueError(f"{name} does not take {kwargs}: {error}") from error
    mean, std = ([float(np.mean(v))] * channels if len(v) != channels else list(v) for v in (config.mean, config.std))
    if folder:
        images = _folder_images(folder, size, channels, mean, std, num)
    else:
        images = _photographs(size, channels, mean, std, num)
    return Panel(label, "released weights" if pretrained else "random weights", model, images)


def _folder_images(
    folder: str | Path, size: tuple[int, int], channels: int, mean: Sequence[float], std: Sequence[float], num: int
) -> list[Tensor]:
    from weightformer.tasks.classification.data import find_images, read_image

    paths = find_images([folder])[:num]
    if not paths:
        raise ValueError(f"{folder} holds no images")
    pictures = [read_image(path, channels, 89_478_485) for path in paths]
    return [_normalised(picture.resize(size[::-1], Image.Resampling.BICUBIC), mean, std) for picture in pictures]


def _photographs(
    size: tuple[int, int], channels: int, mean: Sequence[float], std: Sequence[float], num: int
) -> list[Tensor]:
    """Crops of the two photographs that scikit-learn ships, always the same."""
    from sklearn.datasets import load_sample_images

    if channels not in (1, 3):
        raise ValueError(f"the photographs have no {channels} channels; give images that have with --images")
    photographs = [Image.fromarray(array) for array in load_sample_images().images]
    random = np.random.default_rng(0)
    images = []
    for index in range(num):
        picture = photographs[index % 2]
        scale = random.uniform(0.5, 1) * min(picture.width / size[1], picture.height / size[0])
        width, height = math.floor(size[1] * scale), math.floor(size[0] * scale)
        left = int(random.integers(picture.width - width + 1))
        top = int(random.integers(picture.height - height + 1))
        crop = picture.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.BICUBIC)
        images.append(_normalised(crop.convert("L" if channels == 1 else "RGB"), mean, std))
    return images


def _normalised(picture: Image.Image, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    values = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)
    values = values[None] if values.ndim == 2 else values.permute(2, 0, 1)
    return (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
