"""Weight files: both layouts, every wrapper, other heads and channels, hostile and damaged files."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import struct
import sys
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weightformer.models import WeightFormer
from weightformer.models.checkpoint import (
    from_released,
    load_weights,
    read_state_dict,
    save_weights,
    to_released,
)

Build = Callable[..., WeightFormer]
Images = Callable[..., Tensor]


@pytest.fixture
def model(lively_micro: Build) -> WeightFormer:
    return lively_micro(depth=3)


def fresh(**kwargs: Any) -> WeightFormer:
    """The same architecture with other random weights."""
    torch.manual_seed(1)
    return timm.create_model("weightformer_micro", **{"depth": 3, **kwargs}).eval()


def same(model: nn.Module, other: nn.Module) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


# The released layout


def test_conversion_is_exact_both_ways(golden: Path) -> None:
    released = {k.removeprefix("weights."): v for k, v in load_file(golden).items() if k.startswith("weights.")}
    ours = from_released(released)
    assert not ours.keys() & {k for k in released if "linear" in k or "dwc" in k or "init_norm" in k}
    back = to_released(ours)
    assert list(back) == list(released)
    assert all(back[k] is released[k] for k in released)  # values are not even copied
    assert from_released(ours).keys() == ours.keys()
    assert to_released(back).keys() == back.keys()


def test_conversion_covers_every_parameter() -> None:
    for dynamic_every in (0, 1, 3):
        state = timm.create_model("weightformer_micro", dynamic_every=dynamic_every).state_dict()
        released = to_released(state)
        assert len(released) == len(state)
        assert all(from_released(released)[k] is v for k, v in state.items())


def test_a_released_file_round_trips_bitwise(golden: Path, tmp_path: Path) -> None:
    stored = {k.removeprefix("weights."): v for k, v in load_file(golden).items() if k.startswith("weights.")}
    embed_dim, in_chans, patch_size, _ = stored["patch_embed.proj.weight"].shape
    depth = 1 + max(int(k.split(".")[1]) for k in stored if k.startswith("blocks."))
    model = WeightFormer(in_chans, len(stored["head.bias"]), patch_size=patch_size, embed_dim=embed_dim, depth=depth)
    load_weights(model, stored)
    save_weights(model, tmp_path / "released.safetensors", released=True)
    again = load_file(tmp_path / "released.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[k], stored[k]) for k in stored)


@pytest.mark.parametrize("released", [False, True])
def test_save_and_load(released: bool, model: WeightFormer, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "model.safetensors"
    save_weights(model, path, released=released)
    assert ("blocks.1.linear1.wfm.weight" in load_file(path)) is released
    assert same(load_weights(fresh(), path), model)
    assert same(load_weights(fresh(), path.parent), model)  # a folder that holds model.safetensors
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_an_interrupted_save_keeps_the_old_file(
    model: WeightFormer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    before = path.read_bytes()

    def fail(_: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("weightformer.models.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_weights(fresh(), path)
    assert path.read_bytes() == before


# Wrappers and prefixes

PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "module._orig_mod.",
    "model.",
    "model._orig_mod.",
    "ema.module.",
    "model.ema.module.",
]
WRAPPERS = ["state_dict", "model", "model_ema", "state_dict_ema", "ema", "module", "ema_state_dict"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("released", [False, True])
def test_prefixes(prefix: str, released: bool, model: WeightFormer, images: Images, tmp_path: Path) -> None:
    state = to_released(model.state_dict()) if released else model.state_dict()
    state = {prefix + k: v for k, v in state.items()}
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"state_dict": state}, tmp_path / "a.pth")
    x = images(2, 3, 16, 16)
    for source in (state, tmp_path / "a.safetensors", str(tmp_path / "a.pth")):
        assert torch.equal(load_weights(fresh(), source)(x), model(x))


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "model.module", "state_dict.ema", "ema.state_dict"])
def test_wrappers(wrapper: str, model: WeightFormer, tmp_path: Path) -> None:
    content: dict[str, Any] = {f"module.{k}": v for k, v in model.state_dict().items()}
    for name in reversed(wrapper.split(".")):
        content = {"epoch": 3, "optimizer": {"state": {}}, name: content, "note": None}
    torch.save(content, tmp_path / "last.pth")
    assert same(load_weights(fresh(), tmp_path / "last.pth"), model)


def test_lightning_files(model: WeightFormer, tmp_path: Path) -> None:
    """A module that keeps the model beside a loss with its own weights and an averaged copy."""
    other = fresh().state_dict()
    state = {"criterion.weight": torch.ones(10)}
    state |= {f"model.{k}": v for k, v in other.items()}
    plain = {"state_dict": dict(state), "hyper_parameters": {"lr": 0.1}, "pytorch-lightning_version": "2.6.6"}
    torch.save(plain, tmp_path / "plain.ckpt")
    assert same(load_weights(fresh(), tmp_path / "plain.ckpt"), fresh())

    state |= {f"ema.module.{k}": v for k, v in model.state_dict().items()} | {"ema.n_averaged": torch.tensor(7)}
    torch.save(plain | {"state_dict": state}, tmp_path / "averaged.ckpt")
    assert same(load_weights(fresh(), tmp_path / "averaged.ckpt"), model)


def test_averaged_weights_are_preferred(model: WeightFormer) -> None:
    raw = fresh().state_dict()
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()  # begins with a counter
    for name in ("state_dict_ema", "model_ema", "ema"):
        assert same(load_weights(fresh(depth=3), {"model": raw, name: averaged}), model)
    # a slot that is there but holds no weights does not hide the raw ones
    for empty in (None, {}, {"decay": 0.999}, 3):
        assert same(load_weights(fresh(), {"model": model.state_dict(), "ema": empty}), model)


@pytest.mark.parametrize("wrap", ["compiled", "parallel", "features", "averaged"])
def test_weights_load_into_wrapped_models(wrap: str, model: WeightFormer) -> None:
    target = {
        "compiled": lambda: torch.compile(fresh(), backend="eager"),
        "parallel": lambda: nn.DataParallel(fresh()),
        "features": lambda: timm.create_model("weightformer_micro", depth=3, features_only=True, out_indices=(0, 2)),
        "averaged": lambda: nn.ModuleDict({"model": fresh()}),
    }[wrap]()
    if wrap == "features":
        with pytest.warns(UserWarning, match="the file's head for 10 classes was dropped"):
            load_weights(target, model.state_dict(), strict=False)
        inner = target.model
        inner.norm, inner.head = model.norm, model.head
    else:
        load_weights(target, model.state_dict())
        inner = target["model"] if wrap == "averaged" else getattr(target, "_orig_mod", None) or target.module
    assert same(inner, model)


# Fine-tuning and strictness


def one_warning(call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].filename == __file__, "the warning should point at the caller"
    return str(caught[0].message)


def test_nothing_is_said_when_all_fits(model: WeightFormer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strict in (True, False):
            assert same(load_weights(fresh(), model.state_dict(), strict=strict), model)


@pytest.mark.parametrize("num_classes", [3, 0, 1])
def test_another_number_of_classes(num_classes: int, model: WeightFormer) -> None:
    target = fresh(num_classes=num_classes)
    head = {k: v.clone() for k, v in target.get_classifier().state_dict().items()}
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(ValueError, match=r"head\.weight: file \(10, 64\)") as error:
        load_weights(target, model.state_dict())
    if num_classes:
        assert f"head.weight: file (10, 64), model ({num_classes}, 64)" in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items()), "a refused file changed the model"

    message = one_warning(lambda: load_weights(target, model.state_dict(), strict=False))
    assert "the file's head for 10 classes was dropped" in message
    assert (f"the model's head for {num_classes} classes starts fresh" in message) == (num_classes > 0)
    assert all(torch.equal(v, head[k]) for k, v in target.get_classifier().state_dict().items())
    target.reset_classifier(0)
    model.reset_classifier(0)
    assert same(target, model)


def test_a_file_without_a_head(model: WeightFormer) -> None:
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
    with pytest.raises(ValueError, match=r"missing \(2\): head\.weight, head\.bias"):
        load_weights(fresh(), state)
    message = one_warning(lambda: load_weights(fresh(), state, strict=False))
    assert message == "the given state dict: the model's head for 10 classes starts fresh"


@pytest.mark.parametrize("in_chans", [1, 2, 4, 13])
def test_other_channels(in_chans: int, model: WeightFormer) -> None:
    target = fresh(in_chans=in_chans)
    with pytest.raises(ValueError, match=rf"file \(64, 3, 4, 4\), model \(64, {in_chans}, 4, 4\)"):
        load_weights(target, model.state_dict())
    message = one_warning(lambda: load_weights(target, model.state_dict(), strict=False))
    assert f"the stem was adapted from 3 to {in_chans} channels" in message
    # as timm does it, so that `pretrained=True` and this function give one model
    by_timm = timm.models.adapt_input_conv(in_chans, model.patch_embed.proj.weight)
    torch.testing.assert_close(target.patch_embed.proj.weight, by_timm)


def test_a_grey_image_gives_the_logits_of_its_rgb_copy(model: WeightFormer, images: Images) -> None:
    grey = fresh(in_chans=1)
    with pytest.warns(UserWarning, match="from 3 to 1 channels"):
        load_weights(grey, model.state_dict(), strict=False)
    x = images(2, 1, 24, 20)
    torch.testing.assert_close(grey(x), model(x.expand(-1, 3, -1, -1)), rtol=0, atol=1e-4)


def test_thirteen_channels_load_untouched(lively_micro: Build) -> None:
    source = lively_micro(depth=3, in_chans=13)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(load_weights(fresh(in_chans=13), source.state_dict(), strict=False), source)


def test_a_file_that_hardly_matches_is_an_error_even_for_fine_tuning(model: WeightFormer) -> None:
    state = model.state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"does not fit the model \(\d+% of its tensors do\): .*missing"):
            load_weights(fresh(depth=4), state, strict=strict)
        with pytest.raises(ValueError, match=r"does not fit the model \(\d+% of its tensors do\): do not match"):
            load_weights(fresh(embed_dim=32), state, strict=strict)
        with pytest.raises(ValueError, match=r"\(0% of its tensors do\)"):
            load_weights(fresh(), {"some": torch.ones(2)}, strict=strict)


def test_a_little_that_differs_is_an_error_only_when_strict(model: WeightFormer) -> None:
    state = dict(model.state_dict()) | {"extra": torch.ones(3)}
    del state["norm.bias"]
    with pytest.raises(ValueError, match=r"missing \(1\): norm\.bias; unexpected \(1\): extra: file \(3,\)"):
        load_weights(fresh(), state)
    message = one_warning(lambda: load_weights(fresh(), state, strict=False))
    assert message.endswith("missing (1): norm.bias; unexpected (1): extra: file (3,)")


@pytest.mark.parametrize(
    ("odd", "description"),
    [
        (torch.ones(64, dtype=torch.int64), r"\(64,\) torch\.int64"),
        (torch.ones(64, dtype=torch.complex64), r"\(64,\) torch\.complex64"),
        (torch.ones(64).to_sparse(), r"\(64,\) torch\.sparse_coo"),
        (torch.ones(64, device="meta"), r"\(64,\) without values \(meta\)"),
    ],
    ids=["int64", "complex64", "sparse", "meta"],
)
def test_tensors_that_are_no_dense_floats(odd: Tensor, description: str, model: WeightFormer) -> None:
    with pytest.raises(ValueError, match=rf"do not match \(1\): norm\.bias: file {description}, model \(64,\)"):
        load_weights(fresh(), dict(model.state_dict()) | {"norm.bias": odd})


@pytest.mark.parametrize("odd", [torch.tensor(1.0), torch.ones(0), torch.ones(10, 0)], ids=["0-d", "empty", "10 x 0"])
@pytest.mark.parametrize("key", ["head.weight", "patch_embed.proj.weight"])
def test_a_head_or_stem_of_no_use_for_fine_tuning(key: str, odd: Tensor, model: WeightFormer) -> None:
    state = dict(model.state_dict()) | {key: odd}
    assert ("starts fresh" if key == "head.weight" else "do not match (1)") in one_warning(
        lambda: load_weights(fresh(), state, strict=False)
    )


@pytest.mark.parametrize("odd", [torch.ones(64, 0, 4, 4), torch.ones(64, 1, 4, 4).to_sparse()], ids=["empty", "sparse"])
def test_a_stem_that_cannot_be_adapted(odd: Tensor, model: WeightFormer) -> None:
    state = dict(model.state_dict()) | {"patch_embed.proj.weight": odd}
    assert "do not match (1): patch_embed.proj.weight" in one_warning(
        lambda: load_weights(fresh(), state, strict=False)
    )


def test_a_model_without_memory_is_not_silently_skipped(model: WeightFormer) -> None:
    with pytest.raises(ValueError, match=r"file \(64,\), model \(64,\) without values \(meta\)"):
        load_weights(fresh(device="meta"), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_are_converted(dtype: torch.dtype, model: WeightFormer, tmp_path: Path) -> None:
    save_file({k: v.to(dtype) for k, v in model.state_dict().items()}, tmp_path / "a.safetensors")
    target = load_weights(fresh(), tmp_path / "a.safetensors")
    assert {p.dtype for p in target.parameters()} == {torch.float32}
    assert all(torch.equal(v, model.state_dict()[k].to(dtype).float()) for k, v in target.state_dict().items())


def test_nan_is_loaded_as_it_is(model: WeightFormer) -> None:
    state = dict(model.state_dict()) | {"norm.bias": torch.full((64,), torch.nan)}
    assert load_weights(fresh(), state).norm.bias.isnan().all()


def test_the_mapping_given_is_left_alone(model: WeightFormer) -> None:
    state = {f"module.{k}": v for k, v in model.state_dict().items()}
    content = {"model": dict(state)}
    with pytest.warns(UserWarning, match="starts fresh"):
        load_weights(fresh(in_chans=1, num_classes=2), content, strict=False)
    assert content["model"].keys() == state.keys()
    assert all(content["model"][k] is state[k] for k in state)


def test_odd_mappings(model: WeightFormer) -> None:
    loop: dict[Any, Any] = {"state_dict": {"model": {}}}
    loop["state_dict"]["model"] = loop
    for content, entries in (({}, "none"), ({3: torch.ones(1), "a": "b"}, "3, 'a'"), (loop, "'state_dict'")):
        with pytest.raises(ValueError, match=rf"^the given state dict holds no weights; its entries: {entries}$"):
            load_weights(fresh(), content)
    assert same(load_weights(fresh(), {3: torch.ones(1), "step": 7, **model.state_dict()}), model)


def test_any_timm_model() -> None:
    source = timm.create_model("deit_tiny_patch16_224", depth=2).eval()
    target = timm.create_model("deit_tiny_patch16_224", depth=2)
    assert same(load_weights(target, {"model": {f"module.{k}": v for k, v in source.state_dict().items()}}), source)
    target = timm.create_model("deit_tiny_patch16_224", depth=2, num_classes=3, in_chans=1)
    message = one_warning(lambda: load_weights(target, source.state_dict(), strict=False))
    assert "the file's head for 1000 classes was dropped" in message
    assert "the stem was adapted from 3 to 1 channels" in message
    assert torch.equal(target.pos_embed, source.pos_embed)


def test_counters_of_batch_norm_are_kept() -> None:
    source, target = (timm.create_model("test_resnet") for _ in range(2))
    source(torch.randn(2, 3, 64, 64))
    assert same(load_weights(target, source.state_dict()), source)


# timm's own ways of loading


def test_timm_folder_round_trip(model: WeightFormer, images: Images, tmp_path: Path) -> None:
    labels = {"label_names": list("abcdefghij")}
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True, model_config=labels, model_args={"depth": 3})
    name, x = f"local-dir:{tmp_path}", images(2, 3, 24, 20)
    again = timm.create_model(name, pretrained=True).eval()
    assert same(again, model)
    five = timm.create_model(name, pretrained=True, num_classes=5).eval()
    assert five(x).shape == (2, 5)
    assert torch.equal(five.forward_features(x), model.forward_features(x))
    grey = timm.create_model(name, pretrained=True, in_chans=1).eval()
    torch.testing.assert_close(grey(x[:, :1]), model(x[:, :1].expand(-1, 3, -1, -1)), rtol=0, atol=1e-4)
    features = timm.create_model(name, pretrained=True, features_only=True, out_indices=(0, 2)).eval()
    for found, expected in zip(features(x), model.forward_intermediates(x, (0, 2))[1], strict=True):
        assert torch.equal(found, expected)
    assert same(load_weights(fresh(), tmp_path), model)


@pytest.mark.parametrize("wrapper", [None, "model", "model_ema"])
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_timm_reads_released_files(suffix: str, wrapper: str | None, model: WeightFormer, tmp_path: Path) -> None:
    released, path = to_released(model.state_dict()), tmp_path / f"released.{suffix}"
    if suffix == "safetensors":
        save_file(released, path)
    else:
        torch.save({wrapper: {f"module.{k}": v for k, v in released.items()}} if wrapper else released, path)
    overlay = {"file": str(path), "num_classes": 10}
    loaded = timm.create_model("weightformer_micro", pretrained=True, depth=3, pretrained_cfg_overlay=overlay)
    assert same(loaded, model)
    other = timm.create_model(
        "weightformer_micro", pretrained=True, depth=3, num_classes=3, pretrained_cfg_overlay=overlay
    )
    assert torch.equal(other.norm.weight, model.norm.weight)
    assert other.get_classifier().out_features == 3


def test_timm_checkpoint_path_with_other_classes_raises(model: WeightFormer, tmp_path: Path) -> None:
    save_weights(model, tmp_path / "a.safetensors")
    again = timm.create_model("weightformer_micro", depth=3, checkpoint_path=tmp_path / "a.safetensors")
    assert same(again, model)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        timm.create_model("weightformer_micro", depth=3, num_classes=3, checkpoint_path=tmp_path / "a.safetensors")


# Files that are no weights, or more than weights


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pth", tmp_path):
        with pytest.raises(FileNotFoundError, match=rf"no weight file at {re.escape(str(path))}"):
            load_weights(fresh(), path)


def test_files_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>404</html>")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("not weights")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save(torch.ones(2), tmp_path / "tensor.pth")
    torch.save({"epoch": 3, "model": "weights.pth"}, tmp_path / "no_tensors.pth")
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=re.escape(str(path))):
            load_weights(fresh(), path)


class CfgNode(dict):
    """Pickles as yacs' class of this name does: a dict with an attribute dictionary."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.__dict__.update(__immutable__=True, __deprecated_keys__=set(), __renamed_keys__={}, __new_allowed__=False)


@pytest.fixture
def save_with_yacs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`torch.save` on a machine that has yacs; afterwards it is gone again."""

    def save(content: dict[str, Any], path: Path, **kwargs: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("yacs", "yacs.config"):
                patch.setitem(sys.modules, name, types.ModuleType(name))
            patch.setattr(sys.modules["yacs.config"], "CfgNode", CfgNode, raising=False)
            patch.setattr(CfgNode, "__module__", "yacs.config")
            torch.save(content, path, **kwargs)
        assert "yacs" not in sys.modules

    return save


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_released_training_files_with_their_configuration(
    legacy: bool, model: WeightFormer, tmp_path: Path, save_with_yacs: Callable[..., None]
) -> None:
    content = {
        "model": to_released(model.state_dict()),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "epoch": 299,
        "max_accuracy": 82.1,
        "config": CfgNode({"TRAIN": CfgNode({"LR": 1e-3, "STEPS": [1, 2]}), "TAG": "default"}),
        "args": argparse.Namespace(lr=1e-3, name="x"),
    }
    save_with_yacs(content, tmp_path / "ckpt.pth", _use_new_zipfile_serialization=not legacy)
    assert same(load_weights(fresh(), tmp_path / "ckpt.pth"), model)
    assert read_state_dict(tmp_path / "ckpt.pth")["config"]["TRAIN"]["STEPS"] == [1, 2]
    assert "yacs" not in sys.modules
    assert argparse.Namespace not in torch.serialization.get_safe_globals(), "the stand-in stayed behind"


class Hostile:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def hostile_payloads(marker: Path) -> dict[str, tuple[object, str]]:
    """What a file could carry that creates the marker, and the function to be named."""
    code = f"open({str(marker)!r}, 'w').close()"
    mkdir = Hostile(os.mkdir, str(marker))
    return {
        "system": (Hostile(os.system, f"touch {marker}"), "system"),
        "eval": (Hostile(eval, code), "eval"),
        "exec": (Hostile(exec, code), "exec"),
        "open": (Hostile(open, str(marker), "w"), "open"),
        "nested": (Hostile(pickle.loads, pickle.dumps(mkdir)), "loads"),
        "listed": ([{"a": (1, mkdir)}], "mkdir"),
        "namespace": (argparse.Namespace(a=mkdir), "mkdir"),
    }


HOSTILE = list(hostile_payloads(Path()))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle 2", "pickle 5", "safetensors"])
def test_hostile_files_run_nothing_and_are_named(name: str, form: str, model: WeightFormer, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload, function = hostile_payloads(marker)[name]
    path = tmp_path / ("a.safetensors" if form == "safetensors" else "a.pth")
    if form in ("zip", "legacy"):
        torch.save({"model": model.state_dict(), "x": payload}, path, _use_new_zipfile_serialization=form == "zip")
    else:
        path.write_bytes(pickle.dumps(payload, protocol=2 if form == "pickle 2" else 5))
    for strict in (True, False):
        with pytest.raises(ValueError, match=re.escape(str(path))) as error:
            load_weights(fresh(), path, strict=strict)
        if form == "pickle 5" and name == "namespace":
            assert "argparse.Namespace" in str(error.value)  # the first name in the file
        elif form != "safetensors":
            assert re.search(rf"was refused: it asks to run ([\w.]+\.)?{function}, which", str(error.value))
    with pytest.raises(Exception, match=r"."):  # timm's own words; what matters is the marker
        timm.create_model(
            "weightformer_micro",
            depth=3,
            pretrained=True,
            pretrained_cfg_overlay={"file": str(path), "num_classes": 10},
        )
    assert not marker.exists()


def test_a_hostile_configuration_runs_nothing(tmp_path: Path, save_with_yacs: Callable[..., None]) -> None:
    marker = tmp_path / "marker"
    hostile = Hostile(os.mkdir, str(marker))
    attribute = CfgNode({"a": 1})
    attribute.__dict__["b"] = hostile
    for config in (CfgNode({"a": hostile}), attribute):
        save_with_yacs({"config": config}, tmp_path / "a.pth")
        with pytest.raises(ValueError, match=r"it asks to run (posix|nt)\.mkdir"):
            load_weights(fresh(), tmp_path / "a.pth")
    assert not marker.exists()


def test_the_hostile_payloads_do_work(tmp_path: Path) -> None:
    """Read without the safeguard, each one leaves its marker; otherwise the test above would prove nothing."""
    for i, name in enumerate(HOSTILE):
        marker = tmp_path / str(i)
        pickle.loads(pickle.dumps(hostile_payloads(marker)[name][0]))  # noqa: S301
        assert marker.exists(), name


# Damage


def tiny(**kwargs: Any) -> WeightFormer:
    return WeightFormer(1, 3, patch_size=2, embed_dim=8, depth=2, **kwargs).eval()


def flip_bytes(rng: random.Random, data: bytearray) -> bytearray:
    for _ in range(rng.choice((1, 1, 4, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_header(rng: random.Random, data: bytearray) -> bytearray:
    """Bytes of the safetensors header, of the first pickle, or of the zip directory at the end."""
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.choice((rng.randrange(min(2048, len(data))), -rng.randrange(1, min(1024, len(data)))))] = (
            rng.randrange(256)
        )
    return data


def truncate(rng: random.Random, data: bytearray) -> bytearray:
    return data[: rng.randrange(len(data))]


def append(rng: random.Random, data: bytearray) -> bytearray:
    return data + rng.randbytes(rng.randrange(1, 500))


def blank(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    data[start : start + 200] = bytes(len(data[start : start + 200]))
    return data


def cut_out(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 300) :]


def repeat(rng: random.Random, data: bytearray) -> bytearray:
    start = rng.randrange(len(data))
    return data[:start] + data[start : start + 300] + data[start:]


BYTES = [flip_bytes, flip_header, truncate, append, blank, cut_out, repeat]


ODD_KEYS = ["", ".", "model", "module.", "ema.", "blocks.999999999999.x", "\0", "head", 3, None, ("a", 1), True, 2.5]
ODD_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def edit_content(rng: random.Random, state: dict[Any, Any]) -> dict[Any, Any]:
    """A state dict with some entries renamed, removed, added, or of another type, shape or kind."""
    original, state = state, dict(state)
    for _ in range(rng.choice((1, 1, 3, 10))):
        key = rng.choice(list(state))
        value = original.get(key, torch.ones(2))
        shapes = [value[None], value[..., :0], value.sum(), value.flatten(), value.expand(2, *value.shape)]
        shapes += [value[:, :0], value[:, :1].repeat(1, 3, *[1] * (value.ndim - 2))] if value.ndim > 1 else []
        kinds = [value.to("meta"), value.to_sparse(), nn.Parameter(value, requires_grad=False)]
        match rng.randrange(6):
            case 0:
                del state[key]
            case 1:
                state[rng.choice(ODD_KEYS)] = value
            case 2:
                state[key] = rng.choice([None, "text", 3, [], [value], {}, {"a": value}, {"model": value}])
            case 3:
                state[key] = value.to(rng.choice(ODD_DTYPES))
            case 4:
                state[key] = rng.choice(shapes + kinds)
            case _:
                return {rng.choice(["model", "ema", "state_dict", "x"]): state, "epoch": 3}
    return state


def edit_header(rng: random.Random, data: bytearray) -> bytearray:
    """A safetensors header that parses but says something else."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(list(header))
    entry = header[name]
    kind = rng.randrange(7)
    if kind == 0:
        entry["dtype"] = rng.choice(["I32", "F64", "BF16", "U8", "BOOL", "F8_E4M3", "X", 3, None])
    elif kind == 1:
        entry["shape"] = rng.choice(
            [[], [0], [-1], [2**62, 4], ["8"], None, [*entry["shape"], 1], entry["shape"][::-1]]
        )
    elif kind == 2:
        entry["data_offsets"] = rng.choice([[0, 0], [4, 2], [0, 10**12], [-4, 4], [], None])
    elif kind == 3:
        header[rng.choice(["__metadata__", "", "x" * 1000])] = rng.choice([{}, {"a": "b"}, {"a": 3}, [], entry])
    elif kind == 4:
        del header[name]
    elif kind == 5:
        header["module." + name] = header.pop(name)
    else:
        return bytearray(struct.pack("<Q", rng.choice([0, 1, length + 8, 2**40, 2**63]))) + data[8:]
    text = json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text)) + text) + data[8 + length :]


def edit_zip(rng: random.Random, path: Path) -> None:
    """A member removed, renamed, emptied, compressed, repeated or exchanged for another."""
    with zipfile.ZipFile(path) as file:
        members = [(info.filename, file.read(info)) for info in file.infolist()]
    i, kind = rng.randrange(len(members)), rng.randrange(6)
    name, data = members[i]
    if kind == 0:
        del members[i]
    elif kind == 1:
        members[i] = rng.choice(["archive/other", "../outside", "data.pkl", ""]), data
    elif kind == 2:
        members[i] = name, data[: len(data) // 2]
    elif kind == 3:
        members.insert(0, ("archive/extra", b"x" * 100))
    elif kind == 4:
        members[i] = name, members[rng.randrange(len(members))][1]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == 5 else zipfile.ZIP_STORED) as file:
        for name, data in members:
            file.writestr(name or "nameless", data)


def write_mutated(seed: int, state: dict[str, Tensor], folder: Path) -> Path:
    rng = random.Random(seed)
    kind = rng.choice(["safetensors", "zip", "legacy"])
    path = folder / f"{seed}.{'safetensors' if kind == 'safetensors' else 'pth'}"
    edited = edit_content(rng, state) if rng.random() < 0.35 else dict(state)
    if kind == "safetensors":
        plain = {k: v for k, v in edited.items() if isinstance(k, str) and isinstance(v, Tensor)}
        plain = {k: v.detach().clone() for k, v in plain.items() if v.layout == torch.strided and not v.is_meta}
        save_file(plain or {"a": torch.ones(1)}, path)
    else:
        torch.save(rng.choice([edited, {"model": edited}]), path, _use_new_zipfile_serialization=kind == "zip")
    if edited.keys() != state.keys() or rng.random() < 0.1:
        return path
    mutations = [*BYTES, edit_header] if kind == "safetensors" else [*BYTES, edit_zip] if kind == "zip" else BYTES
    mutation = rng.choice(mutations)
    if mutation is edit_zip:
        edit_zip(rng, path)
    else:
        path.write_bytes(mutation(rng, bytearray(path.read_bytes())))
    return path


def attempt(model: nn.Module, path: Path, strict: bool) -> BaseException | None:
    """What stopped the weights from being loaded, if anything did."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_weights(model, path, strict=strict)
    except BaseException as error:  # noqa: BLE001 - the point is to see whatever comes
        return error
    return None


@pytest.mark.parametrize("part", range(5))
def test_mutated_files_load_or_say_why(part: int, tmp_path: Path) -> None:
    source, target = tiny(), tiny()
    state, outcomes = source.state_dict(), {"loaded": 0, "refused": 0}
    for seed in range(100 * part, 100 * part + 100):
        path = write_mutated(seed, state, tmp_path)
        data = path.read_bytes()
        target.load_state_dict(state)
        refusal = attempt(target, path, strict=seed % 2 == 0)
        outcomes["loaded" if refusal is None else "refused"] += 1
        if refusal is not None:
            assert isinstance(refusal, (ValueError, FileNotFoundError)), f"seed {seed}: {refusal!r}"
            assert re.match(re.escape(str(path)) + r"\W.{10}", str(refusal)), f"seed {seed}: {refusal}"
            assert same(target, source), f"seed {seed}: half loaded"
        assert path.read_bytes() == data, f"seed {seed}: the file was changed"
        path.unlink()
    assert min(outcomes.values()) >= 10, outcomes  # both kinds of outcome are exercised
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "strategy",
    [
        {"linear_predictor": "gap"},
        {"conv_predictor": "conv"},
        {"pool": 1},
        {"static_weight": False},
        {"normalize": False},
    ],
    ids=str,
)
def test_other_strategies_have_no_released_layout_but_ours(strategy: dict[str, object], tmp_path: Path) -> None:
    model = WeightFormer(embed_dim=8, depth=3, num_classes=3, **strategy)
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"blocks\.1\..* is not in the released layout; save with released=False"):
        save_weights(model, path, released=True)
    assert not path.exists()
    save_weights(model, path)
    other = load_weights(WeightFormer(embed_dim=8, depth=3, num_classes=3, **strategy), path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
