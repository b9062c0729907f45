"""Structured logs on stderr: one line an event, for a person or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  pion.server: listening on ...`"""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `time` is UTC in ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; a traceback is one string."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


def configure(level: str, style: str) -> None:
    """Send the `pion` loggers to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger = logging.getLogger("pion")
    logger.handlers[:] = [handler]
    logger.setLevel(LEVELS[level])
    logger.propagate = False
