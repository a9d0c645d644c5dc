"""One image over two and four gloo processes equals one process, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streaming import ranks
from weightformer.streaming import RowParallel, stream
from weightformer.streaming.rows import split_rows

CASES = [(name, *size) for name, _ in ranks.CASES for size in ranks.SIZES]
KWARGS = dict(ranks.CASES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes, what each of them found."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, ranks.__file__, str(folder), "2", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {
        size: [torch.load(folder / f"{size}-{rank}.pt", weights_only=True) for rank in range(size)] for size in (2, 4)
    }


def relative(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_one_process(found, size: int, case: tuple[str, int, int]) -> None:
    name, height, width = case
    model, batch = ranks.build(**KWARGS[name]), ranks.images(height, width).requires_grad_()
    logits = model(batch)
    F.cross_entropy(logits, ranks.labels()).backward()
    assert batch.grad is not None
    for results in found[size]:
        result = results[f"{name} {height} {width}"]
        top, bottom = result["rows"]
        assert relative(result["logits"], logits) < 1e-10
        # The gradient of a process's own pixels is the whole one: what neighbours make of its rows comes back to it.
        assert relative(result["image"], batch.grad[:, :, top:bottom]) < 1e-8
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(result["grads"][key], parameter.grad) < 1e-8, key


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_streaming_equals_one_process(found, size: int, case: tuple[str, int, int]) -> None:
    name, height, width = case
    for strip_rows in (1, 5):
        expected = stream(
            ranks.build(**KWARGS[name]), ranks.images(height, width)[0], strip_rows=strip_rows, progress=False
        )
        for results in found[size]:
            assert relative(results[f"stream {name} {height} {width} {strip_rows}"], expected) < 1e-10


def test_rows_are_shared_out_whole(found) -> None:
    for size, processes in found.items():
        bounds = [p["3 61 33"]["rows"] for p in processes]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == 61
        assert all(bounds[i][1] == bounds[i + 1][0] for i in range(size - 1))


def test_statistics_do_not_grow_with_the_image(found) -> None:
    small, large = (found[2][0][case]["sent"] for case in ("3 61 33", "3 100 52"))
    dim = 16
    per_block = 2 * 8 * (9 * dim + dim // 4 * dim)  # two images of float64: nine regions, a (C / 4, O / 4) Gram matrix
    assert [block["statistics"] for block in small] == [0, per_block, 0, 0, per_block]
    assert [block["statistics"] for block in large] == [block["statistics"] for block in small]
    assert {block["halo"] for block in small} == {2 * 8 * 9 * dim}  # one row of nine tokens to one neighbour
    assert {block["halo"] for block in large} == {2 * 8 * 13 * dim}
    assert {block["halo"] for block in found[4][1]["3 61 33"]["sent"]} == {2 * 2 * 8 * 9 * dim}


def test_masks_are_the_same_on_every_process(found) -> None:
    for processes in found.values():
        drawn = [p["dropped"] for p in processes]
        assert all((other == drawn[0]).all() for other in drawn)
        assert len(drawn[0].unique(dim=0)) > 1  # each forward draws anew
        assert len({p["own noise"].item() for p in processes}) == len(processes)


def test_too_many_processes_for_the_rows(found) -> None:
    assert "4 token rows are too few for 2 processes: each must hold at least 3" in found[2][0]["too few"]
    assert "4 token rows cannot be split over 4 processes: use 2 at most" in found[4][0]["too few"]


@pytest.mark.parametrize(("height", "parts", "bounds"), [(7, 2, [0, 2, 7]), (8, 4, [0, 2, 4, 6, 8]), (9, 1, [0, 9])])
def test_rows_start_even(height: int, parts: int, bounds: list[int]) -> None:
    assert split_rows(height, parts) == bounds


def test_a_dense_output_or_a_resumable_run_is_for_one_process(tmp_path: Path) -> None:
    for kwargs in ({"output": "features"}, {"workspace": tmp_path}):
        with pytest.raises(ValueError, match="over several processes"):
            stream(ranks.build(3), ranks.images(64, 40)[0], progress=False, group=object(), **kwargs)  # type: ignore[arg-type]


def test_a_model_without_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="global_pool='avg'"):
        RowParallel(ranks.build(3, global_pool=""), group=object())  # type: ignore[arg-type]
