"""The log lines of every process: their level, and their format, text or JSON.

Set up once, before the first fork, so that all processes write the same format; never logs itself.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from engine.process.settings import ServerSettings
from lockstep.errors import without_middle

# The logger of the front end's line for each request, which has its own setting.
REQUEST_LOGGER: Final = "engine.requests"
TEXT_FORMAT: Final = "%(asctime)s.%(msecs)03dZ %(levelname)s %(processName)s %(name)s: %(message)s"
_FIELDS: Final = "fields"
# Loggers whose lines clients, strangers and other engines can cause.
EXPOSED_LOGGERS: Final = (
    "engine.cluster.router.watch.batches",
    "engine.frontend.http.connection",
    "engine.frontend.http.kv_events",
    "engine.pipeline.kv_receiver",
    "engine.process.links.listener",
    "uvicorn.error",
)
LOG_INTERVAL_S: Final = 60.0


class JsonFormatter(logging.Formatter):
    """A line of JSON for each record: time, level, process, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its line feed. Times are in UTC."""
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


class OncePerMinute(logging.Filter):
    """Passes one line of each kind a minute, with the number of suppressed ones, so that no client can fill the disk.

    It filters only ``loggers``; errors always pass.
    """

    def __init__(self, loggers: Collection[str] = EXPOSED_LOGGERS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._loggers = loggers
        self._clock = clock
        self._last: dict[object, float] = {}
        self._held: Counter[object] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name not in self._loggers or record.levelno >= logging.ERROR:
            return True
        now, kind = self._clock(), record.msg
        if now - self._last.get(kind, -LOG_INTERVAL_S) < LOG_INTERVAL_S:
            self._held[kind] += 1
            return False
        self._last[kind] = now
        if held := self._held.pop(kind, 0):
            record.msg = f"{kind}; {held} more of this kind since the last line"
        return True


def fields_of(**fields: object) -> dict[str, dict[str, object]]:
    """Return the ``extra`` of a log call that adds these fields to a JSON line."""
    return {_FIELDS: fields}


def failure_line(settings: ServerSettings, text: str) -> str:
    """Return the last line of a server that could not continue, in the format of its log."""
    text = without_middle(text)
    if settings.log_format != "json":
        return f"error: {text}\n"
    return JsonFormatter().format(logging.LogRecord("engine", logging.ERROR, "", 0, "%s", (text,), None)) + "\n"


def configure_logging(settings: ServerSettings) -> None:
    """Log to stderr as the settings say, unless a harness has set up logging."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        formatter = logging.Formatter(TEXT_FORMAT, "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    handler.addFilter(OncePerMinute())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    # They log a line for each request that this process sends.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, logging.root.level))
    logging.getLogger(REQUEST_LOGGER).setLevel(logging.INFO if settings.log_requests else logging.CRITICAL)
