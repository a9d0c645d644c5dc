"""Where the tokens live between two passes: in memory, or in files of a folder from which a killed run resumes.

A pass reads the tokens that the last one left and writes its own. In memory it overwrites them, since what it writes
lies behind what it reads; on disk it writes to a second file, so that the last finished pass stays whole.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from weightformer.streaming.errors import WorkspaceError

__all__ = [
    "FileRows",
    "FileTokens",
    "MemoryTokens",
    "RowStore",
    "Tokens",
    "as_bytes",
    "num_bytes",
    "open_workspace",
    "read_tensors",
    "readable",
    "write_whole",
]


class RowStore(Protocol):
    """Rows that can be written and read back."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop``."""

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows from ``start`` on."""


class Tokens(Protocol):
    """Token rows of one image, (H, W, C); rows are counted from the first one stored here.

    Attributes:
        finished: the last finished pass of an earlier run; -1 for a fresh start.
    """

    finished: int

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of the last finished pass (stop - start, W, C)."""

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows of the running pass."""

    def keep(self, name: str) -> RowStore:
        """A further store of rows of the same shape, written once; what finished passes wrote there stays, too."""

    def finish_pass(self, number: int, statistics: Mapping[str, Tensor], *, wrote_tokens: bool) -> None:
        """Make what the pass wrote the rows to read, and remember the sums it accumulated."""

    def resume(self, number: int) -> dict[str, Tensor]:
        """Make pass ``number`` the last finished one: `finished`, or the one before it. Returns its statistics."""

    def close(self, *, finished: bool) -> None:
        """Free the tokens; after a finished run nothing is left behind."""


class MemoryTokens:
    """Tokens in one tensor, overwritten in place."""

    finished = -1

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty(shape, dtype=dtype, device=device)

    def keep(self, name: str) -> RowStore:
        """See `Tokens`."""
        return MemoryTokens(tuple(self._rows.shape), self._rows.dtype, self._rows.device)  # type: ignore[arg-type]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of the last finished pass (stop - start, W, C)."""
        return self._rows[start:stop]

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows of the running pass."""
        self._rows[start : start + len(rows)] = rows

    def finish_pass(self, number: int, statistics: Mapping[str, Tensor], *, wrote_tokens: bool) -> None:
        """See `Tokens`; there is nothing to do."""

    def resume(self, number: int) -> dict[str, Tensor]:
        """See `Tokens`."""
        return {}

    def close(self, *, finished: bool) -> None:
        """See `Tokens`."""
        del self._rows


class FileRows:
    """Rows of equal shape and type in a file, read and written by plain calls.

    Not a memory map: a full disk is then an error and not a killed process, and the pages count for nobody's memory.

    Args:
        path: the file; made if absent.
        shape: (rows, ...).
        dtype: of the elements.
        offset: bytes before the first row.

    Raises:
        WorkspaceError: the disk has no room for all rows.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._offset = offset
        self._row_bytes = num_bytes(shape[1:], dtype)
        self._file: IO[bytes] = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115
        self._reserve(offset + shape[0] * self._row_bytes)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, ...)."""
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        self._file.seek(self._offset + start * self._row_bytes)
        buffer = rows.view(torch.uint8).numpy().data.cast("B")
        while len(buffer):
            count = self._file.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise WorkspaceError(f"{self.path}: rows {start}-{stop} are cut short; delete the workspace and rerun")
            buffer = buffer[count:]
        return rows

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows from ``start`` on."""
        rows = rows.to("cpu", self.dtype).contiguous()
        self._file.seek(self._offset + start * self._row_bytes)
        buffer = rows.view(torch.uint8).numpy().data.cast("B")
        try:
            while len(buffer):
                buffer = buffer[self._file.write(buffer) :]
        except OSError as error:
            raise WorkspaceError(
                f"{self.path}: rows {start}-{start + len(rows)} could not be written: {error.strerror or error}"
            ) from error

    def sync(self) -> None:
        """Force the rows to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and keep it."""
        self._file.close()

    def _reserve(self, size: int) -> None:
        """Claim the whole size at the start, so that a disk too small shows before any work is done."""
        missing = size - self.path.stat().st_size
        if missing <= 0:
            return
        free = shutil.disk_usage(self.path.parent).free
        try:
            if free < missing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            else:
                self._file.truncate(size)
        except OSError as error:
            self._file.close()
            self.path.unlink()
            raise WorkspaceError(
                f"{self.path} needs {readable(missing)} more for {self.shape[0]} rows but the disk has "
                f"{readable(free)} free ({error.strerror or error}); choose a folder on a larger disk"
            ) from error


class FileTokens:
    """Tokens in two files of a folder, and beside them the number and the sums of the last two finished passes.

    Of several processes, one may have finished a pass that another has not: then all resume from the one before, whose
    tokens are whole until the next pass begins.

    Args:
        folder: the workspace, made if absent.
        shape: (H, W, C).
        dtype: of the tokens.
        run: what a run is made of, by name; a run resumes only if all of it is the same.
        device: where `read` puts the rows.

    Raises:
        ValueError: the folder holds the state of another run, or is in use.
        WorkspaceError: the disk has no room.
    """

    def __init__(
        self,
        folder: Path,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        run: Mapping[str, str],
        device: torch.device,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._run, self._device = folder, dict(run), device
        self._lock = _lock(folder / "lock")
        self._passes = dict(self._stored_passes())
        self.finished = max(self._passes, default=-1)
        self._resumable = bool(self._passes)
        self._current = 1
        self._files = [FileRows(folder / f"tokens-{i}.bin", shape, dtype) for i in range(2)]
        self._kept: list[FileRows] = []

    def keep(self, name: str) -> RowStore:
        """See `Tokens`."""
        tokens = self._files[0]
        self._kept.append(FileRows(self._folder / f"{name}.bin", tokens.shape, tokens.dtype))
        return self._kept[-1]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows of the last finished pass (stop - start, W, C)."""
        return self._files[self._current].read(start, stop).to(self._device, non_blocking=True)

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows of the running pass."""
        self._files[1 - self._current].write(start, rows)

    def finish_pass(self, number: int, statistics: Mapping[str, Tensor], *, wrote_tokens: bool) -> None:
        """See `Tokens`."""
        if wrote_tokens:
            self._current = 1 - self._current
            for file in (self._files[self._current], *self._kept):
                file.sync()
        state = save(
            {name: value.cpu() for name, value in statistics.items()},
            metadata={"pass": str(number), "current": str(self._current), "run": json.dumps(self._run)},
        )
        write_whole(self._states[number % 2], state)
        self._resumable = True

    def resume(self, number: int) -> dict[str, Tensor]:
        """See `Tokens`.

        Raises:
            ValueError: the state of this pass is gone.
        """
        for later in [each for each in self._passes if each > number]:
            self._states[later % 2].unlink()
        if number < 0:
            return {}
        if number not in self._passes:
            raise ValueError(f"the workspace {self._folder} has lost the state of pass {number}; delete the folder")
        self._current, statistics = self._passes[number]
        return {name: value.to(self._device) for name, value in statistics.items()}

    def close(self, *, finished: bool) -> None:
        """See `Tokens`."""
        for file in (*self._files, *self._kept):
            file.close()
        finished |= not self._resumable  # a run that failed in its first pass leaves nothing to go on from
        if finished:
            for path in (*(file.path for file in (*self._files, *self._kept)), *self._states):
                path.unlink(missing_ok=True)
        self._lock.close()
        if finished:
            (self._folder / "lock").unlink()

    @property
    def _states(self) -> list[Path]:
        return [self._folder / f"state-{i}.safetensors" for i in range(2)]

    def _stored_passes(self) -> Iterator[tuple[int, tuple[int, dict[str, Tensor]]]]:
        """Number, token file and statistics of the finished passes that the folder holds."""
        for path in self._states:
            if not path.exists():
                continue
            metadata, tensors = read_tensors(path)
            before = json.loads(metadata["run"])
            changed = [name for name in self._run if before.get(name) != self._run[name]]
            if changed:
                raise ValueError(
                    f"the workspace {self._folder} holds an unfinished run with another {', '.join(changed)}; "
                    "delete the folder to start anew, or name another one"
                )
            yield int(metadata["pass"]), (int(metadata["current"]), tensors)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, however the process ends, it holds all of the data or what it held before."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a safetensors file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["__metadata__"], load(data)


@contextmanager
def open_workspace(
    folder: Path | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    run: Mapping[str, str],
    *,
    temporary: bool,
) -> Iterator[Tokens]:
    """Tokens in memory if ``folder`` is ``None``, else in its files.

    On an error the files of a named folder stay, for the next call to resume from; a temporary one always goes.
    """
    try:
        tokens: Tokens = (
            MemoryTokens(shape, dtype, device) if folder is None else FileTokens(folder, shape, dtype, run, device)
        )
        finished = False
        try:
            yield tokens
            finished = True
        finally:
            tokens.close(finished=finished)
    finally:
        if temporary and folder is not None:
            shutil.rmtree(folder)


def as_bytes(memory: int | str) -> int:
    """A number of bytes from an int or from text such as ``"2GiB"``, ``"500 MB"`` or ``"1e9"``.

    Raises:
        ValueError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)(b?)\s*", str(memory), re.IGNORECASE)
    if match is None:
        raise ValueError(f"memory {memory!r} is no size; write a number of bytes or, say, '2GiB' or '500MB'")
    number, prefix, binary, _ = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def readable(size: int) -> str:
    """A number of bytes for a person."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape."""
    return math.prod(shape) * dtype.itemsize


def _lock(path: Path) -> IO[bytes]:
    """Hold a file for this process; the lock goes with the process, however it ends."""
    file = open(path, "ab")  # noqa: SIM115
    try:
        import fcntl
    except ImportError:  # Windows: two runs in one workspace go unnoticed
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"the workspace {path.parent} is in use by another run; name another folder") from error
    return file
