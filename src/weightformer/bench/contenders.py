"""The models that can be measured: ours in every implementation, the released order, and their peers."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from weightformer import ops
from weightformer.bench.released import ReleasedWeightFormer
from weightformer.layers import DynamicLinear
from weightformer.models import WeightFormer

__all__ = ["OURS", "Contender", "logits", "resolve"]

OURS = ("reference", "eager", "native", "triton", "auto", "compiled", "released")
_TIMM = {
    "deit-fused": "deit_tiny_patch16_224",
    "deit-explicit": "deit_tiny_patch16_224",
    "deit-small-fused": "deit_small_patch16_224",
    "deit-small-explicit": "deit_small_patch16_224",
    "pvtv2": "pvt_v2_b1",
    "convnext": "convnext_tiny",
}


@dataclass(frozen=True)
class Contender:
    """A model to measure.

    Attributes:
        name: as it was asked for and as it is printed.
        build: from an image side to the model, in float32, weights drawn from one seed.
        implementation: the form of our ops while it runs.
        twin: the contender whose outputs it must equal, or `None` where nothing else computes the same function.
        compiled: whether it goes through `torch.compile`.
    """

    name: str
    build: Callable[[int], nn.Module]
    implementation: str = "auto"
    twin: Contender | None = None
    compiled: bool = False

    def load(self, size: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model on its device, in evaluation mode, compiled if it should be."""
        torch.manual_seed(0)
        model = self.build(size).eval().to(device, dtype)
        # One graph a size: a graph of free sizes, which serves every size after the first, is slower.
        return torch.compile(model, fullgraph=True, dynamic=False) if self.compiled else model  # type: ignore[return-value]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The context in which its forward and backward run."""
        with ops.implementation(self.implementation):
            yield


def resolve(name: str, variant: str) -> Contender:
    """The contender of that name.

    Args:
        name: one of `OURS`, a peer's short name, any timm model, or ``PATH:factory`` for a checkout of something
            else: the factory is called with the image side if it takes an argument.
        variant: which of our models `OURS` means, such as ``weightformer_tiny``.

    Raises:
        ValueError: no such name.
        FileNotFoundError: the path of a ``PATH:factory`` does not exist.
    """
    if name in OURS:
        reference = Contender("reference", lambda size: _ours(variant), "reference")
        if name == "reference":
            return reference
        if name == "released":
            return Contender(name, lambda size: _released(variant), "eager", reference)
        if name == "native":
            ops.native.build()
        if name == "compiled":
            return Contender(name, lambda size: _ours(variant), "auto", reference, compiled=True)
        return Contender(name, lambda size: _ours(variant), name, reference)
    if name.endswith("-explicit") and name in _TIMM:
        twin = resolve(name.replace("-explicit", "-fused"), variant)
        return Contender(name, lambda size: _timm(_TIMM[name], size, fused=False), twin=twin)
    if ":" in name:
        return Contender(name, _external(name))
    model = _TIMM.get(name, name)
    if not timm.is_model(model):
        raise ValueError(
            f"unknown model {name!r} to measure; choose one of {', '.join(OURS + tuple(_TIMM))}, a timm model, "
            "or PATH:factory"
        )
    return Contender(name, lambda size: _timm(model, size))


def _ours(variant: str) -> WeightFormer:
    model = cast(WeightFormer, timm.create_model(variant))
    with torch.no_grad():  # a fresh model hardly predicts: make the predicted weights matter to the parity check
        for module in model.modules():
            if isinstance(module, DynamicLinear):
                for factor in ("w1", "w2", "proj.weight"):
                    module.get_parameter(factor).mul_(10)
    return model


def _released(variant: str) -> WeightFormer:
    ours = _ours(variant)
    model = ReleasedWeightFormer(
        num_classes=ours.num_classes,
        patch_size=ours.patch_embed.patch_size,
        embed_dim=ours.embed_dim,
        depth=len(ours.blocks),
    )
    model.load_state_dict(ours.state_dict())
    return model


def _timm(name: str, size: int, fused: bool = True) -> nn.Module:
    arguments: dict[str, Any] = {"img_size": size} if timm.get_pretrained_cfg_value(name, "fixed_input_size") else {}
    model = timm.create_model(name, **arguments)
    module: Any
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def _external(name: str) -> Callable[[int], nn.Module]:
    path, _, factory_name = name.rpartition(":")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: a peer is given as PATH:factory, the path of a Python file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; a peer is given as PATH:factory")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory: Callable[..., nn.Module] | None = getattr(module, factory_name, None)
    if factory is None:
        raise ValueError(f"{path} has no {factory_name!r}; a peer is given as PATH:factory")
    takes_size = bool(inspect.signature(factory).parameters)
    return lambda size: factory(size) if takes_size else factory()


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """What the model returns for these images, as one tensor."""
    output = model(images)
    return output[0] if isinstance(output, (tuple, list)) else output
