"""Messages of commands when the packages of a server are missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lockstep import extras

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def without_the_extra(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that finds no package of the extra."""
    hidden = HIDDEN.format(modules=set(extras.SERVE_MODULES))
    command = [sys.executable, "-c", hidden + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_a_server_command_names_the_extra():
    done = without_the_extra("from engine.__main__ import main; sys.argv = ['engine', 'serve']; main()")
    assert done.returncode == 2
    assert done.stderr.startswith("engine: this needs the package ")
    assert done.stderr.endswith("; pip install 'lockstep-engine[serve]'\n")


def test_a_script_runs_without_it():
    code = (
        "from engine import EngineConfig; from scripted import ScriptedSim\n"
        "def script(t):\n    r = t.start_req(prompt_len=9, max_new_tokens=2)\n    yield from t.run_until_finished(r)\n"
        "print(ScriptedSim.start(EngineConfig()).run(script).steps > 0)"
    )
    done = without_the_extra(code)
    assert done.stdout == "True\n", done.stderr


COMMANDS = """\
new flush_meets_abort --dir tests
run tests/test_flush_meets_abort.py::test_flush_meets_abort --trace run.jsonl
view run.jsonl
replay run.jsonl
vet tests/test_flush_meets_abort.py
explore --schedules 3
explore --corpus --schedules 3
replay "pp_size=4; 1 start a prompt=9" --to-script written.py
gallery list
gallery find flush-ignores-in-flight
shell --help
"""


def test_the_commands_of_the_harness_run_without_it(tmp_path):
    """The page of the project installs the harness alone, and these are its first commands."""
    (tmp_path / "in.txt").write_text("start prompt_len=9\nstep\nquit\n")
    code = (
        f"import contextlib, os, shlex; os.chdir({str(tmp_path)!r})\n"
        "from scripted.cli import main\n"
        "def run(*words):\n"
        "    sys.argv = ['scripted', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as exc:\n        assert not exc.code, (words, exc.code)\n"
        f"for line in {COMMANDS!r}.splitlines():\n    run(*shlex.split(line))\n"
        "sys.stdin = open('in.txt')\n"
        "run('shell')\n"
        "sys.stderr.write('done')\n"
    )
    done = without_the_extra(code)
    assert (done.returncode, done.stderr.endswith("done")) == (0, True), done.stdout + done.stderr


def test_another_missing_module_is_not_explained_away():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), extras.naming_the_extra("engine"):
        import no_such_module  # noqa: F401


def test_the_list_is_that_of_the_package():
    """Every module of the list comes with the extra, and the harness alone brings no torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {Requirement(text).name.replace("-", "_") for text in project["optional-dependencies"]["serve"]}
    brought = brought - {"pyzmq", "pyyaml"} | {"zmq", "yaml", "starlette"}
    assert brought == extras.SERVE_MODULES
    assert not any("torch" in text for text in project["dependencies"])
