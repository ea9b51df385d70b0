"""Resolves settings, the model's facts and the limits before any process is forked.

Refuses configurations that cannot be served, and too few file descriptors. Reads files and measures memory; starts
nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import resource
from pathlib import Path

import msgspec

from engine.core.config import embedded_seed, loras_of, require_lora_names
from engine.core.errors import ConfigError, StartupError
from engine.core.limits import Limits, ModelFacts, embedded_facts
from engine.process.links.secret import read_secret
from engine.process.settings import ServerSettings
from lockstep.extras import INSTALL_TRACING, TRACE_EXPORTER, is_importable
from lockstep.output_files import require_writable

DEVICE_FILES = Path("/dev")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def openvino_is_likely(settings: ServerSettings) -> bool:
    """Guess whether OpenVINO will compute, which decides which of the expensive imports run."""
    if settings.backend != "auto":
        return settings.backend == "openvino"
    is_embedded = embedded_seed(settings.model, settings.seed) is not None
    return not is_embedded and importlib.util.find_spec("openvino") is not None


def refuse_early(settings: ServerSettings) -> None:
    """Raise LockstepError for a missing model, limits beyond the embedded model's, or files that cannot be written.

    Runs before the expensive imports, so that a misspelled path is refused in a fraction of a second.
    """
    from engine.model.checkpoint import require_files
    from engine.model.lora_config import require_lora

    require_files(settings)
    if settings.placement == "local" and settings.device.startswith("cuda"):
        _require_gpu(settings.device)
    for field in ("gate", "stage_probe"):
        if not is_importable(getattr(settings, field).partition(":")[0]):
            raise ConfigError(
                f"{field} must name a module that can be imported, got {getattr(settings, field)!r}; check PYTHONPATH"
            )
    if settings.otlp_traces_endpoint and not is_importable(TRACE_EXPORTER):
        raise ConfigError(
            f"otlp_traces_endpoint needs a package that is not installed, got {settings.otlp_traces_endpoint}; "
            f"{INSTALL_TRACING}, or leave it out"
        )
    if settings.kv_secret_file:
        read_secret(Path(settings.kv_secret_file))
    if settings.record:
        require_writable("record", Path(settings.record))
    if settings.flight_dir:
        require_writable("flight_dir", Path(settings.flight_dir) / "flight.rec")
    if settings.profile_dir and settings.placement == "local":
        require_writable("profile_dir", Path(settings.profile_dir) / "profile" / "stage-0.json")
    require_lora_names(settings.lora, settings.model_name)
    for _, path in loras_of(settings.lora):
        require_lora(path)
    if settings.speculative_draft_model:
        require_files(settings.draft_config())
    if embedded_seed(settings.model, settings.seed) is not None:
        Limits.of(settings, embedded_facts(settings.model))


def _require_gpu(device: str) -> None:
    if not _has_gpu_driver():
        raise ConfigError(
            f"device must exist, but this machine has no driver for {device!r}; use --device cpu, or auto"
        )
    gpus = _visible_gpus()
    number = int(device.partition(":")[2] or 0)
    if gpus is not None and number >= gpus:
        raise ConfigError(
            f"device must be a GPU that this process sees ({gpus}, from cuda:0 on), got {device!r}; name one, use "
            f"--device cpu, or check {VISIBLE_DEVICES}"
        )


def _visible_gpus() -> int | None:
    """Return an upper bound on the GPUs that torch will count; None if neither the device files nor the variable give
    one.
    """
    counts = [len(list(DEVICE_FILES.glob("nvidia[0-9]*"))) or None]
    if (chosen := os.environ.get(VISIBLE_DEVICES)) is not None:
        # CUDA ignores every entry from the first invalid one on.
        counts.append(len(list(itertools.takewhile(lambda one: one and not one.startswith("-"), chosen.split(",")))))
    return min((count for count in counts if count is not None), default=None)


def _has_gpu_driver() -> bool:
    """Return whether CUDA's driver library or AMD's kernel driver is present. Opens no device."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def resolve(settings: ServerSettings) -> tuple[ServerSettings, ModelFacts, Limits]:
    """Derive the final settings, facts and limits from the model's files, the backend and this machine's memory.

    Raises EngineError for a model or a capacity that does not fit.
    """
    from engine.model.backend import takes_openvino, with_its_pages
    from engine.model.capacity import measure_kv_tokens, require_memory
    from engine.model.checkpoint import kv_origin_digest, read_all_facts

    facts = read_all_facts(settings)
    if settings.role != "both":
        facts = msgspec.structs.replace(facts, kv_origin=kv_origin_digest(settings))
    settings = with_its_pages(settings)
    if settings.placement != "local":
        # Other machines compute; each reports its backend and capacity once it has joined.
        return settings, facts, Limits.of(settings, facts)
    takes_openvino(settings)
    capacity = measure_kv_tokens(settings, facts) if settings.max_total_tokens is None else None
    limits = Limits.of(settings, facts, capacity)
    if settings.max_total_tokens is not None:
        require_memory(settings, facts, limits)
    return settings, facts, limits


# Imports, sockets between processes and the listener take at most 20, as measured; the rest is for clients.
LEAST_FOR_A_PROCESS = 64
# For each stage the scheduler has a socket and a listener; the supervisor has a pipe.
FOR_A_STAGE = 2


def least_descriptors(pp_size: int) -> int:
    """Count the files that each process of a server must be able to open."""
    return LEAST_FOR_A_PROCESS + FOR_A_STAGE * pp_size


def require_descriptors(pp_size: int) -> None:
    """Raise StartupError if this process, and so its children, may open too few files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = least_descriptors(pp_size)
    if limit != resource.RLIM_INFINITY and limit < least:
        raise StartupError(
            f"a server of {pp_size} stages must be able to open {least} files in each process, the limit is {limit}; "
            f"raise it, with `ulimit -n {least}` or more"
        )
