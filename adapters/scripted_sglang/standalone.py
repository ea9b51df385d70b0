"""Parts of a standalone test of SGLang: its event loop, its front end, and the promises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)

from scripted.sdk import Abort, Add, FlushCache, Pause, Resume
from scripted.sdk.standalone import Calls, Standalone
from scripted_sglang import event_loop as turns
from scripted_sglang import front, stubs
from scripted_sglang.scheduler_view import rid_of

if TYPE_CHECKING:
    from scripted_sglang.config import SglangSettings
    from scripted_sglang.machine import SglangMachine

_TAKE: Final = "get_next_batch_to_run"
_NO_STOPS: Final = "a request has stop tokens, which turns without a model cannot sample"
# Every request that can end does so within this many more turns.
_MORE_TURNS: Final = 20
_ALL_ENDED: Final = "not front.open"
# A failure's text, and an assertion on the turns that fails with it.
_PROMISES: Final = {
    r"(\w+) ends with abort, but nothing aborted it": "turns.ends.get({0!r}) != 'abort'",
    r"(\w+) is launched, but it was aborted": "all({0!r} not in batch for batch in turns.batches[-1:])",
    r"call-\d+ is refused, although no request owns memory": "turns.flushes[-1]",
    r"a request waits although .* fit together: (\w+) ": "any({0!r} in batch for batch in turns.batches)",
}
_OF_THE_FRONT_END: Final = {**_PROMISES, "nothing happens any more, but something waits forever": _ALL_ENDED}


class _Turns(Standalone):
    """The common part of both kinds of tests. ``runs`` names the function that runs all turns."""

    runs: str
    promises: Mapping[str, str]
    launch = _TAKE
    # The loop gets no results; clients' answers are in ``turns``.
    update = ""
    first = ("import os", "", 'os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")', "")
    prepare = f"import runpy; runpy.run_path({str(Path(stubs.__file__))!r})['install']()"

    @property
    def engine(self) -> str:
        return f"SGLang {version('sglang')}"

    @staticmethod
    def check(settings: SglangSettings) -> None:
        """Raise NotImplementedError for settings that the turns do not support."""
        known = [f"settings.{field.name}" for field in msgspec.structs.fields(settings)]
        text = Path(turns.__file__).read_text(encoding="utf-8")
        changed = [
            field.name
            for field, name in zip(msgspec.structs.fields(settings), known, strict=True)
            if name not in text and field.name != "client_rids" and getattr(settings, field.name) != field.default
        ]
        if changed:
            raise NotImplementedError(f"the turns do not support {' and '.join(changed)}")

    def must_hold(self, machine: SglangMachine, calls: Calls, said: str) -> str:
        del machine
        for pattern, rule in self.promises.items():
            if found := re.search(pattern, said):
                calls.lines += [f"turns.take({_MORE_TURNS})"] if rule is _ALL_ENDED else []
                calls.lines.append(f"{self.runs}.run(new_scheduler(settings))")
                return rule.format(*(calls.names[rid] for rid in found.groups()))
        raise NotImplementedError(f"no turn shows the failure: {said}")

    def remark(self, plan: Any) -> str:
        batch = plan.batch_to_run
        if not batch:
            return "nothing"
        lengths = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        return ", ".join(f"{req.rid}: {length}" for req, length in zip(batch.reqs, lengths, strict=True))


class FrontStandalone(_Turns):
    """Writes a test that calls SGLang's front end, turn by turn."""

    runs = "front"
    promises = _OF_THE_FRONT_END

    def modules(self, config: SglangSettings) -> Sequence[ModuleType]:
        del config
        return (turns, front)

    def opening(self, config: SglangSettings) -> Sequence[str]:
        del config
        return ("turns = Turns()", "front = FrontEnd(turns)")

    def watched(self, machine: SglangMachine) -> Mapping[str, tuple[Any, Sequence[str]]]:
        self.check(machine.settings)
        return {"turns": (machine.scheduler, (_TAKE,)), "front": (machine, ("_take",))}

    def written(self, called: str, given: Sequence[str]) -> str:
        return "turns.take()" if called.endswith(_TAKE) else f"front.{given[0]}"

    def spelled(self, value: Any, calls: Calls, arguments: Sequence[Any]) -> str | None:
        del arguments
        match value:
            case Add():
                if value.stop_token_ids:
                    raise NotImplementedError(_NO_STOPS)
                calls.names[value.rid] = value.rid
                return f"start({value.rid!r}, {list(value.prompt_ids)}, {value.max_new_tokens})"
            case Abort():
                return f"abort({value.rid!r})"
            case Pause():
                return f"pause({value.mode!r})"
            case Resume():
                return "resume()"
        if isinstance(value, FlushCache):
            raise NotImplementedError("the front end of the file has no flush")
        # The batches that a turn begins with.
        return ""


class SglangStandalone(_Turns):
    """Writes a test that gives SGLang's scheduler its messages, turn by turn."""

    runs = "turns"
    promises = _PROMISES
    instead = FrontStandalone()

    def modules(self, config: SglangSettings) -> Sequence[ModuleType]:
        del config
        return (turns,)

    def opening(self, config: SglangSettings) -> Sequence[str]:
        del config
        return ("turns = Turns()",)

    def watched(self, machine: SglangMachine) -> Mapping[str, tuple[Any, Sequence[str]]]:
        self.check(machine.settings)
        scheduler = machine.scheduler
        messages = scheduler._request_dispatcher  # noqa: SLF001 - the machine's own
        return {"scheduler": (scheduler, (_TAKE,)), "front": (messages, ("__call__",))}

    def written(self, called: str, given: Sequence[str]) -> str:
        return "turns.take()" if called.endswith(_TAKE) else f"turns.say({given[0]})"

    def spelled(self, value: Any, calls: Calls, arguments: Sequence[Any]) -> str | None:
        del arguments
        match value:
            case TokenizedGenerateReqInput():
                calls.names[rid_of(value.rid)] = value.rid
                if value.sampling_params.stop_token_ids:
                    raise NotImplementedError(_NO_STOPS)
                more = "" if value.priority is None else f", priority={value.priority}"
                new = value.sampling_params.max_new_tokens
                return f"request({value.rid!r}, {list(value.input_ids)}, {new}{more})"
            case AbortReq(abort_all=True):
                return "AbortReq(abort_all=True)"
            case AbortReq():
                if value.rid not in calls.names.values():
                    raise NotImplementedError("an abort overtakes its request, which these turns cannot express")
                return f"AbortReq(rid={value.rid!r})"
            case PauseGenerationReqInput():
                return f"PauseGenerationReqInput(mode={value.mode!r})"
            case ContinueGenerationReqInput() | FlushCacheReqInput():
                return f"{type(value).__name__}()"
        # The batches that a turn begins with.
        return ""
