"""What becomes of the final tokens, strip by strip: a mean over the image, or rows written as they come."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from weightformer.streaming.errors import WorkspaceError
from weightformer.streaming.sources import import_reader
from weightformer.streaming.workspace import FileRows, num_bytes

__all__ = ["DenseOutput", "MeanOutput", "Output", "accumulator_dtype"]


class Output(Protocol):
    """A consumer of the normalised tokens of an image."""

    def add(self, row: int, strip: Tensor) -> None:
        """Take rows ``row, row + 1, ...`` (n, W, C)."""

    def result(self) -> Any:
        """What `weightformer.streaming.stream` returns."""


class MeanOutput:
    """The head on the mean token, as ``forward_head`` computes it.

    Args:
        tokens: N, tokens in the image.
        head: applied to the mean (1, C).
        total: zero (C,), in the type to accumulate in.
        reduce: adds up the sums of all processes.
        dtype: of the mean.
    """

    def __init__(
        self, tokens: int, head: nn.Module, total: Tensor, reduce: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        self._tokens, self._head, self._total, self._reduce, self._dtype = tokens, head, total, reduce, dtype

    def add(self, row: int, strip: Tensor) -> None:
        """Sum the tokens of a strip (n, W, C)."""
        self._total += strip.sum(dim=(0, 1), dtype=self._total.dtype)

    def result(self) -> Tensor:
        """(1, num_classes), or (1, C) without a head."""
        mean = self._reduce(self._total) / self._tokens
        return self._head(mean.to(self._dtype)[None])


class DenseOutput:
    """One vector a token, in memory or in a ``.npy`` or ``.zarr`` file that is filled row by row.

    Args:
        height: H.
        head: applied to strips (1, n, W, C); its last axis is kept.
        path: where to write (H, W, K); ``None`` keeps (1, H, W, K) in memory.

    Raises:
        ValueError: the path ends in neither ``.npy`` nor ``.zarr``.
    """

    def __init__(self, height: int, head: Callable[[Tensor], Tensor], path: Path | None) -> None:
        if path is not None and path.suffix not in (".npy", ".zarr"):
            raise ValueError(f"dense output goes to a .npy or .zarr path, not {path}")
        self._height, self._head, self._path = height, head, path
        self._write: Callable[[int, Tensor], None] | None = None
        self._close: Callable[[], None] = lambda: None
        self._rows: Tensor | None = None

    def add(self, row: int, strip: Tensor) -> None:
        """Apply the head to a strip (n, W, C) and store what it gives."""
        values = self._head(strip[None])[0]
        if self._write is None:
            self._write = self._open((self._height, *values.shape[1:]), values)
        self._write(row, values)

    def result(self) -> Tensor | Path:
        """(1, H, W, K), or the path written."""
        self._close()
        if self._path is not None:
            return self._path
        assert self._rows is not None
        return self._rows[None]

    def _open(self, shape: tuple[int, ...], values: Tensor) -> Callable[[int, Tensor], None]:
        if self._path is None:
            self._rows = torch.empty(shape, dtype=values.dtype, device=values.device)
            return self._keep
        dtype = torch.float32 if values.dtype == torch.bfloat16 else values.dtype  # neither format has bfloat16
        self._path.parent.mkdir(parents=True, exist_ok=True)
        name = np.dtype(str(dtype).removeprefix("torch."))
        if self._path.suffix == ".npy":
            # Not truncated when opened: of several processes that write their rows, another may have begun.
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                np.lib.format.write_array_header_2_0(
                    file, {"descr": np.lib.format.dtype_to_descr(name), "fortran_order": False, "shape": shape}
                )
                header = file.tell()
                if file.seek(0, os.SEEK_END) > (size := header + num_bytes(shape, dtype)):
                    file.truncate(size)
            rows = FileRows(self._path, shape, dtype, offset=header)
            self._close = rows.close
            return rows.write
        zarr = import_reader("zarr")
        array = zarr.create_array(
            str(self._path), shape=shape, dtype=name, chunks=(min(len(values), shape[0]), *shape[1:]), overwrite=True
        )

        def write(row: int, strip: Tensor) -> None:
            try:
                array[row : row + len(strip)] = strip.to("cpu", dtype).numpy()
            except OSError as error:
                raise WorkspaceError(
                    f"{self._path}: rows {row}-{row + len(strip)} could not be written: {error}"
                ) from error

        return write

    def _keep(self, row: int, strip: Tensor) -> None:
        assert self._rows is not None
        self._rows[row : row + len(strip)] = strip


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """The widest type that sums over all tokens of an image can have on a device."""
    return torch.float32 if device.type == "mps" else torch.float64
