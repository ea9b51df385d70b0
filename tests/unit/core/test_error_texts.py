"""The text of an error on a terminal: bounded, whatever value it quotes."""

from __future__ import annotations

from lockstep.errors import MAX_TEXT_CHARS, error_lines, without_middle


def test_a_long_value_leaves_the_rule_and_the_remedy() -> None:
    (line,) = error_lines("error", f"model must be a folder, got {'x' * 10**6}; check the path").splitlines()
    assert line.startswith("error: model must be a folder, got xxx")
    assert line.endswith("xxx; check the path")
    assert len(line) < MAX_TEXT_CHARS + 100


def test_a_text_at_the_limit_is_whole() -> None:
    assert without_middle("abcdefgh", 8) == "abcdefgh"
    assert without_middle("abcdefghi", 8) == "abcdef... (1 more) ...hi"
