"""Memory and time against the size of the image: streamed, untiled, and DeiT with fused and with explicit attention.

    python benchmarks/large_images.py measure 1024x1024 2048x2048 4096x4096
    python benchmarks/large_images.py measure 16384x16384 32768x32768 --forms streamed-disk
    python benchmarks/large_images.py plot

`measure` writes a mosaic of each size with `weightformer.streaming.mosaic`, runs each form in a process of its own on
one thread, and adds a row to the table. Peak memory is what the process held beyond its weights and, for the forms that
need it whole, the image; token files on disk are not in it (their pages belong to the system), so their size has its
own column. Linux only: the peak comes from /proc.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "large_images.csv"
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "large_images.svg"
FORMS = ("streamed-memory", "streamed-disk", "untiled", "deit-fused", "deit-explicit")
# `difference` is the largest one, relative, to the untiled logits of the same image; empty without those.
COLUMNS = (
    *("form", "height", "width", "rows", "cpu_s", "wall_s", "peak_mb", "disk_mb"),
    *("difference", "logits", "threads", "torch", "cpu"),
)


def memory(key: str) -> float:
    """A number of /proc/self/status, in MB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1000 for line in status if line.startswith(key))


def run_one(form: str, image: Path, strip_rows: int) -> dict[str, Any]:
    """One form on one image, in this process."""
    import timm
    import torch

    import weightformer  # noqa: F401 - registers the models
    from weightformer.streaming import open_source, stream

    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = open_source(image)
    height, width = source.height, source.width
    disk = 0.0
    if form.startswith("streamed"):
        model = timm.create_model("weightformer_tiny").eval()
        budget = 0 if form == "streamed-disk" else 2**50
        stream(model, torch.zeros(3, 224, 224), progress=False)
        disk = 0.0 if budget else 2 * -(-height // 16) * -(-width // 16) * model.embed_dim * 4 / 1e6

        def forward() -> torch.Tensor:
            return stream(model, source, strip_rows=strip_rows, memory=budget, progress=sys.stderr.isatty())
    else:
        name = "weightformer_tiny" if form == "untiled" else "deit_tiny_patch16_224"
        model = timm.create_model(name, **({} if form == "untiled" else {"img_size": (height, width)})).eval()
        for block in model.blocks if form == "deit-explicit" else ():
            block.attn.fused_attn = False
        mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
        pixels = source.read(0, height, 0, width).float().div_(255).sub_(mean).div_(std)[None]

        @torch.inference_mode()
        def forward() -> torch.Tensor:
            return model(pixels)

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    held, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    logits = forward()
    return {
        "form": form,
        "height": height,
        "width": width,
        "rows": strip_rows if form.startswith("streamed") else "",
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_mb": round(memory("VmHWM") - held, 1),
        "disk_mb": round(disk, 1),
        "logits": logits[0].tolist(),
        "threads": 1,
        "torch": torch.__version__,
        "cpu": cpu_name(),
    }


def cpu_name() -> str:
    """The processor's own name."""
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine())


def measure(sizes: list[str], forms: list[str], strip_rows: int, folder: Path) -> None:
    """Run every form on every size and add the rows to the table."""
    from weightformer.streaming.mosaic import write_mosaic

    for size in sizes:
        height, width = map(int, size.split("x"))
        image = folder / f"mosaic-{size}.tif"
        if not image.exists():
            write_mosaic(image.with_suffix(".partial"), height, width).rename(image)
        reference: list[float] = []
        for form in sorted(forms, key=lambda form: form != "untiled"):
            command = [sys.executable, __file__, "one", form, str(image), str(strip_rows)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.stderr.write(f"{form} {size} failed with status {done.returncode}\n")
                continue
            row = json.loads(done.stdout)
            logits = row.pop("logits")
            if form == "untiled":
                reference = logits
            if reference and not form.startswith("deit"):
                largest = max(map(abs, reference))
                row["difference"] = f"{max(abs(a - b) for a, b in zip(logits, reference, strict=True)) / largest:.1e}"
            row["logits"] = " ".join(f"{value:.6f}" for value in logits[:4])
            append(row)
            sys.stderr.write(f"{form} {size}: {row['cpu_s']} s, {row['peak_mb']} MB\n")


def append(row: dict[str, Any]) -> None:
    """Put a row into the table in place of an older one of the same case."""
    rows = []
    if RESULTS.exists():
        with open(RESULTS, newline="") as file:
            rows = list(csv.DictReader(file))
    case = ("form", "height", "width", "rows")
    rows = [old for old in rows if any(old[key] != str(row[key]) for key in case)] + [row]
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot() -> None:
    """Draw the square images of the table."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    plt.rcParams.update({"svg.hashsalt": "weightformer", "font.size": 11})
    with open(RESULTS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["height"] == row["width"] and row["rows"] in ("", "16")]
    labels = dict(
        zip(
            FORMS,
            (
                "streamed, tokens in memory",
                "streamed, tokens on disk",
                "untiled",
                "DeiT, fused attention",
                "DeiT, explicit attention",
            ),
            strict=True,
        )
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for form, marker in zip(FORMS, "osD^v", strict=True):
        points = sorted(
            (int(row["height"]), float(row["cpu_s"]), float(row["peak_mb"])) for row in rows if row["form"] == form
        )
        if points:
            sides, seconds, peaks = zip(*points, strict=True)
            megapixels = [side * side / 1e6 for side in sides]
            axes[0].loglog(megapixels, peaks, marker=marker, label=labels[form])
            axes[1].loglog(megapixels, seconds, marker=marker, label=labels[form])
    for axis, title in zip(
        axes, ("Peak memory beyond weights and image, MB", "CPU time, seconds, one thread"), strict=True
    ):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("image, megapixels")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.set_major_formatter("{x:g}")
            side.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measured = verbs.add_parser("measure", help="add rows to the table")
    measured.add_argument("sizes", nargs="+", help="HEIGHTxWIDTH")
    measured.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS[:3]))
    measured.add_argument("--strip-rows", type=int, default=16)
    measured.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where mosaics are kept")
    one = verbs.add_parser("one", help="one case, as JSON; used by measure")
    one.add_argument("form", choices=FORMS)
    one.add_argument("image", type=Path)
    one.add_argument("strip_rows", type=int)
    verbs.add_parser("plot", help=f"draw {PICTURE.name} from the table")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.verb == "measure":
        measure(arguments.sizes, arguments.forms, arguments.strip_rows, arguments.folder)
    elif arguments.verb == "one":
        sys.stdout.write(json.dumps(run_one(arguments.form, arguments.image, arguments.strip_rows)))
    else:
        plot()


if __name__ == "__main__":
    main()
