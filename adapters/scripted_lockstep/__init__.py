"""The adapter of Lockstep's own engine: actions, oracle, specification, mutants, workloads and tiers."""

import importlib.util
from pathlib import Path

from scripted.core.refusals import EngineHidden


def require_own_engine() -> None:
    """Raise EngineHidden if another package called ``engine`` hides this project's."""
    spec = importlib.util.find_spec("engine")
    found = None if spec is None or spec.origin is None else Path(spec.origin)
    if found is None or not (found.parent / "core" / "scheduler").is_dir():
        raise EngineHidden(
            f"the package 'engine' must be Lockstep's, but Python finds {found or 'none'}; run pytest and scripted "
            "from a folder that has no package 'engine', or give yours a place inside a package of another name; "
            "a script or search of another scheduler (adapter=...) does without Lockstep's"
        )


require_own_engine()
