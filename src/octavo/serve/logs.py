"""Logs: as text or as JSON, a line each; and one line for each request at its end. None has a request's text in it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, TextIO

from octavo.serve.config import ServeConfig

__all__ = ["JsonFormatter", "level_name", "lines_dropped", "log_request", "set_level", "set_up_logging"]

_requests = logging.getLogger("octavo.requests")
_TRACE = 5  # uvicorn's
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        told |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=True, separators=(",", ":"))


class _TextFormatter(logging.Formatter):
    """The message, then the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{name}={value}" for name, value in fields.items())])


class _Handler(logging.StreamHandler[TextIO]):
    """To standard error; a line that cannot be written, as when the disk is full, is counted and forgotten."""

    dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Count it."""
        if isinstance(sys.exc_info()[1], OSError):
            _Handler.dropped += 1
        else:
            super().handleError(record)


def set_level(level: str) -> None:
    """What is logged from now on: one of ``LOG_LEVELS``."""
    logging.getLogger().setLevel(_TRACE if level == "trace" else level.upper())


def level_name() -> str:
    """What is logged now."""
    level = logging.getLogger().level
    return "trace" if level == _TRACE else logging.getLevelName(level).lower()


def lines_dropped() -> int:
    """Lines of this process's log that could not be written."""
    return _Handler.dropped


def set_up_logging(config: ServeConfig) -> None:
    """All loggers of this process to standard error. Requests have lines in JSON, and from the level info on."""
    as_json = config.log_format == "json"
    handler = _Handler()
    handler.setFormatter(JsonFormatter() if as_json else _TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    level = 5 if config.log_level == "trace" else getattr(logging, config.log_level.upper())
    root.setLevel(level)
    _requests.setLevel(logging.INFO if as_json else level)
    for name in _UVICORN:
        logging.getLogger(name).setLevel(level)


def log_request(fields: Callable[[], Mapping[str, Any]]) -> None:
    """A request has ended."""
    if _requests.isEnabledFor(logging.INFO):
        _requests.info("request", extra={"fields": fields()})
