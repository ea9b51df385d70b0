"""The port by which a stage of a prefill or decode engine exchanges KV with the same stage of other engines.

Chooses by the engine's role; an engine with role 'both' opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.core.config import EngineConfig
from engine.core.messages import TransferEvent
from engine.core.plan import TransferOrder
from engine.model.page_image import PageImages
from engine.pipeline.kv_receiver import KVReceiver
from engine.pipeline.kv_sender import KVSender
from engine.process.links.endpoint import Endpoint, parse_endpoint
from engine.process.links.secret import Secret, read_secret
from engine.process.settings import ServerSettings


@dataclass(frozen=True)
class KVLinks:
    """The link for KV from other machines: the endpoint of stage 0 of a decode engine (stage N listens N ports above),
    and the secret that both sides prove. Without ``endpoint`` KV comes only from this machine.
    """

    endpoint: Endpoint | None = None
    secret: Secret | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> KVLinks:
        """Raises ConfigError for a secret that cannot be read."""
        return cls(
            parse_endpoint(settings.kv_listen, "kv_listen") if settings.kv_listen else None,
            read_secret(Path(settings.kv_secret_file)) if settings.kv_secret_file else None,
        )


class KVPort(Protocol):
    """Carries out transfers beside the computation; each order but a ``StopTransfer`` is answered once."""

    def order(self, order: TransferOrder) -> None:
        """Begin or end a transfer, without waiting for the other engine."""

    def forget(self) -> None:
        """Restart the numbers of transfers, while none is under way."""

    def close(self) -> None: ...


def open_kv_port(
    config: EngineConfig,
    images: Callable[[], PageImages],
    answer: Callable[[TransferEvent], None],
    private_dir: Path,
    links: KVLinks,
) -> KVPort | None:
    """Open the port of this role; None for an engine without one. Any thread may call ``answer``.

    Raises StartupError when a decode engine cannot listen at its endpoint.
    """
    if config.role == "decode":
        return KVReceiver(images, answer, private_dir, links.endpoint, links.secret)
    if config.role == "prefill":
        return KVSender(images, answer, links.secret)
    return None
