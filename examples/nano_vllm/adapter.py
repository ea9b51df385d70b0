"""The scheduler of nano-vllm as an adapter of the search: its prefix cache, chunked prefill and preemption.

``git clone https://github.com/GeeeekExplorer/nano-vllm``, then with that folder in PYTHONPATH
``scripted explore --adapter examples/nano_vllm/adapter.py``. It needs xxhash and transformers, and no GPU.
"""

import importlib.util
import sys
import types

import msgspec

from scripted import sdk

if (found := importlib.util.find_spec("nanovllm")) is None:
    raise ModuleNotFoundError("nanovllm is not on the path: clone it and add its folder to PYTHONPATH")
# The package itself imports its model, which needs a GPU.
package = sys.modules["nanovllm"] = types.ModuleType("nanovllm")
package.__path__ = list(found.submodule_search_locations)

from nanovllm.engine.scheduler import Scheduler  # noqa: E402
from nanovllm.engine.sequence import Sequence  # noqa: E402
from nanovllm.sampling_params import SamplingParams  # noqa: E402


class NanoConfig(msgspec.Struct, frozen=True):
    """The fields of nano-vllm's configuration that its scheduler reads."""

    num_kvcache_blocks: int = 12
    kvcache_block_size: int = 4
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    eos: int = -1


class NanoMachine:
    """Its loop computes a batch between ``schedule`` and ``postprocess``; here the result comes with a later step."""

    depth = 1

    def __init__(self, config):
        self.config = config
        self.scheduler = Scheduler(config)
        self.alive = {}
        # The batch that is computed: its sequences, and whether it is a prefill.
        self.in_flight = None
        self.launched = 0

    def step(self, events, now):  # noqa: ARG002 - it has no use for the time
        Sequence.block_size = self.config.kvcache_block_size
        replies = tuple(reply for event in events for reply in self._take(event))
        if self.in_flight is not None or self.scheduler.is_finished():
            return sdk.Stepped(replies=replies)
        running = list(self.scheduler.running)
        self.in_flight = self.scheduler.schedule()
        self.launched += 1
        preempted = tuple(seq.rid for seq in running if seq in self.scheduler.waiting)
        batch = sdk.Batch(id=self.launched, shares=tuple(map(share_of, self.in_flight[0])))
        return sdk.Stepped(microbatch=batch, replies=replies, preempted=preempted, again=True)

    @property
    def is_idle(self):
        return self.in_flight is None and self.scheduler.is_finished()

    def counts(self):
        return {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "in_flight": int(self.in_flight is not None),
            "blocks_free": len(self.scheduler.block_manager.free_block_ids),
        }

    def _take(self, event):
        match event:
            case sdk.Add():
                if reason := self._refusal(event):
                    yield sdk.Refused(rid=event.rid, reason=reason)
                    return
                if event.stop_token_ids:
                    (self.scheduler.eos,) = event.stop_token_ids
                params = SamplingParams(max_tokens=event.max_new_tokens, ignore_eos=not event.stop_token_ids)
                seq = self.alive[event.rid] = Sequence(list(event.prompt_ids), params)
                seq.rid = event.rid
                self.scheduler.add(seq)
            case sdk.Abort() if event.rid in self.alive:
                # It has no abort: a sequence goes as one that ends does, after the result of what is computed of it.
                yield sdk.Tokens(rid=event.rid, finish_reason="abort")
                seq = self.alive.pop(event.rid)
                if self.in_flight is None or seq not in self.in_flight[0]:
                    self._remove(seq)
            case sdk.BatchResult():
                yield from self._told(event)

    def _refusal(self, event):
        """It checks nothing itself: what can never fit ends its loop, and there is one end token."""
        if not event.prompt_ids or not event.max_new_tokens:
            return "it needs a prompt and at least one new token"
        if (
            len(event.prompt_ids) + event.max_new_tokens
            > self.config.kvcache_block_size * self.config.num_kvcache_blocks
        ):
            return "it does not fit into the cache"
        stops = {event.stop_token_ids, *((self.scheduler.eos,) for seq in self.alive.values() if not seq.ignore_eos)}
        return "there is one end token" if len(stops - {()}) > 1 or len(event.stop_token_ids) > 1 else None

    def _told(self, event):
        (seqs, is_prefill), self.in_flight = self.in_flight, None
        before = [seq.num_tokens for seq in seqs]
        self.scheduler.postprocess(seqs, [ids[0] if ids else -1 for ids in event.token_ids], is_prefill)
        for seq, count in zip(seqs, before, strict=True):
            if self.alive.get(seq.rid) is not seq:
                if not seq.is_finished:
                    self._remove(seq)
            elif seq.num_tokens > count:
                stopped = not seq.ignore_eos and seq.last_token == self.scheduler.eos
                reason = ("stop" if stopped else "length") if seq.is_finished else None
                yield sdk.Tokens(rid=seq.rid, token_ids=(seq.last_token,), finish_reason=reason)
                if reason is not None:
                    del self.alive[seq.rid]

    def _remove(self, seq):
        (self.scheduler.waiting if seq in self.scheduler.waiting else self.scheduler.running).remove(seq)
        self.scheduler.block_manager.deallocate(seq)


def share_of(seq):
    """Return a sequence's share of the batch: from the first position without KV, as ``prepare_prefill`` does."""
    blocks = tuple(seq.block_table)
    return sdk.Share(rid=seq.rid, start=seq.num_cached_tokens, count=seq.num_scheduled_tokens, block_ids=blocks)


ADAPTER = sdk.SchedulerAdapter(
    "nano-vllm",
    config=NanoConfig,
    machine=NanoMachine,
    limits=lambda config: sdk.Limits(
        block_size=config.kvcache_block_size,
        blocks=config.num_kvcache_blocks,
        batch_tokens=config.max_num_batched_tokens,
        batch_requests=config.max_num_seqs,
        context_tokens=config.kvcache_block_size * config.num_kvcache_blocks,
        depth=1,
    ),
    can=lambda _: sdk.Capabilities(flush=False),
    may_grow=("block_manager",),  # blocks keep what they hold for the next equal prefix
    packages=("nanovllm",),
    copier=sdk.Copier(),
)
