"""The log lines of every process: their level, and whether they are text or JSON.

Owns the formats. Set up once, before the first fork, so that all processes write alike; never logs itself.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import msgspec

from engine.settings import ServerSettings

__all__ = ["REQUEST_LOGGER", "JsonFormatter", "configure_logging", "failure_line", "fields_of"]

# One line a request, written by the front end. On and off by a setting of its own.
REQUEST_LOGGER: Final = "engine.requests"
TEXT_FORMAT: Final = "%(asctime)s.%(msecs)03dZ %(levelname)s %(processName)s %(name)s: %(message)s"
_FIELDS: Final = "fields"


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time, level, process, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. Times are UTC."""
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.processName,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=repr).decode()


def fields_of(**fields: object) -> dict[str, dict[str, object]]:
    """What a log call passes as ``extra`` to have fields of its own in a JSON line."""
    return {_FIELDS: fields}


def failure_line(settings: ServerSettings, text: str) -> str:
    """The last line of a server that could not go on, as its log lines are."""
    if settings.log_format != "json":
        return f"error: {text}\n"
    return JsonFormatter().format(logging.LogRecord("engine", logging.ERROR, "", 0, "%s", (text,), None)) + "\n"


def configure_logging(settings: ServerSettings) -> None:
    """Write log lines to stderr as the settings say. Does nothing where a harness has set up logging before."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        formatter = logging.Formatter(TEXT_FORMAT, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO if settings.log_requests else logging.CRITICAL)
