"""The page: one HTML file that asks for nothing beyond itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from weightformer.demo.scaling import ATTENTION, EXPLICIT, OURS

__all__ = ["render"]


def render(data: Mapping[str, Any], pictures: Mapping[str, str], thumbnails: Mapping[str, str]) -> str:
    """The report as HTML.

    Args:
        data: what ``report.json`` holds.
        pictures: SVG elements, by name.
        thumbnails: ``data:`` addresses of the test images, by file.
    """
    predictions = data["predictions"]
    wrong = [record for record in predictions if record["label"] != record["classes"][0][0]]
    fields = {
        "tiles": _tiles(data),
        "training_text": _training_text(data),
        "test_text": _test_text(data),
        "confusion": _confusion(data["confusion"]),
        "examples": _cards(predictions[:6], thumbnails),
        "mistakes": _mistakes(wrong, thumbnails),
        "shown_kernel": escape(data["shown_kernel"]),
        "neighbours_text": _neighbours_text(data),
        "neighbours": _neighbours(data),
        "growth_text": _growth_text(data),
        "growth_caption": _growth_caption(data),
        "growth_verdict": _growth_verdict(data["measurements"]),
        "growth_table": _growth_table(data["measurements"]),
        "differences": _differences(data["measurements"]),
        "machine": "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in data["machine"].items()),
        "commands": escape(_commands(data["output"])),
        "python": escape(_python(data["output"])),
    }
    fields |= {f"{name}_figure": picture for name, picture in pictures.items()}
    return Template(files(__package__).joinpath("template.html").read_text(encoding="utf-8")).substitute(fields)


def _tiles(data: Mapping[str, Any]) -> str:
    slopes = data["slopes"]["seconds"]
    values = [
        (f"{data['evaluation']['top1']:.2%}", f"of {data['evaluation']['images']} test images correct"),
        (f"{data['training']['seconds']:.0f} s", f"of training, {data['training']['epochs']} epochs"),
        (f"{data['parameters'][OURS]:,}", "parameters"),
    ]
    if ATTENTION in slopes:
        values.append(
            (
                f"pixels<sup>{slopes[OURS]:.2f}</sup>",
                f"growth of time; attention: pixels<sup>{slopes[ATTENTION]:.2f}</sup>",
            )
        )
    return "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in values)


def _training_text(data: Mapping[str, Any]) -> str:
    training = data["training"]
    return (
        f"<code>{escape(data['model'])}</code> (8 blocks of width 64, patches of 4 × 4 pixels), "
        f"{training['epochs']} epochs over 1,437 images of 8 × 8 pixels, enlarged to 32 × 32, in "
        f"{training['seconds']:.0f} seconds. The digits come with scikit-learn: handwriting of many people, from the "
        "UCI collection “Optical Recognition of Handwritten Digits”."
    )


def _test_text(data: Mapping[str, Any]) -> str:
    evaluation = data["evaluation"]
    right = sum(record["label"] == record["classes"][0][0] for record in data["predictions"])
    return (
        f"On {evaluation['images']} images that were not trained on, {evaluation['top1']:.2%} are classified correctly "
        f"(mean cross-entropy {evaluation['loss']:.3f}). The same images written as PNG files and read back by "
        f"<code>weightformer predict</code>: {right} of {len(data['predictions'])} correct. One image is "
        f"{1 / evaluation['images']:.2%}, so differences of a few images mean little."
    )


def _confusion(counts: Sequence[Sequence[int]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in range(len(counts)))
    rows = [f"<tr><th></th>{head}</tr>"]
    for true, row in enumerate(counts):
        kinds = ["zero" if not n else "right" if column == true else "wrong" for column, n in enumerate(row)]
        cells = "".join(f'<td class="{kind}">{n}</td>' for kind, n in zip(kinds, row, strict=True))
        rows.append(f"<tr><th>{true}</th>{cells}</tr>")
    return f'<table class="confusion">{"".join(rows)}</table>'


def _cards(records: Sequence[Mapping[str, Any]], thumbnails: Mapping[str, str]) -> str:
    cards = []
    for record in records:
        bars = "".join(
            f'<div class="bar{"" if name == record["label"] else " wrong"}"><b>{escape(name)}</b>'
            f'<i style="--share: {probability:.1%}"></i><span>{probability:.1%}</span></div>'
            for name, probability in record["classes"]
        )
        cards.append(
            f'<div class="card"><img src="{thumbnails[record["path"]]}" alt="handwritten digit {record["label"]}">'
            f'<div><span class="truth">true digit {record["label"]}</span>{bars}</div></div>'
        )
    return "".join(cards)


def _mistakes(records: Sequence[Mapping[str, Any]], thumbnails: Mapping[str, str]) -> str:
    if not records:
        return "<p>No test image was classified wrongly.</p>"
    shown = sorted(records, key=lambda record: -record["classes"][0][1])[:9]
    which = "All that" if len(shown) == len(records) else f"Of the {len(records)} that"
    rest = "" if len(shown) == len(records) else f" the {len(shown)} it was surest of"
    return f'<p>{which} it got wrong{rest and ","}{rest}:</p><div class="cards">{_cards(shown, thumbnails)}</div>'


def _neighbours_text(data: Mapping[str, Any]) -> str:
    shown = data["neighbours"][data["shown_kernel"]]
    return (
        f"For {shown:.1%} of the test images, the image with the nearest predicted kernels in "
        f"<code>{escape(data['shown_kernel'])}</code> is the same digit. By chance it would be one in ten; by the "
        f"pixels themselves it is {data['neighbours_of_pixels']:.1%}. For every layer that predicts its weights:"
    )


def _neighbours(data: Mapping[str, Any]) -> str:
    shapes = data["weight_shapes"]
    rows = (
        (f"<code>{escape(name)}</code>", " × ".join(map(str, shapes[name])), f"{share:.1%}")
        for name, share in data["neighbours"].items()
    )
    return _table(("layer", "predicted for each image", "nearest neighbour is the same digit"), rows)


def _growth_text(data: Mapping[str, Any]) -> str:
    parameters = data["parameters"]
    return (
        "One forward pass of one image, one CPU thread, float32, without gradients. The twin is timm's "
        f"VisionTransformer of the same patch, width and depth ({parameters[ATTENTION]:,} parameters at 32 px; "
        f"WeightFormer has {parameters[OURS]:,} at any size), so both see the same patches. It is shown twice: with "
        "PyTorch's fused attention, which computes all N × N comparisons without storing them, and with the explicit "
        "softmax, which stores them."
    )


def _growth_caption(data: Mapping[str, Any]) -> str:
    rounds = {result["rounds"] for record in data["measurements"] for result in record["models"].values()}
    return (
        "Slopes are exponents of the number of pixels, fitted to each curve's three largest images: 1 is linear, 2 "
        f"quadratic. Times are medians of {_range(rounds)} passes, the models taking turns; a curve ends where a pass "
        "would take several seconds. Memory is the most that tensors held at one time, without weights."
    )


def _growth_verdict(measurements: Sequence[Mapping[str, Any]]) -> str:
    both = [(m["side"], m["models"]) for m in measurements if ATTENTION in m["models"]]
    slower = [str(side) for side, models in both if models[OURS]["seconds"] > models[ATTENTION]["seconds"]]
    side, models = both[-1]
    ratio = models[ATTENTION]["seconds"] / models[OURS]["seconds"]
    text = (
        f"At {side} px, the largest size at which both were run, fused attention takes {ratio:.1f} times as long as "
        "WeightFormer."
    )
    if slower:
        text += (
            f" At {', '.join(slower)} px it is the faster one: with few patches the small operations that predict "
            "weights cost more than the comparisons they save."
        )
    explicit = [(m["side"], m["models"]) for m in measurements if EXPLICIT in m["models"]]
    side, models = explicit[-1]
    ratio = models[EXPLICIT]["bytes"] / models[OURS]["bytes"]
    return f"{text} The explicit softmax needs {ratio:.0f} times the memory of WeightFormer at {side} px."


def _growth_table(measurements: Sequence[Mapping[str, Any]]) -> str:
    names = (OURS, ATTENTION, EXPLICIT)
    rows = []
    for record in measurements:
        row = [f"{record['side']} px", f"{record['tokens']:,}"]
        for quantity, form in (("seconds", _milliseconds), ("bytes", _mebibytes), ("multiply_adds", _millions)):
            found = (
                record["models"].get(name, {}).get(quantity)
                for name in names[: 2 if quantity == "multiply_adds" else 3]
            )
            row += ["–" if value is None else form(value) for value in found]
        rows.append(row)
    groups = ((2, ""), (3, "time, ms"), (3, "memory, MiB"), (2, "multiply-adds, M"))
    return _table(
        ("side", "patches", "ours", "fused", "explicit", "ours", "fused", "explicit", "ours", "attention"),
        rows,
        above="".join(f'<th colspan="{columns}">{title}</th>' for columns, title in groups),
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f}"


def _differences(measurements: Sequence[Mapping[str, Any]]) -> str:
    largest: dict[str, float] = {}
    for record in measurements:
        for name, difference in record["differences"].items():
            largest[name] = max(difference, largest.get(name, 0.0))
    return "; ".join(f"{name}, largest relative difference {value:.0e}" for name, value in largest.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], above: str = "") -> str:
    lines = ["".join(f"<th>{cell}</th>" for cell in head), *("".join(f"<td>{c}</td>" for c in row) for row in rows)]
    return f"<table>{above and f'<tr>{above}</tr>'}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _range(values: Iterable[int]) -> str:
    values = sorted(values)
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _commands(output: str) -> str:
    folder = shlex.quote(output)
    checkpoint = f"{folder}/training/checkpoints/last.ckpt"
    return f"""\
# classify image files with the model that was trained here
weightformer predict {checkpoint} {folder}/images/3 --top_k 3

# evaluate it again
weightformer eval {checkpoint}

# the same training without predicted weights, and with attention
weightformer train --config digits --output runs/static --model.kwargs '{{"dynamic_every": 0}}'
weightformer train --config digits --output runs/attention --model.name deit_tiny_patch16_224 \\
    --model.kwargs '{{"patch_size": 4, "embed_dim": 64, "depth": 8, "num_heads": 2}}'

# your own images: FOLDER/train/CLASS/*, FOLDER/val/CLASS/*
weightformer train --config finetune --data.root FOLDER

# what a model costs at any resolution
weightformer info weightformer_tiny --size 1248"""


def _python(output: str) -> str:
    address = f"local-dir:{output}/training/model"
    return f"""\
import timm
import weightformer  # registers the models

model = timm.create_model({address!r}, pretrained=True).eval()  # the one trained here
backbone = timm.create_model("weightformer_tiny", features_only=True, out_indices=(4, 10, 16))"""
