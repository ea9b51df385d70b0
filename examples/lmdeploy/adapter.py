"""The scheduler of LMDeploy's PyTorch engine as an adapter of the search: its block manager, prefix trie and eviction.

``git clone https://github.com/InternLM/lmdeploy``, then with its folder in PYTHONPATH
``scripted explore --adapter examples/lmdeploy/adapter.py``. It needs torch and pydantic, and no GPU.
"""

import importlib.util
import itertools
import sys
import types

import msgspec

from scripted import sdk

if (found := importlib.util.find_spec("lmdeploy")) is None:
    raise ModuleNotFoundError("lmdeploy is not on the path: clone it and add its folder to PYTHONPATH")


def package(name, folder):
    """Stand in for a package whose own module imports engines and models."""
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]


root = found.submodule_search_locations[0]
for part in ("", "vl", "pytorch.engine", "pytorch.strategies", "pytorch.strategies.ar"):
    package(f"lmdeploy.{part}".rstrip("."), "/".join((root, *part.split("."))))
for module, names in {
    "tokenizer": ("Tokenizer",),
    "pytorch.engine.model_agent": ("BatchedOutputs",),
    "pytorch.model_inputs": ("ModelInputs", "ModelInputsDelta"),
}.items():
    sys.modules[f"lmdeploy.{module}"] = types.ModuleType(f"lmdeploy.{module}")
    vars(sys.modules[f"lmdeploy.{module}"]).update(dict.fromkeys(names, object))

from lmdeploy.pytorch import config as real_config  # noqa: E402
from lmdeploy.pytorch import messages  # noqa: E402
from lmdeploy.pytorch.paging import scheduler as real  # noqa: E402
from lmdeploy.pytorch.paging.block_manager import base_block_manager  # noqa: E402
from lmdeploy.pytorch.strategies.ar import sequence  # noqa: E402

# Its clocks order arrivals and evictions: a counter does so in each run alike.
CLOCK = types.SimpleNamespace(perf_counter=itertools.count(1).__next__, time=itertools.count(1).__next__)
real.time = sequence.time = base_block_manager.time = CLOCK
RUNNING, WAITING = messages.MessageStatus.RUNNING, messages.MessageStatus.WAITING
MODES = messages.UpdateTokenMode


class LmConfig(msgspec.Struct, frozen=True):
    """The fields of LMDeploy's configuration that its scheduler reads."""

    num_gpu_blocks: int = 12
    block_size: int = 4
    max_batches: int = 4
    max_prefill_token_num: int = 24
    enable_prefix_caching: bool = True


class LmMachine:
    """Its loop computes a batch between planning and ``update_running``; here the result comes with a later step.

    As in ``InputsMaker``, a step is a prefill while requests wait and fewer than half of the places are taken.
    """

    depth = 1

    def __init__(self, config):
        self.config = config
        cache = real_config.CacheConfig(
            max_batches=config.max_batches,
            block_size=config.block_size,
            num_cpu_blocks=0,
            num_gpu_blocks=config.num_gpu_blocks,
            max_prefill_token_num=config.max_prefill_token_num,
            enable_prefix_caching=config.enable_prefix_caching,
            num_state_caches=0,
        )
        limits = real_config.SchedulerConfig(max_batches=config.max_batches, max_session_len=self.context)
        meta = messages.SequenceMeta(config.block_size, strategy=sequence.ARSequenceStrategy())
        self.scheduler = real.Scheduler(limits, cache, seq_meta=meta)
        self.alive = {}
        self.running = []
        self.in_flight = None
        self.launched = self.sessions = 0

    @property
    def context(self):
        return self.config.num_gpu_blocks * self.config.block_size

    def step(self, events, now):  # noqa: ARG002 - it has no use for the time
        replies = tuple(reply for event in events for reply in self._take(event))
        if self.in_flight is not None or not self.alive:
            return sdk.Stepped(replies=replies)
        batch, preempted = self._plan()
        if not batch:
            return sdk.Stepped(replies=replies, preempted=preempted, again=bool(preempted))
        self.launched += 1
        shares = tuple(map(self._share_of, batch))
        self.in_flight = batch
        launched = sdk.Batch(id=self.launched, shares=shares)
        return sdk.Stepped(microbatch=launched, replies=replies, preempted=preempted, again=True)

    @property
    def is_idle(self):
        return self.in_flight is None and not self.alive

    def counts(self):
        return {
            "waiting": self.scheduler.num_waiting(),
            "running": len(self.running),
            "in_flight": int(self.in_flight is not None),
            "blocks_free": self.scheduler.block_manager.get_num_free_gpu_blocks() + self._cached(),
        }

    def _cached(self):
        """The blocks that only the trie holds."""
        return self.config.num_gpu_blocks - self.scheduler.block_manager.get_num_free_gpu_blocks() - self._held()

    def _held(self):
        tables = map(self.scheduler.block_manager.get_block_table, self.alive.values())
        return len({int(block) for table in tables for block in table})

    def _take(self, event):
        match event:
            case sdk.Add():
                tokens = len(event.prompt_ids) + event.max_new_tokens
                if not event.prompt_ids or tokens > min(self.context, self.config.max_prefill_token_num):
                    # Its engine cuts longer prompts in a loop of its own.
                    yield sdk.Refused(rid=event.rid, reason="it has no prompt, or is too long")
                    return
                self.sessions += 1
                session = self.scheduler.add_session(self.sessions)
                seq = self.alive[event.rid] = session.add_sequence(list(event.prompt_ids))
                seq.rid, seq.request, seq.said = event.rid, event, 0
            case sdk.Abort() if event.rid in self.alive:
                self._end(self.alive[event.rid])
                yield sdk.Tokens(rid=event.rid, finish_reason="abort")
            case sdk.BatchResult():
                yield from self._told(event)

    def _plan(self):
        scheduler, taken = self.scheduler, len(self.running)
        if scheduler.has_waiting() and (taken < self.config.max_batches / 2 or not taken):
            batch = scheduler.schedule(is_prefill=True, prealloc_size=1).running
            if batch:
                scheduler.activate_seqs(batch)
                self.running += batch
                return batch, ()
        if not self.running:
            return (), ()
        mask = scheduler.schedule_running(self.running, num_required_tokens=1, prealloc_size=1)
        gone = [seq for seq, is_valid in zip(self.running, mask, strict=True) if not is_valid]
        self.running = [seq for seq, is_valid in zip(self.running, mask, strict=True) if is_valid]
        return list(self.running), tuple(seq.rid for seq in gone)

    def _share_of(self, seq):
        table = tuple(map(int, self.scheduler.block_manager.get_block_table(seq)))
        return sdk.Share(rid=seq.rid, start=seq.num_history_ids, count=seq.num_token_ids, block_ids=table)

    def _told(self, event):
        batch, self.in_flight = self.in_flight, None
        for seq, (token,) in zip(batch, event.token_ids, strict=True):
            if seq.status != RUNNING:
                continue
            seq.update_token_ids([token], mode=MODES.DECODE)
            seq.said += 1
            is_stop = token in seq.request.stop_token_ids
            is_over = is_stop or seq.said == seq.request.max_new_tokens
            if is_over:
                seq.state.finish()
                self._end(seq)
            reason = ("stop" if is_stop else "length") if is_over else None
            yield sdk.Tokens(rid=seq.rid, token_ids=(token,), finish_reason=reason)

    def _end(self, seq):
        """As its engine does when a session ends, whether a batch of it is computed or not."""
        del self.alive[seq.rid]
        self.running = [other for other in self.running if other is not seq]
        self.scheduler.end_session(seq.session_id)


ADAPTER = sdk.SchedulerAdapter(
    "lmdeploy",
    config=LmConfig,
    machine=LmMachine,
    limits=lambda config: sdk.Limits(
        block_size=config.block_size,
        blocks=config.num_gpu_blocks,
        batch_tokens=config.max_prefill_token_num,
        batch_requests=config.max_batches,
        context_tokens=min(config.num_gpu_blocks * config.block_size, config.max_prefill_token_num),
    ),
    can=lambda _: sdk.Capabilities(flush=False, chunked=False, equal_writes=True),
    may_grow=("block_trie", "block_manager", "seq_manager", "allocator"),
    packages=("lmdeploy",),
)
