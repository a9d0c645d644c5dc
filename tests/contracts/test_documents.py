"""What the README and the documentation tell people to run does run, and what they link to exists."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from weightformer.cli import VERBS, main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]


def ids(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[list[str]]:
    """The ``weightformer`` command lines of a document, comments and torchrun's own part removed."""
    lines = "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    parsed = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("weightformer") + 1 :] for words in parsed if "weightformer" in words]


WITH_PYTHON = [path for path in DOCUMENTS if blocks(path, "python")]
WITH_COMMANDS = [path for path in DOCUMENTS if commands(path)]


def test_there_is_something_to_check() -> None:
    assert ROOT / "README.md" in WITH_PYTHON
    assert ROOT / "README.md" in WITH_COMMANDS


@pytest.mark.parametrize("document", WITH_PYTHON, ids=ids)
def test_python_examples_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    """And give tensors of the shapes that their comments state."""
    namespace: dict[str, Any] = {"__name__": "__example__"}
    for block in blocks(document, "python"):
        exec(compile(block, str(document), "exec"), namespace)  # noqa: S102 - our own examples
        for name, shape in re.findall(r"^(\w+) = .*# (\(\d[\d, ]*\))", block, re.MULTILINE):
            assert str(tuple(namespace[name].shape)) == shape, name


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=ids)
def test_training_commands_are_accepted(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(document):
        assert words[0] in VERBS, f"no verb {words[0]}"
        if words[0] == "train":
            assert main([*words, "--print_config"]) == 0, (words, capsys.readouterr().err)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: weightformer {verb}")
    assert len(text.splitlines()) >= 5


def test_the_readme_walk_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The commands of the README in order, with one epoch of training, on real files."""
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((40, 50), 60).save("photo.png")
    Path("scans").mkdir()
    Image.effect_noise((64, 64), 60).save("scans/one.png")
    done = []
    for words in commands(ROOT / "README.md"):
        if "FOLDER" in words:
            continue
        extra = ["--trainer.epochs", "1"] if words[0] == "train" else []
        assert main([*words, *extra]) == 0, (words, capfd.readouterr().err)
        done.append(words[0])
    assert done == ["train", "eval", "predict", "info"]
    lines = Path("predictions.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == {"photo.png", "scans/one.png"}
    assert "7,074,184" in capfd.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_make_targets_and_links_exist(document: Path) -> None:
    text = document.read_text()
    targets = set(re.findall(r"(?:^ {4}|`)make ([\w-]+)", text, re.MULTILINE))
    for target in targets:
        result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing, missing
    if document.is_relative_to(ROOT / "docs"):  # the site holds no other file
        outside = [link for link in links if not (document.parent / link).resolve().is_relative_to(ROOT / "docs")]
        assert not outside, outside


def test_ci_runs_lint_and_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert {"make lint", "make test"} <= set(script.splitlines())
    assert "set -euo pipefail" in script
