"""The command line as a newcomer meets it."""

from __future__ import annotations

import pytest
import yaml

from weightformer.cli import VERBS, main
from weightformer.config import recipes


def test_overview_names_every_verb_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)
    assert all(name in text for name in recipes())


@pytest.mark.parametrize("verb", ["train", "eval", "predict"])
def test_help_documents_every_key(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert VERBS[verb].__doc__ in text
    for key in ("--optim.lr LR", "--data.on_bad_image", "--trainer.ema_decay", "--mix.mixup", "Peak learning rate"):
        assert key in text


def test_print_config_round_trips(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    assert main(["train", "--config", "imagenet_small", "--data.root", "here", "--print_config"]) == 0
    text = capsys.readouterr().out
    content = yaml.safe_load(text)
    assert content["data"]["root"] == "here"
    assert content["model"]["kwargs"] == {"drop_path_rate": 0.2}
    (tmp_path / "again.yaml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "again.yaml"), "--print_config"]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["tarin"], "no verb 'tarin'; choose one of train"),
        (["train", "--config", "digitz"], "did you mean digits"),
        (["train", "--config", "digits", "--optim.lr", "fast"], "optim.lr"),
        (["train", "--config", "digits", "--trainer.epoch", "3"], "did you mean --trainer.epochs"),
        (["train", "--task", "cooking"], "unknown task 'cooking'"),
        (["data", "mosaics"], "no data set 'mosaics'; choose one of"),
        (["data", "mosaic", "a.tiff", "--size", "big"], "not 'big'"),
        (["info", "weightformer_huge"], "weightformer_tiny"),
        (["info", "weightformer_tiny", "--size", "8"], "smaller than one patch"),
    ],
)
def test_mistakes_end_in_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error


def test_a_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTFORMER_TRACEBACK", "1")
    with pytest.raises(ValueError, match="tarin"):
        main(["tarin"])


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "weightformer_micro", "--size", "32", "64", "--kwargs", '{"dynamic_every": 2}']) == 0
    text = capsys.readouterr().out
    assert "32 x 64 px" in text
    assert "1, 3, 5, 7 of 8" in text
