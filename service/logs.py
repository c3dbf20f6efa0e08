"""How events are written: one line each, to one stream, our own and the libraries' alike.

A process calls `configure` once; modules log through `structlog.stdlib.get_logger(__name__)`. It decides
nothing about what is worth an event: one line per request at its end, never one per token.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


def configure(
    *,
    level: str,
    log_format: Literal["text", "json"],
    fields: Mapping[str, str],
    stream: TextIO | None = None,
) -> None:
    """level: least level written. fields: on every line, for example pool and worker_id. stream: stderr."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Fields(fields),
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.EventRenamer("msg"),
                _renderer(log_format),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _Fields:
    """Adds the process's own fields to each event."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = dict(fields)

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        return {**self._fields, **event}


def _renderer(log_format: Literal["text", "json"]) -> Processor:
    if log_format == "json":
        return structlog.processors.JSONRenderer(default=str)
    return _text_line


def _text_line(logger: WrappedLogger, name: str, event: EventDict) -> str:
    head = " ".join(str(event.pop(key, "")) for key in ("timestamp", "level", "logger", "msg"))
    return head + "".join(f" {key}={_quoted(value)}" for key, value in event.items())


def _quoted(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(character.isspace() for character in text) else text
