"""A probe of global modelling: canvases of real items whose label no sum of local evidence can tell.

Three Fashion-MNIST items lie on a black strip of 28 x 252 px:

    item A ............ cue ............ item B

A dress as the cue names A, a sneaker names B; the label is the class of the item that is named, one of four. A and B
are never of the same class, and every combination of cue, A and B occurs equally often.

What can be reached, and why:

- *Chance* is 1/4.
- *One item alone* names the right one in exactly half of the canvases. A model whose logits are a **sum of local
  terms**, ``u(cue) + v(A) + w(B)``, does no better: swapping A with B and the cue with the other one changes no label,
  so the best such sum under cross-entropy (a convex problem) treats the two places and the two cues alike, and then the
  cue tells it nothing.
- *No such sum*, however chosen, is right on more than 3/4: of the four canvases with classes i and j, the cue would
  have to move ``logit_i - logit_j`` up where A = i and down where A = j, but it moves it the same way in both.
- *The ceiling* is how well the named item can be told when one knows where to look (`ceiling`).

The backbone's head is linear in the mean over tokens, so a model of static blocks is such a sum as long as no token
sees two of the three items. ``depth`` blocks of 3 x 3 convolutions see ``2 depth + 1`` tokens of 7 px a side, and 12
tokens lie between any two items. So static twins of up to 6 blocks (13 tokens: never one of each) fail for that reason,
and any number of images will not help.
"""

from __future__ import annotations

import functools
import itertools
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from weightformer.training.loader import derive_seed

__all__ = ["CHANCE", "CLASSES", "LOCAL", "LOCAL_BOUND", "SIZE", "ceiling", "load_probe", "main"]

CLASSES = {"Trouser": 1, "Pullover": 2, "Bag": 8, "Ankle boot": 9}
"""What is named, and its label in Fashion-MNIST."""

_CUES = {"Dress": 3, "Sneaker": 7}
SIZE = (28, 252)
"""Height and width of a canvas, in pixels."""

_ITEM = 28
_PLACES = (112, 0, 224)  # left edges of cue, A and B
_COMBINATIONS = [
    (cue, a, b) for cue in range(2) for a, b in itertools.permutations(range(len(CLASSES)), 2)
]  # (cue, class of A, class of B)
_REPEATS = {True: 300, False: 80}  # of each combination, so few that no item is shown twice

CHANCE, LOCAL, LOCAL_BOUND = 1 / len(CLASSES), 1 / 2, 3 / 4
"""Shares that are right: guessing; the best sum of local terms; a bound that no sum of local terms exceeds."""


def load_probe(root: str | os.PathLike[str] | None, *, train: bool) -> tuple[Tensor, Tensor]:
    """The 7,200 training or 1,920 test canvases (N, 1, 28, 252) uint8 and their labels, always the same.

    Items of the training canvases come from the training images of Fashion-MNIST, those of the test canvases from its
    test images; no item is shown twice.

    Args:
        root: where Fashion-MNIST is; see `load_fashion_mnist`.
        train: which split.
    """
    cue, a, b, images = _compose(root, train=train)
    canvases = torch.zeros(len(cue), 1, *SIZE, dtype=torch.uint8)
    for left, items in zip(_PLACES, images, strict=True):
        canvases[:, 0, :, left : left + _ITEM] = items
    return canvases, torch.where(cue == 0, a, b)


@functools.cache  # a grid asks after every run
def ceiling(root: str | os.PathLike[str] | None = None) -> float:
    """Share of test canvases on which logistic regression, told where to look, names the item (at half resolution)."""
    from sklearn.linear_model import LogisticRegression

    named = {}
    for train in (True, False):
        cue, a, b, (_, first, second) = _compose(root, train=train)
        chosen = torch.where((cue == 0)[:, None, None], first, second)
        halved = chosen.float().unflatten(1, (_ITEM // 2, 2)).unflatten(3, (_ITEM // 2, 2)).mean(dim=(2, 4)) / 255
        named[train] = (halved.flatten(1).numpy(), torch.where(cue == 0, a, b).numpy())
    return float(LogisticRegression(max_iter=300).fit(*named[True]).score(*named[False]))


def main(argv: Sequence[str]) -> None:
    """``weightformer data probe``: print what can be reached on the probe, and write some canvases to look at."""
    parser = ArgumentParser(prog="weightformer data probe", description=main.__doc__)
    parser.add_argument("output", help="folder for PNG files")
    parser.add_argument("--num", type=int, default=24, help="test canvases to write; they are named after the label")
    parser.add_argument("--fashion_mnist", help="folder of Fashion-MNIST; by default where recipes look for it")
    args = parser.parse_args(argv)
    images, labels = load_probe(args.fashion_mnist, train=False)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    names = [name.replace(" ", "-").lower() for name in CLASSES]
    for index, (image, label) in enumerate(zip(images[: args.num], labels[: args.num].tolist(), strict=True)):
        Image.fromarray(image[0].numpy()).save(folder / f"{index:04d}_{names[label]}.png")
    say = Console(highlight=False).print
    say(f"chance                      {CHANCE:7.2%}")
    say(f"best sum of local terms     {LOCAL:7.2%}  (no such sum exceeds {LOCAL_BOUND:.0%})")
    say(f"ceiling, told where to look {ceiling(args.fashion_mnist):7.2%}  (logistic regression)")


def _compose(root: str | os.PathLike[str] | None, *, train: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Cue (0 or 1), class of A and class of B (N,) of each canvas, and the three items (N, 28, 28) uint8."""
    from weightformer.tasks.classification.sources import load_fashion_mnist

    images, labels = load_fashion_mnist(root, train=train)
    random = np.random.default_rng(derive_seed(0, train))
    rows = np.array(_COMBINATIONS * _REPEATS[train])
    cue, a, b = torch.from_numpy(random.permutation(rows)).unbind(1)
    items = torch.zeros(3, len(cue), _ITEM, _ITEM, dtype=torch.uint8)
    for kinds, roles in ((_CUES, [(0, cue)]), (CLASSES, [(1, a), (2, b)])):
        for kind, label in enumerate(kinds.values()):
            pool = torch.from_numpy(random.permutation(torch.where(labels == label)[0].numpy()))
            for role, values in roles:
                places = torch.where(values == kind)[0]
                items[role, places] = images[pool[: len(places)], 0]
                pool = pool[len(places) :]
    return cue, a, b, list(items)
