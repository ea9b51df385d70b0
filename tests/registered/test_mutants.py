"""Every mutant of the gallery is caught by its test, and every test that names a mutant catches it.

Goal: a test that no bug can fail is no test: each mutant's registered script passes on the healthy engine and fails,
with the mutant's signature, on the broken one. Method: the gallery's own runner in the sim tier; the flagship on real
processes as well; every registered script by itself against the mutants that its file names. Origin: D11.
"""

import ast
import functools
import inspect
import itertools
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from scripted_lockstep.mutants import CONTRACTS, MUTANTS, mutant_named
from thinned import thinned

from ci.register import register_cpu_ci
from scripted import RequestRefused, ScriptedSim, ScriptError
from scripted.cli.single_run import show_mutant
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.script.loader import find_test, load_test, scripts_in
from scripted.script.options import ScriptOptions

register_cpu_ci(est_time=12, suite="base-cpu")

REGISTERED = Path(__file__).parent
ALL = (*MUTANTS, *CONTRACTS)
NAMES = [mutant.name for mutant in ALL]
# Packages of schedulers that this project did not write.
FOREIGN = ("vllm",)
# Under a mutant a script may wait forever; healthy ones take fewer steps than this.
MUTANT_MAX_STEPS = 3000
# Bugs that break every request, so that a script need assert nothing to fail.
NOTICED_BY_ALL = {
    "a-registry-grows",
    "abort-all-of-nothing-kills",
    "continue-needs-a-pause",
    "finished-requests-stay-registered",
}
# Scripts that may fail under such bugs alone, each with the reason.
NOTICE_WHAT_ALL_NOTICE = {
    "test_aborts.py::test_abort_all_of_nothing": "after each script the harness aborts all as well",
    "test_batches.py::test_a_list_that_is_returned_is_a_copy": "the lists are the harness's",
    "test_example_scripts.py::test_time_stands_still_until_it_is_moved": "the example's scheduler knows no time",
    "test_escapes.py::test_an_idle_engine_is_as_small_as_a_new_one": "at the end of each script this is looked at",
    "test_g25_registry.py::test_a_hundred_requests_leave_the_registry": "at the end of each script this is looked at",
    "test_handles.py::test_rids_are_given_and_made": "rids are given by the harness",
    "test_outside_scripts.py::test_a_batch_that_fails_ends_its_own_requests": "no bug is about failed batches alone",
}


# By adapter, configuration and mutant: whether a script without any assertion fails.
_NOTICED = {}


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant):
    """Without it the test passes, which is registered itself."""
    if mutant.schedule:
        assert show_mutant(mutant, "sim")
        return
    test = find_test(mutant.test)
    failure = _failure(test, next(_arguments(test)), mutant.name)
    assert failure is not None
    assert mutant.signature in failure.report.render()


def test_the_flagship_is_caught_in_every_tier(harness):
    flagship = mutant_named("flush-ignores-in-flight")
    test = find_test(flagship.test)
    with harness(test.config) as healthy:
        assert healthy.run(test.script, options=test.options).steps > 0
    with harness(test.config, mutant=flagship.name) as broken, pytest.raises(ScriptError) as caught:
        broken.run(test.script, options=ScriptOptions(check_every_step=False))
    assert flagship.signature in str(caught.value)


def test_names_are_unique():
    assert len(set(NAMES)) == len(NAMES)
    assert len(NAMES) >= 20


def _files():
    return _files_below(REGISTERED)


@functools.cache
def _files_below(folder):
    """Each registered file of scripts, with its docstring's words and the names of its scripts."""
    found = []
    for file in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        scripts = _scripts_in(tree.body)
        if scripts:
            found.append((file, (ast.get_docstring(tree) or "").replace(",", " ").replace(".", " ").split(), scripts))
    return found


def _scripts_in(body, owner=""):
    """Scripts at the top level of a file and in its classes, the latter as ``Class.name``."""
    scripts = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            scripts += _scripts_in(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and _is_scripted(node):
            scripts.append(owner + node.name)
    return scripts


def _claims():
    """Each registered file of scripts with the mutants that its docstring names."""
    for file, words, scripts in _files():
        for name in (*NAMES, *_of_adapters(file, tuple(scripts))):
            if name in words:
                yield pytest.param(str(file), scripts, name, id=f"{file.stem}-{name}")


def _is_shown(file, name, script=None):
    """Whether ``test_a_mutant_is_caught`` shows that this file, or this script of it, catches the mutant."""
    shown, _, by = (mutant_named(name).test if name in NAMES else "").partition("::")
    return shown == str(Path(file).relative_to(REGISTERED.parents[1])) and script in (None, by)


@functools.cache
def _of_adapters(file, scripts):
    """The mutants that the adapters of a file's scripts have beside the gallery's."""
    if "adapter=" not in file.read_text(encoding="utf-8"):
        return ()
    try:
        adapters = {load_test(str(file), script).adapter for script in scripts}
    except pytest.skip.Exception:
        return ()  # Its scheduler is not installed here.
    named = dict.fromkeys(name for adapter in sorted(adapters) for name in adapter_named(adapter).mutant_names)
    return tuple(name for name in named if name not in NAMES)


def _is_scripted(function):
    """Whether a decorator's last name is that of the harness."""
    calls = [each.func for each in function.decorator_list if isinstance(each, ast.Call)]
    return any("scripted" in (getattr(call, "id", None), getattr(call, "attr", None)) for call in calls)


def _tests():
    """Each registered script, with the mutants that its file names."""
    named = {}
    for claim in _claims():
        file, scripts, mutant = claim.values
        for script in scripts:
            named.setdefault((file, script), []).append(mutant)
    for (file, script), mutants in named.items():
        yield pytest.param(file, script, mutants, id=f"{Path(file).stem}-{script}")


@pytest.mark.parametrize(("file", "script", "mutants"), thinned(_tests(), one_in=4))
def test_a_script_fails_under_a_mutant_of_its_file(file, script, mutants):
    """Under one that a script without any assertion passes: all scripts notice the others."""
    test = load_test(file, script)
    if "sim" not in test.tiers:
        pytest.skip("it needs processes; what it claims of the scheduler, a script of the sim tier claims as well")
    noticed_by_all = []
    for mutant in sorted(mutants, key=lambda each: not _is_shown(file, each, script)):
        if _is_shown(file, mutant, script) or _catches(file, script, mutant):
            if f"{Path(file).name}::{script}" in NOTICE_WHAT_ALL_NOTICE or not _is_noticed_by_all(test, mutant):
                return
            noticed_by_all.append(mutant)
    pytest.fail(
        f"no mutant of {mutants} is caught but those that a script without an assertion catches: {noticed_by_all}"
    )


NEW_FILE = '''
"""A file as ``scripted new`` writes it. Mutants: {named}."""

from engine import EngineConfig
from scripted import scripted

PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)


class TestNew:
    @scripted(PP4)
    def test_flush(self, t):
        r = t.start_req(prompt_len=125, max_new_tokens=2)
        yield from t.run_until(lambda: t.state.in_flight and t.state.queues_clear)
        flush = t.flush_cache()
        yield from t.run_until_finished(r)
        assert flush.status == 400


@scripted(PP4)
def test_flush(t):
    yield from TestNew.test_flush.script(None, t)
'''


@pytest.mark.parametrize(
    ("named", "is_enough"),
    [
        ("finished-requests-stay-registered, flush-ignores-in-flight", True),
        ("finished-requests-stay-registered", False),
    ],
)
def test_scripts_of_new_files_and_of_classes_are_held_to_it(tmp_path, monkeypatch, named, is_enough):
    """A bug that a script without an assertion notices does not count."""
    (tmp_path / "test_new.py").write_text(NEW_FILE.replace("{named}", named), encoding="utf-8")
    monkeypatch.setitem(globals(), "REGISTERED", tmp_path)
    tests = [param.values for param in _tests()]
    assert [script for _, script, _ in tests] == ["TestNew.test_flush", "test_flush"]
    for file, script, mutants in tests:
        with nullcontext() if is_enough else pytest.raises(pytest.fail.Exception, match="but those that a script with"):
            test_a_script_fails_under_a_mutant_of_its_file(file, script, mutants)


def _empty(test):
    """A script without assertions, in place of a test's own."""
    options = msgspec.structs.replace(test.options, must_reach=(), must_assert=False)
    return msgspec.structs.replace(test, script=_one_request, options=options)


def _is_noticed_by_all(test, mutant):
    run = test.adapter, test.config, mutant
    if run not in _NOTICED:
        _NOTICED[run] = _fails(_empty(test), {}, mutant)
    return _NOTICED[run]


def _one_request(t):
    try:
        request = t.start_req(prompt_len=5, max_new_tokens=3)
    except RequestRefused:  # a prefill engine generates for no client
        yield
        return
    yield from t.run_until_finished(request)


def test_exceptions_are_scripts_that_exist():
    there = {f"{file.name}::{script}" for file, _, scripts in _files() for script in scripts}
    assert set(NOTICE_WHAT_ALL_NOTICE) <= there


def test_an_empty_script_notices_few_bugs():
    """Only the bugs that break every request."""
    test = _empty(find_test(mutant_named("flush-ignores-in-flight").test))
    noticed = {name for name in NAMES if _fails(test, {}, name)}
    assert noticed == NOTICED_BY_ALL


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def test_it(t): ...", []),
        ("class TestIt:\n    @scripted(C)\n    def test_it(t): yield", ["TestIt.test_it"]),
        ("@harness.scripted(C)\ndef test_it(t): yield", ["test_it"]),
    ],
    ids=["plain", "of a class", "of a module's attribute"],
)
def test_every_spelling_of_a_script_is_looked_at(text, names):
    assert _scripts_in(ast.parse(text).body) == names


def test_no_script_is_overlooked(monkeypatch):
    """Another name of the decorator, a script under a condition, an inherited one: the source says less than pytest."""
    seen = {(file, script) for file, _, scripts in _files() for script in scripts}
    there = set()
    for file in REGISTERED.rglob("test_*.py"):
        monkeypatch.syspath_prepend(str(file.parent))
        try:
            there |= {(file, script) for script in scripts_in(file)}
        except pytest.skip.Exception:  # What it is about is not installed here.
            seen = {(name, script) for name, script in seen if name != file}
    assert there == seen


def test_every_file_of_scripts_names_a_mutant():
    files = {str(file) for file, _, _ in _files()}
    assert files - {claim.values[0] for claim in _claims()} <= {str(file) for file in _not_installed()}


def _not_installed():
    """Files that leave themselves out where the scheduler that they are about is not installed."""
    for file in REGISTERED.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "allow_module_level=True" in text and any(find_spec(name) is None for name in FOREIGN if name in text):
            yield file


@pytest.mark.parametrize(
    ("file", "scripts", "mutant"),
    thinned((claim for claim in _claims() if not _is_shown(claim.values[0], claim.values[2])), one_in=5),
)
def test_a_file_catches_the_mutants_that_it_names(file, scripts, mutant):
    assert any(_catches(file, name, mutant) for name in scripts)


@functools.cache
def _catches(file, script, mutant):
    """Whether a script of the sim tier fails under a bug with any of its arguments."""
    test = load_test(file, script)
    return "sim" in test.tiers and any(_fails(test, arguments, mutant) for arguments in _arguments(test))


def _arguments(test):
    """Everything that pytest would call a test with."""
    sets = [_values(mark) for mark in getattr(test.script, "pytestmark", ()) if mark.name == "parametrize"]
    for chosen in itertools.product(*sets):
        yield {name: value for values in chosen for name, value in values.items()}


def _values(mark):
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
    return [dict(zip(names, values if len(names) > 1 else [values], strict=True)) for values in mark.args[1]]


def _fails(test, arguments, mutant):
    return _failure(test, arguments, mutant) is not None


def _failure(test, arguments, mutant):
    assert inspect.isgeneratorfunction(test.script)
    options = msgspec.structs.replace(test.options, check_every_step=False, max_steps=MUTANT_MAX_STEPS)
    try:
        if test.adapter != DEFAULT_ADAPTER:
            adapter = adapter_named(test.adapter)
            adapter.run_script(test.script, arguments, config=test.config, options=options, mutant=mutant)
        else:
            with ScriptedSim.start(test.config, mutant=mutant) as broken:
                broken.run(test.script, options=options, **arguments)
    except ScriptError as exc:
        return exc
    return None
