"""The log lines that clients and strangers can cause: one of a kind a minute."""

from __future__ import annotations

import logging

from engine.process.logs import EXPOSED_LOGGERS, LOG_INTERVAL_S, OncePerMinute


def test_a_line_of_a_kind_passes_once_a_minute() -> None:
    """A05: 1,000 peers that prove nothing, or connections without room, are one line and a number."""
    now = 0.0
    lines = OncePerMinute(clock=lambda: now)

    def said(text: str, *values: object, level: int = logging.WARNING, logger: str = EXPOSED_LOGGERS[0]) -> str | None:
        record = logging.LogRecord(logger, level, "", 0, text, values, None)
        return record.getMessage() if lines.filter(record) else None

    assert said("dropped %s", 1) == "dropped 1"
    assert [said("dropped %s", peer) for peer in range(1000)] == [None] * 1000
    assert said("another") == "another"
    assert all(said("bad", level=logging.ERROR) for _ in range(3))
    assert all(said("dropped %s", 2, logger="engine.pipeline") for _ in range(3))
    now = LOG_INTERVAL_S
    assert said("dropped %s", 3) == "dropped 3; 1000 more of this kind since the last line"
    assert said("dropped %s", 4) is None
    now *= 2
    assert said("another") == "another"
