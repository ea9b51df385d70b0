"""A stage's process, its parts in this one: which transport, which group, and the end with its supervisor."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.pipeline import stage, stage_process
from engine.pipeline.kv_port import KVLinks
from engine.process.control import Control, Loading, ProcessDied, Ready, Serving, Shutdown, decode_child_message
from engine.process.settings import ServerSettings


class _Ended(Exception):
    """Stands for the end of the process."""


def _settings(**changes: Any) -> tuple[ServerSettings, Limits]:
    settings = ServerSettings(pp_size=2, **changes)
    return settings, Limits.of(settings, EMBEDDED_FACTS)


@pytest.mark.parametrize(
    ("transport", "device", "gpus", "backend"),
    [
        ("socket", "auto", 2, None),
        ("gloo", "auto", 0, "gloo"),
        ("auto", "auto", 1, None),
        ("auto", "auto", 2, "nccl"),
        ("auto", "cuda", 2, "nccl"),
        # The same GPU for all stages: NCCL would refuse it.
        ("auto", "cuda:1", 2, None),
        ("auto", "cpu", 8, None),
    ],
)
def test_gpus_are_grouped_when_each_stage_has_one(
    monkeypatch: pytest.MonkeyPatch, transport: str, device: str, gpus: int, backend: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert stage_process._backend(*_settings(hidden_transport=transport, device=device)) == backend


@pytest.mark.parametrize(("device", "gpus"), [("auto", 1), ("cuda:0", 2), ("cpu", 2)])
def test_nccl_without_a_gpu_a_stage_is_refused(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=rf"'nccl' needs a GPU for each stage, 2 in all.*got device='{device}'"):
        stage_process.require_backend("nccl", *_settings(hidden_transport="nccl", device=device))


@pytest.mark.parametrize(
    ("last", "status"), [(Shutdown(), 0), (ProcessDied(process="stage-1", cause="it was killed"), 0), (None, 1)]
)
def test_the_first_word_that_is_no_good_news_ends_it(
    monkeypatch: pytest.MonkeyPatch, last: msgspec.Struct | None, status: int
) -> None:
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise _Ended

    monkeypatch.setattr(stage_process.os, "_exit", end)
    supervisor, child = Pipe()
    supervisor.send_bytes(msgspec.msgpack.encode(Serving(base_url="http://127.0.0.1:1", pids={})))
    supervisor.send_bytes(b"no message")
    if last is None:
        supervisor.close()
    else:
        supervisor.send_bytes(msgspec.msgpack.encode(last))
    with pytest.raises(_Ended):
        stage_process.end_with_supervisor(Control(child))
    assert ended == [status]


@pytest.mark.parametrize(("wanted", "distributed"), [("socket", False), ("gloo", True)])
def test_a_stage_runs_with_its_transport_and_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str, distributed: bool
) -> None:
    settings, limits = _settings(hidden_transport=wanted)
    joined: list[Any] = []
    ran: list[Any] = []
    supervisor, child = Pipe()

    def run(*arguments: Any, on_load: Any, distributed: bool, wires: object, kv_links: KVLinks, probe: str) -> None:
        assert (wires, probe) == (None, "")
        assert kv_links == KVLinks()
        ran.append((*arguments[:4], distributed))
        on_load(Loading(done=1, total=2, device="cpu", dtype="float32"))
        arguments[4]()

    monkeypatch.setattr(stage, "run_stage", run)
    monkeypatch.setattr(stage_process, "end_with_supervisor", lambda control: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **more: joined.append((given, more)))
    stage_process.run_stage_process(Control(child), settings, limits, 1, tmp_path)
    assert ran == [(settings, limits, 1, tmp_path, distributed)]
    said = [decode_child_message(supervisor.recv_bytes()) for _ in range(2)]
    assert said == [Loading(done=1, total=2, device="cpu", dtype="float32"), Ready()]
    if not distributed:
        assert joined == []
    else:
        (given, more) = joined[0]
        assert given == ("gloo",)
        assert more == {
            "init_method": f"file://{tmp_path}/rendezvous",
            "rank": 1,
            "world_size": 2,
            "timeout": stage_process.RENDEZVOUS_TIMEOUT,
        }
