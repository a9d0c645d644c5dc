"""Which form of an op runs: one process-wide choice, made in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["IMPLEMENTATIONS", "capturing", "implementation", "select"]

IMPLEMENTATIONS = ("auto", "reference", "eager", "native", "triton")

_selected = "auto"


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Run every op of the package in the named form inside the `with` block.

    ``reference`` is the formula, in any dtype; ``eager`` the fast form in plain PyTorch; ``native`` the optional C++
    form; ``triton`` the GPU kernels; ``auto`` (the default outside any block) takes the fastest form that is present.
    The choice holds for the whole process, all threads included.

    Args:
        name: one of `IMPLEMENTATIONS`.

    Raises:
        ValueError: the name is not one of them. A named form that an op does not have raises when the op is called.
    """
    global _selected
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
    previous, _selected = _selected, name
    try:
        yield
    finally:
        _selected = previous


def select(op: str, forms: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The form of ``op`` that the current `implementation` asks for.

    Raises:
        RuntimeError: the form asked for by name does not exist for this op; it never falls back silently.
    """
    name = "eager" if _selected == "auto" else _selected
    if name not in forms:
        raise RuntimeError(f"{op} has no {name!r} implementation here; available: {', '.join(forms)}")
    return forms[name]


def capturing() -> bool:
    """Whether a graph is being captured (compile, export, trace), so that the batch size must stay symbolic."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
