"""What vLLM's model runner knows of the requests, kept from the plans alone: tokens computed and block tables.

Plans say what has changed. What a plan forgets to say is missing here, as it is on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from scripted.adapters.vllm.ids import rid_of
from scripted.sdk import Share, StateTable, Violation, Window

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _Request:
    __slots__ = ("blocks", "known")

    def __init__(self, blocks: Sequence[Sequence[int]], known: int | None) -> None:
        # A table for each group of layers.
        self.blocks = [[*table] for table in blocks]
        # Tokens that the plan said the request has when it began or was resumed; None once that is history.
        self.known = known


def tables_of_groups(
    blocks: Sequence[Sequence[int]], windows: Sequence[tuple[int, bool]], states: Sequence[int]
) -> tuple[tuple[Window, ...], tuple[StateTable, ...]]:
    """Those of the groups behind the first."""
    others = [tuple(table) for table in blocks[1:]]
    return (
        tuple(
            [
                Window(block_ids=table, tokens=tokens, is_chunk=is_chunk)
                for table, (tokens, is_chunk) in zip(others, windows, strict=False)
            ]
        ),
        tuple(
            [
                StateTable(block_ids=table, tokens=tokens)
                for table, tokens in zip(others[len(windows) :], states, strict=True)
            ]
        ),
    )


class RunnerView:
    """``version`` is that of the model runner; ``windows`` are those of the groups behind the first, and ``states`` the
    tokens from one state to the next of those behind them; with ``is_crossed`` the last group is what a decoder reads
    of its encoder.
    """

    def __init__(
        self,
        version: int,
        windows: tuple[tuple[int, bool], ...] = (),
        states: tuple[int, ...] = (),
        *,
        is_crossed: bool = False,
    ) -> None:
        self._version = version
        self._windows = windows
        self._states = states
        self._is_crossed = is_crossed
        self._requests: dict[str, _Request] = {}
        # Those that begin again with what they have.
        self.sessions: set[str] = set()

    def shares_of(self, plan: SchedulerOutput, guessing: Collection[str]) -> tuple[Share, ...]:
        """Take a plan in; what each request computes, in the plan's order. Raises Violation for one with gaps.

        ``guessing`` are requests with guesses in flight, of which the scheduler cannot know where they are.
        """
        starts = self._update(plan)
        shares = []
        for rid, count in plan.num_scheduled_tokens.items():
            if rid not in starts:
                raise Violation(f"the plan computes {count} tokens of {rid_of(rid)}, but says nothing else of it")
            request = self._requests[rid]
            drafts = plan.scheduled_spec_decode_tokens.get(rid, ())
            blocks = request.blocks[:-1] if self._is_crossed else request.blocks
            windows, states = tables_of_groups(blocks, self._windows, self._states)
            unknown = rid in guessing and request.known is None
            shares.append(
                Share(
                    rid=rid_of(rid),
                    start=-1 if unknown else starts[rid],
                    count=count,
                    block_ids=tuple(request.blocks[0]),
                    windows=windows,
                    states=states,
                    crossed=tuple(request.blocks[-1]) if self._is_crossed else None,
                    draft_ids=tuple(drafts),
                    known_tokens=request.known,
                )
            )
            request.known = None
        for rid in plan.scheduled_spec_decode_tokens:
            if rid not in plan.num_scheduled_tokens:
                raise Violation(f"the plan has guesses for {rid_of(rid)}, which it computes nothing of")
        return tuple(shares)

    def _update(self, plan: SchedulerOutput) -> dict[str, int]:
        gone = set(plan.finished_req_ids)
        if self._version == 2:
            # The first version keeps what is preempted, and waits for all of it to be replaced.
            gone |= plan.preempted_req_ids or set()
        for rid in gone:
            self._requests.pop(rid, None)
        self.sessions -= set(plan.finished_req_ids)
        starts = {}
        for new in plan.scheduled_new_reqs:
            if self._version == 1 and new.req_id in self._requests and new.req_id not in self.sessions:
                raise Violation(f"the plan begins {rid_of(new.req_id)}, which the runner has not been told to forget")
            known = len(new.prefill_token_ids if self._version == 2 else new.prompt_token_ids)
            self._requests[new.req_id] = _Request(new.block_ids, known)
            starts[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for rid, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self._requests.get(rid)
            if request is None:
                raise Violation(
                    f"the plan goes on with {rid_of(rid)}, which the runner has not been told of or has forgotten"
                )
            if rid in cached.resumed_req_ids:
                if blocks is None or rid not in cached.all_token_ids:
                    raise Violation(f"the plan resumes {rid_of(rid)} without its blocks or its tokens")
                request.blocks = [[*table] for table in blocks]
                request.known = len(cached.all_token_ids[rid])
            elif blocks is not None:
                for table, more in zip(request.blocks, blocks, strict=True):
                    table += more
            starts[rid] = start
        return starts
