"""An append-only log of a run: one JSON object a line, flushed as it is written."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

__all__ = ["JSONLinesLogger", "read_log"]


class JSONLinesLogger(Logger):
    """Writes ``{"time", "cpu", "step", ...metrics}`` lines to one file, never rewriting it.

    ``cpu`` counts the seconds of processor time that this process has used, which other programs do not disturb.
    A resumed run appends to the same file: where a step occurs twice, the later line is the one that counts.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._started = False

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem

    @property
    def version(self) -> str:
        """There is one version: the file is appended to."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one line."""
        self._append({"step": step, **metrics})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Mark the start, or the resumption, of a run; an evaluation that follows it is neither."""
        if not self._started:
            self._started = True
            self._append({"event": "start"})

    def _append(self, record: dict[str, Any]) -> None:
        stamps = {"time": round(time.time(), 3), "cpu": round(time.process_time(), 3)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({**stamps, **record}) + "\n")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a log, in the order in which they were written.

    Raises:
        ValueError: a line is damaged, as a full disk leaves it.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [_record(line, f"{path}, line {number},") for number, line in enumerate(lines, 1)]


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is damaged; delete that line") from error
