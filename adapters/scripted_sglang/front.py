"""Runs SGLang's own front end and scheduler, without HTTP and tokenizer. Standalone tests contain this file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.aio_rwlock import RWLock

from scripted_sglang.event_loop import Turns, request

# Rounds in which every coroutine runs until it waits, before the scheduler takes their messages.
MOST_WAITS = 20


class FrontEnd(TokenizerManager):
    """The front end's ``generate_request``, ``abort_request``, ``pause_generation`` and ``continue_generation``.

    ``open`` has the open calls by name.
    """

    is_pause = enable_metrics = enable_priority_scheduling = False
    tokenizer = None

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = RWLock()
        self.rid_to_state: dict[str, Any] = {}
        self.request_logger = SimpleNamespace(log_received_request=lambda *_: None)
        self.loop = asyncio.new_event_loop()
        self.open: dict[str, asyncio.Task[Any]] = {}
        self.sent: list[Any] = []
        self.sleeping: list[asyncio.Future[None]] = []

    # -- called by clients and operators, each in a turn --

    def start(self, rid: str, prompt: list[int], new: int) -> None:
        asked = GenerateReqInput(input_ids=prompt, sampling_params={"max_new_tokens": new}, rid=rid)
        self.turns.say(lambda: self._begin(rid, self._served(asked)))

    def abort(self, rid: str) -> None:
        self.turns.say(lambda: self.abort_request(rid))

    def pause(self, mode: str) -> None:
        asked = PauseGenerationReqInput(mode=mode)
        self.turns.say(lambda: self._begin(f"pause {mode}", self.pause_generation(asked)))

    def resume(self) -> None:
        self.turns.say(lambda: self._begin("continue", self.continue_generation(ContinueGenerationReqInput())))

    def flush(self) -> None:
        self.turns.say(lambda: self.sent.append(FlushCacheReqInput()))

    def _begin(self, name: str, call: Coroutine[Any, Any, Any]) -> None:
        self.open[name] = self.loop.create_task(call)

    async def _served(self, asked: GenerateReqInput) -> list[str]:
        return [answer async for answer in self.generate_request(asked)]

    # -- the turns --

    def run(self, scheduler: Any) -> None:
        """Run all turns on the scheduler's own loop. A sleeping coroutine waits for the next turn."""
        with mock.patch.object(self.turns, "come", self._come), mock.patch.object(asyncio, "sleep", self._sleep):
            self.turns.run(scheduler)
        self.open = {name: task for name, task in self.open.items() if not task.done()}

    def _come(self) -> list[Any]:
        sleeping, self.sleeping = self.sleeping, []
        for one in sleeping:
            one.set_result(None)
        for call in [lambda: None, *self.turns.messages.pop(0)]:
            call()
            for _ in range(MOST_WAITS):
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()
        sent, self.sent = self.sent, []
        return sent

    def _sleep(self, _: float) -> asyncio.Future[None]:
        self.sleeping.append(self.loop.create_future())
        return self.sleeping[-1]

    # -- needed by its methods --

    def auto_create_handle_loop(self) -> None: ...

    def _init_req_state(self, obj: Any, request: Any = None) -> None:
        del request
        self.rid_to_state[obj.rid] = SimpleNamespace(abort_sent=False, dispatched=False)

    async def _validate_and_resolve_lora(self, obj: Any) -> None: ...

    async def _tokenize_one_request(self, obj: Any) -> Any:
        return request(obj.rid, obj.input_ids, obj.sampling_params["max_new_tokens"])

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        self.sent.append(tokenized_obj)

    async def _wait_one_response(self, obj: Any, request: Any = None) -> AsyncIterator[str]:
        del request
        while obj.rid not in self.turns.ends:
            await asyncio.sleep(1.0)
        del self.rid_to_state[obj.rid]
        yield obj.rid

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        self.sent.append(obj)

    async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
        self.sent.append(obj)
