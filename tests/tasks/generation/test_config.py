"""Settings that do not go together are refused before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest

from weightformer.config import parse_config
from weightformer.tasks.generation import Config


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"data": {"label_dropout": 0}, "sampling": {"guidance": 2}}, "needs a null class"),
        ({"sampling": {"steps": 0}}, "sampling.steps must be at least 1"),
        ({"sampling": {"guidance": -1}}, "sampling.guidance must be at least 0"),
        ({"score": {"num_samples": 1}}, "score.num_samples must be at least 2"),
        ({"task": "classification"}, "generation configuration"),
        ({"model": {"in_chans": 3}}, "unknown key 'model.in_chans'"),
    ],
)
def test_wrong_settings_are_refused(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_config(Config, content)


def test_without_guidance_no_null_class_is_needed() -> None:
    config = parse_config(Config, {"data": {"label_dropout": 0}, "sampling": {"guidance": 1}})
    assert config.data.label_dropout == 0
