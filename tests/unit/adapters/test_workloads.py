"""The library of base workloads: what its files list is in it, and nothing replaces anything else."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

from scripted.adapters.lockstep import workloads


def test_each_workload_of_every_file_has_a_name_of_its_own() -> None:
    """F: of two workloads of one name the search would run one."""
    found = pkgutil.iter_modules(workloads.__path__)
    files = [importlib.import_module(f"{workloads.__name__}.{file.name}") for file in found]
    tables = [getattr(file, name) for file in files for name in file.__all__]
    names = Counter(name for table in tables if isinstance(table, dict) for name in table)
    assert names == Counter(workloads.TEXTS.keys())
