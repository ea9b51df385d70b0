"""How Hypothesis runs here: no time limit an example, which a loaded machine breaks, and no database left behind."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "lockstep", deadline=None, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lockstep")
