"""Read and write weights: our layout, the released one, and every wrapper and prefix found around either.

Nothing here runs code from a file: safetensors are preferred, pickles are read with ``weights_only=True`` alone.
"""

from __future__ import annotations

import argparse
import os
import pickletools
import re
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weightformer.layers import DynamicDepthwiseConv2d, DynamicLinear

__all__ = ["from_released", "load_weights", "read_state_dict", "save_weights", "to_released", "unwrap"]

StateDict = dict[str, Tensor]
_Model = TypeVar("_Model", bound=nn.Module)
_Table = tuple[tuple[str, str], ...]

# (ours, released) for every renamed parameter of the backbone and of the denoiser; in a dynamic block the first group
# applies, in a static one the second.
_RENAMED_DYNAMIC: _Table = (
    ("modulation.", "adaLN_modulation.1."),
    ("conv.weight", "dwc.w"),
    ("conv.bias", "dwc.b"),
    ("conv.proj1.", "dwc.wfm.0."),
    ("conv.proj2.", "dwc.wfm.2."),
    ("fc1.weight", "linear1.w"),
    ("fc1.bias", "linear1.b"),
    ("fc1.proj.", "linear1.wfm."),
    ("fc1.w1", "linear1.w1"),
    ("fc1.w2", "linear1.w2"),
    ("fc2.", "linear2."),
)
_RENAMED_STATIC: _Table = (
    ("modulation.", "adaLN_modulation.1."),
    ("conv.", "dwc."),
    ("fc1.", "linear1."),
    ("fc2.", "linear2."),
)
_RENAMED_OUTSIDE: _Table = (
    ("embed_norm.", "init_norm."),
    ("input_embed.", "x_embedder."),
    ("time_embed.linear_1.", "t_embedder.mlp.0."),
    ("time_embed.linear_2.", "t_embedder.mlp.2."),
    ("label_embed.", "y_embedder.embedding_table."),
    ("out_modulation.", "final_layer.adaLN_modulation.1."),
    ("out_proj.", "final_layer.linear."),
)

_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")
_PREFIXES = re.compile(r"(?:(?:module|_orig_mod|model|ema|averaged)\.)*")
# Averaged weights first: they are what an evaluation should read.
_WRAPPERS = ("state_dict_ema", "model_ema", "ema", "ema_state_dict", "state_dict", "model", "module")


def from_released(state_dict: Mapping[str, Tensor]) -> StateDict:
    """The released key layout (SPEC section 8 of the project's notes: ``dwc``, ``linear1.wfm``, ...) in our names.

    Keys that are already ours pass unchanged; values are never touched.
    """
    dynamic = {m[1] for key in state_dict if (m := re.match(r"(blocks\.\d+\.)linear1\.wfm\.", key))}
    return {_rename(key, dynamic, to_ours=True): value for key, value in state_dict.items()}


def to_released(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Our key layout in the released names; the exact inverse of `from_released`."""
    dynamic = {m[1] for key in state_dict if (m := re.match(r"(blocks\.\d+\.)fc1\.proj\.", key))}
    return {_rename(key, dynamic, to_ours=False): value for key, value in state_dict.items()}


def _rename(key: str, dynamic_blocks: set[str], to_ours: bool) -> str:
    if match := _BLOCK.fullmatch(key):
        block, rest = match.groups()
        table = _RENAMED_DYNAMIC if block in dynamic_blocks else _RENAMED_STATIC
    else:
        block, rest, table = "", key, _RENAMED_OUTSIDE
    for ours, released in table:
        old, new = (released, ours) if to_ours else (ours, released)
        if rest == old or (old.endswith(".") and rest.startswith(old)):
            return block + new + rest[len(old) :]
    return key


def load_weights(model: _Model, source: str | os.PathLike[str] | Mapping[str, Any], strict: bool = True) -> _Model:
    """Load weights into a model, in our layout or the released one, whatever wraps them.

    Args:
        model: a model of ours (or any timm model, whose own names then apply).
        source: a ``.safetensors`` file, a PyTorch file, a folder that holds ``model.safetensors``, or a mapping
            (a state dict, or a checkpoint that contains one). Averaged (EMA) weights are taken where there are any.
        strict: for evaluation: every parameter must be there in its shape. ``False`` is for fine-tuning: a head of
            another class count stays as initialised and a stem of another channel count is adapted, with one warning.

    Returns:
        The model.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be read safely, holds no weights, does not fit (with both shapes), or fits less
            than 95 % of the model.
    """
    where = "the given state dict" if isinstance(source, Mapping) else os.fspath(source)
    content = source if isinstance(source, Mapping) else read_state_dict(source)
    sets = _by_prefix(model.state_dict())
    prefix, own = next(iter(sets.items())) if len(sets) == 1 else ("", model.state_dict())
    given = unwrap(content, own)
    if not given:
        raise ValueError(f"{where} holds no weights; its entries: {', '.join(map(repr, list(content)[:8])) or 'none'}")
    notes, fresh = ([], set()) if strict else _adapt(model, given, own)

    fit = {k: v for k, v in given.items() if k in own and _describe(v) == _describe(own[k])}
    wrong = [
        f"{k}: file {_describe(v)}, model {_describe(own[k])}" for k, v in given.items() if k in own and k not in fit
    ]
    missing = [k for k in own if k not in given and k not in fresh]
    unexpected = [f"{k}: file {_describe(v)}" for k, v in given.items() if k not in own]
    problems = [
        f"{name} ({len(items)}): {', '.join(items[:4])}{', ...' if len(items) > 4 else ''}"
        for name, items in (("do not match", wrong), ("missing", missing), ("unexpected", unexpected))
        if items
    ]
    share = len(fit) / max(len(own) - len(fresh), 1)
    if share < 0.95 or (strict and problems):
        raise ValueError(f"{where} does not fit the model ({share:.0%} of its tensors do): {'; '.join(problems)}")
    if notes or problems:
        warnings.warn(f"{where}: {'; '.join(notes + problems)}", stacklevel=2)
    model.load_state_dict({prefix + k: v for k, v in fit.items()}, strict=strict)
    return model


def save_weights(model: nn.Module, path: str | os.PathLike[str], released: bool = False) -> None:
    """Write a model's weights as safetensors, in our layout or, with ``released``, in the released one.

    A file that exists is replaced at once when the new one is complete, so it is never left half written.

    Raises:
        ValueError: ``released``, but the model predicts its weights in another way than the released one.
    """
    if released:
        _check_released(model)
    state_dict = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(to_released(state_dict) if released else state_dict, partial)
    os.replace(partial, path)


def _check_released(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DynamicLinear):
            same = (module.predictor, module.pool) == ("bilateral", "2")
        elif isinstance(module, DynamicDepthwiseConv2d):
            same = module.predictor == "adaptive"
        else:
            continue
        if not same or module.weight is None or not module.normalize:
            raise ValueError(f"{name} ({module.extra_repr()}) is not in the released layout; save with released=False")


def read_state_dict(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of a weight file, on the CPU, without ever running code from it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, of another kind, or asks for a function to be called while it is read.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"no weight file at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # Released training checkpoints carry their configuration; an inert stand-in lets it be read past.
        inert: list[Any] = [argparse.Namespace, (OrderedDict, "yacs.config.CfgNode")]
        with torch.serialization.safe_globals(inert):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is damaged or is no weight file: {_reason(error)}") from error
    except Exception as error:  # pickle.UnpicklingError and whatever a hostile byte stream provokes
        unsafe = re.search(r"GLOBAL ([\w.]+)", str(error))
        name = unsafe[1] if unsafe else _first_global(path)
        reason = f"it asks to run {name}, which weights never need" if name else _reason(error)
        raise ValueError(f"{path} was refused: {reason}. Convert it to safetensors where it comes from") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a state dict")
    return content


def _first_global(path: Path) -> str | None:
    """The first function that a bare pickle of a newer protocol names, found without running it."""
    strings: list[str] = []
    with path.open("rb") as file, suppress(ValueError):
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STACK_GLOBAL":
                return ".".join(strings[-2:])
            if isinstance(argument, str):
                strings.append(argument)
    return None


def unwrap(content: Mapping[str, Any], own: Collection[str]) -> StateDict:
    """The state dict inside a checkpoint in our key layout, without wrappers and prefixes; empty if there is none.

    Args:
        content: a state dict or a checkpoint that contains one; anything else in it is passed over.
        own: the model's parameter names. Of several sets under different prefixes, the one with most of them is
            taken, averaged weights first.
    """
    sets = [(prefix, from_released(found)) for prefix, found in _by_prefix(_tensors(content)).items()]
    sets.sort(key=lambda item: not re.search(r"ema|averaged", item[0]))
    return max((found for _, found in sets), key=lambda found: sum(k in own for k in found), default={})


def _tensors(content: Mapping[str, Any], depth: int = 4) -> StateDict:
    """The tensors of the first wrapper that has some, or of ``content`` itself; the depth ends files that loop."""
    if depth:
        for wrapper in _WRAPPERS:
            inner = content.get(wrapper)
            if isinstance(inner, Mapping) and (found := _tensors(inner, depth - 1)):
                return found
    return {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, Tensor)}


def _by_prefix(state_dict: Mapping[str, Tensor]) -> dict[str, StateDict]:
    """The state dict split by what wrappers put in front of its keys, and without it."""
    sets: dict[str, StateDict] = {}
    for key, value in state_dict.items():
        prefix = _PREFIXES.match(key)[0]  # type: ignore[index] # an empty prefix matches too
        sets.setdefault(prefix, {})[key[len(prefix) :]] = value
    return sets


def _adapt(model: nn.Module, given: StateDict, own: StateDict) -> tuple[list[str], set[str]]:
    """Make a file of other classes or channels fit, in place.

    Returns:
        What was done, and the model's parameters that stay as initialised.
    """
    notes: list[str] = []
    fresh: set[str] = set()
    head = _config_name(model, "classifier", "head")
    heads = {k for k in {*given, *own} if k.startswith(head)}
    if any(k not in given or k not in own or given[k].shape != own[k].shape for k in heads):
        before, now = (d[f"{head}weight"].shape[:1].numel() if f"{head}weight" in d else 0 for d in (given, own))
        for key in heads:
            given.pop(key, None)
        fresh = heads & own.keys()
        notes += [f"the file's head for {before} classes was dropped"] * bool(before)
        notes += [f"the model's head for {now} classes starts fresh"] * bool(now)
    stem = _config_name(model, "first_conv", "patch_embed.proj") + "weight"
    file, ours = given.get(stem), own.get(stem)
    if file is not None and ours is not None and file.ndim == ours.ndim == 4 and file.layout == torch.strided:
        before, now = file.shape[1], ours.shape[1]
        if 0 < before != now:
            given[stem] = _adapt_channels(file, now)
            notes.append(f"the stem was adapted from {before} to {now} channels")
    return notes, fresh


def _adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """A kernel (O, I, h, w) for other input channels, as timm does it: their sum for one, else repeated, rescaled."""
    source = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    return weight.repeat(1, -(-channels // source), 1, 1)[:, :channels] * (source / channels)


def _config_name(model: nn.Module, key: str, default: str) -> str:
    name = getattr(model, "pretrained_cfg", {}).get(key) or default
    return f"{name[0] if isinstance(name, (tuple, list)) else name}."


def _describe(tensor: Tensor) -> str:
    """Its shape, and what makes it other than dense floating-point numbers; equal for tensors that fit each other."""
    oddities = [
        *([] if tensor.is_floating_point() else [str(tensor.dtype)]),
        *([] if tensor.layout == torch.strided else [str(tensor.layout)]),
        *(["without values (meta)"] if tensor.is_meta else []),
    ]
    return " ".join([str(tuple(tensor.shape)), *oddities])


def _reason(error: Exception) -> str:
    """The sentence that says why; torch puts its own behind a paragraph of advice."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0][:200]
