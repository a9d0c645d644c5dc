"""Which form of an op runs: one process-wide choice, made in one place."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["IMPLEMENTATIONS", "capturing", "exporting", "implementation", "on_demand", "select"]

IMPLEMENTATIONS = ("auto", "reference", "eager", "native", "triton")

_selected = "auto"
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Run every op of the package in the named form inside the `with` block.

    ``reference`` is the formula, in any dtype; ``eager`` the fast form in plain PyTorch; ``native`` the optional C++
    form; ``triton`` the GPU kernels; ``auto`` (the default outside any block) takes the fastest form that is present:
    the GPU kernels for CUDA tensors, the C++ forms for float32 on a CPU once `weightformer.ops.native.build` has run,
    neither while a graph is being captured, and ``eager`` elsewhere.
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


def select(op: str, forms: Mapping[str, Callable[..., Any]], x: Tensor) -> Callable[..., Any]:
    """The form of ``op`` that the current `implementation` asks for, for an input like ``x``.

    Raises:
        RuntimeError: the form asked for by name does not exist for this op; it never falls back silently.
    """
    name = _selected
    if name == "auto":
        runs = {"triton": _triton_runs, "native": _native_runs}
        name = next((form for form, suits in runs.items() if form in forms and suits(x)), "eager")
    if name not in forms:
        raise RuntimeError(f"{op} has no {name!r} implementation here; available: {', '.join(forms)}")
    return forms[name]


def on_demand(module: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of ``module``, which is imported at the first call: it needs an optional package.

    Raises:
        RuntimeError: at the call, if that package is missing.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if module not in sys.modules:
            _load(module)
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "weightformer"):
            raise
        raise RuntimeError(f"{module} needs {package}, which is not installed: `pip install {package}`") from error


def _triton_runs(x: Tensor) -> bool:
    """Whether the kernels are the fast form: a GPU they compile for, a dtype they compute in, no graph captured."""
    if not (x.is_cuda and _TRITON_INSTALLED and x.dtype != torch.float64) or capturing():
        return False
    return torch.cuda.get_device_properties(x.device).major >= 8


def _native_runs(x: Tensor) -> bool:
    from weightformer.ops import native  # which needs this module

    return native.suits(x)


def capturing() -> bool:
    """Whether a graph is being captured (compile, export, trace), so that the batch size must stay symbolic."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def exporting() -> bool:
    """Whether a graph is being captured to run elsewhere, so that it must hold plain operators only."""
    return capturing() and (not torch.compiler.is_compiling() or torch.compiler.is_exporting())
