"""A prompt that is computed on one engine goes on on another, with the tokens of one that does all by itself."""

from __future__ import annotations

import importlib.util
import select
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from kv_peers import WAIT_S, no_thread_is_left
from stage_farm import StageFarm
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, GrammarReady, PagesReceived, PagesSent, TransferEvent
from engine.core.plan import Forward, ForwardMode, ReceivePages, SamplingSpec, Segment, SendPages, StopTransfer
from engine.model.runner import StageRunner
from engine.pipeline.kv_port import KVLinks, open_kv_port
from engine.pipeline.local import LocalPipeline
from engine.pipeline.staged import StagedPipeline
from engine.process.kv_addresses import kv_addresses

PAGE = 32
PROMPT = tuple(b"one two three, one two three, one two three: a prompt of two full pages of KV and a bit more")
FULL = len(PROMPT) // PAGE * PAGE
TOKENS = 12
# What was said before counts for every choice, so the record of slots must have come along.
SPEC = SamplingSpec(seed=7, repetition_penalty=1.6, frequency_penalty=0.4, prompt_tokens=len(PROMPT))
HAS_OPENVINO = importlib.util.find_spec("openvino") is not None

pytestmark = pytest.mark.usefixtures("_one_torch_thread")

Pipeline = LocalPipeline | StagedPipeline
Start = Callable[..., Pipeline]


@pytest.fixture
def folders() -> Iterator[Sequence[Path]]:
    """One for each engine."""
    with tempfile.TemporaryDirectory(prefix="ls-") as one, tempfile.TemporaryDirectory(prefix="ls-") as other:
        yield Path(one), Path(other)


@pytest.fixture
def start(farm: StageFarm) -> Iterator[Start]:
    """Starts an engine of one stage in this process, or of several in processes of their own."""
    ends: list[Callable[[], object]] = []

    def local(config: EngineConfig, folder: Path) -> LocalPipeline:
        runner = StageRunner(config, Limits.of(config, EMBEDDED_FACTS), 0)
        return LocalPipeline(
            runner, kv_port=lambda answer: open_kv_port(config, runner.page_images, answer, folder, KVLinks())
        )

    def engine(role: str, folder: Path, **values: object) -> Pipeline:
        config = EngineConfig(
            **{"device": "cpu", "page_size": PAGE, "context_length": 256, "kv_sanitizer": True, "role": role} | values
        )
        pipeline: Pipeline = local(config, folder) if config.pp_size == 1 else StagedPipeline(folder, config.pp_size)
        if config.pp_size > 1:
            ends.append(partial(farm.reap, farm.start(config, folder)))
        ends.append(pipeline.close)
        return pipeline

    with no_thread_is_left():
        yield engine
        for end in reversed(ends):
            end()


BACKENDS = [
    {"backend": "torch"},
    {"backend": "torch", "pp_size": 2},
    {"backend": "torch", "kv_sanitizer": False},
    {"backend": "torch", "async_scheduling": True},
    *([{"backend": "openvino"}, {"backend": "openvino", "kv_cache_dtype": "u8"}] if HAS_OPENVINO else []),
]


@pytest.mark.parametrize("values", thinned(BACKENDS, one_in=2), ids=lambda values: "-".join(map(str, values.values())))
def test_it_says_what_one_engine_says(start: Start, folders: Sequence[Path], values: dict[str, object]) -> None:
    """The second half of the pages is sent while the first was already, as parts of a prompt are."""
    stages = int(str(values.get("pp_size", 1)))
    prefill, decode = start("prefill", folders[0], **values), start("decode", folders[1], **values)
    expected = said(prefill, 10, (0, 1, 2, 3), start_at=0, ids=PROMPT)
    to = kv_addresses(folders[1], stages)
    decode.order_transfer(ReceivePages(1, (7, 4)))
    for number, (page, first) in enumerate(((0, 0), (1, 1)), 1):
        prefill.order_transfer(SendPages(number, (page,), to, 1, first))
        assert answer(prefill) == PagesSent(transfer=number)
    assert answer(decode) == PagesReceived(transfer=1, pages=2)
    assert said(decode, 10, (7, 4, 5, 6), start_at=FULL, ids=PROMPT[FULL:]) == expected


def test_what_has_not_come_is_noticed(start: Start, folders: Sequence[Path]) -> None:
    """By the sanitizer, which has the record of the received pages."""
    prefill, decode = start("prefill", folders[0]), start("decode", folders[1])
    said(prefill, 1, (0, 1, 2, 3), start_at=0, ids=PROMPT)
    decode.order_transfer(ReceivePages(1, (7, 4)))
    prefill.order_transfer(SendPages(1, (0,), kv_addresses(folders[1], 1), 1, 0))
    assert answer(prefill) == PagesSent(transfer=1)
    decode.order_transfer(StopTransfer(1))
    assert answer(decode) == PagesReceived(transfer=1, pages=1)
    with pytest.raises(IntegrityError, match="at position 32 must be its own"):
        said(decode, 1, (7, 4, 5, 6), start_at=FULL, ids=PROMPT[FULL:])


def test_engines_that_differ_say_so_and_go_on(start: Start, folders: Sequence[Path]) -> None:
    """Both stages refuse; the order is answered once, with the first one's error."""
    prefill = start("prefill", folders[0], pp_size=2, page_size=64)
    decode = start("decode", folders[1], pp_size=2)
    decode.order_transfer(ReceivePages(1, (0,)))
    prefill.order_transfer(SendPages(1, (0,), kv_addresses(folders[1], 2), 1, 0))
    refused = answer(prefill)
    assert isinstance(refused, PagesSent)
    assert "stage 0: KV could not be sent to unix:" in str(refused.error)
    assert "page_size must be the same on both engines, got 64 on the sender and 32" in str(refused.error)
    decode.order_transfer(StopTransfer(1))
    assert answer(decode) == PagesReceived(transfer=1, pages=0)
    for pipeline in (prefill, decode):
        assert len(said(pipeline, 1, (0, 1, 2, 3), start_at=0, ids=PROMPT)) == TOKENS
        assert pipeline.answers() == ()


def test_an_engine_that_does_all_by_itself_opens_nothing(start: Start, folders: Sequence[Path]) -> None:
    start("both", folders[0])
    assert list(folders[0].iterdir()) == []


def said(pipeline: Pipeline, row: int, pages: tuple[int, ...], *, start_at: int, ids: Sequence[int]) -> list[int]:
    """Compute the rest of a prompt and decode one by one."""
    output = list(computed(pipeline, Segment("r", row, start_at, tuple(ids), 0, pages, emits=True, sampling=SPEC)))
    while len(output) < TOKENS:
        at = len(PROMPT) + len(output) - 1
        output += computed(pipeline, Segment("r", row, at, (output[-1],), 0, (), emits=True))
    return output


def computed(pipeline: Pipeline, segment: Segment) -> tuple[int, ...]:
    pipeline.launch(Forward(segment.start, ForwardMode.PREFILL, (segment,)))
    completion = pipeline.next_completion(WAIT_S)
    assert isinstance(completion, Completion)
    assert completion.error is None, completion.error
    return completion.token_ids


def answer(pipeline: Pipeline) -> GrammarReady | TransferEvent:
    """The next one, for which the loop is woken."""
    while not (answers := pipeline.answers()):
        source = pipeline.answer_source()
        sources = pipeline.wake_sources() if source is None else (source,)
        assert select.select(sources, [], [], WAIT_S)[0], "no answer"
        assert pipeline.next_completion(0) is None
    (event,) = answers
    return event
