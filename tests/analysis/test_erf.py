"""Receptive fields: exact where theory says so, honest labels, and the model left as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from weightformer.analysis.erf import ReceptiveField, panels, receptive_field
from weightformer.cli import main
from weightformer.config import parse_config, read_yaml, recipe_path
from weightformer.tasks.classification import Config, train


def build(**kwargs: Any) -> nn.Module:
    """Two blocks, patch 4; random weights large enough for the predicted ones to count."""
    model = timm.create_model("weightformer_micro", embed_dim=16, depth=2, **kwargs)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def noise(*sizes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(3, *size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("size", [(44, 44), (48, 48), (36, 60), (45, 50)], ids=str)
def test_a_static_model_sees_exactly_its_convolutions_reach(size: tuple[int, int]) -> None:
    field = receptive_field(build(dynamic_every=0), noise(size, size))
    assert field.map.shape == size
    assert field.outside == 0
    rows, cols = -(-size[0] // 4), -(-size[1] // 4)  # of tokens; sides are padded to whole patches
    top, left = 4 * (rows // 2 - 2), 4 * (cols // 2 - 2)
    assert field.window_px == (top, left, top + 20, left + 20)
    assert field.centre_px == (top + 8, left + 8, top + 12, left + 12)
    inside = field.map[top : top + 20, left : left + 20]
    assert (inside > 0).float().mean() > 0.9
    assert field.side(1.0) == 20
    assert field.num_images == 2


def test_a_dynamic_model_sees_all_of_the_image() -> None:
    field = receptive_field(build(dynamic_every=2), noise((44, 44)))
    assert 0 < field.outside < 1
    assert (field.map > 0).float().mean() > 0.5
    assert field.side(1.0) > 20


def test_numbers_of_a_known_map() -> None:
    contributions = torch.zeros(12, 12, dtype=torch.float64)
    contributions[6, 6], contributions[4, 4], contributions[0, 11] = 5, 3, 2
    field = ReceptiveField("", "", contributions, (6, 6, 7, 7), 2, 1)
    assert field.outside == pytest.approx(0.2)
    assert [field.side(share) for share in (0.5, 0.6, 0.8, 0.99)] == [1, 5, 5, 13]
    assert field.picture()[4, 4] == pytest.approx(0.6**0.2)
    assert field.picture().max() == 1


def test_the_map_is_the_mean_over_images() -> None:
    model, images = build(), noise((24, 24), (24, 24))
    single = [receptive_field(model, [image]).map for image in images]
    torch.testing.assert_close(receptive_field(model, images).map, (single[0] + single[1]) / 2)


def test_the_model_is_left_alone() -> None:
    model = build(drop_path_rate=0.5).train()
    model.norm.eval()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state, image = torch.get_rng_state(), noise((24, 24))[0]
    with torch.no_grad():
        field = receptive_field(model, [image])
    assert field.map.sum() > 0
    assert model.training
    assert model.blocks[0].training
    assert not model.norm.training
    assert not model.blocks[0].fc2.weight.requires_grad
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["head.weight"]
    assert torch.equal(torch.get_rng_state(), state)
    assert not image.requires_grad


def test_frozen_weights_see_the_same() -> None:
    model = build()
    before = receptive_field(model, noise((24, 24))).map
    assert torch.equal(receptive_field(model.requires_grad_(False), noise((24, 24))).map, before)


def test_where_nothing_contributes_everything_is_zero() -> None:
    model = build()
    nn.init.zeros_(model.norm.weight)
    nn.init.constant_(model.norm.bias, -1.0)
    field = receptive_field(model, noise((24, 24)))
    assert field.outside == 0
    assert torch.equal(field.picture(), torch.zeros(24, 24, dtype=torch.float64))


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    model = build()
    model.patch_embed.proj.weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match="mine: a gradient with respect to the pixels is not finite"):
        receptive_field(model, noise((24, 24)), label="mine")


def test_images_must_be_there_and_of_one_size() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        receptive_field(build(), [])
    with pytest.raises(ValueError, match="cannot share a map"):
        receptive_field(build(), noise((24, 24), (28, 24)))
    with pytest.raises(ValueError, match="no feature map"):
        receptive_field(nn.Flatten(), noise((24, 24)))


# The command


def test_any_timm_model_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [
        "test_vit",
        "local=weightformer_micro {dynamic_every: 0, depth: 3}",
        "weightformer_micro {linear_predictor: deep, depth: 3}",
        "test_resnet",
    ]
    save = tmp_path / "figure.png"
    assert main(["erf", *specs, "--size", "64", "--num", "2", "--save", str(save)]) == 0
    rows = json.loads(save.with_suffix(".json").read_text())
    assert [row["label"] for row in rows] == ["test_vit", "local", *specs[2:]]
    assert all(row["weights"] == "random weights" and row["size"] == [64, 64] and row["images"] == 2 for row in rows)
    assert rows[1]["outside"] == 0
    assert rows[0]["outside"] > 0.01
    assert rows[2]["outside"] > 0.01
    assert [row["reach"] for row in rows] == [12] * 4, "one window for all, that of the first model of ours"
    assert save.read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "random weights" in text
    assert "64 x 64" in text
    assert "0.00%" in text


def test_the_size_is_the_images(tmp_path: Path) -> None:
    for size, expected in ((["32"], [32, 32]), (["32", "48"], [32, 48]), ([], [32, 32])):
        save = tmp_path / "figure.png"
        argv = ["erf", "weightformer_micro {depth: 2}", "--num", "1", "--save", str(save)]
        assert main([*argv, *(["--size", *size] if size else [])]) == 0
        assert json.loads(save.with_suffix(".json").read_text())[0]["size"] == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("erf") / "short"
    options = {
        "output": folder, "data.image_size": 16, "model.kwargs": "{embed_dim: 16, depth: 2}",
        "trainer.epochs": 1, "trainer.accelerator": "cpu", "data.batch_size": 128,
    }  # fmt: skip
    argv = [f"--{key}={value}" for key, value in options.items()]
    train(parse_config(Config, read_yaml(recipe_path("digits")), argv))
    return folder / "checkpoints" / "last.ckpt"


def test_before_and_after_training(checkpoint: Path, tmp_path: Path) -> None:
    save = tmp_path / "figure.svg"
    assert main(["erf", str(checkpoint), "--before", "--size", "32", "--num", "3", "--save", str(save)]) == 0
    before, after = json.loads(save.with_suffix(".json").read_text())
    assert (before["label"], before["weights"]) == ("short", "random weights")
    assert (after["label"], after["weights"]) == ("short", "trained")
    assert before["size"] == after["size"] == [32, 32]
    assert before["outside"] != after["outside"]
    assert "<svg" in save.read_text()


def test_a_checkpoint_at_another_size_and_on_other_images(checkpoint: Path, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "images").mkdir()
    for i in range(2):
        Image.effect_noise((20, 30), 60).save(tmp_path / "images" / f"{i}.png")
    save = tmp_path / "out.png"
    argv = ["erf", f"mine={checkpoint}", "--save", str(save)]
    assert main([*argv, "--size", "32", "--num", "1"]) == 0
    own = json.loads(save.with_suffix(".json").read_text())[0]
    assert (own["label"], own["size"], own["images"]) == ("mine", [32, 32], 1)
    assert main([*argv, "--size", "32", "--images", str(tmp_path / "images")]) == 0
    other = json.loads(save.with_suffix(".json").read_text())[0]
    assert other["images"] == 2
    assert other["outside"] != own["outside"]


def test_reach_moves_the_window(checkpoint: Path, tmp_path: Path) -> None:
    shares = []
    for reach in ("0", "4"):
        save = tmp_path / "out.png"
        assert main(["erf", str(checkpoint), "--reach", reach, "--num", "1", "--save", str(save)]) == 0
        shares.append(json.loads(save.with_suffix(".json").read_text())[0]["outside"])
    assert shares[0] > shares[1]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["weightformer_huge"], "timm knows no model"),
        (["nowhere.ckpt"], "nowhere.ckpt"),
        (["weightformer_micro", "--size", "1", "2", "3"], "--size"),
        (["weightformer_micro {wings: 2}"], "wings"),
        (["weightformer_micro {depth: [}"], "not valid YAML"),
        (
            ["weightformer_micro {in_chans: 2}"],
            "the photographs have no 2 channels; give images that have with --images",
        ),
        (["weightformer_micro", "--pretrained"], "No pretrained weights exist for weightformer_micro"),
        (["weightformer_micro", "--reach", "-5"], "--reach must not be negative, got -5"),
        (["weightformer_micro", "--num", "0"], "--num must be at least 1, got 0"),
        (["test_vit", "--size", "63"], "test_vit: Input height (63) should be divisible by patch size (16)"),
    ],
)
def test_mistakes_end_in_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["erf", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert sentence in error


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["weightformer_micro", "--save", "figure.json"], "'figure.json' does not say the format of the picture"),
        (["weightformer_micro", "--save", "figure"], "'figure' does not say the format of the picture"),
        (["weightformer_micro", "--save", __file__ + "/figure.png"], __file__),
        (["weightformer_micro", "weightformer_huge"], "'weightformer_huge'"),
        (["weightformer_micro", "nowhere.ckpt"], "no weight file at nowhere.ckpt"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    argv: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weightformer.analysis.erf.receptive_field", lambda *_, **__: pytest.fail("measured"))
    assert main(["erf", *argv]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_that_cannot_be_measured_does_not_cost_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "figure.png"
    argv = ["weightformer_micro {depth: 2}", "test_vit", "test_resnet", "--size", "63", "--num", "1"]
    assert main(["erf", *argv, "--save", str(save)]) == 2
    assert [row["label"] for row in json.loads(save.with_suffix(".json").read_text())] == [argv[0], "test_resnet"]
    error = capsys.readouterr().err
    assert error.startswith("error: test_vit: Input height (63)")
    assert f"({save} shows the others)" in error


def test_a_checkpoint_of_another_task_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "boxes.ckpt"
    stored = {"config": {"task": "detection", "data": {"coco": "x"}}, "class_names": ["a"]}
    torch.save({"hyper_parameters": stored, "state_dict": {}}, path)
    assert main(["erf", str(path)]) == 2
    assert "boxes.ckpt is a checkpoint of detection" in capsys.readouterr().err


def test_runs_of_a_grid_are_called_by_more_than_their_seed(checkpoint: Path, tmp_path: Path) -> None:
    names = []
    for folder in ("static/0", "released/0", "mine"):
        copy = tmp_path / folder / "checkpoints" / "last.ckpt"
        copy.parent.mkdir(parents=True)
        copy.write_bytes(checkpoint.read_bytes())
        names += [panel.label for panel in panels([str(copy)], num=1)]
    assert names == ["static/0", "released/0", "mine"]
