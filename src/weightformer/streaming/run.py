"""`stream`: the forward pass on an image of any size, strip by strip."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weightformer.models import WeightFormer
from weightformer.streaming.embedding import check_image, embedded
from weightformer.streaming.outputs import DenseOutput, MeanOutput, Output, accumulator_dtype
from weightformer.streaming.passes import (
    Segment,
    Strips,
    ahead,
    apply_block,
    dynamic_weights,
    kernel_sums,
    kernel_tokens,
    measure_weight,
    segments,
    static_weights,
    weight_sums_shape,
)
from weightformer.streaming.progress import Meter, block_work, embed_work, measure_work, progress_bar
from weightformer.streaming.rows import Rows, least, together
from weightformer.streaming.sources import Source, open_source
from weightformer.streaming.workspace import RowStore, Tokens, as_bytes, num_bytes, open_workspace

__all__ = ["Passes", "check_arguments", "choose_folder", "digest", "opened", "stream"]

_logger = logging.getLogger("weightformer.streaming")


@torch.no_grad()
def stream(
    model: nn.Module,
    source: Any,
    *,
    output: str | Callable[[Tensor], Tensor] = "logits",
    out: str | os.PathLike[str] | None = None,
    strip_rows: int = 16,
    memory: int | str | None = None,
    workspace: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[float], None] = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor | Path:
    """What ``model.eval()(image)`` returns, computed in memory that does not grow with the height of the image.

    The tokens of the image are kept in memory, or on disk where they exceed ``memory``; everything else takes a few
    strips. Exact: the same sums over the same tokens, only their order differs.

    Args:
        model: a WeightFormer, or an UperNet on one, on any device; runs as in eval mode.
        source: one image, as `open_source` takes it. Integer pixels are scaled by their type's maximum and normalised
            by the mean and deviation of ``model.pretrained_cfg``; floating-point ones are the model's own input.
            One band serves a model of several; of four bands a model of three or one drops the last (alpha), and a
            model of one takes the luma of the others.
        output: ``"logits"`` as the forward returns them, ``"pooled"`` (mean token), ``"features"`` (every final token),
            or a function from final tokens (1, n, W, C) to (1, n, W, K), such as a per-token segmentation head. Of an
            UperNet ``"segmentation"``, the class of every pixel, or ``"logits"``, those of every pixel.
        out: a ``.npy`` or ``.zarr`` path that a dense output is written to as it comes, as (H, W, K).
        strip_rows: token rows computed together. Fewer take less memory; below 8, also more time.
        memory: for the tokens, in bytes or as in ``"2GiB"``; half of the device's memory by default. Tokens that
            exceed it go to ``workspace``, or without one to a temporary folder.
        workspace: a folder for the tokens, whatever their size. A run that was killed or failed resumes after its last
            finished pass when it is called again with the same model, image, ``strip_rows`` and number of processes, to
            the same bits.
        progress: whether to show a bar on the error stream; or a function called with the finished share, 0 to 1.
        group: processes that share the image by rows; each calls with the same arguments and gets the same result. What
            each pass sent is logged (``weightformer.streaming``, level INFO). A dense output goes to a ``.npy`` file
            that all of them can reach.

    Returns:
        (1, num_classes) or (1, C) for a pooled output, (1, H, W, K) for a dense one, of an UperNet (1, height, width)
        labels or (1, height, width, K) logits; the path if ``out`` is given.

    Raises:
        FileNotFoundError: there is no image at the path.
        ValueError: an argument is out of range, does not fit the others or the image, or the workspace is another
            run's.
        RegionError: pixels could not be read.
        WorkspaceError: tokens or results could not be written, as on a full disk.
        PeerError: another process of the group failed.
    """
    check_arguments(model, output, out, strip_rows, memory, group)
    if not isinstance(model, WeightFormer):
        from weightformer.streaming.segmentation import stream_segmentation  # which needs this module

        return stream_segmentation(model, source, output, out, strip_rows, memory, workspace, progress)
    weight = model.patch_embed.proj.weight
    with ExitStack() as stack:
        with together(group, weight.device):
            image = stack.enter_context(opened(source))
            check_image(model, image)
            patch = model.patch_embed.patch_size
            height, width = -(-image.height // patch), -(-image.width // patch)
            rows = Rows(height, group)
            parts = segments(model.blocks)
            rows.check_halo(max((part.halo for part in parts[1:]), default=0))
            sink = _sink(model, output, None if out is None else Path(out), rows, width)

            listener = stack.enter_context(progress_bar(image.name, progress))
            shape = (len(rows) if len(parts) > 1 else 0, width, model.embed_dim)
            folder, temporary = choose_folder(num_bytes(shape, weight.dtype), memory, workspace, weight.device, group)
            run = {}
            if workspace is not None:
                run = {"model": digest(model), "image": image.identity(), "strip_rows": str(strip_rows)}
                run["division into processes"] = f"{rows.start}-{rows.stop} of {height}"
            tokens = stack.enter_context(
                open_workspace(folder, shape, weight.dtype, weight.device, run, temporary=temporary)
            )
        return Passes(model, image, parts, rows, width, strip_rows, tokens, listener).run(sink)


class Passes:
    """The passes over one image.

    Args:
        model: the backbone.
        image: what it sees.
        parts: its blocks.
        rows: which rows of the grid are this process's.
        width: tokens a row.
        strip_rows: rows of a strip.
        tokens: where they live between two passes.
        listener: told the finished share of all work.
        taps: stores for what chosen blocks leave, on one process.
        work_after: what is still to be done after the passes, in the unit of `Meter`.
    """

    def __init__(
        self,
        model: WeightFormer,
        image: Source,
        parts: list[Segment],
        rows: Rows,
        width: int,
        strip_rows: int,
        tokens: Tokens,
        listener: Callable[[float], None],
        *,
        taps: Mapping[nn.Module, RowStore] | None = None,
        work_after: int = 0,
    ) -> None:
        self.model, self.image, self.parts, self.tokens = model, image, parts, tokens
        self.rows, self.width, self.strip_rows = rows, width, strip_rows
        self.taps = {} if taps is None else taps
        work = sum(self._work(number) for number in range(2 * len(parts) - 1))
        self.meter = Meter(work + work_after, listener)

    def run(self, sink: Output) -> Any:
        """What the sink makes of all passes.

        Pass 0 makes tokens from pixels; then each dynamic block takes an odd pass to measure, an even one to apply.

        Each pass leaves the tokens as they enter the next dynamic block's convolution, and the sums it needs.
        """
        finished = least(self.tokens.finished, self.rows.group, self.device)
        statistics = self.tokens.resume(finished)
        self.meter.add(sum(self._work(number) for number in range(finished + 1)))
        for i, part in enumerate(self.parts):
            measure, apply = 2 * i - 1, 2 * i
            if part.dynamic is not None and finished < measure:
                statistics["weight"] = self._measure(part, statistics["kernel"])
                self._finish(measure, statistics, wrote_tokens=False)
            if finished < apply:
                statistics = self._apply(i, statistics, sink)
                if part is not self.parts[-1]:
                    self._finish(apply, statistics, wrote_tokens=True)
        result = sink.result()
        self._log_sent(2 * len(self.parts) - 2)
        return result

    def _finish(self, number: int, statistics: dict[str, Tensor], *, wrote_tokens: bool) -> None:
        with together(self.rows.group, self.device):
            self.tokens.finish_pass(number, statistics, wrote_tokens=wrote_tokens)
        self._log_sent(number)

    def _measure(self, part: Segment, kernel: Tensor) -> Tensor:
        """The sums that a dynamic block predicts its linear weight from."""
        block: Any = part.dynamic
        weights = dynamic_weights(block, kernel, None, self.rows.height, self.width)
        strips, top, bottom = self._stored(halo=1)
        strips = self.meter.count(strips, measure_work(block) * self.width)
        total = self._zeros(1, *weight_sums_shape(block))
        start, height = self.rows.start, self.rows.height
        with together(self.rows.group, self.device):
            measure_weight(block, weights, strips, top, bottom, start, height, total)
        return self.rows.sum(total)

    def _apply(self, index: int, statistics: dict[str, Tensor], sink: Output) -> dict[str, Tensor]:
        """Run the blocks of a segment; feed the sink after the last one, else return the next block's kernel sums."""
        part, last = self.parts[index], index + 1 == len(self.parts)
        strips, top, bottom = self._embedded(part.halo) if part.dynamic is None else self._stored(part.halo)
        strips = self.meter.count(strips, self._apply_work(part) * self.width)
        if part.dynamic is not None:
            sums = statistics["kernel"], statistics["weight"]
            weights = dynamic_weights(part.dynamic, *sums, self.rows.height, self.width)
            strips = self._tapped(part.dynamic, apply_block(weights, strips, top, bottom))
        for block in part.static:
            strips = self._tapped(block, apply_block(static_weights(block), strips, top, bottom))
        first = 0 if top else self.rows.start
        if last:
            with together(self.rows.group, self.device):
                for row, strip in self._own(first, strips):
                    sink.add(row, self.model.norm(strip))
            return {}
        following: Any = part.following
        conv = following.conv
        strips = self._kept(0 if top else first - conv.halo, map(following.norm1, strips))
        total = self._zeros(1, sum(n * n for n in conv.region_sizes), self.model.embed_dim)
        with together(self.rows.group, self.device):
            for row, strip in self._own(first, kernel_tokens(conv, strips, top, bottom)):
                total += kernel_sums(conv, strip[None], row, self.rows.height, total.dtype)
        return {"kernel": self.rows.sum(total)}

    def _tapped(self, block: nn.Module, strips: Strips) -> Strips:
        """The same strips, from the grid's first row on; stored as they pass if this block's are wanted."""
        return self._stored_in(self.taps[block], strips) if block in self.taps else strips

    def _stored_in(self, store: RowStore, strips: Strips) -> Strips:
        row = 0
        for strip in strips:
            store.write(row, strip)
            row += len(strip)
            yield strip

    def _kept(self, row: int, strips: Iterable[Tensor]) -> Strips:
        """The same strips, which begin at ``row``; the rows of this process are stored as they pass."""
        for strip in strips:
            for start, own in self._own(row, [strip]):
                self.tokens.write(start - self.rows.start, own)
            row += len(strip)
            yield strip

    def _own(self, row: int, strips: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Of strips that begin at ``row``, the rows of this process, with the number of each strip's first one."""
        for strip in strips:
            first, last = max(row, self.rows.start), min(row + len(strip), self.rows.stop)
            if first < last:
                yield first, strip[first - row : last - row]
            row += len(strip)

    def _stored(self, halo: int) -> tuple[Strips, bool, bool]:
        """Strips of this process's rows and ``halo`` rows of its neighbours', and whether they reach the borders."""
        count = len(self.rows)
        above = below = None
        if self.rows.group is not None:
            with together(self.rows.group, self.device):
                first, last = self.tokens.read(0, halo), self.tokens.read(count - halo, count)
            above, below = self.rows.neighbours(first, last)

        def strips() -> Strips:
            if above is not None:
                yield above
            for row in range(0, count, self.strip_rows):
                yield self.tokens.read(row, min(row + self.strip_rows, count))
            if below is not None:
                yield below

        return ahead(strips()), above is None, below is None

    def _embedded(self, halo: int) -> tuple[Strips, bool, bool]:
        """Strips of embedded rows, read from the image together with the ``halo`` rows around this process's."""
        start, stop = max(self.rows.start - halo, 0), min(self.rows.stop + halo, self.rows.height)
        return embedded(self.model, self.image, start, stop, self.strip_rows), start == 0, stop == self.rows.height

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.model.patch_embed.proj.weight.device

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=accumulator_dtype(self.device), device=self.device)

    def _log_sent(self, number: int) -> None:
        """Say what this process sent in a pass, and begin to count anew."""
        if self.rows.group is None:
            return
        sent, blocks = self.rows.sent, list(self.model.blocks)
        part = self.parts[(number + 1) // 2]
        run = [*([] if part.dynamic is None else [part.dynamic]), *part.static]
        first = blocks.index(run[0]) if run else 0
        last = first + len(run) - 1
        if number % 2:
            what = f"block {first} measured"
        elif first < last:
            what = f"blocks {first} to {last} applied"
        else:
            what = f"block {first} applied" if run else "pixels embedded"
        _logger.info("%s: sent %d bytes of halo rows and %d of sums", what, sent["halo"], sent["statistics"])
        sent.update(halo=0, statistics=0)

    def _work(self, number: int) -> int:
        """Work of one pass over this process's rows and the halo around them."""
        part, measures = self.parts[(number + 1) // 2], number % 2 == 1
        halo = 1 if measures else part.halo
        count = min(self.rows.stop + halo, self.rows.height) - max(self.rows.start - halo, 0)
        return (
            count * self.width * (measure_work(part.dynamic) if measures and part.dynamic else self._apply_work(part))
        )

    def _apply_work(self, part: Segment) -> int:
        blocks = part.static if part.dynamic is None else (part.dynamic, *part.static)
        return sum(map(block_work, blocks)) + (embed_work(self.model) if part.dynamic is None else 0)


def check_arguments(
    model: nn.Module,
    output: object,
    out: str | os.PathLike[str] | None,
    strip_rows: int,
    memory: int | str | None,
    group: object,
) -> None:
    """Raise ValueError for what no image can be streamed with."""
    backbone = model if isinstance(model, WeightFormer) else getattr(model, "backbone", None)
    if not isinstance(backbone, WeightFormer):
        raise ValueError(
            f"stream needs a WeightFormer, or an UperNet on one, got {type(model).__name__}; unwrap it first"
        )
    segments(backbone.blocks)
    if memory is not None:
        as_bytes(memory)
    if strip_rows < 1:
        raise ValueError(f"strip_rows must be at least 1, got {strip_rows}")
    if not isinstance(model, WeightFormer):
        if output not in ("segmentation", "logits"):
            raise ValueError(f"of an UperNet, output must be 'segmentation' or 'logits', got {output!r}")
        if group is not None:
            raise ValueError("an UperNet is streamed by one process; leave out the group")
        return
    if not callable(output) and output not in ("logits", "pooled", "features"):
        raise ValueError(f"output must be 'logits', 'pooled', 'features' or a function of tokens, got {output!r}")
    dense = callable(output) or output == "features" or model.global_pool == ""
    if out is not None and not dense:
        raise ValueError(f"out is for dense outputs; {output!r} is one vector and is returned")
    if group is not None and dense and (out is None or Path(out).suffix != ".npy"):
        raise ValueError("over several processes, a dense output is written by all of them: give a .npy path as out")


def _sink(
    model: WeightFormer, output: str | Callable[[Tensor], Tensor], out: Path | None, rows: Rows, width: int
) -> Output:
    identity = nn.Identity()
    if callable(output):
        return DenseOutput(rows.height, output, out)
    if output == "features":
        return DenseOutput(rows.height, identity, out)
    head = model.head if output == "logits" else identity
    if model.global_pool == "":
        return DenseOutput(rows.height, head, out)
    weight = model.patch_embed.proj.weight
    total = torch.zeros(model.embed_dim, dtype=accumulator_dtype(weight.device), device=weight.device)
    return MeanOutput(rows.height * width, head, total, rows.sum, weight.dtype)


def choose_folder(
    size: int,
    memory: int | str | None,
    workspace: str | os.PathLike[str] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[Path | None, bool]:
    """Where tokens of this size go, and whether the folder is to be removed afterwards; no folder means memory."""
    if workspace is not None:
        return Path(workspace) if group is None else Path(workspace) / f"process-{dist.get_rank(group)}", False
    if size <= (_half_of_memory(device) if memory is None else as_bytes(memory)):
        return None, False
    return Path(tempfile.mkdtemp(prefix="weightformer-")), True


def _half_of_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2
    if hasattr(os, "sysconf"):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # that torchrun started on this machine
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (2 * processes)
    return float(2 * 2**30)


def digest(model: nn.Module) -> str:
    """Text that differs whenever the model's structure or a weight does."""
    hashed = hashlib.blake2b(str(model).encode())
    for name, value in model.state_dict().items():
        hashed.update(name.encode())
        hashed.update(value.cpu().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


@contextmanager
def opened(source: Any) -> Iterator[Source]:
    """The source, closed afterwards if it was opened here."""
    image = open_source(source)
    try:
        yield image
    finally:
        if image is not source:
            image.close()
