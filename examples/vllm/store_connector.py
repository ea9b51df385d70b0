"""A KV connector for vLLM that keeps blocks in a store of its process, by the tokens that lead to them.

``scripted explore --adapter vllm --connector store_connector:StoreConnector --corpus``, with this folder as the working
folder. Both sides are in one process here; a real one has its store elsewhere.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

# The stored KV of a block by its LoRA and the tokens up to its end, for each store.
STORES = defaultdict(dict)


@dataclass
class Moves(KVConnectorMetadata):
    """What the worker of a step does: pairs of a block and the name of its content."""

    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)


def name_of(lora_request, tokens):
    """Name the content of a block by what it depends on: the LoRA, and the tokens up to its end."""
    return (lora_request.lora_int_id if lora_request else 0, *tokens)


class StoreConnector(KVConnectorBase_V1):
    """Loads are waited for; a block is saved in the step that computes its last token."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        # With context parallelism the ranks share a block, which has room for the tokens of all.
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        self.block_size = vllm_config.cache_config.block_size * ranks
        self.folder = vllm_config.kv_transfer_config.kv_connector_extra_config["shared_storage_path"]
        self.store = STORES[self.folder]
        self.is_worker = role == KVConnectorRole.WORKER
        # Of the scheduler's side: what is to be loaded in the next step, where the load of a request would begin, and
        # the blocks and tokens of requests.
        self.loads = []
        self.begins = {}
        self.tables = {}
        self.tokens = {}
        self.loras = {}

    # -- the scheduler's side --

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens, size = tuple(request.all_token_ids), self.block_size
        # vLLM says only here where the load would begin. It may ask again, and the last answer counts.
        self.begins[request.request_id] = end = num_computed_tokens
        # The last token is computed again, for its output.
        while end + size < len(tokens) and name_of(request.lora_request, tokens[: end + size]) in self.store:
            end += size
        return end - num_computed_tokens, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        begin = self.begins.pop(request.request_id, 0)
        table, tokens, size = blocks.get_block_ids()[0], tuple(request.all_token_ids), self.block_size
        for position in range(begin, begin + num_external_tokens, size):
            name = name_of(request.lora_request, tokens[: position + size])
            self.loads.append((table[position // size], name))

    def request_finished(self, request, block_ids):
        self.begins.pop(request.request_id, None)
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output):
        moves, self.loads = Moves(self.loads), []
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.loras[new.req_id] = new.lora_request
            self.save(moves, scheduler_output, new.req_id, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = list(blocks[0])
            elif blocks is not None:
                self.tables[req_id] += blocks[0]
            self.save(moves, scheduler_output, req_id, computed)
        for req_id in scheduler_output.finished_req_ids:
            self.tables.pop(req_id, None)
            self.tokens.pop(req_id, None)
            self.loras.pop(req_id, None)
        return moves

    def save(self, moves, scheduler_output, req_id, computed):
        """Save the blocks of the prompt that this step completes."""
        size, tokens = self.block_size, self.tokens[req_id]
        end = min(computed + scheduler_output.num_scheduled_tokens[req_id], len(tokens))
        for position in range(computed // size * size + size, end + 1, size):
            name = name_of(self.loras[req_id], tokens[:position])
            moves.saves.append((self.tables[req_id][position // size - 1], name))

    # -- the worker's side --

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):  # noqa: ARG002
        for block, name in self._get_connector_metadata().loads:
            for layer, cache in self.caches.items():
                cache[block] = self.store[name][layer]

    def wait_for_layer_load(self, layer_name):
        """All layers are loaded at the start."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):  # noqa: ARG002
        for block, name in self._get_connector_metadata().saves:
            self.store.setdefault(name, {})[layer_name] = kv_layer[block].clone()

    def wait_for_save(self):
        """All is saved at once."""

    def shutdown(self):
        STORES.pop(self.folder, None)
