"""The text of an error on a terminal: bounded, whatever value it quotes."""

from __future__ import annotations

import pytest

from engine.process.logs import failure_line
from engine.process.settings import ServerSettings
from lockstep.errors import MAX_TEXT_CHARS, error_lines, without_middle


def test_a_long_value_leaves_the_rule_and_the_remedy() -> None:
    (line,) = error_lines("error", f"model must be a folder, got {'x' * 10**6}; check the path").splitlines()
    assert line.startswith("error: model must be a folder, got xxx")
    assert line.endswith("xxx; check the path")
    assert len(line) < MAX_TEXT_CHARS + 100


def test_a_text_at_the_limit_is_whole() -> None:
    assert without_middle("abcdefgh", 8) == "abcdefgh"
    assert without_middle("abcdefghi", 8) == "abcdef... (1 more) ...hi"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_line_of_a_server_is_bounded(log_format: str) -> None:
    line = failure_line(ServerSettings(log_format=log_format), f"model must be a folder, got {'x' * 10**6}; check it")
    assert "xxx; check it" in line
    assert len(line) < MAX_TEXT_CHARS + 1000
