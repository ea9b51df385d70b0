"""The adapter ``transformers``: scheduler and paged cache of continuous batching in an installed transformers.

Nothing else imports them. No code of transformers is copied here.
"""

from __future__ import annotations

import logging

from scripted.core.refusals import ScriptDefinitionError

__all__ = ["ADAPTER"]

try:
    import transformers.generation.continuous_batching  # noqa: F401 - fails here without transformers
except ImportError as exc:
    raise ScriptDefinitionError(
        f"the adapter transformers needs transformers and torch: {exc}; "
        "`pip install 'lockstep-engine[serve]'` brings both"
    ) from exc
# It logs offloads and dropped tokens, thousands of times in a search.
logging.getLogger("transformers.generation.continuous_batching").setLevel(logging.CRITICAL)
from scripted_transformers.adapter import ADAPTER  # noqa: E402 - after its logger was silenced
