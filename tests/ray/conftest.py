"""Ray Serve is imported before any test's own warnings are errors: its models warn of what pydantic will drop.

Whether a process shows a token is read when Ray is imported, so the environment says it before.
"""

from __future__ import annotations

import os
import signal
import warnings

import pytest

from lockstep.ray_environment import ray_defaults

# A shell lets what it starts in its background ignore this signal, and so would `serve run`, which ends by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name, value in ray_defaults().items():
    os.environ.setdefault(name, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401


@pytest.fixture(autouse=True)
def same_signal_handlers() -> None:
    """Ray handles SIGTERM from its first cluster to the end of its process."""
