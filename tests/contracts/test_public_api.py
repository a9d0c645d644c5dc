"""Public names, and docstrings that agree with what they document."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import timm

import weightformer
from weightformer.cli import TASKS, VERBS
from weightformer.config import build_parser

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(weightformer.__path__, "weightformer.")
    if not info.name.endswith("__main__")
]

# Others build on these names: removing or renaming one is a change for the changelog.
PUBLIC = {
    "weightformer.layers": {"AttentionMLP", "Block", "DepthwiseConv2d", "DynamicDepthwiseConv2d", "DynamicLinear"},
    "weightformer.models": {
        "ConvNeXtIsotropic",
        "DiG",
        "PyramidVisionTransformer",
        "WeightFormer",
        "WeightFormerDenoiser",
        "create_denoiser",
    },
    "weightformer.models.checkpoint": {
        "from_released",
        "load_weights",
        "read_state_dict",
        "save_weights",
        "to_released",
    },
    "weightformer.ops": {
        "IMPLEMENTATIONS",
        "dynamic_depthwise_conv2d",
        "dynamic_linear",
        "implementation",
        "linear_weight",
        "pool_2x2",
        "region_mean",
    },
    "weightformer.analysis.flops": {"multiply_adds"},
    "weightformer.ops.native": {"build"},
    "weightformer.streaming": {"RowParallel", "Source", "find_sources", "open_source", "stream", "stream_files"},
    "weightformer.tasks.classification": {"Config", "evaluate", "predict", "train"},
    "weightformer.tasks.detection": {"Config", "evaluate", "predict", "train"},
    "weightformer.tasks.segmentation": {"Config", "evaluate", "predict", "train"},
}
MODELS = {"weightformer_micro", "weightformer_tiny", "weightformer_small", "weightformer_base"}
BASELINES = {f"pvt_v1_{size}" for size in ("tiny", "small", "medium", "large")}
BASELINES |= {f"convnext_isotropic_{size}" for size in ("small", "base")}
VERB_NAMES = {"train", "eval", "predict", "bench", "ablate", "erf", "data", "info", "demo"}


@pytest.mark.parametrize("name", PUBLIC)
def test_names_that_others_rely_on(name: str) -> None:
    assert set(importlib.import_module(name).__all__) >= PUBLIC[name]


def test_model_names_and_verbs() -> None:
    assert set(timm.list_models(module="weightformer")) >= MODELS
    assert set(timm.list_models()) >= BASELINES
    assert VERBS.keys() >= VERB_NAMES


def test_constructor_of_the_backbone() -> None:
    parameters = inspect.signature(weightformer.models.WeightFormer).parameters
    assert list(parameters)[:2] == ["in_chans", "num_classes"]
    released = {"dynamic_every": 3, "linear_predictor": "bilateral", "conv_predictor": "adaptive"}
    released |= {"static_weight": True, "normalize": True, "pool": 2}
    assert {name: parameters[name].default for name in released} == released
    assert {"patch_size", "embed_dim", "depth", "mlp_ratio", "drop_path_rate"} <= parameters.keys()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_say_what_they_are_and_what_is_public(module: ModuleType) -> None:
    assert module.__doc__, f"{module.__name__} has no docstring"
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which does not exist"


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every public class, function and method that is defined in the package."""
    for module in MODULES:
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                methods = {n: m for n, m in vars(value).items() if not n.startswith("_") and inspect.isfunction(m)}
                yield from ((f"{module.__name__}.{name}.{n}", m) for n, m in methods.items())


# A form of an op is documented once for all forms, in the facade of its folder.
UNDOCUMENTED = re.compile(r"weightformer\.ops\.\w+\.(reference|eager|native|triton)\.")


def test_everything_public_has_a_docstring() -> None:
    objects = dict(public_objects())
    assert len(objects) > 80
    bare = [name for name, value in objects.items() if not value.__doc__ and not UNDOCUMENTED.match(name)]
    assert not bare, bare


def documented_arguments(docstring: str) -> list[str]:
    """Names before the colon of every entry of the ``Args:`` section; one entry may name several."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(docstring), re.DOTALL | re.MULTILINE)
    entries = re.findall(r"^ {4}(?! )([\w*, ]+):", section[1], re.MULTILINE) if section else []
    return [name.strip().lstrip("*") for entry in entries for name in entry.split(",")]


def test_documented_arguments_are_the_real_ones() -> None:
    wrong, checked = [], 0
    for name, value in public_objects():
        documented = documented_arguments(value.__doc__ or "")
        if not documented:
            continue
        checked += 1
        # Every constructor passes these two on, in PyTorch's sense.
        real = set(inspect.signature(value).parameters) - {"self", "cls", "device", "dtype"}
        if set(documented) - {"device", "dtype"} != real:
            wrong.append(f"{name}: documents {sorted(documented)}, takes {sorted(real)}")
    assert checked > 25
    assert not wrong, "\n".join(wrong)


def leaves(config: type[Any], prefix: str = "") -> Iterator[str]:
    for name, field in config.__dataclass_fields__.items():
        kind = field.default_factory
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("task", TASKS)
def test_every_key_of_a_configuration_is_explained_in_the_help(task: str) -> None:
    config = importlib.import_module(TASKS[task]).Config
    actions = {action.dest: action for action in build_parser(config)._actions}
    names = list(leaves(config))
    assert len(names) > 30
    unexplained = [name for name in names if not (actions[name].help or "").strip()]
    assert not unexplained, unexplained
