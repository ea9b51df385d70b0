"""Several engines as one Ray Serve application: ``serve run engine.cluster.serve_app:app``, or ``:build`` with options.

Owns the two names that Serve imports. Needs the extra lockstep-engine[ray]; nothing else of the engine imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application

    app: Application

__all__ = ["app", "build"]


def build(arguments: dict[str, str]) -> Application:
    """Build the application from arguments such as ``model=... replicas=2``, which override the environment.

    Raises ConfigError.
    """
    from engine.cluster.serve_app.application import application_of

    return application_of(arguments)


def __getattr__(name: str) -> Application:
    """Build ``app`` from the environment on access, so that importing ``build`` does not build it too."""
    if name == "app":
        return build({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
