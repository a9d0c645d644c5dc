"""Draw images from a trained generator into a folder, alone or by many processes: ``weightformer sample``."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from weightformer.models.checkpoint import load_weights, read_state_dict
from weightformer.tasks.generation.config import GenerationConfig, SamplingConfig
from weightformer.tasks.generation.data import GenerationData
from weightformer.tasks.generation.module import GenerationModule
from weightformer.tasks.generation.pipeline import WeightFormerPipeline
from weightformer.training.loader import derive_seed
from weightformer.training.runs import inference_device

__all__ = [
    "build_pipeline",
    "digest",
    "draw_grid",
    "parse_classes",
    "parse_grid",
    "process_rank",
    "read_samples",
    "sample",
    "sample_images",
    "sample_size",
]

_SETTINGS = "settings.json"
_RECORD = "samples.csv"


def build_pipeline(
    config: GenerationConfig, weights: str | Path, class_names: Sequence[str] | None = None
) -> WeightFormerPipeline:
    """The pipeline of some weights, averaged ones where there are any, with the scheduler that ``config`` asks for.

    Args:
        config: names the denoiser and how to sample.
        weights: a training checkpoint, or a weight file that fits the denoiser exactly.
        class_names: in the order of the labels; by default those of the data.

    Raises:
        ValueError: the weights do not fit, or the VAE is not the one that the latents were made with.
    """
    content = read_state_dict(weights)
    samples = (content.get("hyper_parameters") or {}).get("samples")
    if class_names is None or samples is None:  # a weight file: what it is for lies with the data
        data = GenerationData(config.data, seed=config.seed, class_names=class_names)
        class_names, samples = data.class_names, {"channels": data.channels, "size": data.size, "vae": data.vae}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=None))
    module = GenerationModule(config, class_names, **samples)
    load_weights(module.model, weights)
    return module.pipeline()


def sample(
    config: GenerationConfig,
    weights: str | Path,
    class_names: Sequence[str],
    *,
    classes: str = "",
    grid: str = "",
    num: int = 0,
    save: str | Path | None = None,
) -> Path:
    """What ``weightformer sample`` does: `sample_images` of a checkpoint, and a grid of them.

    Args:
        config: of the checkpoint; ``sampling`` says how, ``seed`` which noise.
        weights: a training checkpoint.
        class_names: in the order of the labels.
        classes: names or numbers, separated by commas; all by default.
        grid: rows and columns, like ``8x8``; by default eight columns, a row for each class up to sixteen.
        num: images; by default as many as the grid shows.
        save: folder; by default ``samples`` beside the checkpoint's folder.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown class, no grid or number of images, or a folder that holds samples of other settings.
    """
    if num < 0:
        raise ValueError(f"--num must be positive, got {num}")
    pipeline = build_pipeline(config, weights, class_names).to(inference_device(config.trainer.accelerator))
    labels = parse_classes(classes, pipeline)
    rows, columns = parse_grid(grid) if grid else (min(len(labels), 16), 8)
    folder = Path(save) if save else Path(weights).parent.parent / "samples"
    num = num or rows * columns
    sample_images(pipeline, labels, num, folder, config.sampling, seed=config.seed, weights=weights)
    if all(_image(folder, i).is_file() for i in range(num)):  # whichever process is the last
        draw_grid(folder, num, rows, columns).save(folder / f".{os.getpid()}.png")
        os.replace(folder / f".{os.getpid()}.png", folder / "grid.png")
    return folder


def sample_images(
    pipeline: WeightFormerPipeline,
    labels: Sequence[int],
    num: int,
    folder: str | Path,
    config: SamplingConfig,
    *,
    seed: int,
    weights: str | Path,
) -> None:
    """Write ``num`` images as ``000000.png``, ... and what they are as ``samples.csv``.

    Classes follow each other in blocks of equal size. Image i is a function of (seed, i) and the settings: under
    torchrun every process draws its share of the same set, and images that are there already are not drawn again.

    Args:
        pipeline: with its scheduler.
        labels: classes, by number.
        num: images over all processes.
        folder: to write.
        config: steps, guidance, and how many at once.
        seed: of the noise.
        weights: where the pipeline's weights come from; their content is noted.

    Raises:
        ValueError: the folder holds samples of other settings.
    """
    from rich.console import Console
    from rich.progress import track

    rank, world = process_rank()
    folder = Path(folder)
    names = pipeline.config.class_names or [str(i) for i in range(pipeline.num_classes)]
    drawn = [labels[i * len(labels) // num] for i in range(num)]
    settings = {
        "weights": digest(weights),
        "classes": [names[label] for label in labels],
        "num": num,
        "seed": seed,
        "scheduler": config.scheduler,
        "steps": config.steps,
        "guidance": config.guidance,
    }
    _claim(folder, settings)
    _write_csv(folder / _RECORD, [[_image(folder, i).name, label, names[label]] for i, label in enumerate(drawn)])
    device = pipeline.device
    left = [i for i in range(rank, num, world) if not _image(folder, i).is_file()]
    batches = [left[start : start + config.batch_size] for start in range(0, len(left), config.batch_size)]
    pipeline.set_progress_bar_config(disable=True)
    for batch in track(batches, f"sampling on {device}", console=Console(stderr=True), disable=rank > 0):
        (images,) = pipeline(
            [drawn[i] for i in batch],
            num_inference_steps=config.steps,
            guidance_scale=config.guidance,
            generator=[torch.Generator().manual_seed(derive_seed(seed, i)) for i in batch],
            return_dict=False,
        )
        for i, image in zip(batch, images, strict=True):
            temporary = folder / f".{os.getpid()}.png"
            image.save(temporary)
            os.replace(temporary, _image(folder, i))


def parse_classes(text: str, pipeline: WeightFormerPipeline) -> list[int]:
    """Class numbers of names or numbers separated by commas; letter case does not matter. All classes for none.

    Raises:
        ValueError: an unknown name, with the nearest ones, or a number out of range.
    """
    if not text.strip():
        return list(range(pipeline.num_classes))
    labels = pipeline.labels
    folded: dict[str, set[int]] = {}
    for name, numbers in labels.items():
        folded.setdefault(name.casefold(), set()).update(numbers)
    chosen: list[int] = []
    for name in (part.strip() for part in text.split(",")):
        same = folded.get(name.casefold(), set())
        if name not in labels and len(same) == 1:
            chosen += same
        else:
            chosen += pipeline.get_label_ids(int(name) if name not in labels and name.isdecimal() else name)
    return chosen


def parse_grid(text: str) -> tuple[int, int]:
    """Rows and columns of ``8x8``.

    Raises:
        ValueError: something else.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise ValueError(f"a grid is rows x columns, like 8x8, not {text!r}")
    return int(match[1]), int(match[2])


def draw_grid(folder: str | Path, num: int, rows: int, columns: int) -> Image.Image:
    """One picture of ``rows`` x ``columns`` of a folder's images, evenly spread, with the classes beside the rows."""
    folder = Path(folder)
    with (folder / _RECORD).open(newline="", encoding="utf-8") as file:
        names = [row["class"] for row in csv.DictReader(file)]
    shown = [i * num // (rows * columns) for i in range(rows * columns)]
    first = Image.open(_image(folder, 0))
    scale = max(1, 64 // max(first.size))  # small images are enlarged, pixel by pixel
    width, height = (side * scale for side in first.size)
    gap, font = max(2, width // 32), ImageFont.load_default(max(12, height // 5))
    captions = [
        ",\n".join(dict.fromkeys(names[i].split(",")[0] for i in shown[row * columns : (row + 1) * columns]))
        for row in range(rows)
    ]
    draw = ImageDraw.Draw(Image.new("L", (1, 1)))
    margin = max(draw.multiline_textbbox((0, 0), text, font=font)[2] for text in captions) + 3 * gap
    size = (int(margin + columns * (width + gap)), rows * (height + gap) + gap)
    picture = Image.new("L" if first.mode == "L" else "RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for row, text in enumerate(captions):
        top = gap + row * (height + gap)
        draw.multiline_text((margin - gap, top + height / 2), text, "black", font, anchor="rm", align="right")
        for column in range(columns):
            image = Image.open(_image(folder, shown[row * columns + column]))
            picture.paste(
                image.resize((width, height), Image.Resampling.NEAREST), (int(margin) + column * (width + gap), top)
            )
    return picture


def read_samples(folder: str | Path, num: int, batch_size: int = 256) -> tuple[Iterator[Tensor], Tensor]:
    """The images of a folder as uint8 batches (B, C, height, width), and their labels (N,)."""
    folder = Path(folder)
    with (folder / _RECORD).open(newline="", encoding="utf-8") as file:
        labels = torch.tensor([int(row["label"]) for row in csv.DictReader(file)])

    def batches() -> Iterator[Tensor]:
        for start in range(0, num, batch_size):
            paths = [_image(folder, i) for i in range(start, min(start + batch_size, num))]
            yield torch.stack([pil_to_tensor(Image.open(path)) for path in paths])

    return batches(), labels


def sample_size(folder: str | Path) -> tuple[int, int]:
    """Height and width of a folder's images."""
    width, height = Image.open(_image(Path(folder), 0)).size
    return height, width


def process_rank() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def digest(path: str | Path) -> str:
    """A short name for the content of a file."""
    content = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            content.update(chunk)
    return content.hexdigest()[:12]


def _image(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.png"


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder; it may hold an earlier part of the same set, and nothing else."""
    path = folder / _SETTINGS
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if differing := [key for key in settings if before.get(key) != settings[key]]:
            raise ValueError(
                f"{folder} holds samples of other settings ({', '.join(differing)}); choose another folder with --save"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{os.getpid()}.json"
    temporary.write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, path)


def _write_csv(path: Path, rows: list[list[Any]]) -> None:
    temporary = path.with_name(f".{os.getpid()}.csv")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "label", "class"])
        writer.writerows(rows)
    os.replace(temporary, path)
