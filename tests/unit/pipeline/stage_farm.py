"""Forks stage processes for tests: serves one typed order a line on standard input.

Run as a script. ``Order`` starts the stages of one engine and answers ``Started`` when all are ready; ``Reap`` waits
for their end and answers ``Reaped``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.config import EngineConfig
from engine.core.errors import ProcessDiedError
from engine.core.limits import Limits
from engine.model.checkpoint import read_facts

if TYPE_CHECKING:
    from forked_commands import ForkedCommands

END_TIMEOUT_S = 20.0
NEIGHBOUR_DIED = 3


class Order(msgspec.Struct, frozen=True, tag=True):
    config: dict[str, Any]
    private_dir: str
    transport: str


class Reap(msgspec.Struct, frozen=True, tag=True):
    pids: list[int]


class Started(msgspec.Struct, frozen=True, tag=True):
    pids: list[int]


class Reaped(msgspec.Struct, frozen=True, tag=True):
    statuses: list[int]


class StageFarm:
    """The test's side: a process that forks stages, itself a fork of one that has imported torch."""

    def __init__(self, commands: ForkedCommands, cache: Path) -> None:
        taken, ordered = os.pipe()
        answered, told = os.pipe()
        self._orders, self._answers = os.fdopen(ordered, "wb"), os.fdopen(answered, "rb")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "XDG_CACHE_HOME": str(cache)}
        with os.fdopen(taken) as stdin, os.fdopen(told, "w") as stdout:
            self._process = commands.start(__file__, env=environment, files=(stdin, stdout, sys.__stderr__ or stdout))

    def start(self, config: EngineConfig, private_dir: Path, *, transport: str = "socket") -> list[int]:
        """Start all stages of an engine; their pids in order, once all are ready."""
        answer = self._ask(Order(config.model_dump(exclude_unset=True), str(private_dir), transport))
        return msgspec.json.decode(answer, type=Started).pids

    def reap(self, pids: list[int]) -> list[int]:
        """Wait for stages to end; their exit codes, negative for a signal."""
        return msgspec.json.decode(self._ask(Reap(pids)), type=Reaped).statuses

    def close(self) -> None:
        self._orders.close()
        self._process.wait(END_TIMEOUT_S)
        self._answers.close()

    def _ask(self, order: Order | Reap) -> bytes:
        self._orders.write(msgspec.json.encode(order) + b"\n")
        self._orders.flush()
        answer = self._answers.readline()
        assert answer, "the stage farm died"
        return answer


def serve() -> None:
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order | Reap)
        answer = Reaped([_status(pid) for pid in order.pids]) if isinstance(order, Reap) else _start(order)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _start(order: Order) -> Started:
    config = EngineConfig(**order.config)
    limits = Limits.of(config, read_facts(config))
    reader, writer = os.pipe()
    pids = [_fork(order, config, limits, stage, writer) for stage in range(config.pp_size)]
    for _ in pids:
        assert os.read(reader, 1) == b"r"
    os.close(reader)
    os.close(writer)
    return Started(pids)


def _fork(order: Order, config: EngineConfig, limits: Limits, stage: int, writer: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _be_stage(order, config, limits, stage, writer)
        status = 0
    except ProcessDiedError:
        status = NEIGHBOUR_DIED
    except BaseException as exc:  # noqa: BLE001 - a forked child must never return into its parent's code
        sys.stderr.write(f"stage {stage}: {type(exc).__name__}: {exc}\n")
    finally:
        os._exit(status)


def _be_stage(order: Order, config: EngineConfig, limits: Limits, stage: int, writer: int) -> None:
    import torch.distributed

    from engine.pipeline.stage import run_stage

    faulthandler.dump_traceback_later(END_TIMEOUT_S * 2, exit=True)
    if order.transport == "distributed":
        where = f"file://{order.private_dir}/rendezvous"
        torch.distributed.init_process_group("gloo", init_method=where, rank=stage, world_size=config.pp_size)
    run_stage(
        config,
        limits,
        stage,
        Path(order.private_dir),
        lambda: assert_written(os.write(writer, b"r")),
        distributed=order.transport == "distributed",
    )


def assert_written(count: int) -> None:
    assert count == 1


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    serve()
