"""The pytest plugin as a test author meets it: every run here is a pytest of its own, in the sim tier."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_commands import ForkedCommands

pytest_plugins = ["pytester"]

SCRIPTS = '''
import pytest
from engine import EngineConfig
from scripted import scripted

ONE = EngineConfig(chunked_prefill_size=64)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)


@pytest.fixture
def words():
    return ["plain", "data"]


@pytest.mark.parametrize("tokens", [1, 3])
@scripted(PP4)
def test_tokens(t, tokens):
    """A docstring."""
    r = t.start_req(prompt_len=70, max_new_tokens=tokens)
    yield from t.run_until_finished(r)
    assert len(r.output_ids) == tokens


@scripted(ONE)
def test_fixture(t, words):
    assert words == ["plain", "data"]
    yield


class TestOfAClass:
    number = 3

    @scripted(ONE)
    def test_method(self, t, words):
        """On a new object of the class."""
        assert (self.number, len(words)) == (3, 2)
        yield

    @staticmethod
    @scripted(ONE)
    def test_static(t):
        t.smoke()
        yield

    @pytest.mark.parametrize("number", [1])
    @scripted(ONE)
    def test_taken_as_static(t, number):
        assert number == 1
        yield


@pytest.mark.skip(reason="a mark")
@scripted(ONE)
def test_marked(t):
    yield


@scripted(ONE, tiers=("sim",))
def test_fails(t):
    r = t.start_req(prompt_len=5, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.output_ids == (1, 2)


@scripted(ONE, must_reach=["never"])
def test_window(t):
    t.sometimes("never", t.state.running)
    yield
'''

FLUSH = """
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig(pp_size=2, pp_async_depth=1))
def test_flush(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
"""


@pytest.fixture
def pytest_of(pytester: pytest.Pytester, commands: ForkedCommands):
    """Run pytest on a file of this text, with these arguments."""

    def run(text: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_scripts=text)
        vet = [] if "--vet" in arguments else ["--vet", "off"]
        return commands.pytest(pytester, "--tier", "sim", *vet, *arguments)

    return run


def test_scripts_are_ordinary_tests(pytest_of) -> None:
    """D01, D03: parametrized, marked, with fixtures; a failure shows its own report, with values and a replay."""
    result = pytest_of(SCRIPTS, "-v")
    result.assert_outcomes(passed=6, skipped=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_tokens?sim-1?*PASSED*",
            "*test_tokens?sim-3?*PASSED*",
            ">       assert r.output_ids == (1, 2)",
            "E       assert (*) == (1, 2)",
            "*The last steps before the end:*",
            "Replay:  pytest 'test_scripts.py::test_fails?sim?' --tier sim",
            "*never reached 'never'*",
            "6 scripts, * compared with *",
            "scripts in which no step had anything to do: 4, in 4 scripts:",
            "    test_scripts.py::test_fixture?sim?",
            "FAILED *test_fails?sim? - assert (*) == (1, 2)",
            "FAILED *test_window?sim? - the script never reached 'never'*",
        ]
    )


def test_scripts_in_odd_places(pytester: pytest.Pytester, pytest_of) -> None:
    """D03, D08: each is run as what it is, or refused with the reason; the line of pytest's summary is the error."""
    pytester.makepyfile(helpers=HELPERS)
    result = pytest_of(IN_CLASSES, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "test_scripts.py:*: in test_wrapped",
            ">       assert t.state.step == 7",
            "*AttributeError: 'TestOfAClass' object has no attribute 'made'; a method runs on a new object*",
            "E       ScriptDefinitionError: OfAnotherKind.test_unit was called, *not of a unittest.TestCase*",
            "E       BadCall: kind is a Kind, which cannot travel to the scheduler process*",
            "FAILED test_scripts.py::test_wrapped?sim? - *assert 1 == 7",
        ]
    )
    assert "arguments.py" not in result.stdout.str()


FINALIZED = """

class Left:
    def __init__(self):
        self.itself = self

    def __del__(self):
        Left()
        raise ValueError("left by a script")

@scripted(ONE)
def test_leaves(t):
    r = t.start_req(prompt_len=5, max_new_tokens=2)
    yield from t.run_until_finished(r)
    Left()
    gc.set_threshold(300)
    assert r.finish_reason == "length"


@pytest.mark.parametrize("number", range(5))
def test_next(number):
    gc.set_threshold(300)
    assert number < 0
"""


def test_a_finalizer_that_raises_does_not_end_the_session(pytest_of) -> None:
    """D03: Python 3.11 parses source for its traceback, which must not meet the parsing for a failure's report."""
    result = pytest_of("import gc\nimport pytest\n" + HEAD + FINALIZED)
    assert "INTERNALERROR" not in result.stdout.str()
    assert result.parseoutcomes()["failed"] >= 5


def test_some_are_chosen_the_first_failure_stops_and_is_run_again(pytest_of) -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""
    pytest_of(SCRIPTS, "-x", "-k", "tokens or fails or window").assert_outcomes(passed=2, failed=1, deselected=5)
    pytest_of(SCRIPTS, "--lf").assert_outcomes(failed=1)


def test_workers_share_the_load(pytest_of) -> None:
    """D10; the names that xdist gives tests of one group are not in the command that runs one again."""
    result = pytest_of(SCRIPTS, "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    result.assert_outcomes(passed=6, skipped=1, failed=2)
    result.stdout.fnmatch_lines(["Replay:  pytest 'test_scripts.py::test_fails?sim?' --tier sim"])
    result.stdout.fnmatch_lines(["FAILED *test_fails?sim?* - assert (*) == (1, 2)"])


def test_workers_keep_the_tests_of_one_server_together(pytest_of) -> None:
    """Grouped by configuration, or by file if a test chooses so; no script in sim waits for another's worker."""
    skipped = "pytestmark = pytest.mark.skip\n\n\ndef test_chooses(harness):\n    assert harness\n"
    options = ("-v", "--tier", "all", "-k", "tokens or window or marked or chooses")
    result = pytest_of(f"{SCRIPTS}\n\n{skipped}", "-p", "xdist", "-n", "1", "--dist", "loadgroup", *options)
    items = re.findall(r"SKIPPED .*::(test_\w+)\[(\w+).*?\](?:@(scripted-\w+))?", result.stdout.str())
    assert {group for _, tier, group in items if tier == "sim"} == {""}
    groups = {(name, group) for name, tier, group in items if tier == "server"}
    assert len(groups) == 4, "the two cases of test_tokens have one configuration"
    of = dict(groups)
    assert of["test_window"] == of["test_marked"]
    assert len({of["test_window"], of["test_tokens"], of["test_chooses"], ""}) == 4


def test_tier_that_a_test_does_not_name_is_left_out(pytest_of) -> None:
    result = pytest_of(SCRIPTS, "--tier", "server", "-k", "fails", "--collect-only", "-q")
    assert "test_fails[" not in result.stdout.str()


def test_mutant_makes_its_test_red(pytester: pytest.Pytester, pytest_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: with the invariants after each step, the failure comes in the step of the flush."""
    result = pytest_of(FLUSH, "--mutant", "flush-ignores-in-flight")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*flush-ignores-in-flight is switched on*", "*--mutant flush-ignores-in-flight"])
    (pytester.path / "below").mkdir()
    monkeypatch.chdir(pytester.path / "below")
    early = pytest_of(FLUSH, "--mutant", "flush-ignores-in-flight", "--invariants", "step", "--rootdir=..", "..")
    early.stdout.fnmatch_lines(["*IntegrityError: This request holds the node from another tree*", "*2 *FLUSH*"])
    # From where pytest was called, with all that the failure depends on.
    replay = (
        "pytest '../test_scripts.py::test_flush?sim?' --tier sim --mutant flush-ignores-in-flight --invariants step"
    )
    early.stdout.fnmatch_lines([f"Replay:  {replay}"])


def test_unknown_mutant_is_a_usage_error(pytest_of) -> None:
    result = pytest_of(FLUSH, "--mutant", "no-such-bug")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--mutant: *no-such-bug*"])


HEAD = "from engine import EngineConfig\nfrom scripted import scripted\nONE = EngineConfig()\n"

IN_CLASSES = """
import enum
import unittest
import pytest
from engine import EngineConfig
from helpers import logged
from scripted import scripted

ONE = EngineConfig()
Kind = enum.Enum("Kind", ["FIRST"])

@scripted(ONE)
@logged
def test_wrapped(t):
    yield
    assert t.state.step == 7

class TestOfAClass:
    number = 3

    def setup_method(self):
        self.made = True

    @classmethod
    @scripted(ONE)
    def test_of_the_class(cls, t):
        assert (cls.number, cls.__name__) == (3, "TestOfAClass")
        yield

    @scripted(ONE)
    def test_of_what_setup_made(self, t):
        yield
        assert self.made

class OfAnotherKind(unittest.TestCase):
    @scripted(ONE)
    def test_unit(self, t):
        yield

@pytest.mark.parametrize("kind", list(Kind))
@scripted(ONE)
def test_enum(t, kind):
    yield
"""

HELPERS = """
import functools

def logged(script):
    @functools.wraps(script)
    def wrapper(t, **arguments):
        yield from script(t, **arguments)
    return wrapper
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("@scripted(ONE)\ndef test_a(t):\n    assert t\n", "never yields, so it would never run a step"),
        ("@scripted(ONE)\nasync def test_a(t):\n    yield\n", "is async, and nothing awaits a script"),
        ("@scripted(ONE)\nasync def test_a(t):\n    assert t\n", "is async, and nothing awaits a script"),
        ("@scripted(ONE)\ndef test_a(t):\n    yield\n\n" * 2, "is defined before, in line"),
        (
            (
                "import functools\ndef bare(f):\n    return functools.wraps(f)(lambda t: f(t))\n\n"
                "@scripted(ONE)\n@bare\ndef test_a(t):\n    yield\n"
            ),
            "is wrapped by a decorator that is not a generator function",
        ),
        ("test_a = scripted(ONE)(lambda t: (yield))\n", "is a lambda"),
        ("def make():\n    @scripted(ONE)\n    def test_a(t):\n        yield\nmake()\n", "inside a function"),
        ("class TestA:\n    @scripted(ONE)\n    def test_a(self, x):\n        yield\n", "must take t as its first"),
        ("@scripted(ONE, must_reach='window')\ndef test_a(t):\n    yield\n", "write must_reach=.'window'."),
        ("@scripted(ONE)\ndef test_a(x):\n    yield\n", "must take t as its first parameter"),
        (
            "@scripted(EngineConfig(role='decode', pp_size=2), placement='join')\ndef test_a(t):\n    yield\n",
            "is for role='both'",
        ),
        ("@scripted\ndef test_a(t):\n    yield\n", "write @scripted.EngineConfig"),
        ("@scripted(ONE, tiers='sim')\ndef test_a(t):\n    yield\n", "tiers must be a tuple"),
        ("@scripted(ONE, max_steps=0)\ndef test_a(t):\n    yield\n", "max_steps must be a whole number"),
    ],
)
def test_what_cannot_be_a_script_is_refused_at_collection(text: str, words: str, tmp_path: Path) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    from scripted import ScriptDefinitionError

    file = tmp_path / "test_refused.py"
    file.write_text(HEAD + text)
    with pytest.raises(ScriptDefinitionError, match=words):
        exec(compile(file.read_text(), str(file), "exec"), {})


def test_refusal_is_shown_by_pytest(pytest_of) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    result = pytest_of(HEAD + "@scripted(ONE)\ndef test_a(t):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ScriptDefinitionError*never yields*"])


def test_debugger_stops_in_the_script(pytester: pytest.Pytester, pytest_of) -> None:
    """``--pdb`` starts at the script's own line, also when one of the harness's waits raised."""
    pytester.makeconftest(
        """
        import pdb

        class Told(pdb.Pdb):
            def cmdloop(self, *_):
                print(f"STOPPED IN {self.curframe.f_code.co_name} at {self.curframe.f_locals['marker']}")

        """
    )
    text = HEAD + (
        "@scripted(ONE)\ndef test_a(t):\n    marker = 'here'\n"
        "    yield from t.run_until(lambda: t.state.step < 0, max_steps=2)\n"
    )
    result = pytest_of(text, "--pdb", "--pdbcls=conftest:Told")
    result.stdout.fnmatch_lines(["*STOPPED IN test_a at here*"])


LEFT_OUT = """
from engine import EngineConfig
from scripted import scripted


@scripted(EngineConfig())
def check_flush(t):
    t.smoke()
    yield


class Races:
    @scripted(EngineConfig())
    def test_abort(self, t):
        t.smoke()
        yield


@scripted(EngineConfig())
def test_that_runs(t):
    t.smoke()
    yield
"""


INHERITED = """
class Shared:
    @scripted(EngineConfig())
    def test_abort(self, t):
        t.smoke()
        yield


class TestShared(Shared):
    pass


class Forgotten:
    @scripted(EngineConfig())
    def test_flush(self, t):
        t.smoke()
        yield
"""


def test_scripts_that_pytest_leaves_out_are_named(pytest_of) -> None:
    result = pytest_of(LEFT_OUT)
    result.assert_outcomes(passed=1, warnings=2)
    result.stdout.fnmatch_lines_random(
        ["*check_flush is decorated with @scripted and never runs*", "*Races.test_abort is*"]
    )


def test_a_class_whose_scripts_run_in_another_one_is_not_named(pytest_of) -> None:
    """F: the warning sent whoever shares scripts by a base class to rename it."""
    result = pytest_of(LEFT_OUT.partition("@scripted(EngineConfig())\ndef check")[0] + INHERITED)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*Forgotten.test_flush is decorated with @scripted and never runs*"])


def test_a_script_of_another_file_is_not_named(pytest_of, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(races=LEFT_OUT.partition("class Races")[0])
    result = pytest_of("from races import check_flush\n\n\ndef test_it():\n    assert check_flush\n")
    result.assert_outcomes(passed=1, warnings=0)


WEAK = """
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig())
def test_weak(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert r.finish_reason in ("length", "stop", "abort")

@scripted(EngineConfig())
def test_holds_both_ways(t):
    r = t.start_req(prompt_len=5, max_new_tokens=3)
    yield from t.run_until_finished(r)
    assert all(one.rid == "x" for one in t.list_active_reqs())
    assert len(r.output_ids) == 3

@scripted(EngineConfig())
def test_says_what_it_is_for(t):
    t.smoke()
    yield
"""


def test_scripts_that_notice_nothing_are_named_at_the_end(pytest_of) -> None:
    """26.14: after the last test, so that none meets what a bug has left; the cache knows it the next time."""
    for _ in range(2):
        result = pytest_of(WEAK, "--vet", "new")
        result.assert_outcomes(passed=3)
        result.stdout.fnmatch_lines(
            [
                "scripts that notice no bug but those that every script notices*: 1, in 1 script:",
                "    test_scripts.py::test_weak",
                "assertions that can never fail: 1",
                "    test_scripts.py:*: assert all(*",
            ]
        )
        result.stdout.no_fnmatch_line("*not vetted*")


def test_scripts_that_passed_on_a_server_are_vetted_too(pytest_of) -> None:
    """26.14: bugs are tried in sim."""
    head, _, rest = WEAK.partition("@scripted(EngineConfig())\ndef test_weak")
    weak = rest.partition("@scripted(EngineConfig())\ndef test_holds")[2].partition("@scripted(EngineConfig())")[0]
    text = f"{head}@scripted(EngineConfig())\ndef test_holds{weak}"
    result = pytest_of(text, "--vet", "all", "--tier", "server")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["assertions that can never fail: 1", "    test_scripts.py:*: assert all(*"])


def test_a_healthy_script_is_not_named_by_vetting(pytest_of) -> None:
    result = pytest_of(FLUSH, "--vet", "all")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*notice no bug*")
    result.stdout.no_fnmatch_line("*never fail*")


ENDINGS = """
import pytest
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig(), tiers={tiers})
def test_skips(t):
    yield
    pytest.skip("not today")

@scripted(EngineConfig(), tiers={tiers})
def test_expects_to_fail(t):
    yield
    pytest.xfail("a known defect")

@scripted(EngineConfig(), tiers={tiers})
def test_fails(t):
    yield
    pytest.fail("it ended otherwise")

@scripted(EngineConfig(), tiers={tiers})
def test_raises_nothing(t):
    yield
    with pytest.raises(KeyError):
        t.start_req(prompt_len=3)
"""


@pytest.mark.parametrize("tier", ["sim", "server"])
def test_what_pytest_offers_to_end_a_test_ends_a_script_s(pytest_of, tier: str) -> None:
    """D02: with the script's own line, where the script ran in another process as well."""
    result = pytest_of(ENDINGS.format(tiers=(tier,)), "-rsxf", "--tier", tier)
    result.assert_outcomes(skipped=1, xfailed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "test_scripts.py:18: in test_fails",
            '>       pytest.fail("it ended otherwise")',
            "E       Failed: it ended otherwise",
            "test_scripts.py:23: in test_raises_nothing",
            "E       Failed: DID NOT RAISE KeyError",
            "SKIPPED [[]1] test_scripts.py:8: not today",
            "XFAIL test_scripts.py::test_expects_to_fail* - a known defect",
            f"FAILED test_scripts.py::test_fails?{tier}? - Failed: it ended otherwise",
        ]
    )


COMPARES = """
import pytest
from engine import EngineConfig
from scripted import scripted

@scripted(EngineConfig(), tiers={tiers})
def test_compares(t):
    r = t.start_req(prompt_len=5, max_new_tokens=2, rid="100%")
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"
"""


@pytest.mark.parametrize(("tier", "difference"), [("sim", ["E         - stop", "E         + length"]), ("server", [])])
def test_a_failed_comparison_shows_where_its_sides_come_from(pytest_of, tier: str, difference: list[str]) -> None:
    """D02: in both tiers; pytest's process adds its own difference."""
    result = pytest_of(COMPARES.format(tiers=(tier,)), "--tier", tier)
    result.assert_outcomes(failed=1)
    origin = "E        +  where 'length' = <100%: finished*.finish_reason"
    result.stdout.fnmatch_lines(["E       assert 'length' == 'stop'", origin, *difference])
