"""Streamed and untiled forwards of the same images, at random sizes: the largest relative differences.

    python benchmarks/streaming_equality.py

Twenty sizes from 16 x 16 to 3000 x 2000 pixels, WeightFormer-T and micro with every and with every third block dynamic,
both precisions, strips of 1 to 64 rows; logits and dense features. Predicted weights are as large as static ones, which
at initialisation they are not. Adds to results/streaming_equality.csv what is missing there, row by row, and ends with
status 1 where a difference exceeds 1e-4 in float32 or 1e-10 in float64.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import weightformer  # noqa: F401 - registers the models
from weightformer.layers import DynamicLinear
from weightformer.streaming import stream

TABLE = Path(__file__).parent / "results" / "streaming_equality.csv"
CASE = ("model", "dynamic_every", "dtype", "height", "width", "strip_rows")
COLUMNS = (*CASE, "features", "logits", "torch")
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


def sizes() -> list[tuple[int, int, int]]:
    """Height, width and rows of a strip; sides are drawn evenly on a logarithmic scale."""
    rng = random.Random(0)
    drawn = [
        (round(16 * (3000 / 16) ** rng.random()), round(16 * (2000 / 16) ** rng.random()), rng.randint(1, 64))
        for _ in range(18)
    ]
    return [(16, 16, 1), *drawn, (3000, 2000, 64)]


def build(name: str, dynamic_every: int) -> nn.Module:
    """A model whose predicted weights matter."""
    torch.manual_seed(0)
    model = timm.create_model(name, dynamic_every=dynamic_every, num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, DynamicLinear):
            for parameter, std in ((module.proj.weight, module.in_features**-0.5), (module.w1, 1.0), (module.w2, 1.0)):
                nn.init.normal_(parameter, std=std)
    return model


def relative(got: Tensor, expected: Tensor) -> float:
    """The largest difference beside the largest value."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    """Measure what the table lacks."""
    rows = []
    if TABLE.exists():
        with open(TABLE, newline="") as file:
            rows = list(csv.DictReader(file))
    done = {tuple(row[key] for key in CASE) for row in rows}
    with open(TABLE, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for name in ("weightformer_micro", "weightformer_tiny"):
            for dynamic_every in (1, 3):
                model = build(name, dynamic_every)
                for dtype in TOLERANCE:
                    model = model.to(getattr(torch, dtype))
                    for height, width, strip_rows in sizes():
                        case = (name, str(dynamic_every), dtype, str(height), str(width), str(strip_rows))
                        if case in done or min(height, width) < model.patch_embed.patch_size:
                            continue
                        generator = torch.Generator().manual_seed(height * width)
                        image = torch.randn(1, 3, height, width, generator=generator, dtype=getattr(torch, dtype))
                        with torch.inference_mode():
                            features = model.forward_features(image)
                            logits = model.forward_head(features)
                        kwargs = {"strip_rows": strip_rows, "progress": False}
                        row = dict(zip(CASE, case, strict=True)) | {"torch": torch.__version__}
                        row["features"] = f"{relative(stream(model, image, output='features', **kwargs), features):.1e}"
                        row["logits"] = f"{relative(stream(model, image, **kwargs), logits):.1e}"
                        writer.writerow(row)
                        file.flush()
                        rows.append(row)
                        print(*row.values())
    wrong = [row for row in rows if max(float(row["features"]), float(row["logits"])) > TOLERANCE[row["dtype"]]]
    print(f"{len(rows)} cases, {len(wrong)} beyond the tolerance")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
