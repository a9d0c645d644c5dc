from __future__ import annotations

import threading

import pytest
import torch

from weightformer import ops
from weightformer.ops import dispatch

TOKENS, KERNEL, BIAS = torch.ones(1, 2, 2, 3), torch.ones(1, 3, 3, 3), torch.zeros(3)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"unknown implementation 'cuda'; choose one of auto, reference, eager"):
        ops.implementation("cuda").__enter__()


@pytest.mark.parametrize("name", ["native", "triton"])
def test_absent_form_raises_when_called_and_names_the_present_ones(name: str) -> None:
    forms = {"reference": min, "eager": max}
    with (
        ops.implementation(name),
        pytest.raises(RuntimeError, match=rf"op has no '{name}'.*available: reference, eager"),
    ):
        dispatch.select("op", forms, TOKENS)
    assert dispatch.select("op", forms, TOKENS) is max


def test_each_op_runs_the_form_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightformer.ops.dynamic_depthwise import eager, reference

    monkeypatch.setattr(eager, "dynamic_depthwise_conv2d", lambda *_: "eager")
    monkeypatch.setattr(reference, "dynamic_depthwise_conv2d", lambda *_: "reference")
    assert ops.dynamic_depthwise_conv2d(TOKENS, KERNEL, BIAS) == "eager"
    for name in ("reference", "eager"):
        with ops.implementation(name):
            assert ops.dynamic_depthwise_conv2d(TOKENS, KERNEL, BIAS) == name


def test_nested_blocks_and_exceptions_restore_the_choice() -> None:
    with ops.implementation("reference"):
        with ops.implementation("eager"):
            assert dispatch._selected == "eager"
        assert dispatch._selected == "reference"
    with pytest.raises(ZeroDivisionError), ops.implementation("reference"):
        _ = 1 / 0
    assert dispatch._selected == "auto"


def test_the_choice_holds_in_other_threads() -> None:
    seen = []
    with ops.implementation("reference"):
        thread = threading.Thread(target=lambda: seen.append(dispatch._selected))
        thread.start()
        thread.join()
    assert seen == ["reference"]  # the backward pass and data-parallel replicas run in threads of their own


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_capturing() -> None:
    assert not dispatch.capturing()
    seen = []

    def probe(x: torch.Tensor) -> torch.Tensor:
        seen.append(dispatch.capturing())
        return x + 1

    torch.jit.trace(probe, torch.ones(1), check_trace=False)
    assert seen[0]
