"""What a gateway shows its workers with each stream: a proof that it has the ticket key, which both must have anyway.

Nobody else attaches, whoever reaches the port. On a wire that others may read it is no more than that wire's TLS.
"""

import hmac

from service.errors import Unauthorised
from service.guard import AUTHORIZATION, OPEN_METHODS, Call, Check, bearer


def credential(ticket_key: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata that a gateway sends."""
    return ((AUTHORIZATION, f"Bearer {_token(ticket_key)}"),)


def check_with(ticket_key: bytes) -> Check:
    """What a worker asks of each call; health is for everybody."""
    token = _token(ticket_key).encode()

    def check(call: Call) -> None:
        if call.method.startswith(OPEN_METHODS):
            return
        if not hmac.compare_digest(bearer(call.authorization).encode(), token):
            raise Unauthorised("authorization: no or wrong proof of the ticket key")

    return check


def _token(ticket_key: bytes) -> str:
    return hmac.digest(ticket_key, b"crossdock worker access", "sha256").hex()
