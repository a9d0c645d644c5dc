"""What is committed: no forbidden pattern, no large file, versions that agree."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import weightformer

ROOT = Path(__file__).parents[2]
PATTERNS = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
    if hook["language"] == "pygrep"
}
TEXT = {"", ".cff", ".cfg", ".cpp", ".cu", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files under version control, without those just deleted."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    if not names:
        pytest.skip("not a git checkout")
    return names


def matches(hook: dict[str, Any], names: list[str]) -> Iterator[str]:
    pattern, excluded = re.compile(hook["entry"]), re.compile(hook.get("exclude", r"^$"))
    suffixes = {".py"} if hook.get("types") == ["python"] else TEXT
    for name in names:
        if Path(name).suffix in suffixes and not excluded.search(name):
            for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    yield f"{name}:{number}: {line.strip()}"


@pytest.mark.parametrize("hook", PATTERNS)
def test_no_forbidden_pattern_is_committed(hook: str, tracked: list[str]) -> None:
    found = list(matches(PATTERNS[hook], tracked))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        ("private-paths", "data: /home/someone/images"),
        ("private-paths", "open('/Users/someone/x')"),
        ("unfinished", "x = 1  # TODO later"),
        ("unsafe-load", "torch.load(path, map_location='cpu')"),
        ("lightning-step-estimate", "total = trainer.estimated_stepping_batches"),
    ],
)
def test_the_patterns_bite(hook: str, line: str) -> None:
    assert re.search(PATTERNS[hook]["entry"], line)


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        ("private-paths", "https://example.org/home/page"),
        ("private-paths", "/usr/share/datasets/fashion-mnist"),
        ("unsafe-load", "torch.load(path, weights_only=True)"),
    ],
)
def test_the_patterns_leave_good_lines_alone(hook: str, line: str) -> None:
    assert not re.search(PATTERNS[hook]["entry"], line)


def test_no_large_file_is_committed(tracked: list[str]) -> None:
    large = [name for name in tracked if (ROOT / name).stat().st_size > 1_000_000]
    assert not large, large


def test_committed_tables_are_rectangular() -> None:
    tables = sorted((ROOT / "benchmarks" / "results").glob("*.csv"))
    assert tables
    for table in tables:
        with table.open(newline="") as file:
            widths = {len(row) for row in csv.reader(file)}
        assert len(widths) == 1, f"{table.name} has rows of {sorted(widths)} fields"


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == weightformer.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    latest = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert latest
    assert latest[1] in ("Unreleased", weightformer.__version__)
    assert "### Upgrading" in changelog


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.lower().split("==") for line in lines)
    needed = [Requirement(text) for text in requires("weightformer") or []]
    # What `make test` and `make docs` install.
    installed = [r for r in needed if not r.marker or re.search(r'"(train|dev|docs)"', str(r.marker))]
    assert len(installed) > 15
    wrong = [
        str(r)
        for r in installed
        if r.name != "weightformer" and not r.specifier.contains(pins.get(r.name.lower(), "0"))
    ]
    assert not wrong, wrong
