"""Opens the port where stages on other machines join this server, with its secret and its checkpoint's digest.

Owns the order of these steps: a user's mistakes are refused before anything expensive starts.
"""

from __future__ import annotations

import platform
import shutil
import socket
import tempfile
import time
from pathlib import Path

import msgspec

from engine.pipeline.progress import StageProgress
from engine.process.control import Gathering
from engine.process.links.endpoint import Endpoint, parse_endpoint
from engine.process.links.listener import LinkListener, bound_at
from engine.process.links.secret import Secret, read_secret
from engine.process.private_dir import SECRET_FILE, PrivateDir
from engine.process.settings import ServerSettings
from engine.server.launch.child import Child, fork_child
from engine.server.placement.messages import StageOrder
from engine.server.placement.ray_order import RAY, RayOrder, become_driver, require_ray
from engine.server.placement.rendezvous import Rendezvous


class RayStages:
    """The Ray driver of one server. ``close`` removes the files that it left."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._folder = tempfile.mkdtemp(prefix="ray-")

    def start(self, gathering: Gathering) -> Child:
        """Start the driver, which makes stages join at ``gathering``. It cleans up even if the supervisor dies."""
        order = RayOrder(
            settings=self._settings.model_dump_json(),
            stages=self._stages(gathering),
            secret_file=gathering.secret_file,
            deadline=time.monotonic() + self._settings.start_timeout_s,
            temp_dir=self._folder,
        )
        return fork_child(RAY, become_driver(order), outlives_supervisor=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _stages(self, gathering: Gathering) -> tuple[StageOrder, ...]:
        if self._settings.placement_options:
            return msgspec.json.decode(self._settings.placement_options, type=tuple[StageOrder, ...])
        return (StageOrder(join=gathering.join),) * gathering.stages


class Meeting(msgspec.Struct):
    """An open rendezvous, its announcement to the user, and the scheduler's end of the socket for plan connections."""

    rendezvous: Rendezvous
    gathering: Gathering
    plans: socket.socket
    progress: StageProgress
    ray: RayStages | None = None

    def close(self) -> None:
        self.rendezvous.close()
        self.plans.close()
        self.progress.close()
        if self.ray is not None:
            self.ray.close()


class MeetingPlace:
    """A bound port and a secret. Raises EngineError if the port is in use or the secret cannot be read."""

    def __init__(self, settings: ServerSettings) -> None:
        if settings.placement == "ray":
            require_ray()
        self._settings = settings
        self._secret = read_secret(Path(settings.secret_file)) if settings.secret_file else None
        self._bound = bound_at(parse_endpoint(settings.stage_listen, "stage_listen"), "stage_listen")

    def open(self, settings: ServerSettings, folder: PrivateDir) -> Meeting:
        """Listen for stages. Takes the resolved settings; a new secret goes into ``folder``."""
        from engine.model.checkpoint import checkpoint_digests

        digests = checkpoint_digests(settings)
        path = Path(settings.secret_file).absolute() if settings.secret_file else folder.path / SECRET_FILE
        secret = self._secret
        if secret is None:
            secret = Secret.new()
            secret.write(path)
        listener = LinkListener(self._bound, secret, silence_s=settings.heartbeat_timeout_s)
        progress = StageProgress(folder.path, settings.pp_size)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        return Meeting(
            rendezvous=Rendezvous(settings, listener, digests, ours, progress),
            gathering=Gathering(join=_reachable(listener.endpoint), secret_file=str(path), stages=settings.pp_size),
            plans=theirs,
            progress=progress,
            ray=RayStages(settings) if settings.placement == "ray" else None,
        )


def _reachable(endpoint: Endpoint) -> Endpoint:
    """Replace a wildcard host, to which no other machine can connect, by this machine's name."""
    return Endpoint(platform.node(), endpoint.port) if endpoint.is_wildcard else endpoint
