"""One image over two and four gloo processes equals one process, forward and backward."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes write to."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """By number of processes, what each of them found."""
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


def test_the_documented_training_script_is_the_same_on_two_processes(tmp_path: Path) -> None:
    """It prints the loss after four steps of an optimiser, and what the first dynamic block sent."""
    document = Path(__file__).parents[2] / "docs" / "large-images.md"
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "train_rows.py"
    script.write_text(next(block for block in blocks if "RowParallel" in block))
    alone, shared = (
        subprocess.run(
            [sys.executable, *launcher, str(script)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    )
    assert (alone.returncode, shared.returncode) == (0, 0), alone.stderr + shared.stderr
    found = [
        re.match(r"loss ([\d.]+), block 1 sent {'halo': (\d+), 'statistics': (\d+)}", x.stdout) for x in (alone, shared)
    ]
    assert found[0]
    assert found[1]
    assert float(found[0][1]) == pytest.approx(float(found[1][1]), abs=2e-5)
    assert float(found[0][1]) < 0.69  # it learned something
    assert (found[0][2], found[1][2]) == ("0", str(40 * 64 * 4))  # a row of 40 tokens to the other process


@pytest.mark.parametrize(("height", "parts", "bounds"), [(7, 2, [0, 2, 7]), (8, 4, [0, 2, 4, 6, 8]), (9, 1, [0, 9])])
def test_rows_start_even(height: int, parts: int, bounds: list[int]) -> None:
    assert split_rows(height, parts) == bounds


def test_dense_outputs_are_written_by_all_processes(found, folder: Path) -> None:
    for height, width in ranks.SIZES:
        expected = stream(ranks.build(3), ranks.images(height, width)[0], output="features", progress=False)
        for size in found:
            got = np.load(folder / f"{height}-{width}-{size}.npy")
            assert relative(torch.from_numpy(got)[None], expected) < 1e-10


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_group_resumes_to_the_same_bits(found, folder: Path, size: int) -> None:
    """The killed process had finished one pass less than the others: all go back to that one."""
    expected = found[size][0]["stream 3 100 52 5"]
    for rank in range(size):
        result = torch.load(folder / f"resumed-{size}-{rank}.pt", weights_only=True)
        assert (result["logits"] == expected).all()
        assert 0.2 < result["seen"][0] < 0.5
        assert list((folder / f"workspace-{size}" / f"process-{rank}").iterdir()) == []


def test_what_crosses_is_logged_by_pass(found) -> None:
    """Sums of float64 that do not grow with the image, and halo rows of 9 or 13 tokens of 16 numbers."""
    for height, width, columns in ((61, 33, 9), (100, 52, 13)):
        assert found[2][0][f"log {height} {width}"] == [
            f"block 0 applied: sent 0 bytes of halo rows and {8 * 9 * 16} of sums",
            f"block 1 measured: sent {8 * columns * 16} bytes of halo rows and {8 * 4 * 16} of sums",
            f"blocks 1 to 3 applied: sent {8 * 3 * columns * 16} bytes of halo rows and {8 * 9 * 16} of sums",
            f"block 4 measured: sent {8 * columns * 16} bytes of halo rows and {8 * 4 * 16} of sums",
            f"block 4 applied: sent {8 * columns * 16} bytes of halo rows and {8 * 16} of sums",
        ]


def test_one_process_that_fails_ends_the_run_on_all(found) -> None:
    """The message of the failing one names the region; the group stays usable, and a missing file ends likewise."""
    for size, processes in found.items():
        failed = [process["failed"] for process in processes]
        assert re.match(r"RegionError: image: rows \d+-64, columns 0-40 could not be read: .*truncated", failed[-1][0])
        assert "another process that shares this image failed" in failed[0][0]
        assert "another process that shares this image failed" in failed[0][1]
        assert all("no image at" in failed[rank][1] for rank in range(1, size))


def test_a_dense_output_over_processes_needs_a_file_they_share(tmp_path: Path) -> None:
    for out in (None, tmp_path / "f.zarr"):
        with pytest.raises(ValueError, match=r"over several processes.* \.npy"):
            stream(
                ranks.build(3),
                ranks.images(64, 40)[0],
                output="features",
                out=out,
                progress=False,
                group=object(),  # type: ignore[arg-type]
            )


def test_a_model_without_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="global_pool='avg'"):
        RowParallel(ranks.build(3, global_pool=""), group=object())  # type: ignore[arg-type]
