"""Cascade R-CNN's box heads on torchvision's parts: each refines the boxes of the one before, at a stricter overlap.

Paper: "Cascade R-CNN: Delving into High Quality Object Detection" (arXiv 1712.00726), section 4; boxes are
class-agnostic and the three scores are averaged, as in detectron2 and ViTDet.

N proposals of all images together, K classes and the background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, remove_small_boxes

__all__ = ["CascadePredictor", "CascadeRoIHeads"]

IOU_THRESHOLDS = (0.5, 0.6, 0.7)
BOX_WEIGHTS = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))


class CascadePredictor(nn.Module):
    """Scores of the background and K classes, and one box for all of them."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(in_features, num_classes)
        self.bbox_pred = nn.Linear(in_features, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, in_features) to scores (N, num_classes) and box deltas (N, 4)."""
        return self.cls_score(x), self.bbox_pred(x)


class CascadeRoIHeads(RoIHeads):
    """Three box heads in a row, and torchvision's mask head on the last one's boxes (in training on the proposals).

    Args:
        box_heads: one a stage.
        box_predictors: a `CascadePredictor` a stage.
        **shared: of ``torchvision.models.detection.roi_heads.RoIHeads``.
    """

    def __init__(self, box_heads: Sequence[nn.Module], box_predictors: Sequence[nn.Module], **shared: Any) -> None:
        super().__init__(
            box_head=nn.ModuleList(box_heads),
            box_predictor=nn.ModuleList(box_predictors),
            fg_iou_thresh=IOU_THRESHOLDS[0],
            bg_iou_thresh=IOU_THRESHOLDS[0],
            bbox_reg_weights=None,
            **shared,
        )
        self.matchers = [Matcher(iou, iou, allow_low_quality_matches=False) for iou in IOU_THRESHOLDS]
        self.box_coders = [BoxCoder(weights) for weights in BOX_WEIGHTS]

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections of each image (eval) or losses (training); arguments and results as torchvision's."""
        if self.training:
            if targets is None:
                raise ValueError("training needs targets")
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detect(features, proposals, image_shapes), {}

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        boxes, matched, labels, _ = self.select_training_samples(proposals, targets)
        positive = [label > 0 for label in labels]
        mask_boxes = [box[keep] for box, keep in zip(boxes, positive, strict=True)]
        mask_matched = [index[keep] for index, keep in zip(matched, positive, strict=True)]
        losses: dict[str, Tensor] = {}
        for stage, coder in enumerate(self.box_coders):
            if stage:
                matched, labels = self._match(self.matchers[stage], boxes, targets)
            logits, deltas = self._run_stage(stage, features, boxes, image_shapes)
            wanted = [_rows(t["boxes"], index) for t, index in zip(targets, matched, strict=True)]
            goal, label = torch.cat(coder.encode(wanted, boxes)), torch.cat(labels)
            found = label > 0
            losses[f"loss_classifier_{stage}"] = F.cross_entropy(logits, label)
            losses[f"loss_box_reg_{stage}"] = F.l1_loss(deltas[found], goal[found], reduction="sum") / max(
                len(label), 1
            )
            boxes = self._refine(coder, deltas.detach(), boxes, image_shapes)
        logits = self._mask_logits(features, mask_boxes, image_shapes)
        masks, classes = [t["masks"] for t in targets], [t["labels"] for t in targets]
        return {**losses, "loss_mask": maskrcnn_loss(logits, mask_boxes, masks, classes, mask_matched)}

    def _detect(
        self, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        scores = []
        for stage, coder in enumerate(self.box_coders):
            logits, deltas = self._run_stage(stage, features, boxes, image_shapes)
            scores.append(logits.softmax(-1))
            boxes = self._refine(coder, deltas, boxes, image_shapes)
        mean = torch.stack(scores).mean(0).split([len(box) for box in boxes])
        found = [self._select(box, score) for box, score in zip(boxes, mean, strict=True)]
        logits = self._mask_logits(features, [f["boxes"] for f in found], image_shapes)
        masks = maskrcnn_inference(logits, [f["labels"] for f in found])
        return [{**f, "masks": mask} for f, mask in zip(found, masks, strict=True)]

    def _run_stage(
        self, stage: int, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        pooled = self.box_roi_pool(features, boxes, image_shapes)
        if pooled.requires_grad:  # the three heads together weigh as much for the pyramid as one does alone
            pooled.register_hook(lambda grad: grad / len(self.box_coders))
        return self.box_predictor[stage](self.box_head[stage](pooled))

    def _mask_logits(
        self, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        return self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, image_shapes)))

    def _match(
        self, matcher: Matcher, boxes: list[Tensor], targets: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The object of each box (0 where there is none) and its label (0 where it overlaps none enough)."""
        matched, labels = [], []
        for box, target in zip(boxes, targets, strict=True):
            if len(target["boxes"]):
                index = matcher(box_iou(target["boxes"], box))
                label = torch.where(index >= 0, target["labels"][index.clamp(min=0)], 0)
            else:
                index = label = torch.zeros(len(box), dtype=torch.int64, device=box.device)
            matched.append(index.clamp(min=0))
            labels.append(label)
        return matched, labels

    def _refine(
        self, coder: BoxCoder, deltas: Tensor, boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> list[Tensor]:
        decoded = coder.decode(deltas, boxes).reshape(-1, 4).split([len(box) for box in boxes])
        return [clip_boxes_to_image(box, shape) for box, shape in zip(decoded, image_shapes, strict=True)]

    def _select(self, boxes: Tensor, scores: Tensor) -> dict[str, Tensor]:
        """The detections of one image: boxes (N, 4) and scores (N, K + 1) thresholded and suppressed per class."""
        row, label = (scores[:, 1:] > self.score_thresh).nonzero(as_tuple=True)
        boxes, scores, labels = boxes[row], scores[row, label + 1], label + 1
        keep = remove_small_boxes(boxes, min_size=1e-2)
        boxes, scores, labels = boxes[keep], scores[keep], labels[keep]
        keep = batched_nms(boxes, scores, labels, self.nms_thresh)[: self.detections_per_img]
        return {"boxes": boxes[keep], "labels": labels[keep], "scores": scores[keep]}


def _rows(boxes: Tensor, index: Tensor) -> Tensor:
    """Rows of (M, 4), or zeros where there are none."""
    return boxes[index] if len(boxes) else boxes.new_zeros(len(index), 4)
