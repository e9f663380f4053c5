"""Logging: text on a terminal, one JSON object a line elsewhere, always on standard error."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

import structlog

# What the run decided, for the processes that Spark starts below it: their standard error is a pipe.
_FORMAT: Final = "_PENSTOCK_LOG_FORMAT"


def configure() -> None:
    """Set structlog up for this process, and send what libraries log the same way."""
    form = os.environ.setdefault(_FORMAT, "text" if sys.stderr.isatty() else "json")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if form == "text" else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        # One write a line: others write to the same pipe, and Spark's workers have no buffer.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.captureWarnings(True)
    logging.getLogger().handlers = [_Forward(logging.WARNING)]


class _Forward(logging.Handler):
    """Hands what a library logs to structlog; traces stay out, their last line is the message."""

    def emit(self, record: logging.LogRecord) -> None:
        if "py4j" in record.pathname:
            return  # a connection to the JVM that broke is reported where it was needed
        error = record.exc_info[1] if record.exc_info else None
        fields = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), logger=record.name, **fields)
