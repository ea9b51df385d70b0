"""The option for how many damaged answers the parsers of calls are tried with."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--damages", type=int, help="damaged answers for each family's parser of calls")
