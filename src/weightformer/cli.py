"""The command line: ``weightformer VERB ...``; each verb imports what it needs when it runs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import sys
import warnings
from argparse import ArgumentParser as PlainParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightformer.config import (
    Arguments,
    build_parser,
    parse_arguments,
    parse_config,
    read_yaml,
    recipe_path,
    recipes,
)

__all__ = ["VERBS", "main"]

# The packages that a configuration's `task` key can name. Each offers a Config, train, evaluate, predict with the
# options PREDICT_ARGUMENTS, and read_checkpoint; one that streams large images also LargeOptions and predict_large.
TASKS = {
    "classification": "weightformer.tasks.classification",
    "detection": "weightformer.tasks.detection",
    "generation": "weightformer.tasks.generation",
    "segmentation": "weightformer.tasks.segmentation",
}

# What `weightformer data` makes, the module whose `main(argv)` makes it, and in a few words what it is.
DATA = {
    "fashion-scenes": ("weightformer.tasks.scenes", "scenes of Fashion-MNIST items in COCO's and ADE20K's formats"),
    "latents": ("weightformer.tasks.generation.latents", "images encoded once by a VAE, to train a generator on"),
    "mosaic": ("weightformer.streaming.mosaic", "one tiled TIFF of real pictures, of any size"),
    "probe": ("weightformer.tasks.classification.probe", "canvases whose label only global modelling can tell"),
}

_CONFIG: Arguments = [
    (("-c", "--config"), {"metavar": "RECIPE", "help": f"a YAML file, or one of {', '.join(recipes())}"}),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; a user's error ends in one sentence and exit status 2.

    With ``WEIGHTFORMER_TRACEBACK=1`` in the environment it ends in a traceback instead.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    _quiet()
    try:
        if argv[0] not in VERBS:
            raise ValueError(f"no verb {argv[0]!r}; choose one of {', '.join(VERBS)}")
        return VERBS[argv[0]](argv[1:])
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if os.environ.get("WEIGHTFORMER_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _train(argv: list[str]) -> int:
    """Train a model as a recipe says, or resume its training."""
    arguments: Arguments = [
        *_CONFIG,
        (("--print_config",), {"action": "store_true", "help": "print the resolved configuration and stop"}),
    ]
    task, content, where = _recipe(argv)
    if _wants_help(argv):
        return _help("train --config RECIPE [--KEY VALUE ...]", _train, task.Config, arguments)
    args = parse_arguments(task.Config, argv, arguments)
    config = parse_config(task.Config, content, argv, where, arguments)
    if args.print_config:
        import yaml

        print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), end="")
        return 0
    result = task.train(config)
    if _is_first_process():
        _print_result(result)
        print(f"written to {config.output}")
    return 0


def _eval(argv: list[str]) -> int:
    """Evaluate a checkpoint, or a weight file with the recipe it belongs to."""
    arguments: Arguments = [
        (("weights",), {"help": "a training checkpoint (.ckpt), or a weight file together with --config"}),
        *_CONFIG,
        (("--json",), {"action": "store_true", "help": "print the result as JSON"}),
    ]
    task, content, where = _recipe(argv, stored=True)
    if _wants_help(argv):
        return _help("eval WEIGHTS [--config RECIPE] [--KEY VALUE ...]", _eval, task.Config, arguments)
    args = parse_arguments(task.Config, argv, arguments)
    class_names = None
    if args.config is None:
        content, class_names = task.read_checkpoint(args.weights)
        where = args.weights
    config = parse_config(task.Config, content, argv, where, arguments)
    result = task.evaluate(config, args.weights, class_names)
    if _is_first_process():
        _print_result(result, as_json=args.json)
    return 0


def _predict(argv: list[str]) -> int:
    """Predict image files and folders with a checkpoint; print a table or write files (``--task`` says which)."""
    task, _, _ = _recipe(argv, stored=True)
    arguments: Arguments = [
        (("weights",), {"help": "a training checkpoint (.ckpt)"}),
        (("images",), {"nargs": "+", "help": "image files, or folders to search for them"}),
        *task.PREDICT_ARGUMENTS,
        *_large_arguments(task),
    ]
    if _wants_help(argv):
        return _help("predict WEIGHTS IMAGE ... [--save FILE] [--KEY VALUE ...]", _predict, task.Config, arguments)
    args = parse_arguments(task.Config, argv, arguments)
    options = {name: args[name] for (flag, *_), _ in task.PREDICT_ARGUMENTS if (name := flag.lstrip("-"))}
    large = _large_options(task, args, options) if hasattr(task, "LargeOptions") else None
    content, class_names = task.read_checkpoint(args.weights)
    config = parse_config(task.Config, content, argv, args.weights, arguments)
    given = (config, args.weights, class_names, args.images)
    if args.get("engine") == "ray":
        if not args.save:
            raise ValueError("--engine ray writes Parquet files: give their folder with --save")
        failed = task.predict_on_cluster(*given, args.save, address=args.address, large=large, top_k=args.top_k)
        print(f"written to {args.save}")
    elif args.get("address"):
        raise ValueError("--address is for --engine ray")
    elif large is not None:
        failed = task.predict_large(*given, large)
    else:
        failed = task.predict(*given, **options)
    if failed and _is_first_process():
        plain = large is None and args.get("engine") != "ray"
        what = "could not be read" if plain else "failed"
        print(f"{failed} image(s) {what}; they are named in the result", file=sys.stderr)
    return 1 if failed else 0


def _sample(argv: list[str]) -> int:
    """Draw images of chosen classes from a trained generator: PNG files and a labelled grid."""
    arguments: Arguments = [
        (("weights",), {"help": "a training checkpoint (.ckpt) of a generator"}),
        (("--classes",), {"default": "", "metavar": "NAMES", "help": "names or numbers, separated by commas; all"}),
        (
            ("--grid",),
            {"default": "", "metavar": "ROWSxCOLUMNS", "help": "of the picture of all; a row for each class"},
        ),
        (("--num",), {"type": int, "default": 0, "help": "images to draw; as many as the grid shows"}),
        (("--guidance",), {"type": float, "help": "scale of classifier-free guidance; 1 is none"}),
        (("--save",), {"metavar": "FOLDER", "help": "where to write; samples/ beside the checkpoint's folder"}),
    ]
    task, _, _ = _recipe(["--task", "generation"])
    if _wants_help(argv):
        return _help("sample CHECKPOINT [--classes NAMES] [--KEY VALUE ...]", _sample, task.Config, arguments)
    args = parse_arguments(task.Config, argv, arguments)
    content, class_names = task.read_checkpoint(args.weights)
    config = parse_config(task.Config, content, argv, args.weights, arguments)
    if args.guidance is not None:
        config = dataclasses.replace(config, sampling=dataclasses.replace(config.sampling, guidance=args.guidance))
    folder = task.sample(
        config, args.weights, class_names, classes=args.classes, grid=args.grid, num=args.num, save=args.save
    )
    if _is_first_process():
        print(f"written to {folder}")
    return 0


_STREAM = {
    "result": (str, "NAME", ""),
    "strip_rows": (int, "N", "token rows computed together; fewer take less memory (default 16)"),
    "memory": (str, "SIZE", "tokens beyond so many bytes, such as 2GiB, go to disk (default: half of the memory)"),
    "workspace": (str, "FOLDER", "keep tokens and finished results here: the same command resumes after a kill"),
}


def _large_arguments(task: Any) -> Arguments:
    """Options for images too large for memory, of a task that can stream."""
    if not hasattr(task, "LargeOptions"):
        return []
    first, *others = task.LargeOptions.RESULTS
    texts = {name: text for name, (_, _, text) in _STREAM.items()} | {
        "result": f"{first} (default), {', '.join(others)}"
    }
    arguments: list[Any] = [
        (("--stream",), {"action": "store_true", "help": "each image whole, at its own resolution, in bounded memory"}),
        *(
            ((f"--{name}",), {"type": kind, "metavar": metavar, "help": f"with --stream: {texts[name]}"})
            for name, (kind, metavar, _) in _STREAM.items()
        ),
        (("--tiles",), {"action": "store_true", "help": "with --stream: a folder given is one image, cut into tiles"}),
    ]
    if hasattr(task, "predict_on_cluster"):
        engine = {"choices": ["local", "ray"], "default": "local", "help": "ray: Parquet files in the folder --save"}
        address = "with --engine ray: a running cluster; by default this machine's"
        arguments += [(("--engine",), engine), (("--address",), {"metavar": "HOST", "help": address})]
    return arguments


def _large_options(task: Any, args: Any, options: dict[str, Any]) -> Any:
    """How to stream; ``None`` without ``--stream``."""
    given = {name: args[name] for name in _STREAM if args[name] is not None} | ({"tiles": True} if args.tiles else {})
    if not args.stream:
        if given:
            raise ValueError(f"--{next(iter(given))} is for large images: add --stream")
        return None
    return task.LargeOptions(**given, **options)


def _info(argv: list[str]) -> int:
    """Print what a model costs: parameters, multiply-adds and dynamic blocks at any resolution."""
    parser = PlainParser(prog="weightformer info", description=_info.__doc__)
    parser.add_argument("model", help="a timm model name, ours included, or a denoiser (denoiser_s_2)")
    parser.add_argument("--size", nargs="+", type=int, metavar="PX", help="side, or height and width; default: its own")
    parser.add_argument("--in_chans", type=int, help="channels of the image (default 3) or latent (default: its own)")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="constructor arguments as JSON")
    homes = {"classification": "weightformer.analysis.info", "detection": "weightformer.tasks.detection.info"}
    parser.add_argument("--task", choices=homes, default="classification", help="detection: backbone and pyramid")
    args = parser.parse_args(argv)
    describe = _import(homes[args.task], _extra(args.task)).describe
    print(describe(args.model, args.size, in_chans=args.in_chans, **args.kwargs))
    return 0


def _bench(argv: list[str]) -> int:
    """Measure speed and memory beside peers: parity first, then interleaved rounds; writes JSON and HTML."""
    if "--stream" in argv:
        return _bench_large([word for word in argv if word != "--stream"])
    from weightformer.bench import BenchConfig
    from weightformer.bench import main as measure

    if _wants_help(argv):
        return _help("bench [--stream] [--KEY VALUE ...]", _bench, BenchConfig, [_BENCH_STREAM])
    config = parse_config(BenchConfig, argv=argv)
    measure(config)
    print(f"written to {config.output}")
    return 0


def _ablate(argv: list[str]) -> int:
    """Run a grid of variants, tasks and seeds, and compare: table, spread, cost, significance, figures."""
    from weightformer.analysis import ablate

    arguments: Arguments = [
        (
            ("name",),
            {"nargs": "?", "default": "strategies", "help": f"a YAML file, or one of {', '.join(ablate.grids())}"},
        ),
        (("--workers",), {"type": int, "default": 1, "help": "runs at the same time, each on one thread"}),
        (("--only",), {"default": "*", "help": "a pattern for task/variant/seed, such as 'probe/*/0'"}),
        (("--quick",), {"action": "store_true", "help": "the grid's small form: five minutes"}),
        (("--list",), {"action": "store_true", "help": "print the command of every run and stop"}),
    ]
    if _wants_help(argv):
        return _help("ablate [GRID] [--KEY VALUE ...]", _ablate, ablate.GridConfig, arguments)
    args = parse_arguments(ablate.GridConfig, argv, arguments)
    grid = ablate.read_grid(args.name, argv, arguments, quick=args.quick)
    if args.list:
        print("\n".join(run.command for run in ablate.expand(grid, args.only)))
        return 0
    failures = ablate.ablate(grid, workers=args.workers, only=args.only)
    print(f"written to {grid.output}")
    for sentence in failures:
        print(f"failed: {sentence}", file=sys.stderr)
    return 1 if failures else 0


def _erf(argv: list[str]) -> int:
    """Draw effective receptive fields of checkpoints and timm models, with the numbers beside the picture."""
    parser = PlainParser(prog="weightformer erf", description=_erf.__doc__)
    parser.add_argument(
        "models", nargs="+", metavar="[LABEL=]MODEL", help="a checkpoint, or a timm name with {arguments} behind it"
    )
    parser.add_argument("--save", default="erf.png", metavar="FILE", help="the picture; numbers go beside it as .json")
    parser.add_argument("--size", nargs="+", type=int, metavar="PX", help="side, or height and width; default: its own")
    parser.add_argument(
        "--images", metavar="FOLDER", help="default: a checkpoint's own data, two photographs for others"
    )
    parser.add_argument("--num", type=int, default=8, help="images a model")
    parser.add_argument(
        "--reach", type=int, metavar="PX", help="of the local window; default: that of the convolutions"
    )
    parser.add_argument("--before", action="store_true", help="each checkpoint with random weights as well")
    parser.add_argument("--pretrained", action="store_true", help="released weights for timm names")
    args = parser.parse_args(argv)
    from weightformer.analysis.erf import erf

    options = {key: value for key, value in vars(args).items() if key not in ("models", "save")}
    erf(args.models, args.save, **options)
    print(f"written to {args.save}")
    return 0


def _data(argv: list[str]) -> int:
    """Write data sets: synthetic large images, composed scenes, cached latents."""
    if not argv or argv[0] in ("-h", "--help"):
        kinds = "\n".join(f"  {name:16s}{text}" for name, (_, text) in DATA.items())
        print(f"usage: weightformer data NAME ... (weightformer data NAME --help explains one)\n\n{kinds}")
        return 0
    if argv[0] not in DATA:
        raise ValueError(f"no data set {argv[0]!r}; choose one of {', '.join(DATA)}")
    _import(DATA[argv[0]][0], "all").main(argv[1:])
    return 0


_BENCH_STREAM: Any = (("--stream",), {"action": "store_true", "help": "large images instead: see --stream --help"})


def _bench_large(argv: list[str]) -> int:
    """Measure memory and time against megapixels: streamed, untiled, and DeiT; writes CSV, a log and a picture."""
    from weightformer.bench.large import LargeConfig, measure_large, plot, show

    if _wants_help(argv):
        return _help("bench --stream [--KEY VALUE ...]", _bench_large, LargeConfig, [_BENCH_STREAM])
    config = parse_config(LargeConfig, argv=argv)
    show(measure_large(config))
    table = Path(config.output) / "large_images.csv"
    plot(table, table.with_suffix(".svg"))
    print(f"written to {config.output}")
    return 0


def _demo(argv: list[str]) -> int:
    """Train, evaluate and predict on handwritten digits in three minutes, and write an illustrated report."""
    parser = PlainParser(prog="weightformer demo", description=_demo.__doc__)
    parser.add_argument("--output", default="report", help="folder for the report and everything it shows")
    args = parser.parse_args(argv)
    from weightformer.demo import run

    print(f"report: {run(args.output)}")
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "predict": _predict,
    "sample": _sample,
    "info": _info,
    "bench": _bench,
    "erf": _erf,
    "ablate": _ablate,
    "data": _data,
    "demo": _demo,
}


def _recipe(argv: Sequence[str], stored: bool = False) -> tuple[Any, Mapping[str, Any], str]:
    """The task package, the content and the name of the recipe that the arguments name.

    With ``stored``, a checkpoint among them may say the task.
    """
    finder = PlainParser(add_help=False, allow_abbrev=False)
    finder.add_argument("-c", "--config")
    finder.add_argument("--task")
    known, _ = finder.parse_known_args(argv)
    content = read_yaml(recipe_path(known.config)) if known.config else {}
    name = known.task or content.get("task") or (_stored_task(argv) if stored else None) or "classification"
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choose one of {', '.join(TASKS)}")
    task = _import(TASKS[name], _extra(name))
    words = [word for word in argv if word.endswith(".ckpt") and not word.startswith("-")] if stored else []
    if missing := [word for word in words if not Path(word).is_file()]:
        raise FileNotFoundError(f"no weight file at {missing[0]}")  # else its task's own options would be unknown
    return task, content, known.config or ""


def _extra(task: str) -> str:
    """The extra of the package that brings what a task needs."""
    return "train" if task == "classification" else task


def _import(module: str, extra: str) -> Any:
    """A module of the package that needs the packages of an extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weightformer"):
            raise
        raise ImportError(f"{error.name} is not installed; run: pip install 'weightformer[{extra}]'") from error


def _stored_task(argv: Sequence[str]) -> str | None:
    """The task of the first training checkpoint among the arguments, if one is there and can be read."""
    from weightformer.models.checkpoint import read_state_dict

    for word in argv:
        if word.endswith(".ckpt") and Path(word).is_file():
            try:
                return read_state_dict(word)["hyper_parameters"]["config"]["task"]
            except (ValueError, KeyError, TypeError):  # the task says what is wrong with the file
                return None
    return None


def _quiet() -> None:
    """Keep Lightning's advertisements and its notices to its own developers off the terminal."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")  # so it is when a run is resumed


def _wants_help(argv: Sequence[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _help(usage: str, verb: Callable[[list[str]], int], config: type[Any], arguments: Arguments) -> int:
    parser = build_parser(config, arguments, usage=f"weightformer {usage}", description=verb.__doc__)
    parser.print_help()
    return 0


def _overview() -> str:
    verbs = "\n".join(f"  {name:9s}{(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items())
    return f"""usage: weightformer VERB ... (weightformer VERB --help explains one)

{verbs}

recipes for --config: {", ".join(recipes())}

examples:
  weightformer train --config digits
  weightformer train --config finetune --data.root FOLDER --model.weights FILE
  weightformer eval runs/digits/checkpoints/last.ckpt
  weightformer predict runs/digits/checkpoints/last.ckpt IMAGE_OR_FOLDER --save out.csv
  weightformer sample runs/fashion_denoiser/checkpoints/last.ckpt --classes "sneaker,bag" --grid 8x8 --guidance 4
  weightformer info weightformer_tiny --size 1248"""


def _is_first_process() -> bool:
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def _print_result(result: Mapping[str, Any], as_json: bool = False) -> None:
    """The result on one line, and tables (the IoU of every class, say) below it."""
    if as_json:
        print(json.dumps(dict(result)))
        return

    def shown(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)

    tables = {name: value for name, value in result.items() if isinstance(value, Mapping)}
    print("  ".join(f"{name} {shown(value)}" for name, value in result.items() if name not in tables))
    for name, table in tables.items():
        width = max(map(len, table), default=0)
        print("\n".join([name, *(f"  {key:{width}s}  {shown(value)}" for key, value in table.items())]))


if __name__ == "__main__":
    sys.exit(main())
