"""How stages and server meet: numbers, refusals in words that both sides read, places that become free again."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from engine import __version__
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.process.control import Dying, Loading, Ready, Shutdown
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import LinkListener, bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret
from engine.process.settings import ServerSettings
from engine.server.placement.control_link import ControlLink, LinkOver
from engine.server.placement.messages import (
    Assigned,
    Begin,
    Ended,
    Join,
    Prepared,
    Refused,
    StagePulse,
    Started,
    ToAgent,
    decode_to_agent,
)
from engine.server.placement.rendezvous import JOIN_TIMEOUT_S, Rendezvous

SECRET = Secret("a secret of the run, for tests")
SETTINGS = ServerSettings(pp_size=2, placement="join", api_key="a-key-of-a-client")
WAIT_S = 30.0
DIGESTS = ("a digest", "")
HERE = Prepared(digests=DIGESTS, kv_tokens=4096)


class Meeting:
    """A rendezvous, driven as the supervisor does it, and agents in this process."""

    def __init__(self) -> None:
        self.phases: list[tuple[Any, ...]] = []
        self.scheduler, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = LinkListener(bound_at(Endpoint("127.0.0.1", 0), "listen"), SECRET, silence_s=5.0)
        self.rendezvous = Rendezvous(SETTINGS, listener, DIGESTS, ours, self)  # type: ignore[arg-type]
        self.agents: list[ControlLink[ToAgent]] = []
        self._pool = ThreadPoolExecutor(1)

    def note(self, *phase: Any) -> None:
        """Record a stage's progress, in place of the shared memory."""
        self.phases.append(phase)

    def connect(self, role: Role = Role.CONTROL, stage: int = -1) -> socket.socket:
        address = LinkAddress(self.rendezvous.endpoint, SECRET, Claim(role, stage), 5.0)
        connecting = self._pool.submit(address.connect)
        while not connecting.done():
            self.drive(0.01)
        return connecting.result()

    def join(self, **changes: Any) -> ControlLink[ToAgent]:
        agent = ControlLink[ToAgent](self.connect(), decode_to_agent)
        self.agents.append(agent)
        join = Join(version=__version__, node="n", pid=1, stage=None, listens=Endpoint("127.0.0.1", len(self.agents)))
        agent.send(msgspec.structs.replace(join, **changes))
        self.drive()
        return agent

    def drive(self, timeout_s: float = WAIT_S) -> None:
        """Let the rendezvous do what there is to do."""
        if select.select([self.rendezvous], [], [], timeout_s)[0]:
            self.rendezvous.listen()

    def close(self) -> None:
        self.rendezvous.close()
        self.scheduler.close()
        for agent in self.agents:
            agent.close()
        self._pool.shutdown()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    opened = Meeting()
    yield opened
    opened.close()


def heard(agent: ControlLink[ToAgent]) -> ToAgent:
    """The one message that the agent has been sent."""
    assert select.select([agent], [], [], WAIT_S)[0]
    (message,) = agent.receive(0.0)
    return message


def test_stages_get_the_numbers_that_they_ask_for_and_the_others_what_is_left(meeting: Meeting) -> None:
    """The keys of clients stay on the serving machine."""
    first, second = meeting.join(node="a"), meeting.join(node="b", stage=0)
    assigned = [heard(agent) for agent in (first, second)]
    assert [one.stage for one in assigned if isinstance(one, Assigned)] == [1, 0]
    for one in assigned:
        assert isinstance(one, Assigned)
        assert one.stages_here == 1
        assert "a-key-of-a-client" not in one.settings
        assert ServerSettings.model_validate_json(one.settings).pp_size == 2
    assert not meeting.rendezvous.is_prepared
    first.send(HERE)
    meeting.drive()
    second.send(msgspec.structs.replace(HERE, kv_tokens=512))
    meeting.drive()
    assert meeting.rendezvous.is_prepared
    assert meeting.rendezvous.kv_tokens() == 512
    assert [one.name for one in meeting.rendezvous.stages] == ["stage-0", "stage-1"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stage": 1}, r"stage 1 is already on n \(127.0.0.1:\d+, agent 7\); choose another --stage, or none"),
        ({"stage": 2}, r"--stage must be in 0..1, got 2"),
        (
            {"version": "0.0"},
            rf"every machine must run the same version, the server runs {__version__}, this one runs 0.0",
        ),
    ],
)
def test_an_agent_is_told_why_it_is_refused(
    meeting: Meeting, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], told: str
) -> None:
    meeting.join(stage=1, pid=7)
    refused = meeting.join(**changes)
    said = heard(refused)
    assert isinstance(said, Refused)
    (reason,) = meeting.rendezvous.refusals
    assert reason.endswith(said.why)
    assert reason in caplog.text
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(said.why)
    with pytest.raises(LinkOver):
        refused.receive(0.0)
    assert meeting.rendezvous.missing() == "stage-0"


def test_one_too_many_is_refused_and_another_checkpoint_leaves_its_place_free(meeting: Meeting) -> None:
    stages = [meeting.join(), meeting.join()]
    extra = heard(meeting.join())
    assert isinstance(extra, Refused)
    assert extra.why == "the server already has all of its 2 stages"
    assert [isinstance(heard(stage), Assigned) for stage in stages] == [True, True]
    stages[0].send(msgspec.structs.replace(HERE, digests=("another", "")))
    meeting.drive()
    refused = heard(stages[0])
    assert isinstance(refused, Refused)
    assert refused.why.startswith(
        "every machine must have the same revision of the checkpoint: config and weights; the one on"
    )
    assert meeting.rendezvous.missing() == "stage-0"
    again = heard(meeting.join())
    assert isinstance(again, Assigned)
    assert again.stage == 0


def test_a_stage_that_leaves_before_the_start_says_why(meeting: Meeting) -> None:
    stage = meeting.join(stage=1)
    stage.send(Dying(error="the checkpoint is not here", traceback="", expected=True))
    stage.close()
    meeting.drive()
    if meeting.rendezvous.stages:
        meeting.drive()
    assert meeting.rendezvous.stages == []
    assert "left before the start: the checkpoint is not here" in meeting.rendezvous.refusals[0]
    assert meeting.rendezvous.missing() == "stage-0 and stage-1"


def test_after_the_beginning_plans_go_to_the_scheduler_once(meeting: Meeting) -> None:
    """Before it, and for a stage that has its connection, there is none."""
    agents = [meeting.join(), meeting.join()]
    early = meeting.connect(Role.PLANS, 1)
    assert early.recv(1) == b""
    limits = Limits.of(SETTINGS, EMBEDDED_FACTS)
    stages = meeting.rendezvous.begin(limits)
    for agent in agents:
        assert select.select([agent], [], [], WAIT_S)[0]
        assert [type(message) for message in agent.receive(0.0)] == [Assigned, Begin]
    theirs = meeting.connect(Role.PLANS, 1)
    number, fds, _, _ = socket.recv_fds(meeting.scheduler, 4, 1)
    assert int.from_bytes(number, "little") == 1
    with socket.socket(fileno=fds[0]) as ours:
        theirs.sendall(b"a report")
        assert ours.recv(10) == b"a report"
    again = meeting.connect(Role.PLANS, 1)
    assert again.recv(1) == b""
    late = heard(meeting.join())
    assert isinstance(late, Refused)
    for one in stages:
        one.close()
    for end in (early, theirs, again):
        end.close()


@pytest.mark.parametrize(
    ("gpus", "transport"), [(("0", "1"), "nccl"), (("0", "0"), "socket"), (("0", ""), "socket"), (("", ""), "socket")]
)
def test_how_hidden_states_travel_is_decided_once(meeting: Meeting, gpus: tuple[str, ...], transport: str) -> None:
    """Machines differ, and all stages must use the same."""
    agents = [meeting.join(), meeting.join()]
    for agent, gpu in zip(agents, gpus, strict=True):
        heard(agent)
        agent.send(msgspec.structs.replace(HERE, gpu=gpu))
        meeting.drive()
    for one in meeting.rendezvous.begin(Limits.of(SETTINGS, EMBEDDED_FACTS)):
        one.close()
    orders = [heard(agent) for agent in agents]
    assert [order.hidden_transport for order in orders if isinstance(order, Begin)] == [transport, transport]


def test_a_joined_stage_is_a_process_like_any_other(meeting: Meeting) -> None:
    agents = [meeting.join(pid=7), meeting.join()]
    stage = meeting.rendezvous.begin(Limits.of(SETTINGS, EMBEDDED_FACTS))[0]
    agent = agents[0]
    loading = Loading(done=1, total=2, device="cpu", dtype="float32")
    for message in (Started(70), loading, Ready(about={"a": "b"}), StagePulse(5, 2, stopped=True)):
        agent.send(message)
    while stage.stopped_since is None:
        stage.listen()
    assert (stage.pid, stage.loading, stage.ready, stage.about) == (70, loading, True, {"a": "b"})
    assert meeting.phases == [(0, 5, 2)]
    agent.send(StagePulse(5, 0))
    while stage.stopped_since is not None:
        stage.listen()
    agent.send(Ended(-9))
    while stage.alive:
        stage.listen()
    assert stage.status == -9
    assert stage.node == "n"
    assert stage.place.startswith("n (127.0.0.1:")
    assert stage.place.endswith(", agent 7, pid 70)")
    for one in meeting.rendezvous.stages:
        one.close()


def test_silence_is_an_end_and_a_pulse_is_none(meeting: Meeting) -> None:
    """A06: on the monotonic clock; what has come and was not read yet counts as heard."""
    agents = [meeting.join(), meeting.join()]
    silent, live = meeting.rendezvous.begin(Limits.of(SETTINGS, EMBEDDED_FACTS))
    now, limit_s = time.monotonic(), SETTINGS.heartbeat_timeout_s
    due = live.tend(now)
    assert due is not None
    assert due <= now + limit_s / 4
    agents[1].send(StagePulse())
    assert select.select([live], [], [], WAIT_S)[0]
    late = now + limit_s + 1
    assert live.tend(late) is not None
    assert silent.tend(late) is None
    assert (live.alive, silent.alive) == (True, False)
    assert silent.dying is not None
    assert silent.dying.error == f"it was silent for {limit_s} s: its machine is gone or the network path is cut"
    for one in (silent, live):
        one.close()


def test_an_agent_that_does_not_say_who_it_is_is_dropped(meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    """A failure stays alone and never ends the process (A05)."""
    silent, wrong = meeting.connect(), meeting.connect()
    ControlLink[ToAgent](wrong, decode_to_agent).send(Shutdown())
    meeting.drive()
    assert "Invalid value 'Shutdown'" in caplog.text
    due = meeting.rendezvous.tend(time.monotonic())
    assert due is not None
    assert meeting.rendezvous.tend(due + JOIN_TIMEOUT_S) is None
    assert silent.recv(1) == b""
    assert f"it did not send a Join within {JOIN_TIMEOUT_S} s" in caplog.text
    assert meeting.rendezvous.missing() == "stage-0 and stage-1"
    silent.close()
    wrong.close()
