"""The pytest plugin in projects that have nothing to do with it: it is loaded there too, and must not be noticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_commands import ForkedCommands
from thinned import thinned

from scripted.cli.new import new_test

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[3]
FINE = "def test_fine():\n    pass\n"


@pytest.fixture
def run(pytester: pytest.Pytester, commands: ForkedCommands):
    """Run pytest with the plugin in this project's folder."""

    def runs(*arguments: str) -> pytest.RunResult:
        return commands.pytest(pytester, *arguments)

    return runs


@pytest.fixture
def fresh_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """The same in an interpreter that has imported nothing, for a project whose packages have names of ours."""
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}:{REPOSITORY}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def runs(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "scripted.pytest_plugin", *arguments)

    return runs


@pytest.mark.parametrize("package", thinned(["engine", "ci", "tests"], one_in=3))
def test_packages_of_the_same_name(pytester: pytest.Pytester, fresh_run, package: str) -> None:
    """A project has a package called ``engine``, ``ci`` or ``tests`` of its own, and even a decorator ``scripted``."""
    pytester.mkpydir(package).joinpath("own.py").write_text("def scripted(function):\n    return function\n")
    pytester.makepyfile(
        f"from {package}.own import scripted\n\n\n@scripted\ndef test_own():\n    assert test_own.__name__\n"
    )
    fresh_run().assert_outcomes(passed=1)


@pytest.mark.nightly
def test_a_script_in_a_project_whose_engine_hides_ours(pytester: pytest.Pytester, fresh_run) -> None:
    """The error names the package that is in the way and what to do, instead of a module that is not there."""
    pytester.mkpydir("engine")
    pytester.makepyfile("from scripted import ScriptContext\n")
    result = fresh_run()
    result.stdout.fnmatch_lines(["*the package 'engine' must be Lockstep's, but Python finds *engine/__init__.py*"])


def test_a_scheduler_of_a_project_with_an_engine_of_its_own(
    pytester: pytest.Pytester, fresh_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts and searches use its adapter without Lockstep's engine, beside tests of its own package ``engine``."""
    pytester.mkpydir("engine").joinpath("own.py").write_text("def answer():\n    return 42\n")
    pytester.makepyfile("from engine.own import answer\n\n\ndef test_own():\n    assert answer() == 42\n")
    for name in ("adapter", "fixed", "scheduler"):
        shutil.copy(REPOSITORY / f"examples/your_scheduler/{name}.py", pytester.path)
    monkeypatch.chdir(pytester.path)
    new_test("race", folder=pytester.path / "tests", adapter="fixed.py")
    fresh_run().assert_outcomes(passed=2)
    new = pytester.run(sys.executable, "-m", "scripted", "new", "other")
    assert new.ret == 2
    new.stderr.fnmatch_lines(["*the package 'engine' must be Lockstep's, but *; other schedulers *"])
    search = pytester.run(sys.executable, "-m", "scripted", "explore", "--adapter", "adapter.py", "--schedules", "150")
    assert search.ret == 1
    search.stdout.fnmatch_lines(["*FAILED on *Violation*"])


def test_a_scheduler_in_a_package_named_engine(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command finds the project's ``engine`` and ``adapters``, although its import path starts elsewhere."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    examples = REPOSITORY / "examples/your_scheduler"
    for package, name in (("engine", "scheduler"), ("adapters", "adapter")):
        text = (examples / f"{name}.py").read_text().replace("from scheduler import", "from engine.scheduler import")
        pytester.mkpydir(package).joinpath(f"{name}.py").write_text(text)
    command = [Path(sys.executable).with_name("scripted"), "explore", "--adapter", "adapters/adapter.py"]
    # Not by pytester, which puts the folder on the path.
    search = subprocess.run(
        [*command, "--schedules", "150"], cwd=pytester.path, capture_output=True, text=True, check=False
    )
    assert search.returncode == 1, search.stderr
    assert "Violation" in search.stdout


def test_a_written_test_needs_no_package_of_this_repository(pytester: pytest.Pytester, run) -> None:
    """A test from ``scripted new`` passes in a project with its own packages ``ci`` and ``tests``."""
    for package in ("ci", "tests"):
        pytester.mkpydir(package)
    pytester.path.joinpath("ci/suites.toml").write_text("# of another kind\n")
    path = new_test("race", folder=pytester.path / "tests")
    assert "import register" not in path.read_text()
    run("--tier", "sim", str(path)).assert_outcomes(passed=1)


def test_options_of_the_same_name(pytester: pytest.Pytester, run) -> None:
    pytester.makeconftest(
        """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--tier", default="gold")
            parser.addoption("--mutant", action="store_true")

        @pytest.fixture
        def tier(request):
            return request.config.getoption("--tier")
        """
    )
    pytester.makepyfile("def test_tier(tier):\n    assert tier == 'silver'\n")
    run("--tier", "silver", "--mutant", "--scripted-tier", "sim").assert_outcomes(passed=1)


def test_fixture_of_the_same_name(pytester: pytest.Pytester, run) -> None:
    """A fixture called ``harness`` is the project's; its test runs once."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def harness():
            return "the project's"

        def test_harness(harness):
            assert harness == "the project's"
        """
    )
    run().assert_outcomes(passed=1)


def test_attribute_of_the_same_name(pytester: pytest.Pytester, run) -> None:
    pytester.makepyfile("def test_marked():\n    pass\n\ntest_marked.scripted = True\n")
    run().assert_outcomes(passed=1)


def test_nothing_of_the_harness_is_imported(pytester: pytest.Pytester, fresh_run) -> None:
    """D12: an environment that has the harness pays nothing for it where no script is collected."""
    pytester.makepyfile(
        """
        import sys

        def test_imports():
            ours = {"scripted", "engine", "lockstep", "msgspec", "pydantic", "torch"}
            found = {name for name in sys.modules if name.partition(".")[0] in ours}
            assert found == {"scripted", "scripted.pytest_plugin"}
        """
    )
    fresh_run().assert_outcomes(passed=1)


def test_short_options_are_there_where_they_are_free(pytester: pytest.Pytester, run) -> None:
    pytester.makepyfile(FINE)
    run("--tier", "sim", "--invariants", "end").assert_outcomes(passed=1)
    run("--tier", "no-such-tier").stderr.fnmatch_lines(["*--tier*invalid choice: 'no-such-tier'*"])
