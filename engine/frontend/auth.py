"""Who may use which routes: clients and operators, by bearer keys that are compared in constant time.

Owns the rule when no key is needed. Keys are read here only, and are never written anywhere.
"""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import Request
from pydantic import SecretStr

from engine.frontend.errors import ApiError, ErrorType
from engine.settings import ServerSettings

SCHEME = "bearer"


class Access:
    """Which keys one server asks for.

    Clients need the API key if there is one. Operators need the admin key if there is one; without it their routes are
    open to clients on loopback and closed elsewhere. The admin key is good for all routes.

    ``loopback`` says that the server listens there.
    """

    def __init__(self, api_key: SecretStr | None, admin_key: SecretStr | None, *, loopback: bool) -> None:
        self._api_key = api_key
        self._admin_key = admin_key
        self.loopback = loopback

    @classmethod
    def of(cls, settings: ServerSettings, address: str) -> Access:
        """The rules of a server that listens on an IP address."""
        return cls(settings.api_key, settings.admin_key, loopback=ipaddress.ip_address(address).is_loopback)

    async def admit_client(self, request: Request) -> None:
        """Let a client in. Raises ApiError (401)."""
        if self._api_key is not None:
            _require_key(request, self._api_key, self._admin_key)

    async def admit_operator(self, request: Request) -> None:
        """Let an operator in. Raises ApiError: 401 for the key, 403 where there is none."""
        if self._admin_key is not None:
            _require_key(request, self._admin_key)
        elif not self.loopback:
            raise ApiError(
                403,
                ErrorType.CLOSED,
                f"{request.url.path} must be opened by an admin key on a server that listens elsewhere than on "
                "loopback, and this one has none; start it with ENGINE_ADMIN_KEY set",
            )
        else:
            await self.admit_client(request)


def _require_key(request: Request, *keys: SecretStr | None) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != SCHEME:
        # As clients of the Anthropic protocol send it.
        given = request.headers.get("x-api-key", "")
    if not given:
        raise ApiError.unauthenticated(
            "the request must send a key as 'Authorization: Bearer KEY', but has none; add the header"
        )
    # Every key is compared, so that the time says nothing about which one was nearly right.
    matches = [_equal(given.strip(), key) for key in keys if key is not None]
    if not any(matches):
        raise ApiError.unauthenticated(
            "the key must be one of this server's for this route, but it is not; ask its operator for one"
        )


def _equal(given: str, key: SecretStr) -> bool:
    return hmac.compare_digest(given.encode(), key.get_secret_value().encode())
