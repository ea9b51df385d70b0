"""The mutual proof that two peers of a run have its secret: three messages of fixed size.

The listener greets with a nonce; the connecting peer answers with its role, a nonce and a MAC over both messages; the
listener returns its own MAC. Pure: opens no socket and waits for nothing.
"""

from __future__ import annotations

import secrets
import struct
from enum import IntEnum
from typing import Final

import msgspec

from engine.core.errors import EngineError
from engine.process.links.secret import MAC_BYTES, Secret

# Incremented whenever the messages between machines change.
PROTOCOL: Final = 2
_MAGIC: Final = b"LOCKSTEP"
_NONCE_BYTES: Final = 32
_GREETING: Final = struct.Struct(f"<8sH{_NONCE_BYTES}s")
_CLAIM: Final = struct.Struct(f"<8sHBh{_NONCE_BYTES}s")
GREETING_BYTES: Final = _GREETING.size
ANSWER_BYTES: Final = _CLAIM.size + MAC_BYTES
# Prefixes of each side's MAC, so that no MAC of one side is valid for the other.
_CONNECTING: Final = b"connects"
_LISTENING: Final = b"listens."


class LinkError(EngineError):
    """Two machines of an engine cannot be connected, or the peer does not prove its claim."""


class Role(IntEnum):
    CONTROL = 1
    PLANS = 2
    HIDDEN = 3
    KV = 4


class Claim(msgspec.Struct, frozen=True):
    """A peer's proved role. ``stage`` is its number, -1 for a stage that has none yet."""

    role: Role
    stage: int


class Challenge:
    """The listener's side of one connection. A nonce is used once, so an answer cannot be replayed."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self.greeting = _GREETING.pack(_MAGIC, PROTOCOL, secrets.token_bytes(_NONCE_BYTES))

    def judge(self, answer: bytes) -> tuple[Claim, bytes]:
        """Return the peer's claim and its confirmation. Raises LinkError if the peer has not proved the secret."""
        said, mac = answer[: _CLAIM.size], answer[_CLAIM.size :]
        magic, protocol, role, stage, _ = _CLAIM.unpack(said)
        if magic != _MAGIC:
            raise LinkError("it does not speak this protocol")
        _require_protocol(protocol)
        if not self._secret.is_mac(mac, _CONNECTING, self.greeting, said):
            raise LinkError("its proof does not hold: it has another secret, or replays an old answer")
        try:
            claim = Claim(Role(role), stage)
        except ValueError as exc:
            raise LinkError(f"role must be one of {[one.value for one in Role]}, got {role}") from exc
        return claim, self._secret.mac(_LISTENING, self.greeting, said)


def answer_to(greeting: bytes, secret: Secret, claim: Claim) -> bytes:
    """Return the connecting peer's answer. Raises LinkError for a greeting of another protocol."""
    magic, protocol, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC:
        raise LinkError("it is not a listener of this engine")
    _require_protocol(protocol)
    said = _CLAIM.pack(_MAGIC, PROTOCOL, claim.role, claim.stage, secrets.token_bytes(_NONCE_BYTES))
    return said + secret.mac(_CONNECTING, greeting, said)


def confirms(confirmation: bytes, secret: Secret, greeting: bytes, answer: bytes) -> bool:
    """True if the listener has the secret too."""
    return secret.is_mac(confirmation, _LISTENING, greeting, answer[: _CLAIM.size])


def _require_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise LinkError(
            f"it speaks protocol {protocol}, this side speaks {PROTOCOL}: run the same version on every machine"
        )
