"""The tests of this folder follow pages as the unit test of the first race does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "harness"))
