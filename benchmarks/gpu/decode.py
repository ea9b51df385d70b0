"""Decode steps: time by part, attention by a kernel or by gathering, graphs or eager.

Compared engines take turns, round by round, over the same prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.device import measured_bandwidth, read_bytes
from benchmarks.gpu.results import Table
from benchmarks.gpu.setting import Setting
from benchmarks.measurement import in_turn
from benchmarks.one_process import PARTS, Engine, Run

__all__ = ["kind_of", "measure_attention", "measure_decodes", "measure_graphs"]

# Names of a device's kernels, by their work; the first match counts.
_KINDS: Final = {
    "copies to the device": ("Memcpy HtoD",),
    "copies from the device": ("Memcpy DtoH",),
    "copies within it": ("Memcpy DtoD", "Memset"),
    "attention": ("flash", "fmha", "attention", "softmax"),
    "matrix products": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "splitk"),
}
_OTHERS: Final = "other kernels"
_SHARE_TARGET: Final = 80.0
_RECORDED: Final[dict[str, Any]] = {"attention_backend": "varlen", "cuda_graphs": "on"}


def measure_decodes(setting: Setting) -> list[Table]:
    """Measure for each batch the parts of a step, the device's work meanwhile, and the share of its bandwidth used."""
    engine = setting.engine(**_RECORDED)
    bandwidth, (weights, kv_token) = measured_bandwidth(setting), read_bytes(setting)
    parts = Table(title="Parts of a decode step as the host sees them, us, medians", columns=("batch", "step", *PARTS))
    on_cuda = setting.device.startswith("cuda")
    done = Table(
        title="What the device does in a step, us, under torch's profiler",
        columns=("batch", "busy", *_KINDS, _OTHERS),
        needs="" if on_cuda else "CUDA",
    )
    limit = Table(
        title=f"Share of the bandwidth's limit (goal: {_SHARE_TARGET:.0f} % at batch 1)",
        columns=("batch", "must be read, MB", "at the copy's bandwidth, us", "step, us", "%", "of the busy time, %"),
        needs="" if on_cuda else "CUDA",
    )
    for rows in setting.batches:
        run = _warm(engine, setting, rows)
        steps = run.decodes(rows)
        step_s = statistics.median(step.seconds for step in steps)
        medians = [statistics.median(step.parts[part] for step in steps) * 1e6 for part in PARTS]
        parts.rows.append((rows, step_s * 1e6, *medians))
        device = _device_times(engine, setting, rows) if on_cuda else {}
        busy_s = sum(device.values())
        done.rows.append((rows, busy_s * 1e6 or None, *[_us(device, kind) for kind in (*_KINDS, _OTHERS)]))
        context = setting.prompt_tokens + setting.new_tokens // 2
        least_s = (weights + rows * context * kv_token) / bandwidth
        of_busy = least_s / busy_s * 100 if busy_s else None
        megabytes = (weights + rows * context * kv_token) / 1e6
        limit.rows.append((rows, megabytes, least_s * 1e6, step_s * 1e6, least_s / step_s * 100, of_busy))
    return [parts, done, limit]


def measure_attention(setting: Setting) -> list[Table]:
    """Compare one kernel call a layer with gathered keys, for decodes and prompts."""
    engines = {name: setting.engine(attention_backend=name) for name in ("sdpa", "varlen")}
    return [
        _compared("A decode step, ms, eager", engines, setting, setting.batches, _decode_ms),
        _compared("The first token of a prompt, ms", engines, setting, setting.long_prompts, _prompt_ms),
    ]


def measure_graphs(setting: Setting) -> list[Table]:
    """Compare graphs with eager decodes, of this forward and of transformers', and check for equal tokens."""
    engines = {
        "transformers' forward": setting.engine(lean=False, attention_backend="varlen"),
        "lean": setting.engine(attention_backend="varlen"),
        "lean, graphs": setting.engine(**_RECORDED),
    }
    for name, engine in engines.items():
        if engine.runner.model.is_lean is name.startswith("transformers"):
            raise RuntimeError(f"{name} must compute, but the other forward was taken; see the log")
    times = _compared("A decode step, ms", engines, setting, setting.batches, _decode_ms)
    same = Table(title="Tokens that are equal with graphs and without, greedily", columns=("batch", "equal, %"))
    for rows in setting.batches:
        said = [_warm(engines[name], setting, rows).tokens for name in ("lean", "lean, graphs")]
        pairs = [
            (one, other)
            for eager, recorded in zip(*[tokens.values() for tokens in said], strict=True)
            for one, other in zip(eager, recorded, strict=True)
        ]
        same.rows.append((rows, 100 * sum(one == other for one, other in pairs) / len(pairs)))
    return [times, same]


def _warm(engine: Engine, setting: Setting, rows: int, seed: int = 0) -> Run:
    """Return a run after a warm-up run with every shape."""
    engine.run(setting.prompts(rows, setting.prompt_tokens, seed), min(4, setting.new_tokens))
    return engine.run(setting.prompts(rows, setting.prompt_tokens, seed), setting.new_tokens)


def _decode_ms(engine: Engine, setting: Setting, rows: int, seed: int) -> float:
    run = engine.run(setting.prompts(rows, setting.prompt_tokens, seed), setting.new_tokens)
    return statistics.median(step.seconds for step in run.decodes(rows)) * 1e3


def _prompt_ms(engine: Engine, setting: Setting, tokens: int, seed: int) -> float:
    return engine.run(setting.prompts(1, tokens, seed), 1).steps[0].seconds * 1e3


def _compared(
    title: str,
    engines: Mapping[str, Engine],
    setting: Setting,
    sizes: Sequence[int],
    measure: Callable[[Engine, Setting, int, int], float],
) -> Table:
    """Return medians over the rounds, and each engine's time relative to the first one's in the same round."""
    names = list(engines)
    table = Table(title=title, columns=("size", *names, *[f"{name} to {names[0]}" for name in names[1:]]))
    for size in sizes:
        for engine in engines.values():
            measure(engine, setting, size, 0)
        rounds = [
            {name: measure(engines[name], setting, size, number + 1) for name in in_turn(names, number)}
            for number in range(setting.rounds)
        ]
        medians = [statistics.median(times[name] for times in rounds) for name in names]
        ratios = [statistics.median(times[name] / times[names[0]] for times in rounds) for name in names[1:]]
        table.rows.append((size, *medians, *ratios))
    return table


def _device_times(engine: Engine, setting: Setting, rows: int) -> dict[str, float]:
    """Return the seconds of each kind of device work in a decode step, from the run's steps after the prompts."""
    prompts = setting.prompts(rows, setting.prompt_tokens, 0)
    short = engine.run(prompts, 1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as whole:
        run = engine.run(prompts, setting.new_tokens)
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prompt_alone:
        engine.run(prompts, 1)
        torch.cuda.synchronize()
    decodes = len(run.steps) - len(short.steps)
    with_prompt, alone = _by_kind(whole), _by_kind(prompt_alone)
    return {kind: max(0.0, with_prompt[kind] - alone[kind]) / decodes for kind in with_prompt}


def _by_kind(profiled: Any) -> dict[str, float]:
    seconds = dict.fromkeys((*_KINDS, _OTHERS), 0.0)
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            seconds[kind_of(event.name)] += event.time_range.elapsed_us() * 1e-6
    return seconds


def kind_of(name: str) -> str:
    """Return a kernel's kind of work, from its name."""
    for kind, words in _KINDS.items():
        if any(word.lower() in name.lower() for word in words):
            return kind
    return _OTHERS


def _us(device: Mapping[str, float], kind: str) -> float | None:
    return device[kind] * 1e6 if kind in device else None
