"""The scheduler of mini-sglang as an adapter of the search: its radix cache, chunked prefill and both of its loops.

``git clone https://github.com/sgl-project/mini-sglang``, then with its folder ``python`` in PYTHONPATH
``scripted explore --adapter examples/mini_sglang/adapter.py``. It needs torch, transformers and msgpack, and no GPU.
"""

import itertools
import sys
import types
from typing import Any, NamedTuple

import msgspec
import torch

from scripted import sdk


def unpinned(make):
    """Without a GPU no memory is pinned."""
    return lambda *what, pin_memory=False, **options: make(*what, **options)  # noqa: ARG005


torch.empty, torch.tensor, torch.Tensor.pin_memory = unpinned(torch.empty), unpinned(torch.tensor), lambda one: one


def common_length(one, other):
    """Count the equal leading tokens, as its compiled kernel does."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


for module, names in {"engine": {"EngineConfig": object}, "kernel": {"fast_compare_key": common_length}}.items():
    sys.modules[f"minisgl.{module}"] = types.ModuleType(f"minisgl.{module}")
    vars(sys.modules[f"minisgl.{module}"]).update(names)

from minisgl import core, message  # noqa: E402
from minisgl.distributed import set_tp_info  # noqa: E402
from minisgl.kvcache import radix_cache  # noqa: E402
from minisgl.scheduler import scheduler as real  # noqa: E402

set_tp_info(rank=0, size=1)
# Its sets of requests and its clock repeat themselves: the order of a set is that of arrival.
core.Req.__hash__ = lambda req: int(req.uid.partition("#")[2])
radix_cache.time = types.SimpleNamespace(monotonic_ns=itertools.count(1).__next__)


class MiniConfig(msgspec.Struct, frozen=True):
    """The fields of mini-sglang's configuration that its scheduler reads, and which of its loops runs."""

    num_pages: int = 12
    page_size: int = 4
    max_extend_tokens: int = 16
    max_running_req: int = 4
    overlap: bool = True


class Output(NamedTuple):
    next_tokens_gpu: torch.Tensor
    next_tokens_cpu: torch.Tensor
    copy_done: Any


class Engine:
    """Stand in for the engine, attention, graphs and sampler that the scheduler calls."""

    def __init__(self, config):
        self.max_seq_len = config.num_pages * config.page_size
        self.page_table = torch.zeros((config.max_running_req + 1, self.max_seq_len), dtype=torch.int32)
        self.graph_runner = self.attn_backend = self.sampler = self

    def pad_batch(self, batch):
        batch.padded_reqs = batch.reqs

    def forward_batch(self, batch, _):
        for req in batch.reqs:
            req.complete_one()
        tokens = torch.zeros(len(batch.reqs), dtype=torch.int32)
        return Output(tokens, tokens.clone(), self)

    def prepare(self, batch):
        """Nothing to do without a device."""

    prepare_metadata = prepare

    def synchronize(self):
        """The tokens are there when the last batch is processed."""


class MiniMachine(real.Scheduler):
    """The scheduler, made without a device; a step is a turn of its loop."""

    def __init__(self, config):
        vars(core)["_GLOBAL_CTX"] = core.Context(config.page_size)
        self.config, self.depth = config, 1 + config.overlap
        self.engine, self.device = Engine(config), torch.device("cpu")
        self.table_manager = real.TableManager(config.max_running_req, self.engine.page_table)
        self.cache_manager = real.CacheManager(config.num_pages, config.page_size, self.engine.page_table, "radix")
        self.decode_manager = real.DecodeManager(config.page_size)
        self.prefill_manager = real.PrefillManager(self.cache_manager, self.table_manager, self.decode_manager)
        self.finished_reqs, self.token_pool = set(), self.table_manager.token_pool
        self.prefill_budget, self.eos_token_id = config.max_extend_tokens, -1
        self.in_flight, self.results, self.alive, self.sent, self.added, self.launched = [], {}, {}, [], 0, 0

    def step(self, events, now):  # noqa: ARG002 - it has no use for the time
        self.results |= {event.batch_id: event.token_ids for event in events if isinstance(event, sdk.BatchResult)}
        before = self.launched - len(self.in_flight)
        if len(self.in_flight) == self.depth:
            self._process_oldest()
        refused = [refusal for event in events for refusal in self._take(event)]
        batch = self._launch() if len(self.in_flight) < self.depth else None
        if batch is None:
            self._process_oldest()
        replies, self.sent = [*refused, *self._told()], []
        again = batch is not None or self.launched - len(self.in_flight) > before
        return sdk.Stepped(microbatch=batch, replies=tuple(replies), again=again)

    @property
    def is_idle(self):
        return not (self.in_flight or self.prefill_manager.runnable or self.decode_manager.runnable)

    def counts(self):
        return {
            "waiting": len(self.prefill_manager.pending_list),
            "running": len(self.decode_manager.running_reqs),
            "in_flight": len(self.in_flight),
            "rows_free": self.table_manager.available_size,
            "blocks_free": self.cache_manager.available_size // self.config.page_size,
        }

    def send_result(self, reply):
        self.sent += reply

    def _take(self, event):
        match event:
            case sdk.Add():
                stop = event.stop_token_ids
                tokens = len(event.prompt_ids) + event.max_new_tokens
                others = any(not ignores for _, ignores in self.alive.values())
                if not event.prompt_ids or not event.max_new_tokens or tokens > self.engine.max_seq_len:
                    # It drops those without a word, or waits forever.
                    yield sdk.Refused(rid=event.rid, reason="it has no prompt, no output, or does not fit")
                elif len(stop) > 1 or (stop and others and stop != (self.eos_token_id,)):
                    yield sdk.Refused(rid=event.rid, reason="there is one end token")
                else:
                    self.eos_token_id = stop[0] if stop else self.eos_token_id
                    self.added += 1
                    self.alive[event.rid] = f"{event.rid}#{self.added}", not stop
                    params = core.SamplingParams(ignore_eos=not stop, max_tokens=event.max_new_tokens)
                    ids = torch.tensor(event.prompt_ids, dtype=torch.int32)
                    self._process_one_msg(message.UserMsg(self.alive[event.rid][0], ids, params))
            case sdk.Abort() if event.rid in self.alive:
                self._process_one_msg(message.AbortBackendMsg(self.alive.pop(event.rid)[0]))

    def _launch(self):
        if (prepared := self._schedule_next_batch()) is None:
            return None
        page = self.config.page_size
        shares = []
        for req in prepared.batch.reqs:
            table = self.engine.page_table[req.table_idx, : req.device_len : page] // page
            rid, start = req.uid.partition("#")[0], req.cached_len
            shares.append(sdk.Share(rid=rid, start=start, count=req.extend_len, block_ids=tuple(table.tolist())))
        self.launched += 1
        self.in_flight.append((self.launched, (prepared, self._forward(prepared))))
        return sdk.Batch(id=self.launched, shares=tuple(shares))

    def _process_oldest(self):
        if self.in_flight and (tokens := self.results.pop(self.in_flight[0][0], None)) is not None:
            _, data = self.in_flight.pop(0)
            data[1].next_tokens_cpu[:] = torch.tensor([ids[0] if ids else 0 for ids in tokens])
            self._process_last_data(data)

    def _told(self):
        for told in self.sent:
            rid = told.uid.partition("#")[0]
            uid, ignores = self.alive.get(rid, ("", True))
            if uid == told.uid:
                stopped = not ignores and told.next_token == self.eos_token_id
                reason = ("stop" if stopped else "length") if told.finished else None
                if told.finished:
                    del self.alive[rid]
                yield sdk.Tokens(rid=rid, token_ids=(told.next_token,), finish_reason=reason)


ADAPTER = sdk.SchedulerAdapter(
    "mini-sglang",
    config=MiniConfig,
    machine=MiniMachine,
    limits=lambda config: sdk.Limits(
        block_size=config.page_size,
        blocks=config.num_pages,
        batch_tokens=config.max_extend_tokens,
        batch_requests=config.max_running_req,
        context_tokens=config.num_pages * config.page_size,
        depth=1 + config.overlap,
    ),
    can=lambda _: sdk.Capabilities(flush=False, preemption=False, answers_aborts=False),
    may_grow=("prefix_cache", "page_table", "token_pool", "finished_reqs"),
    packages=("minisgl",),
    copier=sdk.Copier(copied={torch.Tensor: torch.clone}),
)
