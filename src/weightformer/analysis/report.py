"""The page docs/results: what the paper says, what was measured here, on what, and what follows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightformer.analysis.ablate import write_figures
from weightformer.analysis.claims import CLAIMS, Measurements, read_measurements
from weightformer.tasks.classification import probe

if TYPE_CHECKING:
    from weightformer.analysis.experiments import Experiment, Skipped

__all__ = ["page", "write_page"]

_INTRODUCTION = """# Results

*Written by `make results` from the measurements in `benchmarks/results`; do not edit.*

The paper proposes image models without attention: in some blocks, a layer's weight is *predicted from the image*, and
so every place of it learns what the whole image says ([the idea](../idea.md)). This page takes its claims one by one.
What could be tried on two CPU cores was; each verdict follows from the numbers by a rule in
`weightformer.analysis.claims`. **Holds** and **does not hold here** speak of these small models and short runs only.
**Not testable here** means that data or hardware are missing, or that the differences found are within the spread of
the seeds.
"""

_PROBE = f"""### The probe of global modelling

Three real Fashion-MNIST items lie on a black strip of {probe.SIZE[0]} × {probe.SIZE[1]} px, far from each other. A
dress or a sneaker in the middle (the cue) says whether to name the item at the left end or at the right end. Guessing
is right in {probe.CHANCE:.0%} of the canvases; naming one of the items without heeding the cue in {probe.LOCAL:.0%};
and no model that adds up local evidence can exceed {probe.LOCAL_BOUND:.0%}. The static twin is such a model: its
convolutions never see two of the three items, and its last layer averages what each place says. The picture's
*ceiling* is logistic regression that is told where to look. Attention reaches everything: a DeiT twin that stays near
{probe.LOCAL:.0%} has not learned the task in these few epochs, which does not say that it cannot.
"""

_TASKS = {"fashion_mnist": "### Fashion-MNIST, 28 × 28 px\n", "probe": _PROBE}


def write_page(results: Path, docs: Path, experiments: Sequence[Experiment], skipped: Sequence[Skipped]) -> Path:
    """Write ``index.md`` and the figures it shows.

    Args:
        results: folder of the measurements.
        docs: folder of the page.
        experiments: what was, or is to be, measured.
        skipped: what does not fit two cores.

    Returns:
        The path of the page.
    """
    docs.mkdir(parents=True, exist_ok=True)
    measured = read_measurements(results)
    for name in ("strategies", "stability"):
        if content := measured.json(name):
            write_figures(content, docs, prefix=f"{name}-")
    for picture in sorted(results.glob("erf_*.png")):
        shutil.copyfile(picture, docs / picture.name)
    path = docs / "index.md"
    path.write_text(page(measured, experiments, skipped), encoding="utf-8")
    return path


def page(measured: Measurements, experiments: Sequence[Experiment], skipped: Sequence[Skipped]) -> str:
    """The page as Markdown, a function of the measurements alone.

    Args:
        measured: the committed measurements.
        experiments: see `write_page`.
        skipped: see `write_page`.
    """
    parts = [_INTRODUCTION, "## The paper's claims\n", _claims(measured)]
    parts += ["\n## How predicted, how often\n", _strategies(measured)]
    parts += ["\n## What the models see\n", _fields(measured)]
    parts += ["\n## Where optimisation breaks\n", _stability(measured)]
    parts += ["\n## How it was measured\n", _commands(measured, experiments)]
    parts += ["\n## What does not fit two cores\n", _skipped(skipped)]
    return "\n".join(parts)


def _claims(measured: Measurements) -> str:
    lines = ["| the paper says | measured here | on | verdict |", "|---|---|---|---|"]
    for claim in CLAIMS:
        finding = claim.find(measured)
        lines.append(f"| {claim.says} | {finding.measured} | {finding.on} | **{finding.verdict}** |")
    return "\n".join(lines) + "\n"


def _strategies(measured: Measurements) -> str:
    content = measured.json("strategies")
    if content is None:
        return "Not measured yet: `weightformer ablate strategies --workers 2`.\n"
    from weightformer.analysis.ablate import significance_note, slug, summarise, table

    summaries = summarise(content["rows"], content["grid"]["baseline"])
    parts = [
        "All models have 6 blocks, of width 48 (Fashion-MNIST) or 32 (probe), and are trained by the same short "
        "recipe; *static* has no predicted weights, the *DeiT twin* has attention and a position embedding. "
        "`linear x` and `conv x` replace one of the two predictors of "
        "*bilateral + adaptive*, the released form, which makes one block in three dynamic; `every nth block` changes "
        "that. [Formulas](../strategies.md); all but bilateral and adaptive are inferred from the paper's pictures.\n"
    ]
    for task in dict.fromkeys(s.task for s in summaries):
        chosen = [s for s in summaries if s.task == task]
        parts += [_TASKS.get(task, f"### {task}\n"), table(chosen), "", significance_note(chosen)]
        parts.append(f"\n![Top-1 of every seed on {task}](strategies-{slug(task)}.svg)\n")
    return "\n".join([*parts, *_missing(content)])


def _missing(content: dict[str, Any]) -> list[str]:
    missing, number = content["missing"], len(content["rows"])
    return (
        [f"Still missing: {len(missing)} of {len(missing) + number} runs, {missing[0]} the first.\n"] if missing else []
    )


def _fields(measured: Measurements) -> str:
    parts = [
        "The effective receptive field of the central token: how much each pixel moves its features. White dashes "
        "mark what the model's convolutions reach; brightness is the fifth root, on one scale for all panels. The last "
        "two columns give the side of the square around that token which holds so much of it; a square may extend "
        "beyond the image. **Before training** predicted linear weights are next to nothing "
        "([how small](../strategies.md)), so that the panels `linear x` show what the *adaptive* convolution sees: gap "
        "and bilateral, which start from the same random numbers, agree, and the others differ mostly by theirs.\n"
    ]
    titles = {
        "erf_before": "Before training, `weightformer_tiny` at 1024 px, tokens pooled to 7 × 7 as in the paper",
        "erf_after": "The probe's models before and after training",
    }
    for name, title in titles.items():
        content = measured.json(name)
        if content is None:
            parts.append(f"{title}: not measured yet.\n")
            continue
        parts += [f"### {title}\n", f"![{title}]({name}.png)\n"]
        parts += [
            "| model | weights | image | from outside the window | 50 % within | 99 % within |",
            "|---|---|---|---|---|---|",
        ]
        parts += [_field_row(row) for row in content["rows"]] + [""]
    return "\n".join(parts)


def _field_row(row: dict[str, Any]) -> str:
    height, width = row["size"]
    cells = [row["label"], row["weights"], f"{height} × {width} px", f"{row['outside']:.2%}"]
    cells += [f"{row['side_50']} px", f"{row['side_99']} px"]
    return f"| {' | '.join(cells)} |"


def _stability(measured: Measurements) -> str:
    content = measured.json("stability")
    if content is None:
        return "Not measured yet: `weightformer ablate stability --workers 2`.\n"
    from weightformer.analysis.ablate import slug
    from weightformer.analysis.dynamics import dynamics_table

    parts = [
        "Fashion-MNIST, one epoch, gradients not clipped unless said; every quantity is that of the worst layer "
        "([what they mean](../experiments.md#dynamics)). *The last* is `every block, no normalisation, rate x4`, and "
        "what follows *cured by* is what was tried against it, whether it helped or not; `cured by normalisation` "
        "clips as well, and `every block, rate x4` is normalised alone.\n"
    ]
    for task in dict.fromkeys(row["task"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["task"] == task]
        parts += [dynamics_table(rows), f"\n![Top-1 of every seed on {task}](stability-{slug(task)}.svg)\n"]
        parts.append(f"![Loss and dynamics over steps](stability-{slug(task)}-dynamics.svg)\n")
    return "\n".join([*parts, *_missing(content)])


def _commands(measured: Measurements, experiments: Sequence[Experiment]) -> str:
    lines = ["`make experiments` runs all of it, and continues where it was stopped.\n"]
    lines += ["| measurement | command | cost | date | machine | versions |", "|---|---|---|---|---|---|"]
    for experiment in experiments:
        content = measured.json(experiment.name) or {}
        made = content.get("machine", {})
        versions = ", ".join(f"{k} {v}" for k, v in made.items() if k not in ("processor", "system", "accelerator"))
        where = ", ".join(made[key] for key in ("processor", "accelerator", "system") if key in made)
        date = content.get("date", "not measured yet")
        cells = [experiment.name, f"`{experiment.command}`", experiment.cost, date, where, versions]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _skipped(skipped: Sequence[Skipped]) -> str:
    lines = ["| experiment | what it takes | command |", "|---|---|---|"]
    lines += [f"| {s.name} | {s.why} | {f'`{s.command}`' if s.command else '–'} |" for s in skipped]
    return "\n".join(lines) + "\n"
