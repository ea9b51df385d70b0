"""The main function of a stage process: joins the process group if needed, watches the supervisor, runs the loop.

A stage has no final message to send, so it exits at once when the supervisor ends.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Final

from engine.core.errors import ConfigError, ProcessDiedError
from engine.core.limits import Limits
from engine.pipeline.wires import StageWires
from engine.process.control import Control, Ready, Serving
from engine.process.links.endpoint import Endpoint
from engine.process.settings import ServerSettings

# It also bounds the wait for hidden states, so it must exceed any idle time. The watch below ends the wait after a
# death.
RENDEZVOUS_TIMEOUT: Final = timedelta(days=365)


def run_stage_process(
    control: Control,
    settings: ServerSettings,
    limits: Limits,
    stage: int,
    private_dir: Path,
    *,
    wires: StageWires | None = None,
    meeting: Endpoint | None = None,
) -> None:
    """Load one stage's weights and compute until the supervisor ends the stage or is gone.

    A stage on another machine gets ``wires``, and ``meeting``, the first stage's endpoint, for the process group.
    """
    from engine.pipeline.kv_port import KVLinks
    from engine.pipeline.stage import run_stage

    threading.Thread(target=end_with_supervisor, args=(control,), name="supervisor-watch", daemon=True).start()
    backend = _backend(settings, limits)
    if backend is not None:
        if meeting is None:
            require_backend(backend, settings, limits)
        _join_process_group(backend, stage, settings, limits, private_dir, meeting)
    run_stage(
        settings,
        limits,
        stage,
        private_dir,
        lambda: control.send(Ready()),
        on_load=control.send,
        distributed=backend is not None,
        wires=wires,
        kv_links=KVLinks.of(settings),
        probe=settings.stage_probe,
    )


def _backend(settings: ServerSettings, limits: Limits) -> str | None:
    """Choose the torch.distributed backend for hidden states; None for sockets, which are faster between CPU stages."""
    if settings.hidden_transport != "auto":
        return None if settings.hidden_transport == "socket" else settings.hidden_transport
    return "nccl" if _has_a_gpu_a_stage(settings, limits) else None


def _has_a_gpu_a_stage(settings: ServerSettings, limits: Limits) -> bool:
    """Return whether every stage has its own GPU; a device with a number is the same GPU for all stages."""
    import torch

    from engine.model.arithmetic import stage_devices

    gpus = 0 if settings.device == "cpu" else torch.cuda.device_count()
    return gpus > 0 and len(set(stage_devices(settings.device, limits.pp_size, gpus))) == limits.pp_size


def require_backend(backend: str, settings: ServerSettings, limits: Limits) -> None:
    """Raise ConfigError for NCCL unless every stage has its own GPU, which NCCL requires."""
    if backend == "nccl" and not _has_a_gpu_a_stage(settings, limits):
        raise ConfigError(
            f"hidden_transport='nccl' needs a GPU for each stage, {limits.pp_size} in all, and device='auto' or "
            f"'cuda', got device={settings.device!r}; use hidden_transport='socket'"
        )


def _join_process_group(
    backend: str, stage: int, settings: ServerSettings, limits: Limits, private_dir: Path, meeting: Endpoint | None
) -> None:
    """Join the stages' process group, rank = stage, at the first one's endpoint or by a file in the private folder."""
    import torch
    import torch.distributed

    from engine.model.arithmetic import stage_devices

    if meeting is None or meeting.is_loopback:
        # A server on one machine uses only loopback.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        # Otherwise every stage would open a context on the first GPU.
        devices = stage_devices(settings.device, limits.pp_size, torch.cuda.device_count())
        torch.cuda.set_device(devices[stage])
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{private_dir}/rendezvous" if meeting is None else f"tcp://{meeting}",
        rank=stage,
        world_size=limits.pp_size,
        timeout=RENDEZVOUS_TIMEOUT,
    )


def end_with_supervisor(control: Control) -> None:
    """Block on the control pipe, and exit at the first message that ends the engine."""
    try:
        while (message := control.receive()) is None or isinstance(message, Serving):
            continue
    except ProcessDiedError:
        os._exit(1)
    os._exit(0)
