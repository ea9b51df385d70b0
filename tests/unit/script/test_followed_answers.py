"""Stop strings: the harness knows by the front end's own rules when one is found, and in which step the abort comes."""

from __future__ import annotations

import pytest
from scripted_lockstep.script.followed_answers import ByteDecoder, FollowedAnswers
from scripted_lockstep.script.handle import RequestHandle

from engine import EngineConfig
from engine.core.messages import Abort, FinishReason, Generate, SamplingParams, TokenOutput
from scripted import ScriptedSim
from scripted.script.clients import ClientView

CONFIG = EngineConfig(pp_size=2, pp_async_depth=1)
STOPPED = [Abort(rid="r", finish_reason=FinishReason.STOP)]


def handle_of(*stop: str) -> RequestHandle:
    message = Generate(rid="r", prompt_ids=(65,), sampling=SamplingParams(max_new_tokens=9, stop=stop))
    return RequestHandle(message, ClientView("r"))


def say(text: str, reason: FinishReason | None = None) -> list[TokenOutput]:
    return [TokenOutput(rid="r", token_ids=tuple(text.encode()), finish_reason=reason)]


def test_stop_string_over_two_outputs_is_found_once() -> None:
    watch, live = FollowedAnswers(ByteDecoder), {"r": handle_of("cd")}
    assert watch.follow(say("abc"), live)[1] == []
    assert watch.follow(say("d"), live)[1] == STOPPED
    assert watch.follow(say("e"), live)[1] == []


def test_clients_are_shown_nothing_behind_a_stop_string() -> None:
    watch, live = FollowedAnswers(ByteDecoder), {"r": handle_of("b")}
    shown, stopped = watch.follow(say("abc"), live)
    assert stopped == STOPPED
    assert [reply.token_ids for reply in shown if isinstance(reply, TokenOutput)] == [(97, 98)]
    assert watch.follow(say("d"), live)[0] == []
    assert len(watch.follow(say("", FinishReason.STOP), live)[0]) == 1


def test_request_that_ended_by_itself_is_not_stopped() -> None:
    assert FollowedAnswers(ByteDecoder).follow(say("ab", FinishReason.LENGTH), {"r": handle_of("b")})[1] == []


def test_client_that_hung_up_stops_nothing() -> None:
    handle = handle_of("b")
    handle.client.dropped = True
    assert FollowedAnswers(ByteDecoder).follow(say("b"), {"r": handle})[1] == []


def test_requests_without_stop_strings_need_no_tokenizer() -> None:
    def never() -> ByteDecoder:
        raise AssertionError("it is not needed")

    assert FollowedAnswers(never).follow(say("b"), {"r": handle_of()}) == (say("b"), [])


@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_ends_the_request_in_the_next_step(stream: bool) -> None:
    """D01, D09: the front end's abort comes in the step after the output; the client sees what is before it."""

    def script(t):
        whole = t.start_req(prompt_len=20, max_new_tokens=30)
        yield from t.run_until_finished(whole)
        stop = whole.client.text[10:12]
        r = t.start_req(prompt_len=20, max_new_tokens=30, stop=stop, stream=stream)
        yield from t.run_until_finished(r)
        found = next(i for i in range(len(whole.client.text)) if whole.client.text[: i + 1].endswith(stop))
        aborts = [record.step for record in t.history if any(isinstance(e, Abort) for e in record.events)]
        last_token = [record.step for record in t.history if any(_is_token(reply, r.rid) for reply in record.replies)]
        assert aborts == [last_token[found] + 1]
        assert (r.finish_reason, r.client.finish_reason, r.client.status) == ("stop", "stop", 200)
        assert r.client.text == whole.client.text[: whole.client.text.index(stop)]

    with ScriptedSim.start(CONFIG) as sim:
        sim.run(script)


def _is_token(reply: object, rid: str) -> bool:
    return isinstance(reply, TokenOutput) and reply.rid == rid and bool(reply.token_ids)
