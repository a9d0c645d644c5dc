"""The table and the picture of docs/large-images.md.

    python benchmarks/large_images.py measure 512x512 1024x1024 2048x2048 4096x4096
    python benchmarks/large_images.py measure 4096x4096 --native --forms untiled streamed-memory streamed-disk
    python benchmarks/large_images.py measure 1024x2048 4096x2048 8192x2048 16384x2048 --forms streamed-disk untiled
    python benchmarks/large_images.py measure 16384x16384 32768x32768 --forms streamed-disk
    python benchmarks/large_images.py plot

`measure` adds rows to results/large_images.csv and says in results/large_images.log how far it is. Killed, it goes on
where it was when it is called again; what the table holds is measured again only with --fresh. The largest mosaic takes
2 GB and its tokens 6.4 GB of the folder --mosaics. `weightformer bench --stream` is the same for any folder.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from weightformer.bench.large import FORMS, LargeConfig, measure_large, plot

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "large_images.svg"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measured = verbs.add_parser("measure", help="add rows to the table")
    measured.add_argument("sizes", nargs="+", help="HEIGHTxWIDTH")
    measured.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    measured.add_argument("--strip_rows", type=int, default=16)
    measured.add_argument("--native", action="store_true", help="our ops in C++")
    measured.add_argument("--threads", type=int, default=1)
    measured.add_argument("--limit", type=float, default=300.0, help="skip what would take more seconds")
    measured.add_argument("--fresh", action="store_true", help="measure again what the table holds")
    measured.add_argument("--mosaics", default=tempfile.gettempdir(), help="folder for images and unfinished runs")
    verbs.add_parser("plot", help=f"draw {PICTURE.name} from the table")
    arguments = vars(parser.parse_args())
    if arguments.pop("verb") == "measure":
        measure_large(LargeConfig(**arguments, output=str(RESULTS)))
    else:
        plot(RESULTS / "large_images.csv", PICTURE)


if __name__ == "__main__":
    main()
