"""The rendezvous of stages on other machines with the supervisor: admits or refuses agents, and numbers the stages.

Driven by the supervisor's selector; never blocks. Also accepts the authenticated connections for plans, and passes
them on to the scheduler process.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import Counter
from typing import Final

import msgspec

from engine import __version__
from engine.core.frames import BadFrameError
from engine.core.limits import Limits
from engine.pipeline.channel import hand_over
from engine.pipeline.progress import StageProgress
from engine.process.control import STAGE_PREFIX, Shutdown
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import Link, LinkListener
from engine.process.links.proof import Role
from engine.process.settings import ServerSettings
from engine.server.placement.control_link import ControlLink, LinkOver
from engine.server.placement.joined import JoinedStage
from engine.server.placement.messages import AgentMessage, Assigned, Begin, Join, Refused, decode_agent_message

# An agent sends its Join at once.
JOIN_TIMEOUT_S: Final = 5.0

logger = logging.getLogger(__name__)


class _Arriving(msgspec.Struct):
    """The connection of an agent that has proved the secret but has not sent its Join yet."""

    link: ControlLink[AgentMessage]
    peer: str
    due: float


class Rendezvous:
    """Gathers the stages of one server. ``fileno()`` is readable when ``listen`` has work.

    ``digests`` are of the server's own checkpoint and draft model. ``plans`` carries the plan connections to the
    scheduler process, and ``progress`` the stages' progress.
    """

    def __init__(
        self,
        settings: ServerSettings,
        listener: LinkListener,
        digests: tuple[str, str],
        plans: socket.socket,
        progress: StageProgress,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._digests = digests
        self._plans = plans
        self._progress = progress
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._arriving: dict[int, _Arriving] = {}
        # In order of arrival; in stage order once all have joined.
        self._joined: list[JoinedStage] = []
        self._has_begun = False
        self._with_plans: set[int] = set()
        # The latest reasons why agents were refused or left, for the error of a start that times out.
        self.refusals: list[str] = []

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    @property
    def is_prepared(self) -> bool:
        """Return whether all stages have joined and reported their machines."""
        return len(self._joined) == self._settings.pp_size and all(one.prepared for one in self._joined)

    @property
    def stages(self) -> list[JoinedStage]:
        return list(self._joined)

    def kv_tokens(self) -> int | None:
        """Return the smallest KV capacity of all machines, in tokens; None if no machine measured one."""
        return min(
            (one.prepared.kv_tokens for one in self._joined if one.prepared and one.prepared.kv_tokens), default=None
        )

    def missing(self) -> str:
        """Describe the missing stages, for the error of a start that times out."""
        taken = {one.stage for one in self._joined if one.stage >= 0} | {one.join.stage for one in self._joined}
        free = [f"{STAGE_PREFIX}{stage}" for stage in range(self._settings.pp_size) if stage not in taken]
        count = self._settings.pp_size - len(self._joined)
        if not count:
            return "the reports of " + ", ".join(one.place for one in self._joined if not one.prepared)
        return " and ".join(free) if count == len(free) else f"{count} of {', '.join(free)}"

    def listen(self) -> None:
        """Handle new connections, new agents, and messages from joined agents until ``begin``."""
        now = time.monotonic()
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                for link in self._listener.take(now):
                    self._take(link, now)
            elif fd in self._arriving:
                self._hear(self._arriving[fd], now)
            # An earlier event of the same poll may have dropped this connection.
            elif (one := next((one for one in self._joined if one.fileno() == fd), None)) is not None:
                self._look_at(one)

    def tend(self, now: float) -> float | None:
        """Drop connections whose Join is late. Returns when to call this again."""
        listener_due = self._listener.due()
        if listener_due is not None and listener_due <= now:
            for link in self._listener.take(now):
                self._take(link, now)
        for late in [one for one in self._arriving.values() if one.due <= now]:
            self._drop(late, f"it did not send a Join within {JOIN_TIMEOUT_S} s")
        dues = [self._listener.due(), *(one.due for one in self._arriving.values())]
        return min((due for due in dues if due is not None), default=None)

    def begin(self, limits: Limits) -> list[JoinedStage]:
        """Order every stage to start. The caller owns the stages from now on, and silence counts as their end."""
        self._has_begun = True
        book = tuple(one.join.listens for one in self._joined)
        order = Begin(limits=limits, book=book, hidden_transport=self._hidden_transport())
        now = time.monotonic()
        for one in self._joined:
            self._epoll.unregister(one.fileno())
            one.watch(self._settings.heartbeat_timeout_s, now)
            one.order(order)
        return list(self._joined)

    def _hidden_transport(self) -> str:
        """Resolve 'auto': NCCL if every stage has its own GPU, else sockets."""
        if self._settings.hidden_transport != "auto":
            return self._settings.hidden_transport
        gpus = {(one.join.node, one.prepared.gpu) for one in self._joined if one.prepared and one.prepared.gpu}
        return "nccl" if len(gpus) == self._settings.pp_size else "socket"

    def close(self) -> None:
        """Close everything that the caller does not own; idempotent."""
        for arriving in self._arriving.values():
            arriving.link.close()
        self._arriving.clear()
        if not self._has_begun:
            for one in self._joined:
                one.send(Shutdown())
                one.close()
        self._listener.close()
        self._plans.close()
        self._epoll.close()

    # ---- connections ----

    def _take(self, link: Link, now: float) -> None:
        match link.claim.role:
            case Role.CONTROL:
                control = ControlLink(link.connection, decode_agent_message)
                self._arriving[control.fileno()] = _Arriving(control, link.peer, now + JOIN_TIMEOUT_S)
                self._epoll.register(control.fileno(), select.EPOLLIN)
            case Role.PLANS if self._has_begun and self._is_awaited(link.claim.stage):
                self._with_plans.add(link.claim.stage)
                hand_over(self._plans, link.claim.stage, link.connection)
            case _:
                logger.warning("dropped an unexpected connection of %s: %s", link.peer, link.claim)
                link.connection.close()

    def _is_awaited(self, stage: int) -> bool:
        return 0 <= stage < self._settings.pp_size and stage not in self._with_plans

    def _hear(self, arriving: _Arriving, now: float) -> None:
        """Read an agent's first message, which must be its Join."""
        try:
            messages = arriving.link.receive(now)
        except (LinkOver, BadFrameError) as exc:
            self._drop(arriving, str(exc))
            return
        if not messages:
            return
        join = messages[0]
        if not isinstance(join, Join) or len(messages) > 1:
            self._drop(arriving, f"an agent's first message must be a lone Join, got {type(join).__name__}")
            return
        del self._arriving[arriving.link.fileno()]
        stage = JoinedStage(arriving.link, join, arriving.peer, self._progress)
        why = self._why_not(join)
        if why is not None:
            self._refuse(stage, why)
            return
        self._joined.append(stage)
        if len(self._joined) == self._settings.pp_size:
            self._assign()

    def _drop(self, arriving: _Arriving, why: str) -> None:
        logger.warning("dropped the agent at %s: %s", arriving.peer, why)
        fd = arriving.link.fileno()
        del self._arriving[fd]
        self._epoll.unregister(fd)
        arriving.link.close()

    # ---- agents ----

    def _why_not(self, join: Join) -> str | None:
        """Return why an agent is refused, with the remedy; None when it is admitted."""
        pp_size = self._settings.pp_size
        if join.version != __version__:
            return (
                f"every machine must run the same version, the server runs {__version__}, this one runs {join.version}"
            )
        if self._has_begun or len(self._joined) == pp_size:
            return f"the server already has all of its {pp_size} stages"
        if join.stage is None:
            return None
        if not 0 <= join.stage < pp_size:
            return f"--stage must be in 0..{pp_size - 1}, got {join.stage}"
        holder = next((one for one in self._joined if join.stage in (one.join.stage, one.stage)), None)
        if holder is not None:
            return f"stage {join.stage} is already on {holder.place}; choose another --stage, or none"
        return None

    def _assign(self) -> None:
        """Number the stages: as requested, and the others in order of arrival."""
        taken = {number for one in self._joined for number in (one.stage, one.join.stage) if number is not None}
        free = iter(number for number in range(self._settings.pp_size) if number not in taken)
        sharing = Counter(one.join.node for one in self._joined)
        for one in self._joined:
            if one.stage >= 0:
                continue
            one.take_number(next(free) if one.join.stage is None else one.join.stage)
            settings = self._settings.model_dump_json()
            one.order(Assigned(stage=one.stage, settings=settings, stages_here=sharing[one.join.node]))
        self._joined.sort(key=lambda one: one.stage)

    def _look_at(self, one: JoinedStage) -> None:
        """Read from a stage before ``begin``, and free its number if it is gone or has another checkpoint."""
        one.listen()
        if not one.alive:
            why = one.dying.error if one.dying is not None else f"its agent ended with status {one.status}"
            self._leave(one, why)
        elif one.prepared is not None and (why_not := self._why_unlike(one)) is not None:
            self._joined.remove(one)
            self._refuse(one, why_not)

    def _why_unlike(self, one: JoinedStage) -> str | None:
        assert one.prepared is not None
        if one.prepared.digests[0] != self._digests[0]:
            return (
                "every machine must have the same revision of the checkpoint: config and weights; "
                f"the one on {one.join.node} differs from the server's {self._settings.model!r}; copy it there, or "
                "give its path with --model"
            )
        if one.prepared.digests[1] != self._digests[1]:
            return (
                "every machine must have the same draft model, at the path in speculative_draft_model; the one on "
                f"{one.join.node} differs"
            )
        return None

    def _leave(self, one: JoinedStage, why: str) -> None:
        self._say(f"the stage on {one.place} left before the start: {why}")
        self._joined.remove(one)
        self._epoll.unregister(one.fileno())
        one.close()

    def _refuse(self, one: JoinedStage, why: str) -> None:
        self._say(f"refused the stage on {one.place}: {why}")
        self._epoll.unregister(one.fileno())
        one.order(Refused(why))
        one.close()

    def _say(self, what: str) -> None:
        self.refusals.append(what)
        del self.refusals[: -self._settings.pp_size]
        logger.warning("%s", what)
