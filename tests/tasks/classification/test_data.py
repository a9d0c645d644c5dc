"""Whole batches: from a configuration and real files to what the model is given."""

from __future__ import annotations

import pickle
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weightformer.tasks.classification.data import DataConfig, ImageData, eval_transform, read_image

CLASSES = ["1", "10", "2"]  # plain sorting, not by value
HEAVY = {"scale": (0.2, 1.0), "hflip": 0.5, "rand_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5, "pad_crop": 2}


def write_images(folder: Path, count: int, classes: Sequence[str] = CLASSES, mode: str = "RGB") -> None:
    """Images that differ, of sizes that differ."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            array = rng.integers(0, 256, (20 + i, 30, 3), np.uint8)
            Image.fromarray(array).convert(mode).save(folder / name / f"{i}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_images(tmp_path / "train", 7)
    write_images(tmp_path / "val", 3)
    return tmp_path


def make(root: Path | None = None, /, in_chans: int = 3, **options: Any) -> ImageData:
    """Data of a folder, or of the digits without one."""
    names = ("rank", "world_size", "class_names", "seed")
    rest = {name: options.pop(name) for name in names if name in options}
    source = {"source": "folder", "root": str(root)} if root else {"source": "digits", "crop_pct": 1.0}
    config = DataConfig(**{**source, "image_size": 16, "batch_size": 4, **options})
    return ImageData(config, in_chans=in_chans, mean=[0.5] * in_chans, std=[0.25] * in_chans, **{"seed": 0, **rest})


def batches(data: ImageData, *epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = data.train_loader()
    found = []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        found += list(loader)
    return found


def assert_same(a: Sequence[Any], b: Sequence[Any]) -> None:
    torch.testing.assert_close(list(a), list(b), rtol=0, atol=0)


# What a batch is


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("source", ["folder", "digits"])
@pytest.mark.parametrize("augmentation", [{}, HEAVY], ids=["plain", "heavy"])
def test_batches_have_the_promised_form(source: str, in_chans: int, augmentation: dict[str, Any], root: Path) -> None:
    data = make(root if source == "folder" else None, in_chans, **augmentation)
    for loader in (data.train_loader(), data.val_loader()):
        images, labels = next(iter(loader))
        assert images.shape == (4, in_chans, 16, 16)
        assert images.dtype == torch.float32
        assert images.isfinite().all()
        assert labels.shape == (4,)
        assert labels.dtype == torch.int64
        assert 0 <= labels.min() <= labels.max() < len(data.class_names)


def test_evaluation_sees_every_image_once_as_prediction_would(root: Path) -> None:
    data = make(root)
    images, labels = (torch.cat(parts) for parts in zip(*data.val_loader(), strict=True))
    transform = eval_transform(data.config, 3, [0.5] * 3, [0.25] * 3)
    files = [(root / "val" / name / f"{i}.png", label) for label, name in enumerate(CLASSES) for i in range(3)]
    expected = torch.stack([transform(read_image(path, 3, 10**6)) for path, _ in files])
    assert torch.equal(images, expected)
    assert labels.tolist() == [label for _, label in files]
    assert data.class_names == CLASSES
    assert (data.num_train, data.num_val) == (21, 9)


def test_grey_files_follow_in_chans(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, 2, mode="L")
    (grey, _), (rgb, _) = (next(iter(make(tmp_path, in_chans).val_loader())) for in_chans in (1, 3))
    assert torch.equal(grey.expand(-1, 3, -1, -1), rgb)


@pytest.mark.parametrize("in_chans", [2, 4, 13])
def test_arrays_of_many_channels_train_too(in_chans: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                np.save(tmp_path / split / name / f"{i}.npy", rng.random((20, 30, in_chans), np.float32))
    data = make(tmp_path, in_chans, **{**HEAVY, "rand_augment": ""})
    for loader in (data.train_loader(), data.val_loader()):
        images, _ = next(iter(loader))
        assert images.shape == (4, in_chans, 16, 16)
        assert images.isfinite().all()
    means = images.mean((0, 2, 3))
    assert len(means.unique()) == in_chans  # no channel was repeated
    with pytest.raises(ValueError, match=r"data\.rand_augment"):
        make(tmp_path, in_chans, rand_augment="rand-m9")


def test_statistics_and_channels_have_to_agree(root: Path) -> None:
    config = DataConfig(source="folder", root=str(root))
    with pytest.raises(ValueError, match="mean has 3 values for 1 input channels"):
        ImageData(config, in_chans=1, mean=[0.5] * 3, std=[0.5], seed=0)
    with pytest.raises(ValueError, match=r"digits is grey: model\.in_chans must be 1 or 3, not 4"):
        make(None, 4)


def test_digits_show_what_scikit_learn_holds() -> None:
    from sklearn.datasets import load_digits

    data = make(image_size=8, in_chans=1)
    assert (data.num_train, data.num_val, data.class_names) == (1437, 360, list("0123456789"))
    originals = {image.tobytes(): label for image, label in zip(*load_digits(return_X_y=True), strict=True)}
    seen = 0
    for images, labels in data.val_loader():
        for image, label in zip(images, labels, strict=True):
            values = ((image * 0.25 + 0.5) * 16).round().double().flatten().numpy()
            seen += originals[values.tobytes()] == label
    assert seen == 360


def test_digits_are_resized_as_pil_would() -> None:
    small, large = (next(iter(make(image_size=size, in_chans=1).val_loader()))[0] for size in (8, 32))
    pictures = [Image.fromarray(((image[0] * 0.25 + 0.5) * 255).round().byte().numpy()) for image in small]
    expected = np.stack([np.asarray(p.resize((32, 32), Image.Resampling.BICUBIC)) for p in pictures])
    np.testing.assert_allclose((large[:, 0].numpy() * 0.25 + 0.5) * 255, expected, atol=1.01)  # rounding


# Every option changes something


@pytest.mark.parametrize(
    "option",
    [
        {"scale": (0.3, 0.6)},
        {"hflip": 0.5},
        {"rand_augment": "rand-m9"},
        {"erasing": 0.9},
        {"pad_crop": 1},
        {"image_size": 12},
        {"crop_pct": 0.5},
        {"crop_mode": "center", "crop_pct": 0.5},
        {"interpolation": "bilinear"},
        {"batch_size": 5},
    ],
    ids=lambda option: "-".join(option),
)
@pytest.mark.parametrize("source", ["folder", "digits"])
def test_every_option_changes_the_batch(source: str, option: dict[str, Any], root: Path) -> None:
    folder = root if source == "folder" else None
    (plain, _), *_ = batches(make(folder), 0)
    (varied, _), *_ = batches(make(folder, **option), 0)
    assert plain.shape != varied.shape or not torch.equal(plain, varied)


def test_crop_mode_and_ratio_matter(root: Path) -> None:
    for a, b in (
        ({"crop_mode": "center"}, {"crop_mode": "squash"}),
        ({"scale": (0.3, 0.6)}, {"scale": (0.3, 0.6), "ratio": (1.0, 1.0)}),
    ):
        assert not torch.equal(batches(make(root, **a), 0)[0][0], batches(make(root, **b), 0)[0][0])


def test_the_last_smaller_batch_is_left_out_unless_it_is_the_only_one(root: Path) -> None:
    assert [len(labels) for _, labels in batches(make(root), 0)] == [4] * 5
    assert [len(labels) for _, labels in batches(make(root, batch_size=100), 0)] == [21]
    assert [len(labels) for _, labels in make(root).val_loader()] == [4, 4, 1]


# Randomness and order


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_workers_and_reruns_change_nothing_epochs_and_seeds_everything(source: str, root: Path) -> None:
    folder = root if source == "folder" else None
    options: dict[str, Any] = {**HEAVY, "batch_size": 7 if folder else 479}
    runs = [batches(make(folder, **options, num_workers=n), 0, 1) for n in (0, 2)]
    assert_same(runs[0], runs[1])
    images = torch.cat([image for image, _ in runs[0]])
    assert len(images) == (42 if folder else 2874)
    distinct = len({image.numpy().tobytes() for image in images})
    assert distinct == 42 if folder else distinct > 2850  # a few digits are posterised to black
    other = torch.cat([image for image, _ in batches(make(folder, **options, seed=1), 0)])
    seen = {image.numpy().tobytes() for image in images}
    assert sum(image.numpy().tobytes() in seen for image in other) <= (0 if folder else 20)


@pytest.mark.parametrize("augmentation", [{"scale": (0.2, 0.9)}, {"pad_crop": 4}, {"erasing": 1.0}])
def test_the_seed_reaches_order_and_augmentation(augmentation: dict[str, Any], root: Path) -> None:
    first, second = (make(root, seed=seed, **augmentation).train_loader() for seed in (0, 1))
    assert list(first.sampler) != list(second.sampler)
    keys = [(0, i) for i in range(8)]
    assert not torch.equal(first.dataset.__getitems__(keys)[0], second.dataset.__getitems__(keys)[0])


@pytest.mark.parametrize("source", ["folder", "fashion_mnist"])
def test_equal_images_are_cropped_each_in_its_own_way(source: str, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    if source == "folder":
        for name in ("a", "b"):
            (tmp_path / "train" / name).mkdir(parents=True)
            for i in range(6):
                Image.fromarray(image).save(tmp_path / "train" / name / f"{i}.png")
    else:
        for name, array in (("images-idx3", np.stack([image] * 12)), ("labels-idx1", np.zeros(12, np.uint8))):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (tmp_path / f"train-{name}-ubyte").write_bytes(header + array.tobytes())
    data = make(tmp_path, 1, source=source, scale=(0.2, 1.0), batch_size=12)
    images = torch.cat([images for images, _ in batches(data, 0, 1)])
    assert len({image.numpy().tobytes() for image in images}) >= 22  # of 24; few boxes are drawn twice


@pytest.mark.parametrize("source", ["folder", "digits"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_is_exact(source: str, num_workers: int, root: Path) -> None:
    def data() -> ImageData:
        size = {"batch_size": 4} if source == "folder" else {"batch_size": 300}
        return make(root if source == "folder" else None, num_workers=num_workers, **{**HEAVY, **size})

    whole = batches(data(), 1)
    loader = data().train_loader()
    loader.sampler.set_epoch(1)
    iterator = iter(loader)
    before = [next(iterator), next(iterator)]
    resumed = data().train_loader()
    resumed.load_state_dict(loader.state_dict())
    assert_same(before + list(resumed), whole)


def test_ranks_share_an_epoch_and_no_random_numbers(root: Path) -> None:
    options: dict[str, Any] = {**HEAVY, "batch_size": 5, "world_size": 2}
    ranks = [batches(make(root, rank=rank, **options), 0) for rank in range(2)]
    assert [len(labels) for rank in ranks for _, labels in rank] == [5, 5, 5, 5]
    images = torch.cat([image for rank in ranks for image, _ in rank])
    assert len({image.numpy().tobytes() for image in images}) == 20


@pytest.mark.parametrize("world_size", [2, 4, 12])
def test_evaluation_counts_every_image_once_over_all_ranks(world_size: int, root: Path) -> None:
    whole = list(make(root).val_loader())
    ranks = [list(make(root, rank=rank, world_size=world_size).val_loader()) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1  # none waits for another for ever
    parts = [batch for rank in ranks for batch in rank]
    assert {images.shape[1:] for images, _ in parts} == {(3, 16, 16)}
    found = sorted(image.numpy().tobytes() for images, _ in parts for image in images)
    assert found == sorted(image.numpy().tobytes() for images, _ in whole for image in images)


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_datasets_travel_to_spawned_workers(source: str, root: Path) -> None:
    data = make(root if source == "folder" else None, **HEAVY)
    keys = [(0, 1), (0, 2)]
    dataset = data.train_loader().dataset
    copy = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - our own bytes
    assert_same(copy.__getitems__(keys), dataset.__getitems__(keys))


# Images that cannot be read


def damage(root: Path, *names: str) -> list[str]:
    paths = [root / name for name in names]
    for path, content in zip(paths, [b"", b"no image", paths[-1].read_bytes()[:60]], strict=False):
        path.write_bytes(content)
    return [str(path) for path in paths]


def failure(loader: Any) -> str:
    """The message of the error; keeping the error itself would keep the workers waiting."""
    try:
        list(loader)
    except ValueError as error:
        return str(error)
    pytest.fail("no error was raised")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_bad_image_stops_the_run_and_is_named(split: str, num_workers: int, root: Path) -> None:
    (path,) = damage(root, f"{split}/2/1.png")
    data = make(root, num_workers=num_workers)
    message = failure(data.train_loader() if split == "train" else data.val_loader())
    assert message.startswith(f"cannot read image {path}: ")
    assert "data.on_bad_image: skip" in message
    assert "\n" not in message  # no worker's traceback


@pytest.mark.filterwarnings("ignore:passed over")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_puts_the_next_readable_image_in_the_place_of_a_bad_one(num_workers: int, root: Path) -> None:
    intact = make(root, batch_size=21).train_loader()
    ((images, labels),) = intact
    bad = damage(root, "train/1/6.png", "train/10/0.png", "train/2/6.png")
    data = make(root, batch_size=21, num_workers=num_workers, on_bad_image="skip")
    loader = data.train_loader()
    ((replaced, replaced_labels),) = loader
    order = [index for _, index in intact.sampler]
    substitute = {6: 8, 7: 8, 20: 0}
    for place, index in enumerate(order):
        source = order.index(substitute.get(index, index))
        assert torch.equal(replaced[place], images[source])
        assert replaced_labels[place] == labels[source]
    assert data.skipped == bad
    list(loader)
    assert data.skipped == bad  # counted once, not in every epoch


@pytest.mark.filterwarnings("ignore:passed over")
def test_bad_images_leave_ranks_in_step_and_a_resumed_run_exact(root: Path) -> None:
    damage(root, "train/1/6.png", "train/10/0.png", "train/2/6.png")
    options: dict[str, Any] = {**HEAVY, "on_bad_image": "skip", "world_size": 2, "batch_size": 2}
    ranks = [batches(make(root, rank=rank, **options), 0) for rank in range(2)]
    assert [len(labels) for rank in ranks for _, labels in rank] == [2] * 10
    resumed = make(root, rank=1, **options).train_loader()
    resumed.load_state_dict({**resumed.state_dict(), "batches": 2})
    assert_same(list(resumed), ranks[1][2:])


@pytest.mark.filterwarnings("ignore:passed over")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_leaves_bad_images_out_and_counts_them(num_workers: int, root: Path) -> None:
    whole = {image.numpy().tobytes() for images, _ in make(root).val_loader() for image in images}
    bad = damage(root, "val/1/0.png", "val/10/2.png", "val/2/2.png")
    data = make(root, num_workers=num_workers, batch_size=1, on_bad_image="skip")
    found = list(data.val_loader())
    assert [len(labels) for _, labels in found] == [0, 1, 1, 1, 1, 0, 1, 1, 0]
    assert torch.cat([labels for _, labels in found]).tolist() == [0, 0, 1, 1, 2, 2]
    assert found[0][0].shape == (0, 3, 16, 16)
    assert {image.numpy().tobytes() for images, _ in found for image in images} < whole
    assert data.skipped == bad


def test_a_passed_over_image_is_announced_once_and_not_read_again(root: Path) -> None:
    (path,) = damage(root, "val/1/0.png")
    loader = make(root, on_bad_image="skip").val_loader()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, second = list(loader), list(loader)
    assert_same(first, second)
    assert [path in str(w.message) for w in caught if "passed over" in str(w.message)] == [True]


@pytest.mark.filterwarnings("ignore:passed over")
def test_a_dataset_of_bad_images_ends(root: Path) -> None:
    for path in (root / "train").rglob("*.png"):
        path.write_text("no image")
    with pytest.raises(ValueError, match="none of the 21 training images can be read"):
        list(make(root, on_bad_image="skip").train_loader())


def test_a_file_that_vanished_is_not_passed_over(root: Path) -> None:
    loader = make(root, on_bad_image="skip").val_loader()
    (root / "val" / "1" / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"0\.png"):
        list(loader)


def test_large_images_follow_max_pixels_through_the_crop(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"data\.max_pixels \(599\)"):
        list(make(root, max_pixels=599).val_loader())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL would refuse these images, and crops of them
    data = make(root, scale=(0.9, 1.0))
    assert len(batches(data, 0)) == 5
    assert Image.MAX_IMAGE_PIXELS == 100


# Classes


def test_splits_with_other_classes_are_refused_with_the_differences(root: Path) -> None:
    (root / "val" / "2").rename(root / "val" / "3")
    with pytest.raises(ValueError, match=r"val are not those of .*train: missing 2; unknown 3"):
        make(root)


def test_many_differences_are_cut_short(root: Path) -> None:
    names = [f"x{i}" for i in range(12)]
    with pytest.raises(ValueError, match=r"missing x0, .*, x9, \.\.\. \(12 in all\); unknown 1, 10, 2$"):
        make(root, class_names=names)


def test_labels_follow_the_order_of_a_model_s_classes(root: Path) -> None:
    data = make(root, class_names=["10", "2", "1"])
    assert data.class_names == ["10", "2", "1"]
    labels = torch.cat([labels for _, labels in data.val_loader()])
    assert labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    first, _ = next(iter(data.val_loader()))
    other, other_labels = list(make(root).val_loader())[0:2][0]
    assert other_labels[3] == 1
    assert torch.equal(first[0], other[3])  # the image of class "10"


def test_a_model_of_other_classes_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"train are not those of the model: missing cat; unknown 2"):
        make(root, class_names=["1", "10", "cat"])
    with pytest.raises(ValueError, match="class names of the model are not all different: 1, 1, 10, 2"):
        make(root, class_names=["1", "10", "2", "1"])
    with pytest.raises(ValueError, match="digits are in another order than those of the model"):
        make(class_names=list("9876543210"))


def test_a_class_without_images_is_refused_in_training_only(root: Path) -> None:
    for split in ("train", "val"):
        for path in (root / split / "10").iterdir():
            path.unlink()
    data = make(root)
    with pytest.raises(ValueError, match=r"class folder .*10 holds no images"):
        data.train_loader()
    with pytest.warns(UserWarning, match=r"class folder .*10 holds no images"):
        loader = data.val_loader()
    assert torch.cat([labels for _, labels in loader]).tolist() == [0] * 3 + [2] * 3


def test_evaluation_needs_no_training_images(root: Path) -> None:
    (root / "train").rename(root / "other")
    data = make(root, class_names=CLASSES)
    assert data.num_val == 9
    with pytest.raises(FileNotFoundError, match=r"holds no train/ folder"):
        data.train_loader()


def test_missing_folders_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        make(tmp_path / "nowhere")
    (root / "val").rename(root / "other")
    data = make(root)
    assert data.num_train == 21
    with pytest.raises(FileNotFoundError, match=r"holds no val/ folder"):
        data.val_loader()


# Configuration


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"source": "folder"}, r"data\.root is needed"),
        ({"root": "x"}, r"data\.root has no use"),
        ({"image_size": 0}, r"data\.image_size must be at least 1, got 0"),
        ({"batch_size": 0}, r"data\.batch_size"),
        ({"num_workers": -1}, r"data\.num_workers"),
        ({"max_pixels": 0}, r"data\.max_pixels"),
        ({"pad_crop": -1}, r"data\.pad_crop must be at least 0"),
        ({"pad_crop": 40, "image_size": 32}, r"data\.pad_crop \(40\) is larger than the image \(32\)"),
        ({"hflip": 1.1}, r"data\.hflip is a probability"),
        ({"erasing": -0.1}, r"data\.erasing is a probability"),
        ({"hflip": float("nan")}, r"data\.hflip is a probability"),
        ({"crop_pct": 0.0}, r"data\.crop_pct must be in \[0\.1, 1\]"),
        ({"crop_pct": 1.1}, r"data\.crop_pct"),
        ({"crop_pct": float("nan")}, r"data\.crop_pct"),
        ({"scale": (0.5, 0.1)}, r"data\.scale must be two rising shares"),
        ({"scale": (0.0, 1.0)}, r"data\.scale"),
        ({"scale": (0.1, 2.0)}, r"data\.scale"),
        ({"ratio": (2.0, 1.0)}, r"data\.ratio must be two rising positive"),
        ({"ratio": (0.0, 1.0)}, r"data\.ratio"),
        ({"rand_augment": "augmix-m3"}, r"data\.rand_augment 'augmix-m3' is not in timm's notation"),
        ({"rand_augment": "rand-x9"}, r"data\.rand_augment"),
        ({"rand_augment": "rand-m9.5"}, r"data\.rand_augment"),
    ],
)
def test_settings_out_of_range_are_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**option)
