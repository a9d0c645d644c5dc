"""Losses over a whole set; and scores of sampled images beside real ones, in the features of a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from weightformer.config import parse_config
from weightformer.models.checkpoint import load_weights, read_state_dict
from weightformer.tasks import classification
from weightformer.tasks.classification.module import ClassificationModule
from weightformer.tasks.classification.run import normalization, without_start_weights
from weightformer.tasks.classification.transforms import Normalize, eval_framing

__all__ = [
    "Features",
    "MeanLosses",
    "classifier_features",
    "extract",
    "frechet_distance",
    "inception_features",
    "precision_recall",
    "score",
    "spread",
]


class MeanLosses(Metric):
    """Means of the parts of the hybrid loss, and the number of samples they were taken over.

    They are summed in float64, so the result does not depend on how the samples were split over processes or batches.
    """

    full_state_update = False
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        for name in ("loss", "mse", "vb"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Mapping[str, Tensor]) -> None:
        """Add one batch: losses (B,) by name."""
        for name, values in losses.items():
            setattr(self, name, getattr(self, name) + values.double().sum())
        self.samples += len(losses["loss"])

    def compute(self) -> dict[str, Tensor]:
        """``loss``, ``mse`` and ``vb`` (0 without learned variance), and the count ``samples``."""
        return {name: getattr(self, name) / self.samples for name in ("loss", "mse", "vb")} | {"samples": self.samples}


@dataclass
class Features:
    """A network that images are compared through."""

    network: Callable[[Tensor], tuple[Tensor, Tensor]]
    """uint8 images (B, C, height, width) to features (B, D) and class logits (B, K)."""
    description: str
    """Which network, and what it does to the size and the values of an image."""
    class_names: list[str] | None = None
    """Of the logits, where they are known."""


def inception_features(weights: str | Path | None = None, device: str | torch.device = "cpu") -> Features:
    """The InceptionV3 that FID is defined with: 2048 features.

    Images are resized as TensorFlow did, without antialiasing, so that numbers compare with published ones.

    Args:
        weights: file of torch-fidelity's weights; without one they are downloaded.
        device: where to run it.

    Raises:
        ImportError: torch-fidelity is missing.
        FileNotFoundError: no such file.
        ValueError: the weights can be neither read safely nor downloaded.
    """
    from torchmetrics.image.fid import NoTrainInceptionV3

    path = str(weights) if weights else None
    if path:
        read_state_dict(path)  # torch-fidelity would run code from a file that holds some; this refuses it
    try:
        inception: Any = NoTrainInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"], path, antialias=False)
    except ModuleNotFoundError as error:
        raise ImportError('Inception comes with torch-fidelity: pip install "weightformer[generation]"') from error
    except (OSError, RuntimeError) as error:
        tried, reason = "read" if path else "downloaded", " ".join(str(error).split())[:200]
        raise ValueError(
            f"Inception's weights could not be {tried} ({reason}); give their file as score.inception_weights, or "
            "score with a classifier: score.features CHECKPOINT"
        ) from error
    inception.to(device)

    def network(images: Tensor) -> tuple[Tensor, Tensor]:
        return inception._torch_fidelity_forward(images.to(device).expand(-1, 3, -1, -1))

    return Features(network, "InceptionV3, 299 px by TensorFlow 1's bilinear resize without antialiasing")


def classifier_features(weights: str | Path, device: str | torch.device = "cpu") -> Features:
    """A classifier trained with this package: its features before the head, and its classes.

    Args:
        weights: a training checkpoint.
        device: where to run it.

    Raises:
        ValueError: it is no checkpoint of a classifier.
    """
    content, class_names = classification.read_checkpoint(weights)
    config = without_start_weights(parse_config(classification.Config, content, where=str(weights)))
    model: Any = load_weights(ClassificationModule(config, class_names).model, weights).eval().to(device)
    chans, framing = config.model.in_chans, eval_framing(config.data)
    normalize = Normalize(chans, *normalization(config.model))

    def network(images: Tensor) -> tuple[Tensor, Tensor]:
        if images.shape[1] not in (1, chans):
            raise ValueError(f"{weights} classifies images of {chans} channel(s), the samples have {images.shape[1]}")
        for step in framing:
            images = step(images)
        tokens = model.forward_features(normalize(images.expand(-1, chans, -1, -1)).to(device))
        return model.forward_head(tokens, pre_logits=True), model.forward_head(tokens)

    size, how = config.data.image_size, f"{config.data.crop_mode}, {config.data.interpolation}"
    return Features(network, f"{config.model.name} of {Path(weights)}, {size} px ({how})", class_names)


@torch.inference_mode()
def extract(features: Features, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Features (N, D) and logits (N, K), in float32, of batches of uint8 images.

    Raises:
        ValueError: images in other than uint8: whether 0 to 1 or -1 to 1 is meant could only be guessed.
    """
    found = []
    for images in batches:
        if images.dtype != torch.uint8:
            raise ValueError(f"scores are taken of uint8 images from 0 to 255, not of {images.dtype}")
        found.append([x.float().cpu() for x in features.network(images)])
    columns = [torch.cat(column) for column in zip(*found, strict=True)]
    return columns[0], columns[1]


def score(real: Tensor, fake: Tensor, logits: Tensor, *, seed: int) -> dict[str, float]:
    """FID, KID, inception score, precision and recall of samples.

    Args:
        real: features of the reference (M, D).
        fake: features of the samples (N, D).
        logits: of the samples (N, K).
        seed: of KID's subsets (100 of up to 1000) and the inception score's ten parts.

    Returns:
        ``fid``, ``kid``, ``kid_std``, ``inception_score``, ``inception_score_std``, ``precision``, ``recall``.
    """
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*save all extracted features in buffer")
        subset = min(1000, len(real), len(fake))
        kid = KernelInceptionDistance(feature=_Given(fake.shape[1]), subset_size=subset)
        inception = InceptionScore(feature=_Given(logits.shape[1]), splits=min(10, len(logits)))
    kid.update(real, real=True)
    kid.update(fake, real=False)
    inception.update(logits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kid_mean, kid_std = kid.compute()
        is_mean, is_std = inception.compute()
    precision, recall = precision_recall(real, fake)
    return {
        "fid": frechet_distance(real, fake),
        "kid": float(kid_mean),
        "kid_std": float(kid_std),
        "inception_score": float(is_mean),
        "inception_score_std": float(is_std),
        "precision": precision,
        "recall": recall,
    }


def frechet_distance(real: Tensor, fake: Tensor) -> float:
    """FID: the distance between the Gaussians of two sets of features, (M, D) and (N, D).

    Warns where there are fewer images than features.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    count, dim = min(len(real), len(fake)), fake.shape[1]
    if count < dim:
        warnings.warn(
            f"{count} images are fewer than the {dim} features: FID is far too high then, and compares with nothing "
            "but numbers from as many",
            stacklevel=2,
        )
    fid = FrechetInceptionDistance(feature=_Given(dim))
    fid.update(real.double(), real=True)
    fid.update(fake.double(), real=False)
    return float(fid.compute())


def precision_recall(real: Tensor, fake: Tensor, *, neighbours: int = 3, limit: int = 10_000) -> tuple[float, float]:
    """Improved precision and recall (arXiv 1904.06991).

    Precision is the share of samples within some real image's distance to its ``neighbours``-th nearest real one;
    recall the same with the sides exchanged.

    Args:
        real: features (M, D).
        fake: features (N, D).
        neighbours: k.
        limit: use at most so many of each, evenly spread: the work grows with their product.
    """
    real, fake = (x[spread(len(x), limit)].double() for x in (real, fake))
    return _covered(fake, real, neighbours), _covered(real, fake, neighbours)


def _covered(points: Tensor, manifold: Tensor, neighbours: int) -> float:
    """Share of ``points`` inside a ball around a point of ``manifold``, up to that one's k-th neighbour."""
    k = min(neighbours + 1, len(manifold))  # the nearest is the point itself
    radii = torch.cat([torch.cdist(part, manifold).kthvalue(k).values for part in manifold.split(1000)])
    return float(
        torch.cat([(torch.cdist(part, manifold) <= radii).any(dim=1) for part in points.split(1000)]).double().mean()
    )


def spread(count: int, limit: int) -> Tensor:
    """Up to ``limit`` indices below ``count``, evenly spread."""
    kept = min(count, limit)
    return torch.arange(kept) * count // max(kept, 1)


class _Given(nn.Module):
    """Takes features as they are: the place of torchmetrics' own network."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        """As given."""
        return features
