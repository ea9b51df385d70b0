"""The project's own rules: sources that anybody can read, honest `__all__`, a README whose commands exist."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from every_case import every_case
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scripted_lockstep.mutants import ESCAPES, MUTANTS, RACES
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.script.handle import RequestHandle
from scripted_lockstep.script.state import EngineState, TreeState

from ci.cli import app as ci_app
from engine.cli import app as engine_app
from scripted.cli import app as scripted_app
from scripted.script.clients import Call, ClientView
from scripted.script.state import KVState, MicrobatchInFlight, RowState

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "lockstep", "scripted", "ci")
WRITTEN_HERE = (*PACKAGES, "benchmarks", "tests", "docs", "skills", "deploy", ".ci", ".github")
SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".json", ".jinja", ""}
DOCSTRING_LINES = 5
# Homes of people, and the folder that this checkout happens to be in.
PERSONAL_PATHS = re.compile(rf"/(home|Users|root)/\w|{re.escape(str(ROOT))}")
APPS = {"engine": engine_app, "scripted": scripted_app, "ci": ci_app}
GUIDES = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "skills/race-tests/SKILL.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
GUIDES_LIMIT_WORDS = 30_000
SCRIPT_OBJECTS = (
    ScriptContext,
    RequestHandle,
    Call,
    ClientView,
    EngineState,
    MicrobatchInFlight,
    KVState,
    RowState,
    TreeState,
)


def texts() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".coverage"))
    for folder in WRITTEN_HERE:
        yield from (
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
        )


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_in_all(path: Path) -> list[str]:
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return ast.literal_eval(node.value)
    return []


def test_sources_are_ascii():
    """F: what is not ASCII looks alike and is not."""
    assert [name_of(path) for path in texts() if not path.read_bytes().isascii()] == []


def test_no_file_names_somebodys_folder():
    """F: no personal paths."""
    found = [
        f"{name_of(path)}: {match.group()}"
        for path in texts()
        if path != Path(__file__)
        for match in PERSONAL_PATHS.finditer(path.read_text())
    ]
    assert found == []


def test_a_module_says_what_it_is_in_a_few_lines():
    """Module docstrings are one to five lines: what the module owns and what it never does."""
    said = {name_of(path): ast.get_docstring(tree_of(path)) or "" for path in modules(*PACKAGES, "benchmarks")}
    lines = {name: sum(bool(line.strip()) for line in docstring.splitlines()) for name, docstring in said.items()}
    assert {name: count for name, count in lines.items() if not 0 < count <= DOCSTRING_LINES} == {}


# Folders whose modules are imported only where a package is installed that they are about.
ABOUT = {
    "engine/model/openvino": "openvino",
    "engine/cluster/serve_app": "ray.serve",
    "adapters/scripted_sglang": "sglang",
    "adapters/scripted_vllm": "vllm",
}


@every_case("folder", [*ABOUT, *PACKAGES])
def test_all_names_what_a_module_has(folder):
    if folder in ABOUT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Serve's models use what pydantic will drop.
            pytest.importorskip(ABOUT[folder], reason=f"it is about {ABOUT[folder]}", exc_type=ImportError)
    elsewhere = tuple(f"{name}/" for name in ABOUT if name != folder)
    wrong = []
    for path in modules(folder):
        if (names := names_in_all(path)) and not name_of(path).startswith(elsewhere):
            module = importlib.import_module(
                name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
            wrong += [
                f"{name_of(path)}: {name}" for name in names if not hasattr(module, name) or names.count(name) > 1
            ]
    assert wrong == []


def test_a_public_class_of_the_harness_has_a_name_of_its_own():
    """F: two things of one name are taken for one another."""
    names = Counter(
        node.name
        for path in modules("scripted")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_test_files_have_names_of_their_own():
    """F: pytest imports test files by their bare name, so two of one name hide each other."""
    names = Counter(path.name for path in modules("tests") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_test_hides_another():
    """F: of two tests of one name in one file only the second runs."""
    hidden = []
    for path in modules("tests"):
        for scope in [tree_of(path), *(node for node in tree_of(path).body if isinstance(node, ast.ClassDef))]:
            tests = Counter(
                node.name
                for node in scope.body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
            )
            hidden += [f"{name_of(path)}: {name}" for name, count in tests.items() if count > 1]
    assert hidden == []


def test_what_is_needed_is_pinned():
    """A fresh machine gets what was tested: one exact version a package, from no particular place."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {}
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", line), f"constraints.txt: {line!r} is not name==version"
        name, _, version = line.partition("==")
        pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # vLLM's build for CPUs states the exact versions of what it brings, and is itself exact.
    listed = [text for name, texts in extras.items() if name != "vllm" for text in texts]
    assert [text for text in extras["vllm"] if "==" not in text] == []
    for requirement in map(Requirement, [*project["dependencies"], *listed]):
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def test_an_argument_that_make_passes_on_has_no_comma():
    """D: make splits what it calls at each comma, so '.[serve,browser]' was cut and nothing was installed."""
    text = (ROOT / "Makefile").read_text()
    calls = re.findall(r"^\t\$\(call get,(.*)\)$", text, re.MULTILINE)
    assert calls
    assert [call for call in calls if call.count(",") != 1] == []


@every_case("guide", GUIDES)
def test_commands_in_the_guides_exist(guide):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in command_lines((ROOT / guide).read_text()):
        if line.startswith("make "):
            assert line.split()[1] in targets, f"{guide}: {line}"
        said = re.match(r"(?:python -m )?(engine|scripted|ci) (.*)", line)
        if said:
            check_command(said[1], shlex.split(said[2], comments=True), f"{guide}: {line}")


def test_the_guides_stay_short():
    """Whoever adds to a guide cuts elsewhere. The index says which pages are reference."""
    reference = (ROOT / "docs/index.md").read_text().partition("**Reference**")[2]
    apart = {"index.md", *re.findall(r"\]\((\w+\.md)\)", reference)}
    guides = [page for page in (ROOT / "docs").glob("*.md") if page.name not in apart]
    assert sum(len(page.read_text().split()) for page in guides) <= GUIDES_LIMIT_WORDS


@functools.cache
def command_of(program: str) -> Any:
    """Making the hundred flags of all commands takes longer than to compare them."""
    return typer.main.get_command(APPS[program])


def check_command(program: str, words: list[str], where: str) -> None:
    """Every sub-command and every flag that a guide shows is one of the program's."""
    command = command_of(program)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    ours = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in ours if word.startswith("-") and word.partition("=")[0] not in {*flags, "--help"}]
    assert not unknown, f"{where}: there is no {unknown[0]}"
    assert not hasattr(command, "commands") or not words or words[0].startswith("-"), (
        f"{where}: there is no {words[0]!r}"
    )


def groups(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        yield name, command
        for one, inner in command.commands.items():
            yield from groups(inner, f"{name} {one}")


GROUPS = {name: group for program in APPS for name, group in groups(command_of(program), program)}


@every_case("name", GROUPS)
def test_a_list_of_commands_is_readable(name, monkeypatch, capsys):
    """A command whose first sentence is too long for a line of a terminal is shown cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        GROUPS[name].main(["--help"], prog_name=name)
    _, found, listed = capsys.readouterr().out.partition("\nCommands:\n")
    assert found
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


PROSE_COLUMNS = 100
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for name in ("docs", "benchmarks", "skills") for path in sorted((ROOT / name).rglob("*.md"))),
]

# They write the files that they name.
NOT_FILES = (ROOT / "docs/first_race.md", ROOT / "skills/race-tests/SKILL.md")
# Folders of the repository, as a page names a file in them.
FOLDERS = "adapters|benchmarks|ci|deploy|docs|engine|examples|lockstep|scripted|tests"
# A folder of a user's cache.
OUTSIDE = ("lockstep/openvino", "tests/v1/e2e")


@every_case("page", [page for page in PAGES if page not in NOT_FILES])
def test_files_on_the_pages_exist(page):
    named = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)", page.read_text())
    assert [path for path in named if path not in OUTSIDE and not (ROOT / path).exists()] == []


# They are pasted into a tracker, which keeps each break of a line.
REPORTS = sorted((ROOT / "docs/reports").glob("*-*.md"))


@every_case("page", [page for page in PAGES if page not in REPORTS])
def test_prose_wraps(page):
    """Rows of tables cannot be wrapped, and commands and code that are to be copied must not be."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "![", "#"))]
    assert [line for line in lines if len(line) > PROSE_COLUMNS] == []


def test_mutants_in_the_readme_exist():
    known = {mutant.name for mutant in MUTANTS}
    text = (ROOT / "README.md").read_text()
    assert f"{len(RACES)} races and scheduling bugs" in text
    assert f"{len(ESCAPES)} more were found by review" in text
    named = re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)
    assert named
    assert [name for name in named if name not in known] == []


def command_lines(text: str) -> list[str]:
    """The lines of indented and fenced blocks that are a command of ours, continued lines as one."""
    text = re.sub(r"\\\n\s*", "", text)
    fenced = re.findall(r"^```(?:console|sh)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [
        *re.findall(r"^    (.*)$", text, re.MULTILINE),
        *(line for block in fenced for line in block.splitlines()),
    ]
    commands = [line.strip().removeprefix("$ ") for line in blocks]
    return [line for line in commands if re.match(r"make |(python -m )?(engine|scripted|ci) [a-z-]", line)]


@every_case("kind", SCRIPT_OBJECTS)
def test_the_script_guide_names_everything_that_a_script_can_use(kind):
    """The guide names every call of a script, and no call that is gone."""
    guide = (ROOT / "docs/script_api.md").read_text()
    internal = {"check_waits", "check_reached", "bind", "is_bound", "see", "see_refusal", "receive", "fail", "answer"}
    internal |= {"was_computed_with", "step_on", "see_chunked", "loose_ends"}
    # What verbs are made with.
    internal |= {"check_handle", "check_live_stage", "check_released", "check_stage", "count_ineffective", "next_rid"}
    internal |= {"line_notes", "note_failure", "note_line", "rid_of", "wait_for"}
    names = [name for name in dir(kind) if not name.startswith("_") and name not in internal]
    assert [name for name in names if not re.search(rf"\b{name}\b", guide)] == []


def anchors_of(page):
    """Return the anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@every_case("page", PAGES)
def test_links_lead_somewhere(page):
    """F: a guide linked to figures that no page had."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert "://" in target or there.exists(), target
        assert "://" in target or not anchor or anchor in anchors_of(there), target


SITE = (ROOT / "docs", ROOT / "benchmarks/tables")


@every_case("page", [page for page in PAGES if any(map(page.is_relative_to, SITE))])
def test_links_of_the_site_stay_in_it(page):
    """F: `make docs` was red because a page linked to README."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        there = (page.parent / target).resolve()
        assert "://" in target or any(map(there.is_relative_to, SITE)), target
