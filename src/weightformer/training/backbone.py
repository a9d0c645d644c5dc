"""Any timm model as the backbone of a dense task: chosen feature maps, start weights, groups for layer-wise decay."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import timm
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from torch import nn

import weightformer  # noqa: F401  registers the models
from weightformer.models.checkpoint import load_weights, read_state_dict, unwrap
from weightformer.training.config import ModelConfig

__all__ = ["FeatureMap", "build_backbone", "groups_below"]


@dataclass(frozen=True)
class FeatureMap:
    """One of the maps that a backbone's ``forward_intermediates`` returns."""

    index: int
    """Its place among all of them: a block of an isotropic model, a stage of a hierarchical one."""
    channels: int
    """Its channels."""
    stride: int
    """Pixels of the image, a side, to one of its cells."""


# Arguments that free the models of timm which by default take images of one size, each kind its own.
_ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"dynamic_img_size": True, "dynamic_img_pad": True},  # position embeddings are interpolated
    {"strict_img_size": False},  # windows
)


def build_backbone(
    config: ModelConfig, indices: Sequence[int] | Callable[[list[int]], Sequence[int]] | None = None
) -> tuple[nn.Module, list[FeatureMap]]:
    """The timm model that a configuration names, without its head and whatever else the maps do not need.

    ``backbone.forward_intermediates(images, indices=[m.index for m in maps], intermediates_only=True)`` returns the
    maps (B, channels, H, W), as the blocks leave them: without the final norm.

    Args:
        config: names the model, and the weights to start from.
        indices: maps to take, negative from the end, or a function that chooses them by the strides of all maps; by
            default the last four of a hierarchical model, and those that
            end the four quarters of an isotropic one (blocks 5, 11, 17 and 23 of 24).

    Raises:
        ValueError: timm does not know the name; the constructor refuses an argument; the model has no such maps, or
            takes images of one size only.
    """
    model = _create(config)
    if config.weights:
        _load(model, config.weights)
    info = [(int(entry["num_chs"]), int(entry["reduction"])) for entry in _feature_info(model, config.name)]
    choose = _default_indices if indices is None else indices
    take = list(choose([stride for _, stride in info]) if callable(choose) else choose)
    if not take or any(not -len(info) <= i < len(info) for i in take):
        raise ValueError(f"feature indices {take} are out of range: {config.name} has {len(info)} feature maps")
    take = model.prune_intermediate_layers([i % len(info) for i in take], prune_norm=True, prune_head=True)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    return model, [FeatureMap(i, *info[i]) for i in take]


def groups_below(name: str, model: Any, coarse: bool = False) -> dict[str, Any]:
    """A timm model's ``group_matcher`` for the larger model that holds it as attribute ``name``.

    What lies outside of it (neck and heads) forms one last group, whose learning rate is not decayed.
    """

    def below(pattern: str) -> str:
        return rf"^{name}\.(?:{_ANCHOR.sub('', pattern)})"

    def convert(value: Any) -> Any:
        return below(value) if isinstance(value, str) else [(below(pattern), rest) for pattern, rest in value]

    return {group: convert(value) for group, value in model.group_matcher(coarse=coarse).items()}


_ANCHOR = re.compile(r"(?<!\[)\^")


def _create(config: ModelConfig) -> Any:
    if not timm.is_model(config.name):
        near = timm.list_models(f"*{config.name.split('_')[0]}*")[:5]
        raise ValueError(f"timm knows no model {config.name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    own = timm.models.get_pretrained_cfg(config.name)
    refused: TypeError | None = None
    for free in _ANY_SIZE if own is not None and own.fixed_input_size else ({},):
        try:
            return timm.create_model(
                config.name,
                pretrained=config.pretrained,
                num_classes=0,
                in_chans=config.in_chans,
                **{**free, **config.kwargs},
            )
        except TypeError as error:  # noqa: PERF203 - two tries at most
            refused = refused or error
    raise ValueError(
        f"model.kwargs {config.kwargs} do not fit {config.name}, or it takes images of one size only: {refused}"
    ) from refused


def _feature_info(model: Any, name: str) -> Sequence[dict[str, Any]]:
    if not hasattr(model, "forward_intermediates") or not hasattr(model, "prune_intermediate_layers"):
        raise ValueError(f"{name} does not return feature maps (timm's forward_intermediates); choose another backbone")
    return model.feature_info


def _default_indices(strides: Sequence[int]) -> list[int]:
    if len(set(strides)) == 1:
        return sorted({max(len(strides) * quarter // 4 - 1, 0) for quarter in (1, 2, 3, 4)})
    return list(range(len(strides)))[-4:]


def _load(model: nn.Module, path: str) -> None:
    own = model.state_dict()
    found = sum(key in own for key in unwrap(read_state_dict(path), own))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_weights(model, path, strict=False)
    notes = [str(warning.message).removeprefix(f"{path}: ") for warning in caught]
    _say("; ".join([f"backbone: {found} of {len(own)} tensors from {path}", *notes]))


@rank_zero_only
def _say(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
