"""EngineHandles and clients' views: a handle belongs to one life of its rid, and what it saw stays as it was."""

from __future__ import annotations

import pytest
from scripted_lockstep.script.history import EngineHandles

from engine import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, Generate, Refusal, RefusalKind, SamplingParams, TokenOutput
from engine.core.scheduler import Scheduler
from scripted import RequestHandle
from scripted.script.clients import Chunk, ClientView

SCHEDULER = Scheduler(Limits.of(EngineConfig(), EMBEDDED_FACTS))


def handle_of(rid: str) -> RequestHandle:
    return RequestHandle(Generate(rid=rid, prompt_ids=(1, 2), sampling=SamplingParams()), ClientView(rid))


def output(rid: str, *tokens: int, end: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(rid=rid, token_ids=tokens, finish_reason=end)


def test_reused_rid_inherits_nothing() -> None:
    """A reused rid inherits nothing (D04)."""
    handles, old, new = EngineHandles(), handle_of("r"), handle_of("r")
    handles.start(old)
    handles.update([output("r", 7, end=FinishReason.LENGTH)], SCHEDULER)
    handles.start(new)
    handles.update([output("r", 8)], SCHEDULER)
    assert (old.output_ids, old.finish_reason, old.status) == ((7,), "length", "finished")
    assert (new.output_ids, new.finish_reason, new.status) == ((8,), None, "waiting")
    assert handles.latest("r") is new
    assert handles.live() == {"r": new}


def test_two_lives_in_one_step_keep_apart() -> None:
    """D04: the terminal reply is the older one's."""
    handles, old, new = EngineHandles(), handle_of("r"), handle_of("r")
    handles.start(old)
    handles.start(new)
    handles.update([output("r", end=FinishReason.ABORT), output("r", 9)], SCHEDULER)
    assert (old.status, new.output_ids) == ("aborted", (9,))


def test_late_refusal_is_an_end() -> None:
    handles, handle = EngineHandles(), handle_of("r")
    handles.start(handle)
    handles.update([Refusal(rid="r", kind=RefusalKind.UNAVAILABLE, message="the stage-1 process died")], SCHEDULER)
    assert (handle.finished, handle.finish_reason, handle.error) == (True, "error", "the stage-1 process died")


def test_reply_behind_the_end_is_an_error() -> None:
    """A reused rid inherits nothing (D04)."""
    handle = handle_of("r")
    handle.see(output("r", end=FinishReason.LENGTH), 0)
    with pytest.raises(AssertionError, match="another reply after its terminal one"):
        handle.see(output("r", 3), 0)


def test_replies_to_strangers_change_nothing() -> None:
    handles = EngineHandles()
    handles.update([output("missing", 3), Refusal(rid="r", kind=RefusalKind.BUSY, message="full")], SCHEDULER)
    assert handles.all == []


def test_handle_of_a_request_that_nobody_saw_is_waiting() -> None:
    handle = handle_of("r")
    assert (handle.status, handle.req, handle.chunks_done) == ("waiting", None, 0)
    assert (handle.kv_pages, handle.lock_refs) == (0, 0)
    assert (handle.cached_tokens_device, handle.cached_tokens_host) == (0, 0)
    assert (handle.remaining_prompt_tokens, handle.cached_tokens, handle.is_chunking) == (2, 0, False)


def test_view_counts_terminal_answers() -> None:
    """D02: one for every client of an engine that works."""
    view = ClientView("r")
    view.receive(Chunk(text="a", token_ids=(97,)))
    assert (view.terminal_answers, view.finish_reason) == (0, None)
    view.receive(Chunk(text="b", token_ids=(98,), finish_reason="length"))
    assert (view.text, view.token_ids, view.finish_reason, view.terminal_answers) == ("ab", (97, 98), "length", 1)


def test_view_that_failed_ends_with_an_error() -> None:
    view = ClientView("r")
    view.fail("the stage-1 process died", 503)
    assert (view.finish_reason, view.status, view.closed, view.terminal_answers) == ("error", 503, True, 1)


def test_a_park_is_a_row_of_steps_that_launch_none_of_a_partly_prefilled_request() -> None:
    handle = handle_of("r")
    for is_parked, parks in ((False, 0), (True, 1), (True, 1), (False, 1), (False, 1), (True, 2)):
        handle.see_chunked(is_parked=is_parked)
        assert handle.chunked_parks == parks
