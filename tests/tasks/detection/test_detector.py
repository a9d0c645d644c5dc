"""Both detectors: one image's result is its own, every parameter learns, odd inputs pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightformer.tasks.detection import Config
from weightformer.tasks.detection.config import HeadConfig
from weightformer.tasks.detection.data import DetectionData
from weightformer.tasks.detection.detector import Detector
from weightformer.tasks.detection.metrics import coco_metrics, coco_results
from weightformer.training.config import ModelConfig, OptimConfig
from weightformer.training.optim import build_optimizer

HEAD = {"channels": 16, "fc_channels": 32, "num_convs": 1, "proposals": 30, "roi_samples": 16, "detections": 10}


def build(kind: str = "mask", model: dict[str, Any] | None = None, **head: Any) -> Detector:
    config = ModelConfig(**{"name": "weightformer_micro", "kwargs": {"embed_dim": 16, "depth": 2}, **(model or {})})
    return Detector(config, HeadConfig(kind=kind, **{**HEAD, "score_threshold": 0.0, **head}), num_classes=3)


def target(count: int, height: int, width: int, labels: list[int] | None = None) -> dict[str, Tensor]:
    boxes = torch.tensor([[4.0 + 9 * i, 6.0, 26.0 + 9 * i, 30.0] for i in range(count)]).reshape(count, 4)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (x, y, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y:bottom, x:right] = 1
    return {"boxes": boxes, "masks": masks, "labels": torch.tensor(labels or [1 + i % 3 for i in range(count)]).long()}


@pytest.fixture(params=["mask", "cascade"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_result_does_not_depend_on_the_batch(kind: str) -> None:
    """Alone, with a larger image, and four of a size: features and detections of an image stay its own."""
    detector = build(kind).eval()
    small, large, others = torch.randn(3, 60, 77), torch.randn(3, 100, 130), [torch.randn(3, 60, 77) for _ in range(3)]
    with torch.no_grad():
        alone = detector([small])[0]
        for batch in ([small, large], [large, small], [*others, small]):
            together = detector(batch)[batch.index(small)] if batch[0] is small else detector(batch)[-1]
            assert len(together["scores"]) == len(alone["scores"]) > 0
            for key in ("boxes", "scores", "masks"):
                torch.testing.assert_close(together[key], alone[key], atol=1e-4, rtol=1e-4)
            assert torch.equal(together["labels"], alone["labels"])
        features = detector.trunk(torch.stack([small, *others]))["0"][:1]
        torch.testing.assert_close(features, detector.trunk(small[None])["0"], atol=1e-4, rtol=1e-4)


BACKBONES: list[dict[str, Any]] = [
    {},
    {"kwargs": {"embed_dim": 16, "depth": 2, "dynamic_every": 0}},
    {
        "name": "deit_tiny_patch16_224",
        "kwargs": {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "img_size": 28},
    },
    {"name": "convnext_atto", "kwargs": {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}},
    {"name": "pvt_v2_b0", "kwargs": {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 1, 1, 1)}},
]


@pytest.mark.parametrize("model", BACKBONES, ids=lambda m: m.get("name", "weightformer" + "_static" * bool(m)))
def test_every_parameter_has_a_gradient(kind: str, model: dict[str, Any]) -> None:
    """Also where one image has no object and none has a positive proposal beyond it, so DDP needs no flag."""
    detector = build(kind, model).train()
    losses = detector([torch.randn(3, 64, 64), torch.randn(3, 50, 70)], [target(2, 64, 64), target(0, 50, 70)])
    assert all(torch.isfinite(loss) for loss in losses.values()), losses
    sum(losses.values()).backward()
    assert not [n for n, p in detector.named_parameters() if p.grad is None]
    detector.zero_grad()
    sum(detector([torch.randn(3, 64, 64)], [target(0, 64, 64)]).values()).backward()
    assert not [n for n, p in detector.named_parameters() if p.grad is None]


def test_losses_of_the_cascade_are_named_by_stage() -> None:
    losses = build("cascade").train()([torch.randn(3, 64, 64)], [target(2, 64, 64)])
    stages = {f"loss_{part}_{i}" for part in ("classifier", "box_reg") for i in range(3)}
    assert losses.keys() == stages | {"loss_objectness", "loss_rpn_box_reg", "loss_mask"}


def test_three_stages_weigh_on_the_pyramid_as_one() -> None:
    heads = build("cascade").train().roi_heads
    features = {str(i): torch.randn(1, 16, 16 >> i, 16 >> i, requires_grad=True) for i in range(4)}
    boxes, sizes = [torch.tensor([[3.0, 4.0, 40.0, 50.0]])], [(64, 64)]
    scores, _ = heads._run_stage(0, features, boxes, sizes)
    pooled = heads.box_roi_pool(features, boxes, sizes)
    alone, _ = heads.box_predictor[0](heads.box_head[0](pooled))
    torch.testing.assert_close(scores, alone)
    shared, whole = (
        torch.autograd.grad(x.square().sum(), features["0"], retain_graph=True)[0] for x in (scores, alone)
    )
    torch.testing.assert_close(shared, whole / 3)


def test_losses_are_means_over_images(kind: str) -> None:
    """A batch of different sizes weighs each image the same: three groups, one image each."""
    detector = build(kind).train()
    images = [torch.randn(3, 64, 64), torch.randn(3, 60, 64), torch.randn(3, 64, 56)]
    targets = [target(2, *image.shape[1:]) for image in images]
    for sampler in (detector.rpn.fg_bg_sampler, detector.roi_heads.fg_bg_sampler):
        sampler.batch_size_per_image = 10**6  # nothing is drawn at random
    whole = detector(images, targets)["loss_objectness"]
    single = [detector([i], [t])["loss_objectness"] for i, t in zip(images, targets, strict=True)]
    torch.testing.assert_close(whole, torch.stack(single).mean())


@pytest.mark.parametrize("size", [(5, 7), (16, 200), (97, 131)])
def test_sizes_that_are_no_multiple_of_anything(kind: str, size: tuple[int, int]) -> None:
    detector = build(kind).eval()
    with torch.no_grad():
        (found,) = detector([torch.randn(3, *size)])
    assert found["boxes"].isfinite().all()
    assert (found["boxes"] <= torch.tensor([size[1], size[0]] * 2)).all()
    losses = detector.train()([torch.randn(3, *size)], [target(0, *size)])
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_the_first_image_does_not_settle_the_scales() -> None:
    # 9 px, padded to one patch of 16, look like a larger scale.
    model = {"name": "weightformer_tiny", "kwargs": {"embed_dim": 16, "depth": 2}}
    a, b = build(model=model).eval(), build(model=model).eval()
    b.load_state_dict(a.state_dict())
    image = torch.randn(3, 90, 90)
    with torch.no_grad():
        b([torch.randn(3, 9, 9)])
        torch.testing.assert_close(b([image])[0]["scores"], a([image])[0]["scores"])


def test_anchors_lie_on_the_strides() -> None:
    detector = build(anchor_scale=2.0)
    seen: dict[str, Any] = {}
    detector.rpn.anchor_generator.register_forward_hook(lambda _, __, anchors: seen.update(anchors=anchors))
    with torch.no_grad():
        detector.eval()([torch.randn(3, 100, 100)])
    (anchors,) = seen["anchors"]
    centers, sides = (anchors[:, :2] + anchors[:, 2:]) / 2, (anchors[:, 2:] - anchors[:, :2]).prod(1).sqrt()
    start = 0
    for stride in (4, 8, 16, 32, 64):
        count = 3 * (-(-100 // stride)) ** 2
        level = slice(start, start + count)
        assert (centers[level] % stride == 0).all()
        torch.testing.assert_close(sides[level], torch.full((count,), 2.0 * stride), rtol=0.1, atol=0)
        start += count
    assert start == len(anchors)


def test_nothing_found_is_a_result(kind: str) -> None:
    detector = build(kind, score_threshold=1.0).eval()
    with torch.no_grad():
        (found,) = detector([torch.randn(3, 40, 40)])
        assert detector([]) == []
    assert (found["boxes"].shape, found["masks"].shape) == ((0, 4), (0, 1, 28, 28))
    assert coco_results(found, image_id=1, size=(40, 40), scaled_size=(40, 40), category_ids=[3, 7, 9]) == []


def test_labels_out_of_range_are_named() -> None:
    detector = build().train()
    for bad in (0, 4):
        wanted = target(1, 64, 64, [bad]) | {"image_id": 139}
        with pytest.raises(ValueError, match=rf"labels \[{bad}\] are not all in 1..3 .*image 139"):
            detector([torch.randn(3, 64, 64)], [wanted])
    with pytest.raises(ValueError, match="needs targets"):
        detector([torch.randn(3, 64, 64)])


def test_mixed_precision(kind: str) -> None:
    detector = build(kind).train()
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector([torch.randn(3, 64, 64)], [target(2, 64, 64)])
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in detector.parameters())


def test_learning_rates_fall_with_depth() -> None:
    detector = build(model={"kwargs": {"embed_dim": 16, "depth": 3}})
    config = OptimConfig(lr=1.0, lr_batch=0, warmup_epochs=0, layer_decay=0.5)
    optimizer, _ = build_optimizer(detector, config, global_batch=1, total_steps=10, steps_per_epoch=1)
    names = {id(p): name for name, p in detector.named_parameters()}
    rates = {names[id(p)]: group["initial_lr"] for group in optimizer.param_groups for p in group["params"]}
    assert len(rates) == len(names)
    by_depth = [rates["trunk.body.patch_embed.proj.weight"]] + [
        rates[f"trunk.body.blocks.{i}.fc2.weight"] for i in range(3)
    ]
    assert by_depth == pytest.approx([by_depth[-1] / 2 ** (3 - i) for i in range(4)])
    assert {rate for name, rate in rates.items() if not name.startswith("trunk.body")} == {1.0}
    assert by_depth[-1] < 1.0


def test_head_options_take_effect() -> None:
    def parameters(**head: Any) -> int:
        return sum(p.numel() for p in build(**head).parameters())

    plain = parameters()
    assert parameters(strides=[8, 16]) != plain
    for name, value in (("channels", 24), ("fc_channels", 40), ("num_convs", 2), ("kind", "cascade")):
        assert parameters(**{name: value}) > plain, name
    image = torch.randn(3, 64, 64)
    with torch.no_grad():
        detector = build().eval()
        assert len(detector([image])[0]["boxes"]) == 10
        detector.roi_heads.nms_thresh = 0.0
    for name, attribute in (("detections", "detections_per_img"), ("nms_threshold", "nms_thresh")):
        value = {"detections": 3, "nms_threshold": 0.25}[name]
        assert getattr(build(**{name: value}).roi_heads, attribute) == value
    assert build(rpn_samples=7).rpn.fg_bg_sampler.batch_size_per_image == 7
    assert build(roi_samples=7).roi_heads.fg_bg_sampler.batch_size_per_image == 7
    assert build(proposals=9).rpn.post_nms_top_n() == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"strides": [4, 16]},
        {"strides": []},
        {"channels": 0},
        {"num_convs": 0},
        {"score_threshold": 2.0},
        {"window": -1},
    ],
)
def test_refused_heads(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"head\."):
        HeadConfig(**changes)


def test_it_learns_a_few_scenes(kind: str, small_config: Callable[..., Config], scenes: Path) -> None:
    """Two images, learnt by heart: the whole path from annotation file to average precision fits together."""
    config = small_config(data__hflip=0)
    data = DetectionData(config.data, in_chans=1, mean=[0.286], std=[0.353], seed=0)
    batches = list(data.train_loader())
    chosen = [(i, t) for images, targets in batches for i, t in zip(images, targets, strict=True) if len(t["labels"])][
        :2
    ]
    images, targets = [i for i, _ in chosen], [t for _, t in chosen]
    model = ModelConfig(name="weightformer_micro", kwargs={"embed_dim": 32, "depth": 2}, in_chans=1)
    head = HeadConfig(
        kind=kind, channels=32, fc_channels=64, num_convs=1, anchor_scale=4.0, proposals=60, roi_samples=64
    )
    detector = Detector(model, head, len(data.categories)).train()
    optimizer = torch.optim.AdamW(detector.parameters(), 2e-3)
    for _ in range(80):
        optimizer.zero_grad()
        sum(detector(images, targets).values()).backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 1.0)
        optimizer.step()
    detector.eval()
    with torch.no_grad():
        found = detector(images)
    numbers, results = list(data.categories), []
    for f, t in zip(found, targets, strict=True):
        results += coco_results(f, image_id=t["image_id"], size=t["size"], scaled_size=t["size"], category_ids=numbers)
    truth = data.train.ground_truth()
    wanted = {t["image_id"] for t in targets}
    truth["images"] = [image for image in truth["images"] if image["id"] in wanted]
    truth["annotations"] = [a for a in truth["annotations"] if a["image_id"] in wanted]
    values = coco_metrics(truth, results)
    assert values["box_ap50"] > 0.8, values
    assert values["mask_ap50"] > 0.6, values
