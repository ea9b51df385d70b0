"""KV that goes to host memory and comes back is what it was, on every backend, in every form that it is kept in."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import msgspec
import pytest
import torch
from chained_stages import DEVICE, ChainedStages

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion
from engine.core.plan import Copies, Microbatch, SamplingSpec, Segment
from engine.model.host_pool import HostPool
from engine.model.kv_pool import KVPool

PAGE = 32
PROMPT = list(b"a prompt that fills two pages of KV, and then goes on a little")
OTHER = list(b"something else that is computed where the first prompt was, page by page")
SPEC = SamplingSpec(seed=0, return_logprob=True, top_logprobs_num=5)
HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
BACKENDS = [
    {"backend": "torch"},
    {"backend": "torch", "pp_size": 4},
    {"backend": "torch", "async_scheduling": True},
    {"backend": "torch", "speculative_algorithm": "draft_model", "speculative_draft_model": "embedded"},
    *(
        [{"backend": "openvino", "device": "cpu"}, {"backend": "openvino", "device": "cpu", "kv_cache_dtype": "u8"}]
        if HAS_OPENVINO
        else []
    ),
]


def chain_of(**values: object) -> ChainedStages:
    config = EngineConfig(
        **{"device": DEVICE, "context_length": 256, "page_size": PAGE, "host_kv_tokens": 4 * PAGE, "kv_sanitizer": True}
        | values
    )
    return ChainedStages(config, Limits.of(config, EMBEDDED_FACTS), early=True)


def computed(chain: ChainedStages, segment: Segment, copies: Copies | None = None) -> Completion:
    microbatch, output = msgspec.structs.replace(chain.plan(segment), copies=copies), None
    for runner in chain.runners:
        if runner.can_launch(microbatch):
            return runner.finish(runner.launch(microbatch))
        output = runner.forward(microbatch, output if isinstance(output, torch.Tensor) else None)
    assert isinstance(output, Completion)
    return output


def part(row: int, ids: Sequence[int], *, start: int, pages: Sequence[int]) -> Segment:
    return Segment(f"r{row}", row, start, tuple(ids), 0, tuple(pages), True, SPEC)


@pytest.mark.parametrize("values", BACKENDS, ids=lambda values: "-".join(map(str, values.values())))
def test_pages_come_back_as_they_were(values: dict[str, object]) -> None:
    """B18: their old place is computed over in the very microbatch that takes them out."""
    chain = chain_of(**values)
    ids = PROMPT[: 2 * PAGE - 8]
    computed(chain, part(0, ids[:PAGE], start=0, pages=(5,)))
    expected = computed(chain, part(1, ids[PAGE:], start=PAGE, pages=(5, 7)))
    computed(chain, part(2, OTHER[:PAGE], start=0, pages=(5,)), Copies(((5, 3),), ()))
    found = computed(chain, part(3, ids[PAGE:], start=PAGE, pages=(2, 6)), Copies((), ((3, 2),)))
    assert msgspec.structs.replace(found, microbatch_id=0) == msgspec.structs.replace(expected, microbatch_id=0)


def test_a_page_that_was_not_loaded_is_noticed() -> None:
    """The record of slots goes with the pages, so the sanitizer knows what is not there."""
    chain = chain_of(backend="torch")
    ids = PROMPT[: 2 * PAGE - 8]
    computed(chain, part(0, ids[:PAGE], start=0, pages=(5,)))
    computed(chain, part(1, OTHER[:PAGE], start=0, pages=(6,)), Copies(((5, 3),), ()))
    with pytest.raises(IntegrityError, match="must be its own"):
        computed(chain, part(2, ids[PAGE:], start=PAGE, pages=(2, 7)), Copies((), ((1, 2),)))


def test_a_plan_with_pages_that_do_not_exist_fails_its_microbatch() -> None:
    chain = chain_of(backend="torch")
    for copies in (Copies(((0, 4),), ()), Copies((), ((-1, 0),)), Copies(((512, 0),), ())):
        failed = computed(chain, part(0, PROMPT[:PAGE], start=0, pages=(5,)), copies)
        assert "the plan is broken" in (failed.error or "")


def test_a_failed_microbatch_copies_nothing() -> None:
    chain = chain_of(backend="torch")
    computed(chain, part(0, PROMPT[:PAGE], start=0, pages=(5,)))
    chain.runners[0].fail_next()
    assert computed(chain, part(1, OTHER[:PAGE], start=0, pages=(6,)), Copies(((5, 3),), ())).error
    record = chain.runners[0]._record
    assert not record._kept[0].any()


@pytest.mark.parametrize("pages_first", [False, True])
def test_a_page_is_copied_whole_and_nothing_else(pages_first: bool) -> None:
    config = EngineConfig(page_size=4, max_total_tokens=16, host_kv_tokens=8)
    limits = Limits.of(config, EMBEDDED_FACTS)
    pool = KVPool(
        limits,
        layers=2,
        kv_heads=3,
        head_dim=5,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        pages_first=pages_first,
    )
    for number, part in enumerate((pool.keys, pool.values)):
        part.copy_(torch.arange(part.numel()).reshape(part.shape) % 251 + number)
    before = [[part.clone() for part in pool.page(page)] for page in range(4)]
    host = HostPool(pool, limits)
    host.carry_out(Copies(((1, 0), (2, 1)), ((0, 3), (1, 0))), pool)
    after = [list(pool.page(page)) for page in range(4)]
    for page, source in enumerate((2, 1, 2, 1)):
        assert all(torch.equal(one, other) for one, other in zip(after[page], before[source], strict=True))


def test_a_microbatch_travels_with_its_copies() -> None:
    microbatch = msgspec.structs.replace(chain_of().plan(), copies=Copies(((1, 2),), ((3, 4),)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(microbatch), type=Microbatch) == microbatch
