"""``python -m benchmarks.gpu``: runs every part on the GPU, each in its own process with a time limit.

A part that fails or times out is reported, and the next one follows. ``--part`` runs some parts and adds them to this
machine's results in the file; ``--dry-run`` takes the same paths on the CPU over a tiny model.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.gpu.results import PartResult, Status, Table, read_report, write_report
from benchmarks.gpu.setting import Setting
from benchmarks.measurement import output_folder
from lockstep.interruption import interruptible

__all__ = ["PARTS", "main", "run_parts"]

_ROOT: Final = Path(__file__).parents[2]
_TAIL_BYTES: Final = 6_000
NO_GPU: Final = 3
_GRACE_S: Final = 5.0


class Part(NamedTuple):
    """One part. ``measure`` is its MODULE:FUNCTION, so that the process that starts the parts imports none.

    With ``computes`` it runs in its own process, over the checkpoint.
    """

    measure: str
    limit_s: float
    computes: bool
    about: str


PARTS: Final[dict[str, Part]] = {
    "device": Part("device:measure_device", 120, True, "bandwidth of a copy; pages that the attention kernel takes"),
    "decode": Part("decode:measure_decodes", 300, True, "where a decode step's time goes; share of the bandwidth"),
    "graphs": Part("decode:measure_graphs", 300, True, "CUDA graphs on and off, and equal tokens"),
    "attention": Part("decode:measure_attention", 300, True, "one kernel call a layer beside gathered keys"),
    "ahead": Part("ahead:measure_ahead", 300, True, "steps launched before the last one's tokens are known"),
    "beside": Part("beside:measure_beside", 420, True, "beside transformers' continuous batching"),
    "overlap": Part(
        "overlap:measure_overlap", 420, False, "served: pp_async_depth 1 beside 0, one stage and four; async_scheduling"
    ),
    "model": Part("checks:check_model", 420, False, "the model's parity tests with --device"),
    "suite": Part("checks:check_servers", 580, False, "the registered suite in the server tier with --device"),
}

_OVER_THE_CHECKPOINT: Final = {name for name, part in PARTS.items() if part.computes} | {"overlap"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the report; the exit status is 0 if all are done."""
    asked = _parser().parse_args(arguments)
    if asked.inside:
        return be_parts(asked.inside.split(","), Path(asked.given))
    setting = Setting.small() if asked.dry_run else Setting()
    from benchmarks.gpu.device import machine

    here = machine()
    if not asked.dry_run and here["GPU"] == "none":
        sys.stderr.write("no GPU: nvidia-smi is not there; --dry-run takes the same paths on the CPU\n")
        return NO_GPU
    report = read_report(asked.out / "gpu.json", here, dry_run=asked.dry_run)
    names = asked.part or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        scratch = Path(folder)
        if set(names) & _OVER_THE_CHECKPOINT:
            setting = _with_checkpoint(setting, scratch / "model")
        for group in groups(names, together=asked.dry_run):
            for name in group:
                print(f"{name}: {PARTS[name].about}, at most {PARTS[name].limit_s:.0f} s", flush=True)  # noqa: T201
            for result in run_parts(group, setting, scratch, sum(PARTS[name].limit_s for name in group)):
                report.parts[result.name] = result
                last = result.error.strip().splitlines()[-1:]
                print(f"{result.name}: {result.status}, {result.seconds:.0f} s", *last, flush=True)  # noqa: T201
            _, page = write_report(report, asked.out)
    print(page.read_text(), f"written to {page}", sep="\n")  # noqa: T201
    return 0 if all(report.parts[name].status is Status.DONE for name in names) else 1


def run_parts(names: Sequence[str], setting: Setting, scratch: Path, limit_s: float) -> list[PartResult]:
    """Run parts sequentially in a process group of their own, which is ended when the time is up."""
    given, log = scratch / "setting.json", scratch / f"{names[0]}.log"
    given.write_bytes(msgspec.json.encode(setting))
    command = [sys.executable, "-m", "benchmarks.gpu", "--inside", ",".join(names), "--given", str(given)]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"}
    status, began = Status.FAILED, time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end_group(process)
            status = Status.OUT_OF_TIME
        except BaseException:
            _end_group(process)
            raise
    found, seconds = [], time.monotonic() - began
    for name in names:
        result = _result_of(scratch, name)
        if result.is_file():
            found.append(msgspec.json.decode(result.read_bytes(), type=PartResult))
            result.unlink()
        else:
            tail = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            error = f"{tail}\nthe process that measured it ended with status {process.returncode}"
            found.append(PartResult(name=name, status=status, seconds=seconds, error=error))
    return found


def groups(names: Sequence[str], *, together: bool) -> list[list[str]]:
    """Group the parts that share a process: in a dry run all that compute, because imports take most of their time."""
    alone = [[name] for name in names if not (together and PARTS[name].computes)]
    sharing = [name for name in names if together and PARTS[name].computes]
    return [sharing, *alone] if sharing else alone


def be_parts(names: Sequence[str], given: Path) -> int:
    """Measure in this process and write each part's result."""
    from importlib import import_module

    from benchmarks.gpu.stand_ins import stand_ins

    setting = msgspec.json.decode(given.read_bytes(), type=Setting)
    notes = ["A tape stands for graphs, documented arithmetic for the kernel."] if setting.dry_run else []
    for name in names:
        module, _, function = PARTS[name].measure.partition(":")
        found = PartResult(name=name, status=Status.DONE, seconds=0.0, notes=notes if PARTS[name].computes else [])
        began = time.monotonic()
        with stand_ins() if setting.dry_run else nullcontext():
            try:
                measure: Callable[[Setting], list[Table]] = getattr(import_module(f"benchmarks.gpu.{module}"), function)
                found.tables = measure(setting)
            except Exception as exc:  # noqa: BLE001 - whatever a device raises is this part's result
                found.status = Status.FAILED
                found.error = "".join(traceback.format_exception(exc))[-_TAIL_BYTES:]
        found.seconds = time.monotonic() - began
        _result_of(given.parent, name).write_bytes(msgspec.json.encode(found))
    return 0


def _result_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.result.json"


def _with_checkpoint(setting: Setting, folder: Path) -> Setting:
    from benchmarks.checkpoints import make_checkpoint

    print(f"writing a checkpoint of shape {setting.shape} with random weights", flush=True)  # noqa: T201
    make_checkpoint(folder, setting.dtype, setting.shape)
    return msgspec.structs.replace(setting, checkpoint=str(folder))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and its processes, gently at first, so that servers end their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)


def _parser() -> argparse.ArgumentParser:
    listed = "; ".join(f"{name}: {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, epilog=f"parts: {listed}")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="run this part alone; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="take the same paths on the CPU, with a tiny model")
    parser.add_argument("--out", type=output_folder, default=Path("out"), help="folder for gpu.json and gpu.md")
    for name in ("--inside", "--given"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    with interruptible("benchmarks.gpu"):
        sys.exit(main())
