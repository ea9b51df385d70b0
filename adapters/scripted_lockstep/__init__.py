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
            f"the package 'engine' must be Lockstep's, but Python finds {found or 'none'}; start from a "
            "folder without a package 'engine', or move yours into a package of another name; other schedulers "
            "(adapter=...) do without Lockstep's"
        )


require_own_engine()
