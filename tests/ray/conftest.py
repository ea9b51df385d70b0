"""Ray Serve is imported before any test's own warnings are errors: its models warn of what pydantic will drop."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
