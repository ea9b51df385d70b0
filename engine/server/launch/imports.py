"""The costly imports: the models' are done once in a process that then forks, the front end's in its own process.

The only place of this layer that loads torch, and it does so for the stages to come. Starts no thread: a fork takes
only the calling thread along, so a lock that another one holds would stay locked for ever.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
from collections.abc import Iterable

# The libraries' numeric thread pools start at import, unless told not to.
THREAD_POOL_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# What the frameworks import when they look at the first parameter of a route, and send the first large answer.
FRONTEND_MODULES = ("engine.frontend.http.process", "pydantic.v1", "anyio._backends._asyncio")
SCHEDULER_MODULES = ("engine.server.scheduler_process.main", "engine.pipeline.staged")
MODEL_MODULES = (
    "engine.model.checkpoint",
    "engine.model.runner",
    "engine.pipeline.local",
    "engine.pipeline.stage",
)
# OpenVINO needs these for a conversion alone, and a conversion is done once a checkpoint.
TORCH_MODEL_MODULES = (
    "engine.model.stage_model",
    "engine.model.conversion",
    "transformers.models.qwen3.modeling_qwen3",
)


def limit_imports() -> None:
    """Keep what is imported after this from starting threads, and from printing advice about them."""
    for variable in THREAD_POOL_VARIABLES:
        os.environ.setdefault(variable, "1")
    # A library that asks for CUDA while it is imported would otherwise open the driver, which no child could use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def import_engine(*more: str) -> None:
    """Import everything that any process of the engine needs: for a process that forks whole servers.

    Of ``more`` what is not found here is left to the servers, which search where their client does.
    """
    import_frontend()
    import_models()
    _import(module for module in more if _is_found(module))


def import_frontend() -> None:
    """Import what the front end alone needs. Its process does that while the stages load."""
    _import(FRONTEND_MODULES)


def import_models(*, of_torch: bool = True) -> None:
    """Import what the scheduler and the stages need.

    Without the models of torch a process that needs them after all imports them itself.
    """
    _import((*SCHEDULER_MODULES, *MODEL_MODULES, *(TORCH_MODEL_MODULES if of_torch else ())))


def import_stage() -> None:
    """Import what a machine needs that has a stage and nothing else."""
    _import((*MODEL_MODULES, *TORCH_MODEL_MODULES))


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


def _import(modules: Iterable[str]) -> None:
    """Import, and take what is there out of the garbage collector's sight.

    What is frozen is not touched by collections in the children, so its memory stays shared with them.
    """
    limit_imports()
    # Nearly all that imports make is kept, so looking through it again and again would be in vain.
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
