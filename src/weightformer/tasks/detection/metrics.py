"""COCO's mean average precision of boxes and masks, the same for any number of processes; and COCO's result format."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from weightformer.tasks.detection.coco import CocoSet, encode_mask

__all__ = ["CocoMetrics", "coco_metrics", "coco_results"]

Result = dict[str, Any]

_STATISTICS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # the first six that COCO prints


def coco_results(
    found: Mapping[str, Tensor],
    *,
    image_id: int,
    size: tuple[int, int],
    scaled_size: tuple[int, int],
    category_ids: Sequence[int],
) -> list[Result]:
    """A detector's output for one image as COCO's result records, in the image's own pixels.

    Args:
        found: of `Detector`.
        image_id: the annotation file's number for the image.
        size: height and width of the image.
        scaled_size: height and width that the detector saw.
        category_ids: the annotation file's id of label 1, label 2, ...
    """
    (height, width), (seen_height, seen_width) = size, scaled_size
    scale = found["boxes"].new_tensor([width / seen_width, height / seen_height] * 2)
    boxes, masks = (found["boxes"] * scale).float().cpu(), found["masks"].float().cpu()
    records = []
    for i, (label, score) in enumerate(zip(found["labels"].tolist(), found["scores"].tolist(), strict=True)):
        # One at a time: a hundred masks of a large image would not fit in memory.
        mask = paste_masks_in_image(masks[i : i + 1], boxes[i : i + 1], (height, width))[0, 0] > 0.5
        x, y, right, bottom = boxes[i].tolist()
        records.append(
            {
                "image_id": image_id,
                "category_id": category_ids[label - 1],
                "bbox": [x, y, right - x, bottom - y],
                "score": score,
                "segmentation": encode_mask(mask.numpy().astype(np.uint8)),
            }
        )
    return records


def coco_metrics(ground_truth: Mapping[str, Any], results: Sequence[Result]) -> dict[str, float]:
    """Average precision in [0, 1] as COCO computes it: over IoU 0.5 to 0.95, at 0.5 and 0.75, and by object size.

    Args:
        ground_truth: of `CocoSet.ground_truth`.
        results: COCO result records with ``bbox`` and ``segmentation``; possibly none.

    Returns:
        ``box_ap``, ``box_ap50``, ``box_ap75``, ``box_ap_small``, ``box_ap_medium``, ``box_ap_large`` and the same for
        ``mask``; sizes that no object has are left out.
    """
    truth = COCO(copy.deepcopy(dict(ground_truth)))
    values: dict[str, float] = {}
    for kind, name, other in (("bbox", "box", "segmentation"), ("segm", "mask", "bbox")):
        # Without the other, since the area of a result is taken from whichever comes first.
        records = [{key: value for key, value in record.items() if key != other} for record in results]
        evaluation = COCOeval_faster(truth, truth.loadRes(records), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        for statistic, value in zip(_STATISTICS, evaluation.stats, strict=False):
            if value >= 0 or statistic in _STATISTICS[:3]:
                values[f"{name}_{statistic}"] = max(float(value), 0.0)
    return values


class CocoMetrics:
    """Collects the detections of all processes and evaluates them against a set.

    Args:
        coco: the set.
    """

    def __init__(self, coco: CocoSet) -> None:
        self.ground_truth = coco.ground_truth()
        self.results: list[Result] = []
        """What this process found so far."""

    def update(self, results: Sequence[Result]) -> None:
        """Add the records of one image."""
        self.results += results

    def compute(self) -> dict[str, float]:
        """See `coco_metrics`. Every process takes part and gets the result; the records are then forgotten."""
        results, self.results = self.results, []
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return coco_metrics(self.ground_truth, results)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, results)
        values: list[Any] = [None]
        if dist.get_rank() == 0:
            values[0] = coco_metrics(self.ground_truth, [record for share in shares for record in share])
        dist.broadcast_object_list(values)
        return values[0]
