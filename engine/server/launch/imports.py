"""The expensive imports: the models' run once, in a process that then forks; the front end's run in its own process.

The only place of this layer that loads torch, for the stages that will be forked. Starts no thread: a fork copies only
the calling thread, so a lock held by another thread would stay locked forever in the child.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterable

# Numeric libraries start thread pools at import unless these variables forbid it.
THREAD_POOL_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# The frameworks import all but the first lazily: for the first route parameter, the first large reply, the tokenizer
# and the start of the server.
FRONTEND_MODULES = (
    "engine.frontend.http.process",
    "pydantic.v1",
    "anyio._backends._asyncio",
    "transformers.models.auto.tokenization_auto",
    "uvicorn.lifespan.off",
)
SCHEDULER_MODULES = ("engine.server.scheduler_process.main", "engine.pipeline.staged")
MODEL_MODULES = ("engine.model.checkpoint", "engine.model.runner", "engine.pipeline.local", "engine.pipeline.stage")
# OpenVINO needs these only for a conversion, which happens once per checkpoint.
TORCH_MODEL_MODULES = (
    "engine.model.stage_model",
    "engine.model.conversion",
    "transformers.models.qwen3.modeling_qwen3",
)


def limit_imports() -> None:
    """Keep later imports from starting threads or printing advice about threads."""
    for variable in THREAD_POOL_VARIABLES:
        os.environ.setdefault(variable, "1")
    # A library that probes CUDA at import would otherwise open the driver, and then no forked child could use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def import_engine(*more: str) -> None:
    """Import the modules that any process of the engine needs, and ``more``, in a process that forks whole servers.

    Skips modules that this process cannot find: the servers import them with their client's ``sys.path``.
    """
    import_frontend()
    import_models()
    _import(module for module in more if _is_found(module))


def import_frontend() -> None:
    """Import the modules that only the front end needs. Its process calls this while the stages load."""
    _import(FRONTEND_MODULES)


def import_models(*, of_torch: bool = True) -> None:
    """Import the modules of the scheduler and the stages.

    Without ``of_torch``, a process that turns out to need the torch models imports them itself.
    """
    _import((*SCHEDULER_MODULES, *MODEL_MODULES, *(TORCH_MODEL_MODULES if of_torch else ())))


def import_stage() -> None:
    """Import the modules of a machine that only runs a stage."""
    _import((*MODEL_MODULES, *TORCH_MODEL_MODULES))


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parent packages is missing
        return False


def _import(modules: Iterable[str]) -> None:
    """Import the modules, then freeze all objects for the garbage collector.

    Collections in forked children then leave these objects alone, so their memory stays shared.
    """
    limit_imports()
    # Nearly every object that an import creates is kept, so collecting during imports only costs time.
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
