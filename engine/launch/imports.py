"""The costly imports, done once in a process that then forks: they take seconds before the fork, and none after it.

The only place of this layer that loads torch, and it does so for the stages to come. Starts no thread: a fork takes
only the calling thread along, so a lock that another one holds would stay locked for ever.
"""

from __future__ import annotations

import gc
import importlib
import os

__all__ = ["import_engine"]

# The libraries' numeric thread pools start at import, unless told not to.
THREAD_POOL_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

FRONTEND_MODULES = ("engine.frontend.process",)
SCHEDULER_MODULES = ("engine.scheduler_process.main", "engine.pipeline.staged")
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


def import_engine(*, models_of_torch: bool = True) -> None:
    """Import everything that any process of the engine needs, and take it out of the garbage collector's sight.

    Without the models of torch a process that needs them after all imports them itself. What is frozen is not touched
    by collections in the children, so its memory stays shared with them.
    """
    for variable in THREAD_POOL_VARIABLES:
        os.environ.setdefault(variable, "1")
    # A library that asks for CUDA while it is imported would otherwise open the driver, which no child could use then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    models = (*MODEL_MODULES, *TORCH_MODEL_MODULES) if models_of_torch else MODEL_MODULES
    for module in (*FRONTEND_MODULES, *SCHEDULER_MODULES, *models):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
