"""The plugin of vLLM: without the variable it imports nothing, and no error of ours keeps a server from its start."""

from __future__ import annotations

import logging
import sys

import pytest
from scripted_plugins.vllm import install

HOOK = "scripted_vllm.flight.hook"


def test_a_server_without_the_variable_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LOCKSTEP_RECORD", raising=False)
    monkeypatch.setitem(sys.modules, HOOK, None)  # its import would fail, and be logged
    install()
    assert not caplog.text


def test_a_recorder_that_cannot_be_made_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCKSTEP_RECORD", "somewhere")
    monkeypatch.setitem(sys.modules, "scripted_vllm", None)
    with caplog.at_level(logging.ERROR):
        install()
    assert "nothing is recorded" in caplog.text
