"""Memory and time against the size of the image: streamed, untiled, and DeiT with fused and with explicit attention.

Each case runs in a process of its own on a mosaic of that size. `peak_mb` is what the process held at most beyond what
it held before the forward pass: weights, libraries and, for the forms that need it whole, the image are not in it.
`mapped_mb` is how much of that was pages of mapped files, `disk_mb` the size of the token files. Linux only: the
figures come from /proc.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Column, Table

import weightformer  # noqa: F401 - registers the models
from weightformer.bench.memory import address_space_limit
from weightformer.ops import native
from weightformer.streaming import open_source, stream
from weightformer.streaming.mosaic import write_mosaic

__all__ = ["FORMS", "LargeConfig", "measure_large", "plot", "show"]

FORMS = {
    "streamed-memory": "streamed, tokens in memory",
    "streamed-disk": "streamed, tokens on disk",
    "untiled": "untiled",
    "deit-fused": "DeiT, fused attention",
    "deit-explicit": "DeiT, explicit attention",
}
# `difference`: the largest one, relative, to the untiled logits of the same image. `runs`: more than 1 after a kill.
COLUMNS = (
    *("form", "ops", "height", "width", "rows", "status", "cpu_s", "wall_s", "peak_mb", "mapped_mb", "disk_mb"),
    *("runs", "difference", "logits", "threads", "torch", "cpu"),
)
_CASE = ("form", "ops", "height", "width", "rows")
_LOG_SHARE, _LOG_SECONDS = 0.05, 5.0
_NOTE_SECONDS = 2.0


@dataclass
class LargeConfig:
    """Which images, in which forms."""

    sizes: list[str] = field(default_factory=lambda: ["512x512", "1024x1024", "2048x2048"])
    """Images, as HEIGHTxWIDTH in pixels."""
    forms: list[str] = field(default_factory=lambda: list(FORMS))
    """streamed-memory, streamed-disk, untiled (WeightFormer-T), deit-fused and deit-explicit (DeiT-T)."""
    strip_rows: int = 16
    """Token rows computed together where the image is streamed."""
    native: bool = False
    """Build and use the C++ forms of our ops."""
    threads: int = 1
    """CPU threads."""
    limit: float = 300.0
    """Skip a form at a size where it is expected to take more seconds of CPU time, by its last smaller size."""
    fresh: bool = False
    """Measure again what the table holds already."""
    mosaics: str = tempfile.gettempdir()
    """Folder for the images, and for what a killed run resumes from."""
    output: str = "runs/bench-large"
    """Folder for large_images.csv, .log and .svg."""

    def __post_init__(self) -> None:
        if unknown := set(self.forms) - FORMS.keys():
            raise ValueError(f"unknown form {min(unknown)!r}; choose from {', '.join(FORMS)}")
        for size in self.sizes:
            if not all(side.isdigit() and int(side) >= 16 for side in size.split("x")) or size.count("x") != 1:
                raise ValueError(f"a size is HEIGHTxWIDTH in pixels, 16 at least, such as 4096x4096, not {size!r}")
        if min(self.strip_rows, self.threads) < 1:
            raise ValueError("strip_rows and threads must be at least 1")


@dataclass
class _Case:
    """One form on one image, as its process is told."""

    form: str
    image: str
    strip_rows: int
    native: bool
    threads: int
    notes: str
    """Where a streamed run keeps its tokens and what it has used so far."""


def measure_large(config: LargeConfig) -> list[dict[str, str]]:
    """Measure every form on every size, write the table row by row, and return it.

    Called again, it measures what is missing; a streamed run that was killed goes on where it was.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    table = output / "large_images.csv"
    for size in sorted(config.sizes, key=lambda size: _pixels(*size.split("x"))):
        height, width = size.split("x")
        image = Path(config.mosaics) / f"mosaic-{size}.tif"
        for form in sorted(config.forms, key=lambda form: form != "untiled"):  # the others are compared with it
            ours, streamed = not form.startswith("deit"), form.startswith("streamed")
            row = {
                "form": form,
                "ops": ("native" if config.native else "eager") if ours else "",
                "height": height,
                "width": width,
                "rows": str(config.strip_rows) if streamed else "",
            }
            rows = read_table(table)
            if not config.fresh and any(_same_case(old, row) and not _unfinished(old, config) for old in rows):
                continue
            expected = _expected_seconds(row, rows)
            if expected > config.limit and not streamed:
                row["status"] = f"skipped: about {expected:.0f} s"
            else:
                if not image.exists():
                    write_mosaic(image, int(height), int(width))
                notes = image.with_name(f"{image.stem}-{form}-{row['ops']}-{config.strip_rows}")
                case = _Case(form, str(image), config.strip_rows, config.native, config.threads, str(notes))
                row |= _run(case, output / "large_images.log")
                row["difference"] = _difference(row, rows) if ours else ""
            _write_table(table, [*(old for old in rows if not _same_case(old, row)), row])
    return read_table(table)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows measured so far."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _write_table(path: Path, rows: list[dict[str, str]]) -> None:
    order = {form: place for place, form in enumerate(FORMS)}
    rows = sorted(rows, key=lambda row: (int(row["width"]), int(row["height"]), order[row["form"]], row["ops"]))
    partial = path.with_suffix(".partial")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def _same_case(a: dict[str, str], b: dict[str, str]) -> bool:
    return all(a[key] == b[key] for key in _CASE)


def _unfinished(row: dict[str, str], config: LargeConfig) -> bool:
    """Whether a row that was skipped is within today's limit, or ran out of memory that may be free now."""
    return row["status"] != "ok" and (
        row["status"] == "out of memory" or float(row["status"].split()[-2]) <= config.limit
    )


def _expected_seconds(row: dict[str, str], rows: list[dict[str, str]]) -> float:
    """The last smaller size's time, scaled by the pixels; by their square where attention is quadratic."""
    pixels = _pixels(row["height"], row["width"])
    known = [
        (_pixels(old["height"], old["width"]), float(old["cpu_s"]))
        for old in rows
        if old["form"] == row["form"] and old["ops"] == row["ops"] and old["status"] == "ok"
    ]
    smaller = max((entry for entry in known if entry[0] < pixels), default=None)
    if smaller is None:
        return 0.0
    return smaller[1] * (pixels / smaller[0]) ** (2 if row["form"].startswith("deit") else 1)


def _difference(row: dict[str, str], rows: list[dict[str, str]]) -> str:
    """Of the first logits to those of the untiled model."""
    where = ("ops", "height", "width")
    other = [old for old in rows if old["form"] == "untiled" and all(old[key] == row[key] for key in where)]
    if row["status"] != "ok" or not other or other[0]["status"] != "ok":
        return ""
    ours, theirs = ([float(value) for value in each["logits"].split()] for each in (row, other[0]))
    largest = max(map(abs, theirs))
    return f"{max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / largest:.1e}"


def _pixels(height: str, width: str) -> int:
    return int(height) * int(width)


def _run(case: _Case, log: Path) -> dict[str, str]:
    """The measured columns of one case, from a process of its own."""
    command = [sys.executable, "-m", "weightformer.bench.large", json.dumps(asdict(case))]
    environment = os.environ | {"OMP_NUM_THREADS": str(case.threads)}
    with open(log, "a", encoding="utf-8") as file:

        def say(text: str) -> None:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {Path(case.image).stem} {case.form}: {text}\n"
            file.write(line)
            file.flush()
            sys.stderr.write(line)

        say(f"begins on {_cpu_name()}, torch {torch.__version__}, {case.threads} thread(s)")
        result: dict[str, str] = {}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                message = json.loads(line)
                if "say" in message:
                    say(message["say"])
                else:
                    result = message
            child.wait()
            errors.seek(0)
            complaint = errors.read()
        if child.returncode:
            memory = child.returncode < 0 or "allocate memory" in complaint or "MemoryError" in complaint
            if not memory:
                raise RuntimeError(f"{case.form} on {case.image} failed:\n{complaint[-2000:]}")
            result = {"status": "out of memory", "threads": str(case.threads), "torch": torch.__version__}
        say(", ".join(f"{key} {value}" for key, value in result.items() if key not in ("logits", "torch", "cpu")))
    return result


def _one(case: _Case) -> dict[str, str]:
    """The measurement itself, in this process; how far it is goes to the output, a line of JSON each."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    if case.native:
        native.build()
    source = open_source(case.image)
    before: dict[str, float] = {}
    streamed, disk = case.form.startswith("streamed"), 0.0
    if streamed:
        model: Any = timm.create_model("weightformer_tiny").eval()
        stream(model, torch.zeros(3, 224, 224), progress=False)  # libraries load what they load once
        on_disk = case.form == "streamed-disk"
        tokens = -(-source.height // 16) * -(-source.width // 16) * model.embed_dim * 4
        disk = 2 * tokens / 1e6 if on_disk else 0.0
        place: dict[str, Any] = {"workspace": case.notes} if on_disk else {"memory": 2 * tokens}

        def forward(listen: Callable[[float], None]) -> torch.Tensor:
            return stream(model, source, strip_rows=case.strip_rows, progress=listen, **place)  # type: ignore[return-value]
    else:
        sizes: list[dict[str, Any]] = [{}]
        if case.form != "untiled":
            sizes.append({"img_size": (source.height, source.width)})
        for size in sizes:
            name = "weightformer_tiny" if case.form == "untiled" else "deit_tiny_patch16_224"
            model = timm.create_model(name, **size).eval()
            for block in model.blocks if case.form == "deit-explicit" else ():
                block.attn.fused_attn = False
            if not size:
                with torch.inference_mode():
                    model(torch.zeros(1, 3, 224, 224))
        mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        pixels = source.read(0, source.height, 0, source.width).float().div_(255).sub_(mean).div_(std)[None]

        @torch.inference_mode()
        def forward(listen: Callable[[float], None]) -> torch.Tensor:
            return model(pixels)

    notes = Path(f"{case.notes}.json")
    if case.form == "streamed-disk" and notes.exists():
        before = json.loads(notes.read_text())
    usage = _Usage(before)
    noted = told = said = 0.0

    def listen(share: float) -> None:
        nonlocal noted, told, said
        if case.form != "streamed-disk":
            return
        used = usage.now()
        if used["wall_s"] - noted > _NOTE_SECONDS:
            noted = used["wall_s"]
            notes.write_text(json.dumps(used))
        if share >= told + _LOG_SHARE and used["wall_s"] > said + _LOG_SECONDS:
            told, said = share, used["wall_s"]
            text = f"{share:.0%} after {used['cpu_s']:.0f} s of CPU time, peak {used['peak_mb']:.0f} MB"
            sys.stdout.write(json.dumps({"say": text}) + "\n")
            sys.stdout.flush()

    with address_space_limit(torch.device("cpu")):
        logits = forward(listen)
    used = usage.now()
    notes.unlink(missing_ok=True)
    if case.form == "streamed-disk":
        Path(case.notes).rmdir()
    return {
        "status": "ok",
        "cpu_s": f"{used['cpu_s']:.2f}",
        "wall_s": f"{used['wall_s']:.2f}",
        "peak_mb": f"{used['peak_mb']:.1f}",
        "mapped_mb": f"{used['mapped_mb']:.1f}",
        "disk_mb": f"{disk:.1f}",
        "runs": f"{used['runs']:.0f}",
        "logits": " ".join(f"{value:.7f}" for value in logits[0, :8].tolist()),
        "threads": str(case.threads),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
    }


class _Usage:
    """Time and memory from now on, added to those of a run that was killed."""

    def __init__(self, before: dict[str, float]) -> None:
        self._before = before
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
        self._held, self._mapped = _status("VmRSS"), _mapped()
        self._largest = 0.0
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def now(self) -> dict[str, float]:
        """Seconds and MB since the start; peaks are those of the worst run."""
        self._largest = max(self._largest, _mapped() - self._mapped)
        before = self._before
        return {
            "cpu_s": before.get("cpu_s", 0.0) + time.process_time() - self._cpu,
            "wall_s": before.get("wall_s", 0.0) + time.perf_counter() - self._wall,
            "peak_mb": max(before.get("peak_mb", 0.0), _status("VmHWM") - self._held),
            "mapped_mb": max(before.get("mapped_mb", 0.0), self._largest),
            "runs": before.get("runs", 0.0) + 1,
        }


def _mapped() -> float:
    return _status("RssFile") + _status("RssShmem")


def _status(key: str) -> float:
    """A number of /proc/self/status, in MB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith(key))


def _cpu_name() -> str:
    """The processor's own name."""
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())


def show(rows: list[dict[str, str]]) -> None:
    """Print a table."""
    table = Table(
        "image, px",
        Column("form", no_wrap=True),
        Column("CPU s", no_wrap=True),
        "peak MB",
        "mapped",
        "on disk",
        "difference",
    )
    for row in rows:
        figures = (row["cpu_s"], row["peak_mb"], row["mapped_mb"], row["disk_mb"], row["difference"])
        cells = figures if row["status"] == "ok" else (row["status"], "", "", "", "")
        form = row["form"] + (" (C++)" if row["ops"] == "native" else "")
        table.add_row(f"{row['height']} x {row['width']}", form, *cells)
    Console().print(table)


def plot(table: Path, picture: Path) -> None:
    """Draw the table: memory and time of square images against megapixels, and memory against height at one width.

    The C++ forms are left to the table.

    Raises:
        ValueError: the table holds nothing that was measured.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    plt.rcParams.update({"svg.hashsalt": "weightformer", "font.size": 11})
    rows = [row for row in read_table(table) if row["status"] == "ok" and row["rows"] in ("", "16")]
    rows = [row for row in rows if row["ops"] != "native"]
    if not rows:
        raise ValueError(f"{table} has no row to draw: measure something first")
    square = [row for row in rows if row["height"] == row["width"]]
    tall = _of_one_width(rows)
    threads = rows[0]["threads"]
    panels = [
        (square or rows, "peak_mb", "Peak memory beyond weights and image, MB"),
        (square or rows, "cpu_s", f"CPU time, seconds, {threads} thread{'s' if threads != '1' else ''}"),
    ]
    if len({row["height"] for row in tall}) > 1:
        panels.append((tall, "peak_mb", f"Peak memory at a width of {tall[0]['width']} px, MB"))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.8), layout="constrained")
    for axis, (shown, key, title) in zip(axes, panels, strict=True):
        against_height = shown is tall
        for place, (form, label) in enumerate(FORMS.items()):
            points = sorted(
                (int(row["height"]) if against_height else _pixels(row["height"], row["width"]) / 1e6, float(row[key]))
                for row in shown
                if row["form"] == form and float(row[key]) > 0  # below what can be told is no point on a log scale
            )
            if points:
                axis.plot(*zip(*points, strict=True), f"C{place}-", marker="osD^v"[place], label=label)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("height, pixels" if against_height else "image, megapixels")
        axis.set_xscale("log")
        axis.set_yscale("linear" if against_height else "log")
        for side in (axis.xaxis,) if against_height else (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_locator(NullLocator())
        if against_height:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(FORMS), frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


def _of_one_width(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Streamed and untiled, the images of the width of which there are the most heights."""
    streamed = [row for row in rows if row["form"] == "streamed-disk"]
    heights = {row["width"]: {r["height"] for r in streamed if r["width"] == row["width"]} for row in streamed}
    width = max(heights, key=lambda width: len(heights[width]), default="")
    return [row for row in rows if row["width"] == width and row["form"] in ("streamed-disk", "untiled")]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_one(_Case(**json.loads(sys.argv[1])))) + "\n")
