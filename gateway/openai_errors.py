"""Refusals as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}.

The HTTP routes call it. Which status an error has is service.status's business.
"""

import math
from collections.abc import Mapping

import orjson
from starlette.responses import Response

from gateway.json_fields import JsonObject
from gateway.openai_names import USUAL_NAMES, FieldNames
from service.errors import AttemptsLost, InvalidRequest, ModelNotFound, ServiceError
from service.status import http_status

JSON_TYPE = "application/json"
_RETRY_STATUSES = (429, 503)
_FINAL = (AttemptsLost.reason, "CLIENT_STALLED")
"""Reasons that another try would only repeat, whatever a client makes of the status."""
_VIOLATIONS_MAX = 8


def error_object(error: ServiceError, names: FieldNames = USUAL_NAMES) -> JsonObject:
    """names: of the fields in the JSON request. The first of many mistakes are enough."""
    _, kind, code = http_status(error)
    message, param = error.message, "model" if isinstance(error, ModelNotFound) else None
    if isinstance(error, InvalidRequest) and error.violations:
        first = error.violations[:_VIOLATIONS_MAX]
        named = [(names.of(violation.field), violation.description) for violation in first]
        message, param = "; ".join(f"{name}: {rule}" for name, rule in named), named[0][0]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ServiceError, names: FieldNames = USUAL_NAMES) -> Response:
    """With Retry-After where another try can help, and the scheme where a credential would. OpenAI's clients ask
    x-should-retry before they ask the status."""
    status, _, _ = http_status(error)
    headers = {}
    if error.reason in _FINAL:
        headers["x-should-retry"] = "false"
    elif status in _RETRY_STATUSES:
        headers["retry-after"] = str(max(1, math.ceil((error.retry_after_ms or 0) / 1000)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(error_object(error, names)), status, headers, JSON_TYPE)


def plain_error(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """For what never reaches the service: no such path, a body that is too large."""
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return Response(orjson.dumps(body), status, headers, JSON_TYPE)
