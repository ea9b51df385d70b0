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
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
)

from scripted.sdk import Abort, Add, FlushCache, Pause, Resume, Sleep, Wake
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
_NO_LAUNCH: Final = "not turns.since({pause})"
# A failure's text, and an assertion on the turns that fails with it.
_PROMISES: Final = {
    r"(\w+) ends with abort, but nothing aborted it": "turns.ends.get({0!r}) != 'abort'",
    r"(\w+) is launched, but it was aborted": "sum({0!r} in batch for batch in turns.since({abort})) <= {late}",
    r"call-\d+ is refused, although no request owns memory": "turns.flushes[-1]",
    r"call-\d+ empties the cache although \d+ tokens are locked": "not turns.flushes[-1]",
    r"a request waits although .* fit together: (\w+) ": "any({0!r} in batch for batch in turns.batches[:{launched}])",
    r"the scheduler has dropped (\w+),": "{0!r} in turns.ends",
    r"is launched while (?:generation is paused|the device sleeps)": _NO_LAUNCH,
    r"(\w+) reads block \d+, which was written before": "{0!r} not in turns.stale",
    r"(\w+) computes position \d+ again": "{0!r} not in turns.again",
    r"the block does not hold their KV|whose slots do not follow one another": (
        "turns.written.issuperset(scheduler.tree_cache.all_values_flatten().tolist())"
    ),
    r"the query load changed something": "turns.load(scheduler) == turns.load(scheduler)",
}
_PAUSES: Final = ("pause(", "PauseGenerationReqInput(", "ReleaseMemoryOccupationReqInput(")
_WITH_ALL_TURNS: Final = "the scheduler has dropped"
_OF_THE_FRONT_END: Final = {**_PROMISES, "nothing happens any more, but something waits forever": _ALL_ENDED}
# They change nothing in a run without a GPU.
_WITHOUT_EFFECT: Final = ("client_rids", "enable_memory_saver")


def _turn_of(calls: Calls, *messages: str) -> int:
    """Return the turn in which the last of these messages was said."""
    said = [at for at, line in enumerate(calls.lines) if any(one in line for one in messages)]
    return sum(line.startswith("turns.take(") for line in calls.lines[: said[-1]]) if said else 0


class _Turns(Standalone):
    """The common part of both kinds of tests. ``runs`` names the function that runs all turns."""

    runs: str
    promises: Mapping[str, str]
    launch = _TAKE
    # The loop gets no results; clients' answers are in ``turns``.
    update = ""
    first = ("import os", "", 'os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")', "")
    prepare = stubs.PREPARE

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
            if name not in text and field.name not in _WITHOUT_EFFECT and getattr(settings, field.name) != field.default
        ]
        if changed:
            raise NotImplementedError(f"the turns do not support {' and '.join(changed)}")

    def must_hold(self, machine: SglangMachine, calls: Calls, said: str) -> str:
        found = next(((one, rule) for text, rule in self.promises.items() if (one := re.search(text, said))), None)
        if found is None:
            raise NotImplementedError(f"no turn shows the failure: {said}")
        match, rule = found
        plans: list[Any] = [calls.results[name][0] for name in calls.named(self.launch)]
        words: dict[str, Any] = {"launched": sum(bool(plan.batch_to_run) for plan in plans)}
        words |= {"late": machine.depth, "pause": _turn_of(calls, *_PAUSES)}
        names = [calls.names[rid] for rid in match.groups()]
        for name in names:
            words["abort"] = _turn_of(calls, f"abort({name!r})", f"AbortReq(rid={name!r})", "AbortReq(abort_all")
        if rule is _ALL_ENDED or _WITH_ALL_TURNS in said:
            calls.lines.append(f"turns.take({_MORE_TURNS})")
        made = "new_scheduler(settings)"
        if "scheduler" in rule:
            calls.lines.append(f"scheduler = {made}")
            made = "scheduler"
        calls.lines.append(f"{self.runs}.run({made})")
        return rule.format(*names, **words)

    def ending(self, calls: Calls) -> Sequence[str]:
        del calls
        return (f"turns.take({_MORE_TURNS})", f"{self.runs}.run(new_scheduler(settings))")

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
            case FlushCache():
                return "flush()"
            case Sleep() | Wake():
                raise NotImplementedError("the front end of the file has no calls for memory")
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
            case ReleaseMemoryOccupationReqInput() | ResumeMemoryOccupationReqInput():
                return f"{type(value).__name__}(tags={value.tags!r})"
        # The batches that a turn begins with.
        return ""
