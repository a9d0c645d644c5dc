"""Architectures, one readable file each, and the checkpoint layouts they read and write."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightformer.models.weightformer import WeightFormer

if TYPE_CHECKING:
    from weightformer.models.denoiser import WeightFormerDenoiser, create_denoiser

__all__ = ["WeightFormer", "WeightFormerDenoiser", "create_denoiser"]

# What diffusers is needed for. A saved pipeline names this module, and diffusers then wants the base class here too.
_LAZY = ("ModelMixin", "WeightFormerDenoiser", "create_denoiser")


def __getattr__(name: str) -> Any:
    """The denoiser's names, imported when asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("weightformer.models.denoiser"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "diffusers":
            raise
        raise ImportError('the denoiser needs diffusers; run: pip install "weightformer[generation]"') from error
