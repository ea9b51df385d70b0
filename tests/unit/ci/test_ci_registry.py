"""Registrations are read from the source, and every wrong one is found with file, line and remedy."""

import ast
import sys
from pathlib import Path

import pytest
from sample_tree import SampleTree

from ci.errors import CatalogueError
from ci.register import register_cpu_ci, register_cuda_ci
from ci.suites import Catalogue, Hardware

CUDA = (
    'from ci.register import register_cuda_ci\nregister_cuda_ci(est_time=40, stage="extra-b", runner_config="4-gpu")\n'
)


def test_registration_does_nothing_at_run_time() -> None:
    assert register_cpu_ci(est_time=1, suite="base-cpu") is None
    assert register_cuda_ci(est_time=1, stage="x", runner_config="y", nightly=True, disabled="why") is None


def test_a_good_file_is_registered_with_all_that_it_says(tree: SampleTree) -> None:
    """A wrong registration is an error with file and line (E01)."""
    path = tree.good("pipeline/test_flush.py", est_time=6.5)
    (file,) = tree.registry.files
    entry = file.registrations[0]
    assert (file.path, entry.hardware, entry.group, entry.est_time_s) == (path, Hardware.CPU, "base-cpu", 6.5)
    assert not entry.nightly
    assert entry.disabled is None
    assert tree.findings() == []


def test_one_file_may_run_on_both_kinds_of_hardware(tree: SampleTree) -> None:
    tree.write(
        "test_both.py",
        CUDA
        + """
import ci.register as reg
from ci import register
reg.register_cpu_ci(est_time=1, suite="base-cpu", nightly=True, disabled="waits for a driver")
register.register_cpu_ci(est_time=1, suite="extra-cpu")
def test_x(): pass
""",
    )
    (file,) = tree.registry.files
    assert [entry.group for entry in file.registrations] == ["extra-b", "base-cpu", "extra-cpu"]
    assert file.registrations[0].runner == "4-gpu"
    assert (file.registrations[1].nightly, file.registrations[1].disabled) == (True, "waits for a driver")
    assert tree.findings() == []


def test_a_file_is_never_imported_or_run(tree: SampleTree) -> None:
    """E01: a file under review is data."""
    tree.write(
        "test_evil.py",
        """
        from ci.register import register_cpu_ci
        open("/tmp/ci-was-run", "w")
        raise SystemExit("imported")
        register_cpu_ci(est_time=1, suite="base-cpu")
        def test_x(): pass
    """,
    )
    before = set(sys.modules)
    assert len(tree.registry.files) == 1
    assert "test_evil" not in set(sys.modules) - before


IMPORT = "from ci.register import register_cpu_ci\n"
CALL = IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu")'
TEST = "\ndef test_x(): pass\n"


@pytest.mark.parametrize(
    ("source", "line", "text"),
    [
        ("def test_x(): pass\n", 1, "is not registered"),
        (IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu")\n', 1, "runs no test"),
        (IMPORT + 'register_cpu_ci(suite="base-cpu")' + TEST, 2, "lacks est_time"),
        (IMPORT + "register_cpu_ci(est_time=1)" + TEST, 2, "lacks suite"),
        (IMPORT + 'register_cpu_ci(1, "base-cpu")' + TEST, 2, "positional"),
        (IMPORT + 'T = 3\nregister_cpu_ci(est_time=T, suite="base-cpu")' + TEST, 3, "not a constant (T)"),
        (IMPORT + 'register_cpu_ci(est_time=2*3, suite="base-cpu")' + TEST, 2, "not a constant (2 * 3)"),
        (IMPORT + 'register_cpu_ci(est_time=1, suite=f"base-cpu")' + TEST, 2, "not a constant"),
        (IMPORT + "register_cpu_ci(**{})" + TEST, 2, "takes no ** argument"),
        (IMPORT + 'register_cpu_ci(est_time=0, suite="base-cpu")' + TEST, 2, "got 0"),
        (IMPORT + 'register_cpu_ci(est_time=-4, suite="base-cpu")' + TEST, 2, "got -4"),
        (IMPORT + 'register_cpu_ci(est_time=True, suite="base-cpu")' + TEST, 2, "got True"),
        (IMPORT + 'register_cpu_ci(est_time="1", suite="base-cpu")' + TEST, 2, "got '1'"),
        (IMPORT + 'register_cpu_ci(est_time=1e999, suite="base-cpu")' + TEST, 2, "got inf"),
        (IMPORT + f'register_cpu_ci(est_time=0x{"9" * 100_000}, suite="base-cpu")' + TEST, 2, "got inf"),
        (IMPORT + f'register_cpu_ci(est_time=0x{"9" * 100_000} + 1, suite="base-cpu")' + TEST, 1, "cannot be read"),
        (IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpp")' + TEST, 2, "unknown suite 'base-cpp'"),
        (IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu", color=1)' + TEST, 2, "no argument 'color'"),
        (IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu", nightly=1)' + TEST, 2, "nightly must be"),
        (CALL[:-1] + ', disabled=" ")' + TEST, 2, "disabled must be a reason"),
        (CALL.replace("\nreg", "\nif True:\n    reg") + TEST, 3, "not called at the top level"),
        ('register_cpu_ci(est_time=1, suite="base-cpu")' + TEST, 1, "not imported from ci.register"),
        (CALL + "\n" + CALL.replace(IMPORT, "") + TEST, 3, "repeats the registration of line 2"),
        (CALL + TEST * 2, 5, "defines test_x twice"),
        (CUDA.replace("4-gpu", "5-gpu") + TEST, 2, "unknown runner_config '5-gpu'"),
        (CUDA.replace("4-gpu", "cpu") + TEST, 2, "unknown runner_config 'cpu'"),
        (CUDA.replace("extra-b", "extra-z") + TEST, 2, "unknown stage 'extra-z'"),
        ("def (:\n", 1, "is not Python"),
        ("x = " + "(" * 5000 + "\n", 1, ""),
        ("x = 1" + "+1" * 60_000 + "\n", 1, ""),
        ("x = '\0'\n", 1, ""),
        ("#" * 600_000, 1, "larger than"),
    ],
)  # fmt: skip
def test_each_wrong_registration_is_found(tree: SampleTree, source: str, line: int, text: str) -> None:
    """A wrong registration is an error with file and line (E01)."""
    path = tree.write("test_wrong.py", source)
    findings = [finding for finding in tree.registry.findings if text in finding.problem]
    assert findings, tree.findings()
    assert (findings[0].path, findings[0].line) == (path, line)
    assert findings[0].remedy


def test_same_file_name_twice_is_found(tree: SampleTree) -> None:
    tree.good("a/test_same.py")
    tree.good("b/test_same.py")
    (finding,) = tree.registry.findings
    assert finding.path == "tests/registered/b/test_same.py"
    assert "tests/registered/a/test_same.py" in finding.problem


def test_registered_file_that_pytest_would_not_collect(tree: SampleTree) -> None:
    tree.write("flush_test.py", IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu")' + TEST)
    assert any("does not collect" in text for text in tree.findings())


def test_supporting_files_need_no_registration(tree: SampleTree) -> None:
    tree.write("conftest.py", "x = 1")
    tree.write("sub/__init__.py", "")
    tree.write("support.py", "x = 1")
    assert tree.findings() == []


def test_links_do_not_lead_out_of_the_tree(tmp_path: Path) -> None:
    """E05: a pull request may contain links."""
    tree = SampleTree(tmp_path / "repository")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "test_secret.py").write_text(IMPORT + 'register_cpu_ci(est_time=1, suite="base-cpu")' + TEST)
    registered = tree.root / "tests" / "registered"
    (registered / "folder").symlink_to(outside)
    (registered / "test_link.py").symlink_to(outside / "test_secret.py")
    assert tree.registry.files == ()
    assert any("is a link" in text for text in tree.findings())
    (registered / "folder").unlink()
    (registered / "test_link.py").unlink()
    registered.rmdir()
    registered.symlink_to(outside)
    assert tree.registry.files == ()


def test_files_of_one_engine_configuration_have_one_key(tree: SampleTree) -> None:
    scripted = 'register_cpu_ci(est_time=1, suite="base-cpu")\n{}\n@scripted({})\ndef test_{}(t):\n    yield\n'
    tree.write("test_a.py", IMPORT + scripted.format("PP4 = EngineConfig(pp_size=4)", "PP4", "a"))
    tree.write("test_b.py", IMPORT + scripted.format("", "EngineConfig(pp_size=4)", "b"))
    tree.write("test_c.py", IMPORT + scripted.format("PP4 = EngineConfig(pp_size=1)", "PP4", "c"))
    keys = [file.engine_key for file in tree.registry.files]
    assert keys[0] == keys[1] == "EngineConfig(pp_size=4)"
    assert keys[2] != keys[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("base-cpu =", "Base Cpu ="), "is not ASCII TOML"),
        (('error = "AddressInUseError"', 'error = "AssertionError"'), "never retried"),
        (("timeout_per_file_s = 600", "timeout_per_file_s = 0"), "timeout_per_file_s"),
        (("timeout_per_file_s", "timeout"), "timeout"),
        (('["tests/registered", "tests/ray"]', '["../elsewhere"]'), "inside the repository"),
        (("cpu = [", "cpus = ["), "'cpu'"),
    ],
)
def test_a_wrong_catalogue_is_refused(tree: SampleTree, change: tuple[str, str], text: str) -> None:
    """E02: a code error cannot even be declared flaky."""
    path = tree.root / "ci" / "suites.toml"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(CatalogueError, match=text):
        Catalogue.load(tree.root)


def test_a_value_of_many_names_is_written_out_once(tree: SampleTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """E05: once for each name of a long value, or for each of its tests, takes quadratic time: hours."""
    names = "".join(f"a{number} = " for number in range(200))
    tests = "".join(f"@scripted(a{number})\ndef test_{number}(): pass\n" for number in range(200))
    tree.write("test_names.py", f"{CALL}\n{names}[1, 2]\n{tests}")
    written: list[ast.AST] = []
    unparse = ast.unparse
    monkeypatch.setattr(ast, "unparse", lambda node: (written.append(node), unparse(node))[1])
    assert len(tree.registry.files) == 1
    assert len(written) == 1


def test_a_long_chain_of_calls_is_not_written_out(tree: SampleTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """E05: each call of `a.b().b()...` contains those before it, so writing all of them out takes quadratic time."""
    tree.write("test_chain.py", f"{CALL}\na{'.b()' * 150}\n{TEST}")
    written: list[ast.AST] = []
    unparse = ast.unparse
    monkeypatch.setattr(ast, "unparse", lambda node: (written.append(node), unparse(node))[1])
    assert len(tree.registry.files) == 1
    assert len(written) < 10
