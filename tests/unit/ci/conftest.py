from pathlib import Path

import pytest
from fake_github import FakeGitHub
from sample_tree import SampleTree


@pytest.fixture
def tree(tmp_path: Path) -> SampleTree:
    return SampleTree(tmp_path)


@pytest.fixture
def fake() -> FakeGitHub:
    return FakeGitHub()
