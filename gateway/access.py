"""Which credential each call needs, over gRPC and HTTP alike. Knows no wire: both faces ask it.

Health is for everybody. Answers are for tenants, by API key. The control service and the metrics are for operators, by
a token or a certificate of their own: no tenant's key opens them. Contracts and load reports are for both. Whatever is
not named here is as for tenants.
"""

import hmac
from collections.abc import Callable, Collection
from hashlib import sha256

from gateway.api_keys import ApiKeys
from service import orca
from service.errors import Unauthorised
from service.guard import OPEN_METHODS, Call, bearer

NO_TENANT = ""
"""Everybody, where there are no keys."""

OPERATOR_METHODS = ("/crossdock.v1.ControlService/",)
EITHER_METHODS = ("/grpc.reflection.", f"/{orca.SERVICE}/")
"""For tenants and operators alike."""
OPEN_PATHS = ("/health", "/ping", "/version")
OPERATOR_PATHS = ("/metrics",)


class Access:
    """keys: None lets everybody ask for answers, as one tenant. control_token: of operators; identities: names in
    certificates that are operators'. With neither nobody is one: behind a proxy all callers come from this machine.
    on_refused: called for each call that is refused."""

    def __init__(
        self,
        *,
        keys: ApiKeys | None = None,
        control_token: str | None = None,
        control_identities: Collection[str] = (),
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._keys = keys
        self._token = None if control_token is None else sha256(control_token.encode()).digest()
        self._identities = frozenset(control_identities)
        self._on_refused = on_refused

    def check(self, call: Call) -> None:
        """A gRPC call. Raises Unauthorised."""
        if call.method.startswith(OPEN_METHODS):
            return
        if call.method.startswith(OPERATOR_METHODS):
            self._require_operator(call)
        elif not (call.method.startswith(EITHER_METHODS) and self._is_operator(call)):
            self.tenant(call.authorization)

    def check_path(self, path: str, call: Call) -> str:
        """An HTTP request; whose it is. Raises Unauthorised."""
        if path in OPEN_PATHS:
            return NO_TENANT
        if path in OPERATOR_PATHS:
            if self._keys is not None:
                self._require_operator(call)
            return NO_TENANT
        return self.tenant(call.authorization)

    def tenant(self, authorization: str) -> str:
        """Whose call it is. authorization: the header as it came. Raises Unauthorised."""
        if self._keys is None:
            return NO_TENANT
        tenant = self._keys.tenant_of(bearer(authorization))
        if tenant is None:
            raise self._refusal("authorization: no or wrong API key; it is `Bearer <key>`")
        return tenant

    def _require_operator(self, call: Call) -> None:
        if self._is_operator(call):
            return
        if self._token is None and not self._identities:
            raise self._refusal("a control token is needed, and none is set")
        raise self._refusal("authorization: no or wrong control token")

    def _is_operator(self, call: Call) -> bool:
        if not self._identities.isdisjoint(call.identities):
            return True
        if self._token is None:
            return False
        given = sha256(bearer(call.authorization).encode()).digest()
        return hmac.compare_digest(given, self._token)

    def _refusal(self, message: str) -> Unauthorised:
        self._on_refused()
        return Unauthorised(message)
