"""The path of a GPU, without one: tensors that are fake and not on the CPU show an operation that mixes devices.

A fake tensor has a device, a type and a shape, and no values: an operation over two devices raises, and so does code
that asks for a value. With ``--device cuda`` the rest of this folder computes on a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from chained_stages import ChainedStages, limits_for
from thinned import thinned
from tiny_checkpoints import save_weights
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError, DeviceLostError, EngineError
from engine.core.limits import ModelFacts
from engine.core.plan import UNKNOWN_TOKEN, Forward, ForwardMode, SamplingSpec, Segment
from engine.model import capacity, stage_model
from engine.model.arithmetic import stage_devices
from engine.model.lora import Pair
from engine.model.prompt_logprobs import PromptScores
from engine.model.runner import StageRunner
from engine.model.sampling import Sampler
from engine.model.stage_model import StageModel
from engine.model.stage_slice import StageSlice
from engine.model.weights import WeightFiles

# Of a device that is not the CPU every build of torch can make fake tensors, if it is this one.
GPU = torch.device("meta")
SPECS = [
    SamplingSpec(seed=0, return_logprob=True, top_logprobs_num=2),
    SamplingSpec(seed=1, temperature=0.7, logit_bias=((3, 1.0),), return_logprob=True),
    SamplingSpec(seed=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, suppressed_ids=(4,), suppressed_until=99),
    SamplingSpec(seed=3, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
]


def _tensor(values: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
    """Like torch.tensor, but makes real tensors for the fake device."""
    array = np.array(values)
    return torch.empty(array.shape, dtype=dtype or torch.from_numpy(array).dtype, device=device)


class _Equal:
    """Stands for outputs that are equal, where values are what tensors do not have."""

    def __sub__(self, other: _Equal) -> _Equal:
        return self

    def __float__(self) -> float:
        return 0.0

    def norm(self) -> _Equal:
        return self


@pytest.fixture
def fakes(checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """A machine with a GPU whose tensors have no values; checkpoints are made before."""
    folders = {family: checkpoint_of(family) for family in ("qwen3", "llama")}
    # At its first use of a device as a context torch notes its constructors for good, which must be its own.
    with torch.device("cpu"):
        torch.empty(0)
    monkeypatch.setattr(stage_model, "_device", lambda *_: GPU)
    monkeypatch.setattr(stage_model, "why_not_varlen", lambda *_, **__: None)
    # Values: of weights, of the comparison with transformers', and of numbers that are copied to the device.
    monkeypatch.setattr(StageSlice, "_require_finite", lambda *_: None)
    monkeypatch.setattr(StageModel, "_compare_outputs", lambda self: _Equal())
    monkeypatch.setattr(StageSlice, "_refuse_work_between_layers", lambda self: None)
    for module in ("batch", "lora", "newest_tokens", "sampler_output", "sampling"):
        monkeypatch.setattr(f"engine.model.{module}.sent", _sent)
    monkeypatch.setattr(torch, "tensor", _tensor)
    monkeypatch.setattr(WeightFiles, "load", lambda self, names, shape: torch.empty(shape, dtype=torch.bfloat16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield folders.__getitem__


def _sent(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device) for array in arrays]


class _NoWaits(TorchFunctionMode):
    """Refuses what waits for the device without reading a value: copies to it from memory that is not pinned.

    An index that is a list is such a copy, and one of truth values is counted on the host.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if func in (torch.Tensor.to, torch.Tensor.copy_) and self._crosses(args, kwargs):
            raise Waited(func.__name__)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and tensors[0].device == GPU:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in parts:
                counted = isinstance(part, torch.Tensor) and (part.device != GPU or part.dtype == torch.bool)
                if counted or isinstance(part, list | np.ndarray):
                    raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _crosses(args: Any, kwargs: Any) -> bool:
        places = [
            value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.device | torch.Tensor)
        ]
        return len({place if isinstance(place, torch.device) else place.device for place in places}) > 1


class Waited(RuntimeError):
    """The host waited for the device."""


def _waits(*_: object, **__: object) -> None:
    raise Waited("tensor")


@pytest.fixture
def values_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors leave the device as lists of zeros; ``tolist`` is the only way that they may."""

    def zeros(tensor: torch.Tensor) -> Any:
        return np.zeros(tuple(tensor.shape), int if not tensor.is_floating_point() else float).tolist()

    monkeypatch.setattr(FakeTensor, "tolist", zeros)


def stage_of(folder: Path, stage: int = 0, **values: Any) -> StageModel:
    config = EngineConfig(model=str(folder), dtype="bfloat16", page_size=4, **values)
    return StageModel(config, limits_for(config), stage)


def segments_of(kind: str) -> list[Segment]:
    decodes = [Segment(f"r{row}", row, 4, (row + 1,), 0, (row, row + 8), True) for row in range(4)]
    prompts = [Segment("p", 5, 0, (1, 2, 3, 4, 5), 0, (20, 21), True)]
    scored = [Segment("s", 6, 0, (1, 2, 3), 0, (30,), True, logprobs_from=0)]
    return {"decodes": decodes, "prompt": prompts, "mixed": [*prompts, *decodes], "scored": [*scored, *decodes]}[kind]


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("kind", thinned(["mixed", "decodes", "prompt", "scored"], one_in=4))
def test_a_forward_stays_on_its_device(kind: str, backend: str, fakes: Callable[[str], Path]) -> None:
    """And asks it for no value, so that it can be launched while the one before is computed."""
    stage = stage_of(fakes("qwen3"), attention_backend=backend)
    assert (stage.device, stage.is_lean, stage.pool.keys.device) == (GPU, True, GPU)
    segments = segments_of(kind)
    for segment in segments:
        stage.pool.adopt(segment)
    taken: list[torch.Tensor] = []
    with torch.inference_mode():
        logits = stage.forward(stage.batch(segments), None, taken.append if kind == "scored" else None)
    assert (logits.device, logits.dtype, tuple(logits.shape)) == (GPU, torch.bfloat16, (len(segments), 199))
    assert [tuple(part.shape) for part in taken] == ([(2, 199)] if kind == "scored" else [])


def test_loras_stay_on_their_device(fakes: Callable[[str], Path]) -> None:
    """Rows side by side and rows apart, beside rows without one."""
    stage = stage_of(fakes("qwen3"), max_loras=1)
    assert stage.lora is not None
    widths = ((64, 128), (64, 64), (64, 192), (96, 64))
    pairs = [[_pair(*width) for width in widths] for _ in stage.facts.layers]
    stage.lora.held |= {1: pairs, 2: pairs}
    segments = [
        msgspec.structs.replace(segment, lora=version)
        for segment, version in zip(segments_of("decodes"), (1, 2, 0, 1), strict=True)
    ]
    with torch.inference_mode():
        assert stage.forward(stage.batch(segments), None).device == GPU


@pytest.mark.parametrize("backend", thinned(["varlen", "sdpa"], one_in=2))
def test_launching_waits_for_nothing(
    backend: str, fakes: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C02: prompts and decodes of every parameter but penalties, then decodes whose tokens are not known, LoRAs."""
    config = EngineConfig(
        model=str(fakes("qwen3")),
        dtype="bfloat16",
        page_size=4,
        max_loras=2,
        attention_backend=backend,
        async_scheduling=True,
    )
    runner = StageRunner(config, limits_for(config), 0, early=True)
    widths = ((64, 128), (64, 64), (64, 192), (96, 64))
    loaded = [[_pair(*width) for width in widths] for _ in range(5)]
    assert runner.model.lora is not None
    runner.model.lora.held |= {1: loaded, 2: loaded}
    parts = [
        Segment(f"r{row}", row, 0, (1, 2, 3, 4), 0, (row, row + 8), row != 3, SPECS[row % 3], lora=lora)
        for row, lora in enumerate((1, 0, 1, 2))
    ]
    decodes = [
        msgspec.structs.replace(part, start=4, token_ids=(UNKNOWN_TOKEN,), emits=True, pages=(), sampling=None)
        for part in parts[:3]
    ]
    rest = msgspec.structs.replace(parts[3], start=4, token_ids=(5, 6), emits=True, pages=(), sampling=None)
    monkeypatch.setattr(torch, "tensor", _waits)
    for number, segments in enumerate([parts, [rest, *decodes], [decodes[2], decodes[0]]]):
        microbatch = Forward(number, ForwardMode.MIXED, tuple(segments))
        assert runner.can_launch(microbatch)
        with _NoWaits():
            launched = runner.launch(microbatch)
        if launched.failure is not None:
            raise launched.failure


def _pair(inputs: int, outputs: int) -> Pair:
    down, up = torch.zeros((inputs, 4), device=GPU), torch.zeros((4, outputs), device=GPU)
    return Pair(down.to(torch.bfloat16), up.to(torch.bfloat16))


def test_a_stage_in_the_middle_stays_on_its_device(fakes: Callable[[str], Path]) -> None:
    stage = stage_of(fakes("llama"), stage=1, pp_size=3)
    segments = segments_of("mixed")
    with torch.inference_mode():
        hidden = torch.zeros((9, 64), dtype=torch.bfloat16, device=GPU)
        assert tuple(stage.forward(stage.batch(segments), hidden).shape) == (9, 64)
        with pytest.raises((EngineError, RuntimeError), match="device"):
            stage.forward(stage.batch(segments), hidden.cpu())


@pytest.mark.usefixtures("fakes", "values_are_zeros")
def test_sampling_and_logprobs_stay_on_their_device() -> None:
    """C02: every parameter, and never more than lists of numbers from the device."""
    sampler = Sampler(never=(5,), vocab_size=16, device=GPU)
    segments = [Segment(f"r{row}", row, 0, (1,), 0, (), True, spec) for row, spec in enumerate(SPECS)]
    for segment in segments:
        sampler.adopt(segment)
    with torch.inference_mode():
        logits = torch.zeros((4, 16), dtype=torch.bfloat16, device=GPU)
        ids, logprobs = sampler.sample(logits, segments, lambda _: np.array([1, 2, 2], np.int32))
        assert ids == (0, 0, 0, 0)
        assert [one is not None for one in logprobs] == [True, True, False, False]
        spec = SamplingSpec(seed=0, prompt_top_logprobs_num=2)
        scored = Segment("s", 0, 0, (1, 2, 3), 0, (), True, spec, logprobs_from=0)
        scores = PromptScores([scored], lambda _: spec)
        scores.take(logits[:2])
    assert [len(part) for part in scores.parts()] == [2]


@pytest.mark.usefixtures("fakes")
def test_a_fake_gpu_notices_what_these_tests_look_for() -> None:
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(2, device=GPU) + torch.zeros(2)
    with pytest.raises(DataDependentOutputException):
        float(torch.zeros(2, device=GPU).sum())
    numbers, waits = torch.zeros(2, device=GPU), [lambda: numbers[[0]], lambda: numbers[numbers > 0]]
    for wait in [*waits, lambda: torch.zeros(2).to(GPU), lambda: numbers.copy_(torch.zeros(2))]:
        with _NoWaits(), pytest.raises(Waited):
            wait()


@pytest.mark.parametrize(
    ("name", "stages", "gpus", "expected"),
    [
        ("auto", 4, 4, (0, 1, 2, 3)),
        ("cuda", 2, 8, (0, 1)),
        ("auto", 4, 1, (0, 0, 0, 0)),
        ("cuda", 4, 3, (0, 0, 0, 0)),
        ("cuda:2", 2, 4, (2, 2)),
    ],
)
def test_each_stage_has_a_gpu_of_its_own_where_there_are_enough(
    name: str, stages: int, gpus: int, expected: tuple[int, ...]
) -> None:
    assert stage_devices(name, stages, gpus) == expected
    with pytest.raises(CheckpointError, match="must be one of the 2 GPUs that torch sees, got 'cuda:2'"):
        stage_devices("cuda:2", stages, 2)


@pytest.mark.parametrize(
    ("own", "draft", "tokens"),
    [
        # 10,000 bytes free, 4,000 of weights, 0.85 of the rest, 100 bytes a token.
        (False, "", 51),
        # Each of two stages has half of the layers, and half of each token's KV.
        (True, "", 136),
        # A draft model is whole on the last stage; nothing of what it leaves is counted twice.
        (True, "embedded", 51),
    ],
)
def test_kv_is_sized_from_the_gpu_that_is_full_first(
    own: bool, draft: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policies and limits hold at every size (B17)."""
    save_weights(tmp_path, 4_000)
    monkeypatch.setattr(capacity, "_cuda_memory", lambda config: capacity._CudaMemory(10_000, own))
    facts = ModelFacts(name="m", vocab_size=100, context_length=1000, num_layers=4, kv_bytes_per_token=100)
    values = {"speculative_algorithm": "draft_model", "speculative_draft_model": draft} if draft else {}
    config = EngineConfig(model=str(tmp_path), pp_size=2, max_running_requests=64, page_size=1, **values)
    assert capacity.measure_kv_tokens(config, facts) == tokens


@pytest.mark.parametrize("lost", [True, False])
def test_a_device_that_is_lost_ends_its_stage_and_any_other_failure_its_microbatch(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A05, A06: else every later microbatch would fail, and the server would look alive."""
    config = EngineConfig(device="cpu", context_length=256, page_size=4)
    chain = ChainedStages(config, limits_for(config, vocab_size=264, num_layers=4))

    def synchronize(device: torch.device) -> None:
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(chain.runners[0].model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    chain.runners[0].fail_next()
    if lost:
        with pytest.raises(DeviceLostError, match=r"stage 0 has lost cuda:0: a failure was injected"):
            chain.forward(chain.segment(0, [1, 2]))
    else:
        assert "a failure was injected" in str(chain.forward(chain.segment(0, [1, 2])).error)
