"""A small repository in a folder: a catalogue, registered tests, nothing else."""

import shutil
import textwrap
from functools import cached_property
from pathlib import Path

from ci.registry import Registry, read_registry
from ci.suites import CATALOGUE_PATH, Catalogue

REPOSITORY = Path(__file__).parents[3]
GOOD = """
from ci.register import register_cpu_ci
register_cpu_ci(est_time={est_time}, suite="base-cpu")
def test_{name}():
    pass
class TestGroup:
    def test_method(self):
        pass
"""


class SampleTree:
    """Files are given relative to tests/registered, as text that is dedented."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "ci").mkdir(parents=True)
        shutil.copy(REPOSITORY / CATALOGUE_PATH, root / CATALOGUE_PATH)
        (root / "tests" / "registered").mkdir(parents=True)

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.load(self.root)

    @property
    def registry(self) -> Registry:
        return read_registry(self.root, self.catalogue)

    @cached_property
    def settled(self) -> tuple[Catalogue, Registry]:
        """Return both, read once, for tests with many conversations about unchanged files."""
        return self.catalogue, self.registry

    def write(self, path: str, text: str) -> str:
        file = self.root / "tests" / "registered" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return f"tests/registered/{path}"

    def good(self, path: str, est_time: float = 5) -> str:
        name = Path(path).stem.removeprefix("test_")
        return self.write(path, GOOD.format(name=name, est_time=est_time))

    def findings(self) -> list[str]:
        return [str(finding) for finding in self.registry.findings]
