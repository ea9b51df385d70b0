"""The pytest plugin in projects that have nothing to do with it: it is loaded there too, and must not be noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[3]
FINE = "def test_fine():\n    pass\n"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run pytest with the plugin in this project's folder, whose own packages come first, as ``python -m`` has it."""
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}:{REPOSITORY}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def runs(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess("-p", "lockstep_pytest", *arguments)

    return runs


@pytest.mark.parametrize("package", ["engine", "scripted"])
def test_packages_of_the_same_name(pytester: pytest.Pytester, run, package: str) -> None:
    """A project has a package called ``engine`` or ``scripted`` of its own, and even a decorator of that name."""
    pytester.mkpydir(package).joinpath("own.py").write_text("def scripted(function):\n    return function\n")
    pytester.makepyfile(
        f"from {package}.own import scripted\n\n\n@scripted\ndef test_own():\n    assert test_own.__name__\n"
    )
    run().assert_outcomes(passed=1)


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


def test_nothing_of_the_harness_is_imported(pytester: pytest.Pytester, run) -> None:
    """D12: an environment that has the harness pays nothing for it where no script is collected."""
    pytester.makepyfile(
        """
        import sys

        def test_imports():
            ours = {"scripted", "engine", "msgspec", "pydantic", "torch"}
            assert not ours & {name.partition(".")[0] for name in sys.modules}
        """
    )
    run().assert_outcomes(passed=1)


def test_short_options_are_there_where_they_are_free(pytester: pytest.Pytester, run) -> None:
    pytester.makepyfile(FINE)
    run("--tier", "sim", "--invariants", "end").assert_outcomes(passed=1)
    run("--tier", "no-such-tier").stderr.fnmatch_lines(["*--tier*invalid choice: 'no-such-tier'*"])
