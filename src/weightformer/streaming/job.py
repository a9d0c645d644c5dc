"""Many images, one after the other: what fails is reported by name, and what is finished is kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from safetensors.torch import save
from torch import Tensor, nn

from weightformer.streaming.errors import PeerError
from weightformer.streaming.progress import job_bar
from weightformer.streaming.rows import least, together
from weightformer.streaming.run import check_arguments, digest, stream
from weightformer.streaming.sources import find_sources, open_source
from weightformer.streaming.workspace import as_bytes, read_tensors, write_whole

__all__ = ["StreamOptions", "Streamed", "show_saved", "stream_files"]

# What one image may fail of, a lack of memory (a RuntimeError of torch's) and another process among them.
_FAILURES = (OSError, ValueError, ImportError, MemoryError, RuntimeError)


@dataclass
class Streamed:
    """What became of one image."""

    name: str
    """As `weightformer.streaming.sources.find_sources` calls it."""
    path: Path
    """Where the image is."""
    value: Tensor | Path | None = None
    """What `weightformer.streaming.stream` returned; ``None`` if it failed."""
    error: str = ""
    """Why it failed."""


@dataclass
class StreamOptions:
    """How images are streamed and what is wanted of them; a task's options are a subclass with its ``RESULTS``."""

    RESULTS: ClassVar[Mapping[str, Sequence[str]]]
    """What can be asked for, and the kinds of path it is written to; ``""`` among them: the terminal will do."""

    result: str
    """One of ``RESULTS``."""
    save: str | None = None
    """Where to; a path for dense results has {name} in it for several images."""
    strip_rows: int = 16
    """Token rows computed together."""
    memory: str | None = None
    """Tokens that exceed so many bytes (such as 2GiB) go to disk; by default half of the memory."""
    workspace: str | None = None
    """Folder from which the same command resumes after a kill."""
    tiles: bool = False
    """Whether a folder given is one image, cut into tiles."""

    def __post_init__(self) -> None:
        if self.result not in self.RESULTS:
            raise ValueError(f"the result must be one of {', '.join(self.RESULTS)}, got {self.result!r}")
        if self.memory is not None:
            as_bytes(self.memory)

    def find(self, images: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
        """Paths of the images by name, see `weightformer.streaming.sources.find_sources`.

        Raises:
            FileNotFoundError: a path that does not exist, or folders without any image.
            ValueError: the result is not written to a path of this kind.
        """
        kinds = self.RESULTS[self.result]
        if Path(self.save or "").suffix not in kinds:
            raise ValueError(
                f"{self.result} are written to a {' or '.join(filter(None, kinds))} path: "
                + (f"{self.save} is none" if self.save else "give one with --save")
            )
        return find_sources(images, tiles=self.tiles)


def stream_files(
    model: nn.Module,
    images: Mapping[str, Path],
    *,
    output: str = "logits",
    out: str | os.PathLike[str] | None = None,
    strip_rows: int = 16,
    memory: int | str | None = None,
    workspace: str | os.PathLike[str] | None = None,
    progress: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Iterator[Streamed]:
    """`stream` on many images, in order; one that fails is reported and does not end the job.

    Args:
        model: see `stream`.
        images: paths by name, as `weightformer.streaming.sources.find_sources` gives them.
        output: ``"logits"``, ``"pooled"`` or ``"features"``; of an UperNet ``"segmentation"`` or ``"logits"``.
        out: where dense outputs go, a ``.npy`` or ``.zarr`` path; ``{name}`` in it stands for the image's name.
        strip_rows: see `stream`.
        memory: see `stream`.
        workspace: a folder for tokens and for results of images already finished. A job that was killed goes on where
            it was when it is called again; once all images are done, the folder is empty.
        progress: whether to show a bar on the error stream, for the whole job, weighted by pixels.
        group: see `stream`.

    Raises:
        ValueError: the model cannot be streamed, an argument is out of range or does not fit the others, or ``out`` is
            one path for several images.
    """
    check_arguments(model, output, out, strip_rows, memory, group)
    paths = {name: None if out is None else Path(str(out).replace("{name}", name)) for name in images}
    if out is not None and len(set(paths.values())) < len(images):
        raise ValueError(f"{out} names one file for {len(images)} images; write {{name}} where each one's name belongs")
    run = functools.partial(stream, model, output=output, strip_rows=strip_rows, memory=memory, group=group)
    setting = [output, str(strip_rows)]
    sizes = {name: _pixels(path) for name, path in images.items()}
    records: list[Path] = []
    failed = False
    with job_bar(sum(sizes.values()), progress) as job:
        for name, path in images.items():
            result = Streamed(name, path)
            listener = job.image(name, sizes[name])
            try:
                if workspace is None:
                    result.value = run(path, out=paths[name], progress=listener)
                else:
                    record = _record(model, path, paths[name], Path(workspace), setting, group)
                    result.value = _kept(run, path, paths[name], record, listener)
                    records.append(record)
            except _FAILURES as error:
                result.error = _reason(error, group)
                failed = True
                job.without(name, sizes[name])
            yield result
    for record in () if failed else records:
        record.unlink()


def show_saved(rows: Iterable[tuple[str, str, str]]) -> int:
    """Print which image was written where, or why not, once all are; returns how many failed."""
    table = Table(Column("image", overflow="fold"), Column("written to", overflow="fold"))
    failed = 0
    for path, saved, error in rows:
        failed += bool(error)
        table.add_row(path, f"[red]failed[/red]: {escape(error)}" if error else saved)
    Console().print(table)
    return failed


def _kept(
    run: functools.partial[Tensor | Path], path: Path, out: Path | None, record: Path, listener: Callable[[float], None]
) -> Tensor | Path:
    """What an earlier run of the job found, if it finished this image; else `stream`, resumed where that run ended."""
    if record.exists():
        listener(1.0)
        return read_tensors(record)[1]["value"] if out is None else out
    folder = record.with_suffix("")
    try:
        value = run(path, out=out, workspace=folder, progress=listener)
    finally:
        for empty in (*folder.glob("process-*"), folder):
            with contextlib.suppress(OSError):
                empty.rmdir()
    write_whole(record, save({"value": value.cpu()} if isinstance(value, Tensor) else {}, {"image": str(path)}))
    return value


def _record(
    model: nn.Module,
    path: Path,
    out: Path | None,
    workspace: Path,
    setting: list[str],
    group: dist.ProcessGroup | None,
) -> Path:
    """The file that says that an image is finished, named after all that its result depends on.

    One that not every process has is removed: they go on together, or begin together.
    """
    device = next(model.parameters()).device
    with together(group, device):
        with contextlib.closing(open_source(path)) as image:
            parts = [image.identity(), digest(model), str(out), *setting]
        if group is not None:
            parts.append(f"process {dist.get_rank(group)} of {dist.get_world_size(group)}")
        workspace.mkdir(parents=True, exist_ok=True)
        key = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        record = workspace / f"{key}.safetensors"
    if not least(record.exists(), group, device):
        record.unlink(missing_ok=True)
    return record


def _pixels(path: Path) -> int:
    """Of an image; none if it cannot be opened, which `stream` will say."""
    try:
        with contextlib.closing(open_source(path)) as image:
            return image.height * image.width
    except (OSError, ValueError, ImportError):
        return 0


def _reason(error: Exception, group: dist.ProcessGroup | None) -> str:
    """Why an image failed, in the words of the process on which it did.

    Raises:
        Exception: the same error, if it is not of a kind that an image or the machine can cause.
    """
    memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
    if isinstance(error, RuntimeError) and not (memory or isinstance(error, PeerError)):
        raise error
    reason = "" if isinstance(error, PeerError) else " ".join(str(error).split()) or type(error).__name__
    if group is None:
        return reason
    reasons: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons))
