"""The adapter ``vllm``: an installed vLLM's scheduler and KV cache manager, with a simulated model runner.

Nothing else imports vLLM. No code of vLLM is copied here.
"""

from __future__ import annotations

import warnings

from scripted.core.refusals import ScriptDefinitionError

__all__ = ["ADAPTER"]

# vLLM and its libraries warn about a missing GPU, which the scheduler does not need.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import vllm.v1.core.sched.async_scheduler  # noqa: F401 - fails here without vLLM
    except ImportError as exc:
        raise ScriptDefinitionError(
            f"the adapter vllm needs an installed vLLM: {exc}; on a machine without a GPU, "
            "`pip install lockstep-engine[vllm]` brings one that runs on the CPU"
        ) from exc
    from scripted_vllm.adapter import ADAPTER
