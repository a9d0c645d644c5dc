"""Average precision: COCO's own to six digits, 1.0 for the truth, 0.0 for nothing."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightformer.tasks.detection.coco import CocoSet, decode_mask, encode_mask
from weightformer.tasks.detection.metrics import CocoMetrics, coco_metrics, coco_results


@pytest.fixture(scope="module")
def coco(scenes: Path) -> CocoSet:
    return CocoSet(scenes / "annotations" / "instances_train2017.json", scenes / "train2017")


def truth_as_results(coco: CocoSet) -> list[dict[str, Any]]:
    records = []
    for image in coco.images:
        for a in (a for a in image.annotations if not a["iscrowd"]):
            mask = encode_mask(decode_mask(a["segmentation"], image.height, image.width))
            record = {key: a[key] for key in ("image_id", "category_id", "bbox")}
            records.append({**record, "score": 1.0, "segmentation": mask})
    return records


def perturbed(coco: CocoSet, seed: int) -> list[dict[str, Any]]:
    """The truth, moved by some pixels, some given twice, of the wrong class, or missing; ties among the scores."""
    rng, categories = np.random.default_rng(seed), list(coco.categories)
    records = []
    for record in truth_as_results(coco):
        for _ in range(rng.integers(0, 4)):
            mask = decode_mask(record["segmentation"], 64, 64)
            moved = np.roll(mask, rng.integers(-4, 5, 2), (0, 1))
            box = (np.array(record["bbox"]) + rng.normal(0, 2, 4)).clip(0.5).tolist()
            label = record["category_id"] if rng.random() < 0.7 else int(rng.choice(categories))
            records.append(
                {
                    "image_id": record["image_id"],
                    "category_id": label,
                    "bbox": box,
                    "score": round(float(rng.random()), 1),
                    "segmentation": encode_mask(moved),
                }
            )
    return records


def test_the_truth_scores_one(coco: CocoSet) -> None:
    values = coco_metrics(coco.ground_truth(), truth_as_results(coco))
    assert values.keys() >= {f"{kind}_{name}" for kind in ("box", "mask") for name in ("ap", "ap50", "ap75")}
    assert all(value == pytest.approx(1.0, abs=1e-9) for value in values.values()), values


def test_nothing_found_scores_zero(coco: CocoSet) -> None:
    values = coco_metrics(coco.ground_truth(), [])
    assert values["box_ap"] == values["mask_ap50"] == 0.0
    assert "box_ap_large" not in values, "no object is that large"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_to_pycocotools(coco: CocoSet, seed: int) -> None:
    pycocotools = pytest.importorskip("pycocotools.coco", reason="needs pycocotools, the witness")
    from pycocotools.cocoeval import COCOeval

    results = perturbed(coco, seed)
    values = coco_metrics(coco.ground_truth(), results)
    assert 0.05 < values["box_ap"] < 0.9
    assert abs(values["box_ap"] - values["mask_ap"]) > 0.01
    with contextlib.redirect_stdout(io.StringIO()):
        truth = pycocotools.COCO()
        truth.dataset = copy.deepcopy(coco.ground_truth())
        truth.createIndex()
        for kind, name, other in (("bbox", "box", "segmentation"), ("segm", "mask", "bbox")):
            records = [{k: copy.deepcopy(v) for k, v in r.items() if k != other} for r in results]
            evaluation = COCOeval(truth, truth.loadRes(records), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            for place, statistic in enumerate(("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")):
                theirs = evaluation.stats[place]
                assert values.get(f"{name}_{statistic}", -1) == pytest.approx(theirs, abs=1e-6), (kind, statistic)


def test_results_are_in_the_image_own_pixels_and_ids() -> None:
    found = {
        "boxes": torch.tensor([[10.0, 4.0, 20.0, 12.0], [0.0, 0.0, 4.0, 2.0]]),
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.9, 0.2]),
        "masks": torch.ones(2, 1, 28, 28),
    }
    first, second = coco_results(found, image_id=139, size=(50, 80), scaled_size=(25, 20), category_ids=[3, 90])
    assert (first["image_id"], first["category_id"], second["category_id"]) == (139, 90, 3)
    assert first["bbox"] == [40, 8, 40, 16]
    mask = decode_mask(first["segmentation"], 50, 80)
    assert mask[8:24, 40:80].mean() > 0.9
    assert mask.sum() < 1.2 * 40 * 16
    assert json.loads(json.dumps([first, second]))[0] == first


def test_metrics_collect_and_forget(coco: CocoSet) -> None:
    metrics = CocoMetrics(coco)
    records = truth_as_results(coco)
    metrics.update(records[:5])
    metrics.update(records[5:])
    assert metrics.compute()["box_ap"] == pytest.approx(1.0)
    assert metrics.compute()["box_ap"] == 0.0


def test_categories_from_zero(coco_file: Callable[..., Path]) -> None:
    annotations = [
        {
            "id": i,
            "image_id": 1 + i % 2,
            "category_id": i % 2,
            "bbox": [i, 2, 9, 7],
            "segmentation": [[i, 2, i + 9, 2, i + 9, 9, i, 9]],
        }
        for i in range(4)
    ]
    path = coco_file(annotations, categories=[1, 0])
    coco = CocoSet(path, path.parent.parent / "val2017")
    truth = coco.ground_truth()
    results = [
        {**a, "score": 0.5, "segmentation": encode_mask(decode_mask(a["segmentation"], 20, 30))}
        for a in truth["annotations"]
    ]
    values = coco_metrics(truth, results)
    assert values["box_ap"] == values["mask_ap"] == pytest.approx(1.0)
