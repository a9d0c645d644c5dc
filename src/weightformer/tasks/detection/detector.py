"""Mask R-CNN and Cascade Mask R-CNN on a simple feature pyramid, of torchvision's parts.

Papers: "Mask R-CNN" (arXiv 1703.06870), ViTDet (arXiv 2203.16527). Differs in this: images of different sizes are
never padded to a common one. The images of a batch run in groups of equal size, so that padding does not enter the
weights that the backbone predicts from an image, and what is found in an image does not depend on which others it came
with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from weightformer.tasks.detection.cascade import IOU_THRESHOLDS, CascadePredictor, CascadeRoIHeads
from weightformer.tasks.detection.config import HeadConfig
from weightformer.tasks.detection.pyramid import PyramidBackbone
from weightformer.training.backbone import groups_below
from weightformer.training.config import ModelConfig

__all__ = ["Detector"]


class Detector(nn.Module):
    """Boxes, classes and masks of the objects in images.

    Args:
        model: names the backbone, and the weights to start from.
        head: everything else.
        num_classes: of objects, without the background.

    Raises:
        ValueError: see `PyramidBackbone`.
    """

    def __init__(self, model: ModelConfig, head: HeadConfig, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.trunk = PyramidBackbone(model, channels=head.channels, strides=head.strides, window=head.window)
        self.rpn = _build_rpn(head)
        self.roi_heads = _build_roi_heads(head, num_classes + 1)
        if model.compile:
            self.trunk.compile()

    def forward(
        self, images: Sequence[Tensor], targets: Sequence[dict[str, Tensor]] | None = None
    ) -> list[dict[str, Tensor]] | dict[str, Tensor]:
        """Detections of each image, or in training the losses.

        Args:
            images: (C, height, width) each, normalised, of any sizes.
            targets: in training, of each image ``boxes`` (N, 4) as x1 y1 x2 y2 in pixels, ``labels`` (N,) in
                1..num_classes and ``masks`` (N, height, width); N may be 0.

        Returns:
            In training, named losses, the mean over images. Else of each image, best first, ``boxes`` (N, 4),
            ``labels``, ``scores`` and ``masks`` (N, 1, 28, 28), the mask's probability within the box.

        Raises:
            ValueError: a label out of range, or training without targets.
        """
        if self.training:
            self._check(targets)
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, image in enumerate(images):
            groups.setdefault(tuple(image.shape), []).append(i)
        found: list[dict[str, Tensor]] = [{} for _ in images]
        losses: dict[str, Tensor] = {}
        for chosen in groups.values():
            known = [targets[i] for i in chosen] if self.training and targets else None
            detections, group_losses = self._run(torch.stack([images[i] for i in chosen]), known)
            for i, detection in zip(chosen, detections, strict=False):
                found[i] = detection
            for name, loss in group_losses.items():
                losses[name] = losses.get(name, 0) + loss * (len(chosen) / len(images))
        return losses if self.training else found

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The backbone's parameter groups by depth; pyramid and heads are one last group."""
        return groups_below(r"trunk\.body", self.trunk.body, coarse)

    def no_weight_decay(self) -> set[str]:
        """What the backbone exempts."""
        exempt: set[str] = getattr(self.trunk.body, "no_weight_decay", set)()  # not every timm model has it
        return {f"trunk.body.{name}" for name in exempt}

    def _run(
        self, images: Tensor, targets: list[dict[str, Tensor]] | None
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        features = self.trunk(images)
        sizes = [(images.shape[-2], images.shape[-1])] * len(images)
        proposals, rpn_losses = self.rpn(ImageList(images, sizes), features, targets)
        detections, roi_losses = self.roi_heads(features, proposals, sizes, targets)
        return detections, {**rpn_losses, **roi_losses}

    def _check(self, targets: Sequence[dict[str, Tensor]] | None) -> None:
        if targets is None:
            raise ValueError("training needs targets")
        for target in targets:
            labels = target["labels"]
            if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) <= self.num_classes:
                raise ValueError(
                    f"labels {labels.tolist()} are not all in 1..{self.num_classes} (0 is the background); image "
                    f"{target.get('image_id', '?')}"
                )


class _Anchors(AnchorGenerator):
    """torchvision's anchors, at the pyramid's true strides: it takes them from sizes, which round for odd ones."""

    def __init__(self, strides: Sequence[int], scale: float) -> None:
        super().__init__(tuple((stride * scale,) for stride in strides), ((0.5, 1.0, 2.0),) * len(strides))
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        x = feature_maps[0]
        self.set_cell_anchors(x.dtype, x.device)
        steps = [[torch.tensor(stride, device=x.device)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors([list(m.shape[-2:]) for m in feature_maps], steps))
        return [anchors] * len(image_list.image_sizes)


def _build_rpn(head: HeadConfig) -> RegionProposalNetwork:
    anchors = _Anchors([*head.strides, 2 * head.strides[-1]], head.anchor_scale)
    return RegionProposalNetwork(
        anchors,
        RPNHead(head.channels, anchors.num_anchors_per_location()[0], conv_depth=2),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=head.rpn_samples,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * head.proposals, "testing": head.proposals},  # of each level
        post_nms_top_n={"training": head.proposals, "testing": head.proposals},
        nms_thresh=0.7,
    )


def _build_roi_heads(head: HeadConfig, num_outputs: int) -> RoIHeads:
    def box_head() -> nn.Module:
        return FastRCNNConvFCHead((head.channels, 7, 7), convs, [head.fc_channels], norm_layer=_norm)

    convs = [head.channels] * head.num_convs
    shared: dict[str, Any] = {
        "box_roi_pool": _roi_align(head.strides, 7),
        "batch_size_per_image": head.roi_samples,
        "positive_fraction": 0.25,
        "score_thresh": head.score_threshold,
        "nms_thresh": head.nms_threshold,
        "detections_per_img": head.detections,
        "mask_roi_pool": _roi_align(head.strides, 14),
        "mask_head": MaskRCNNHeads(head.channels, convs, dilation=1, norm_layer=_norm),
        "mask_predictor": MaskRCNNPredictor(head.channels, head.channels, num_outputs),
    }
    if head.kind == "cascade":
        stages = range(len(IOU_THRESHOLDS))
        predictors = [CascadePredictor(head.fc_channels, num_outputs) for _ in stages]
        return CascadeRoIHeads([box_head() for _ in stages], predictors, **shared)
    return RoIHeads(
        box_head=box_head(),
        box_predictor=FastRCNNPredictor(head.fc_channels, num_outputs),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        bbox_reg_weights=None,
        **shared,
    )


def _norm(channels: int) -> nn.Module:
    return LayerNorm2d(channels, eps=1e-6)


def _roi_align(strides: Sequence[int], size: int) -> MultiScaleRoIAlign:
    """Pools each box from the level of its size (a box of 224 px from stride 16).

    torchvision would guess the strides from the first image it sees, once and for all: wrongly where that one is small.
    """
    pool = MultiScaleRoIAlign([str(i) for i in range(len(strides))], size, sampling_ratio=2)
    first, last = (round(math.log2(stride)) for stride in (strides[0], strides[-1]))
    pool.scales, pool.map_levels = [1 / stride for stride in strides], LevelMapper(first, last)
    return pool
