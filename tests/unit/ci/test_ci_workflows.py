"""The workflows hold no logic, no secret and no more permission than they need; comment text never reaches a script."""

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from every_case import every_case
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sample_tree import REPOSITORY

from ci import bot
from ci.suites import Catalogue

FOLDER = REPOSITORY / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
PINNED = re.compile(r"^\s*- uses: actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
SHELL_LOGIC = re.compile(r"[;&|<>`]|\$\(|\b(if|for|while|case|curl|eval)\b")
DISPATCHED = [bot.RERUN_WORKFLOW, bot.STAGE_WORKFLOW, bot.EXPLORE_WORKFLOW]


def load(path: Path) -> dict[Any, Any]:
    loaded = yaml.safe_load(path.read_text(encoding="ascii"))
    assert isinstance(loaded, dict)
    loaded["on"] = loaded.pop(True)  # YAML 1.1 reads the bare word `on` as true.
    return loaded


def jobs(path: Path) -> dict[str, Any]:
    return dict(load(path)["jobs"])


def scripts(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


def test_all_that_is_needed_is_there() -> None:
    names = {path.name for path in FILES}
    assert {"pull-request.yml", "nightly.yml", "comment.yml", *DISPATCHED} <= names


@every_case("path", FILES)
def test_each_workflow_is_safe_and_plain(path: Path) -> None:
    """A comment is hostile input (E05)."""
    text = path.read_text(encoding="ascii")
    assert "secrets." not in text
    assert "pull_request_target" not in text
    assert "workflow_run" not in text
    assert all(PINNED.match(line) for line in text.splitlines() if "uses:" in line)
    workflow = load(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job
        assert "write-all" not in str(job.get("permissions", ""))
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    for script in scripts(path):
        assert "${{" not in script
        assert "\n" not in script
        assert not SHELL_LOGIC.search(script), script


@every_case("path", FILES)
def test_jobs_that_can_write_run_the_default_branch_only(path: Path) -> None:
    """A comment is hostile input (E05)."""
    for name, job in jobs(path).items():
        can_write = "write" in (job.get("permissions") or {}).values()
        checkouts = [step.get("with", {}) for step in job["steps"] if "checkout@" in step.get("uses", "")]
        if can_write:
            assert name == "answer"
            assert all("path" in checkout for checkout in checkouts if "ref" in checkout)
            assert not any(
                "--editable" in step.get("run", "") or "make " in step.get("run", "") for step in job["steps"]
            )
        else:
            assert "token" not in str(job).lower(), name


def test_the_comment_reaches_the_bot_by_the_event_file_only() -> None:
    """A comment is hostile input (E05)."""
    text = (FOLDER / "comment.yml").read_text()
    mentions = [line.strip() for line in text.splitlines() if "comment.body" in line]
    assert mentions == ["if: github.event.issue.pull_request && startsWith(github.event.comment.body, '/')"]
    assert load(FOLDER / "comment.yml")["on"] == {"issue_comment": {"types": ["created"]}}


@every_case("path", FILES)
def test_what_runs_tests_has_the_versions_that_were_tested(path: Path) -> None:
    """E01: `make install` holds to constraints.txt, and what it installs is in .venv."""
    ours = "python -m pip install --no-deps --requirement ci/requirements.txt"
    for job in jobs(path).values():
        steps = [step["run"] for step in job["steps"] if "run" in step]
        assert ours in steps or steps[0].startswith("make "), steps
        assert all(step.startswith("make ") or ".venv/bin/" in step for step in steps if ours not in steps)


def test_a_pull_request_runs_all_that_make_test_runs() -> None:
    """A wrong registration is an error with file and line (E01)."""
    (wanted,) = re.findall(r"^test: (.*?) ##", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    run = " ".join(scripts(FOLDER / "pull-request.yml"))
    made = {target for line in re.findall(r"make ([a-z -]+)", run) for target in line.split()}
    assert "--suite base-cpu" in run
    # `left-out` runs nothing: it says what was not run.
    assert made >= set(wanted.split()) - {"registered", "left-out"}


# Targets of the Makefile that run no tests.
NO_TESTS = {"install", "demo", "picture", "bench", "gpu", "serve", "clean", "help"}


def test_the_night_runs_what_make_test_leaves_out() -> None:
    """E01: what nobody runs rots: the suite of Ray was red for days."""
    makefile = (REPOSITORY / "Makefile").read_text()
    offered = dict(re.findall(r"^([a-z-]+):(.*?) ## ", makefile, re.MULTILINE))
    tested = {"test", *offered["test"].split(), "unit", "load"}
    nightly = FOLDER / "nightly.yml"
    run = {word for line in scripts(nightly) if line.startswith("make ") for word in line.split()[1:]}
    run |= {
        target
        for job in jobs(nightly).values()
        for target in job.get("strategy", {}).get("matrix", {}).get("target", ())
    }
    assert set(offered) - tested - NO_TESTS == run - {'"$TARGET"', "install"}


@pytest.mark.parametrize("name", DISPATCHED)
def test_dispatched_workflows_take_what_the_bot_sends(name: str) -> None:
    workflow = load(FOLDER / name)
    inputs = workflow["on"]["workflow_dispatch"]["inputs"]
    assert {"ticket", "pull_request", "sha", "runner", "timeout_minutes"} <= set(inputs)
    assert workflow["run-name"] == f"{name.removesuffix('.yml')} ${{{{ inputs.ticket }}}}"
    assert jobs(FOLDER / name)["run"]["permissions"] == {"contents": "read"}
    own = {
        bot.RERUN_WORKFLOW: {"request"},
        bot.STAGE_WORKFLOW: {"hw", "suite", "stage", "runner_config"},
        bot.EXPLORE_WORKFLOW: {"scenario", "minutes"},
    }
    assert set(inputs) - {"ticket", "pull_request", "sha", "runner", "timeout_minutes"} == own[name]
    assert len(inputs) <= 10  # GitHub's limit.
    used = set(re.findall(r"inputs\.(\w+)", (FOLDER / name).read_text()))
    assert used == set(inputs)


def test_every_gpu_runner_of_the_catalogue_is_known_to_the_workflows() -> None:
    catalogue = Catalogue.load(REPOSITORY)
    gpu_runners = set(catalogue.runners) - {"cpu"}
    matrix = jobs(FOLDER / "pull-request-label.yml")["cuda"]["strategy"]["matrix"]["runner"]
    labels = yaml.safe_load((FOLDER.parent / "actionlint.yaml").read_text())["self-hosted-runner"]["labels"]
    assert set(matrix) == set(labels) == gpu_runners
    assert all(catalogue.runner_labels(runner) == ("self-hosted", runner) for runner in gpu_runners)


def test_jobs_that_hold_a_token_install_exact_versions() -> None:
    """E05: what they install is pinned with its dependencies, in the versions of constraints.txt."""
    tested = dict(
        line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line
    )
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    lines = [line for line in (REPOSITORY / "ci/requirements.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert pinned == {name: tested.get(name) for name in pinned}
    for name in pinned:
        for needed in map(Requirement, importlib.metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert canonicalize_name(needed.name) in pinned, f"{name} needs {needed.name}"
