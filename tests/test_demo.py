"""The demonstration, small but whole: the page agrees with what was measured and asks for nothing beyond itself."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shlex
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from weightformer.cli import main
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.demo import run, scaling
from weightformer.demo.run import _train as train_or_continue
from weightformer.demo.weights import neighbour_agreement, predicted_weights, principal_plane
from weightformer.layers import DynamicDepthwiseConv2d, DynamicLinear
from weightformer.tasks import classification

OPTIONS = [
    "--model.kwargs={'embed_dim': 32, 'depth': 5}", "--data.image_size=16", "--optim.lr=5e-3",
    "--trainer.epochs=4", "--trainer.val_every=2", "--trainer.accelerator=cpu",
]  # fmt: skip
SIDES = (32, 48, 64, 96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "report"
    assert run(output, options=OPTIONS, sides=SIDES) == output / "report.html"
    return output


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


class Elements(HTMLParser):
    """Every element with its attributes; fails on one that is not closed, or closed in the wrong place."""

    VOID = ("meta", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> in the wrong place, line {self.getpos()[0]}"


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def rows(page: str, table: str) -> list[list[str]]:
    """The cells of the table that follows a text."""
    html = page[page.index(table) :].partition("<table")[2].partition("</table>")[0]
    return [[text_of(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in html.split("<tr>")[1:]]


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    elements = Elements(page).found
    names = Counter(tag for tag, _ in elements)
    assert names["svg"] == 5, "the diagram and four figures"
    assert not names.keys() & {"script", "link", "iframe", "object", "embed", "audio", "video"}
    loads = [
        v for _, attributes in elements for k, v in attributes.items() if k in ("src", "href", "xlink:href", "srcset")
    ]
    assert len(loads) > 40
    assert not [v for v in loads if not (v or "").startswith(("data:image/png;base64,", "#"))]
    assert not re.search(r"url\((?!#)|@import", page)
    assert set(re.findall(r"https?://[^\"'\s<]*", page)) <= {"http://www.w3.org/1999/xlink"}, "only a namespace"
    identifiers = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    references = set(re.findall(r"url\(#([^)]+)\)", page)) | {v[1:] for v in loads if v and v.startswith("#")}
    assert references <= set(identifiers)
    assert not re.search(r"\$\w", page), "a field was left unfilled"


def test_pictures_follow_the_theme_of_the_page(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    figures = re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert "currentColor" in figure
        assert not re.search(r"(?:fill|stroke): ?(?:#000000|#ffffff|black|white)", figure)


def test_accuracy_is_that_of_eval_and_of_the_log(folder: Path, page: str, data: Any, capsys: Any) -> None:
    assert main(["eval", str(folder / "training" / "checkpoints" / "last.ckpt"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["top1"] == data["evaluation"]["top1"] > 0.5
    assert again["images"] == data["evaluation"]["images"] == 360
    assert data["training"]["accuracies"][-1] == pytest.approx([4, again["top1"]])
    assert f"{again['top1']:.2%} of 360 test images correct" in text_of(page)
    assert f"{again['top1']:.2%} are classified correctly" in page


def test_predictions_and_confusion_are_those_of_predict(folder: Path, page: str, data: Any) -> None:
    with (folder / "predictions.csv").open() as file:
        first = [row for row in csv.DictReader(file) if row["rank"] == "1"]
    assert len(first) == 360
    counts = np.zeros((10, 10), int)
    for row in first:
        counts[int(Path(row["path"]).parent.name), int(row["class"])] += 1
    shown = rows(page, '<table class="confusion"')
    assert shown[0] == ["", *map(str, range(10))]
    assert [[int(cell) for cell in row[1:]] for row in shown[1:]] == counts.tolist()
    right = int(counts.trace())
    assert f"{right} of 360 correct" in page
    # Resizing files one by one may round a pixel otherwise than resizing a batch does.
    assert abs(right - 360 * data["evaluation"]["top1"]) <= 2
    wrong = 360 - right
    cards = page.count('<div class="card">')
    assert cards == 6 + min(wrong, 9)
    assert f"{float(first[0]['probability']):.1%}</span>" in page


def test_images_shown_are_the_files_predicted(folder: Path, page: str) -> None:
    files = sorted((folder / "images").rglob("*.png"), key=lambda file: file.name)
    assert len(files) == 360
    embedded = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="handwritten digit (\d)">', page)
    for (content, label), file in zip(embedded[:6], files, strict=False):
        assert label == file.parent.name
        picture = Image.open(io.BytesIO(base64.b64decode(content)))
        assert picture.size == (8, 8)
        assert np.array_equal(np.asarray(picture), np.asarray(Image.open(file)))


def test_times_and_slopes_in_the_page_are_those_measured(page: str, data: Any) -> None:
    measured = data["measurements"]
    assert [record["side"] for record in measured] == list(SIDES)
    names = [scaling.OURS, scaling.ATTENTION, scaling.EXPLICIT]
    assert list(measured[0]["models"]) == names
    groups, _, *body = rows(page[page.index("Time and memory against") :], "<figure>")
    assert groups == ["", "time, ms", "memory, MiB", "multiply-adds, M"]
    table = {row[0]: row for row in body}
    assert set(table) == {f"{side} px" for side in SIDES}
    for record in measured:
        row = table[f"{record['side']} px"]
        assert row[1] == f"{(record['side'] // 4) ** 2:,}"
        for place, name in enumerate(names):
            result = record["models"].get(name)
            assert row[2 + place] == ("–" if result is None else f"{result['seconds'] * 1e3:,.1f}")
            assert row[5 + place] == ("–" if result is None else f"{result['bytes'] / 2**20:,.1f}")
    pairs = [(r["side"], *(r["models"][n]["seconds"] for n in names[:2])) for r in measured if names[1] in r["models"]]
    faster = ", ".join(str(side) for side, ours, attention in pairs if attention < ours)
    assert (f"At {faster} px it is the faster one" in page) == bool(faster)
    assert f"takes {pairs[-1][2] / pairs[-1][1]:.1f} times as long" in page
    for quantity in ("seconds", "bytes"):
        for name in names:
            found = [(r["side"], r["models"][name][quantity]) for r in measured if name in r["models"]][-3:]
            if len(found) > 1:
                x, y = np.log([[side**2, value] for side, value in found]).T
                expected = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
                assert data["slopes"][quantity][name] == pytest.approx(expected)
                assert f"{name}: slope {expected:.2f}" in page
    assert all(max(record["differences"].values()) < 1e-5 for record in measured)


def test_counted_growth_is_linear_for_one_and_quadratic_for_the_other(data: Any) -> None:
    """Multiply-adds and bytes are counted, not timed, so they hold on a busy machine too."""
    first, last = (data["measurements"][i]["models"] for i in (0, -1))
    growth = (SIDES[-1] / SIDES[0]) ** 2
    ours = last[scaling.OURS]["multiply_adds"] / first[scaling.OURS]["multiply_adds"]
    assert growth * 0.9 < ours <= growth
    assert last[scaling.ATTENTION]["multiply_adds"] > 1.5 * growth * first[scaling.ATTENTION]["multiply_adds"]
    if scaling.EXPLICIT in last:  # a machine too slow for it leaves it out
        tokens, heads = (SIDES[-1] // 4) ** 2, 2
        assert last[scaling.EXPLICIT]["bytes"] > 4 * heads * tokens**2 > last[scaling.OURS]["bytes"]


def test_commands_to_go_on_with_work(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands, python = (unescape(block) for block in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL))
    lines = [shlex.split(line, comments=True) for line in commands.replace("\\\n", " ").splitlines()]
    verbs = []
    for command, *words in filter(None, lines):
        assert command == "weightformer"
        extra = ["--print_config"] if words[0] == "train" else []
        assert main([*words, *extra]) == 0, (words, capsys.readouterr().err)
        verbs.append(words[0])
    assert verbs == ["predict", "eval", "train", "train", "train", "info"]
    namespace: dict[str, Any] = {}
    exec(python, namespace)  # noqa: S102 - our own example
    assert namespace["model"](torch.zeros(1, 1, 16, 16)).shape == (1, 10)


def test_a_complete_run_is_not_trained_again_and_told_the_same(folder: Path, data: Any) -> None:
    before = (folder / "training" / "checkpoints" / "last.ckpt").read_bytes()
    config = parse_config(classification.Config, read_yaml(folder / "training" / "config.yaml"))
    assert train_or_continue(config) == data["training"]
    assert [epoch for epoch, _ in data["training"]["accuracies"]] == [2, 4]
    assert data["training"]["losses"][-1][0] == pytest.approx(4, abs=0.25)
    assert (folder / "training" / "checkpoints" / "last.ckpt").read_bytes() == before


def test_other_settings_replace_the_earlier_run(tmp_path: Path) -> None:
    output = tmp_path / "report"
    small = ["--model.kwargs={'embed_dim': 16, 'depth': 2}", "--data.image_size=8", "--data.batch_size=360"]
    small += ["--trainer.epochs=1", "--trainer.log_every=1"]
    earlier = [*small, f"--output={output / 'training'}", "--seed=1"]
    classification.train(parse_config(classification.Config, read_yaml(recipe_path("digits")), earlier))
    (output / "mine.txt").touch()
    data = json.loads(run(output, options=small, sides=(8, 16)).with_suffix(".json").read_text())
    assert data["training"]["epochs"] == 1
    assert read_yaml(output / "training" / "config.yaml")["seed"] == 0
    assert (output / "mine.txt").exists(), "only the demonstration's own files are replaced"


@pytest.fixture
def twins() -> dict[str, nn.Module]:
    return scaling.build(16)


@pytest.mark.parametrize("broken", [scaling.OURS, scaling.EXPLICIT])
def test_nothing_is_timed_if_forms_disagree(
    twins: dict[str, nn.Module], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch.rand(1, 1, 16, 16)
    assert max(scaling.check(twins, image).values()) < 1e-5
    if broken == scaling.EXPLICIT:
        with torch.no_grad():
            twins[broken].get_submodule("blocks.3.attn.proj").weight.mul_(1.01)
    else:
        fast = DynamicDepthwiseConv2d.predict
        calls = []

        def other_on_second_call(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            calls.append(self)
            return fast(self, x) * (1 + 0.01 * (len(calls) > 3))

        monkeypatch.setattr(DynamicDepthwiseConv2d, "predict", other_on_second_call)
    with pytest.raises(RuntimeError, match="disagree"):
        scaling.check(twins, image)


def test_a_failed_measurement_says_why() -> None:
    with pytest.raises(RuntimeError, match="smaller than one patch"):
        list(scaling.measure((2,)))


class ThreeSums(nn.Module):
    """Makes three tensors of the input's size, never more than two alive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y + 1
        del y
        return z + 1


def test_peak_memory_counts_what_is_alive_at_once() -> None:
    assert scaling.peak_memory(ThreeSums(), torch.zeros(1, 1, 100, 100)) == pytest.approx(2 * 4 * 100 * 100, rel=0.01)


def test_slope_is_the_exponent_of_the_largest_images() -> None:
    pixels = [1.0, 100.0, 400.0, 1600.0]
    assert scaling.slope(pixels, [77.0, *(3 * p**1.5 for p in pixels[1:])]) == pytest.approx(1.5)


def test_predicted_weights_are_those_each_layer_applies(lively_micro: Any, images: Any) -> None:
    model, x = lively_micro(in_chans=1), images(3, 1, 32, 32)
    weights = predicted_weights(model, x)
    assert list(weights) == [f"blocks.{i}.{part}" for i in (1, 4, 7) for part in ("conv", "fc1")]
    alone = predicted_weights(model, x[1:2])
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, (DynamicDepthwiseConv2d, DynamicLinear))
        assert weight.shape == (3, *(layer.weight.squeeze(1) if weight.ndim == 4 else layer.weight).shape)
        torch.testing.assert_close(weight[1:2], alone[name])
    first = model.blocks[0](model.embed_norm(model.patch_embed(x)))
    torch.testing.assert_close(weights["blocks.1.conv"], model.blocks[1].conv.predict(model.blocks[1].norm1(first)))
    assert not model.blocks[1].conv._forward_pre_hooks


def test_neighbours_and_plane() -> None:
    torch.manual_seed(0)
    corners = torch.tensor([[0.0, 0, 0], [9, 0, 0], [0, 9, 0]]).repeat_interleave(4, 0)
    points = corners + 0.1 * torch.randn(12, 3)
    labels = list("aaaabbbbcccc")
    assert neighbour_agreement(points, labels) == 1
    assert neighbour_agreement(points, ["a", "x", "y", "z", *labels[4:]]) == pytest.approx(8 / 12)
    assert neighbour_agreement(points, list("abcdefghijkl")) == 0
    plane, share = principal_plane(points)
    assert plane.shape == (12, 2)
    assert 0.99 < share < 1
    assert principal_plane(corners + torch.tensor([5.0, 5.0, 9.0]))[1] == pytest.approx(1), "the mean is no variation"
    torch.testing.assert_close(torch.cdist(plane, plane), torch.cdist(points, points).double(), rtol=0.1, atol=0.4)
