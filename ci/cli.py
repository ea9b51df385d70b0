"""The commands of `python -m ci`: each reads its options, makes one call and turns its outcome into an exit status.

Exit status: 0 all is well, 1 the tests or the registrations are not, 2 the command itself was wrong.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ci.bot import answer_result, handle_comment
from ci.errors import CiError
from ci.registry import Registry, read_registry
from ci.request import REPEAT_MAX, RerunRequest, Tier
from ci.requirements import PAGE, files_by_number, rendered, untested
from ci.results import FileStatus, RunResult, require_writable, write_json, write_junit
from ci.run import Sharing, run_files
from ci.selection import SelectedFile, Selector, disabled_files, expected_seconds, parts_of, select
from ci.session import SessionOptions
from ci.specs import SpecTarget, resolve_specs
from ci.suites import Catalogue, Hardware
from ci.summary import print_plan, print_summary
from ci.times import MeasuredTimes, estimate_findings
from lockstep.errors import error_lines

JSON_PATH = Path("out/ci/results.json")
JUNIT_PATH = Path("out/ci/junit.xml")
PLAIN_WIDTH = 160  # Of a pipe or a runner's log.

HELP = """Run the registered tests, check their registrations, answer comments on pull requests.

Exit status: 0 all is well, 1 the tests or the registrations are not, 2 the command itself was wrong.
"""

app = typer.Typer(
    no_args_is_help=True,
    # Plain text: boxes cut off the longer flags in a narrow terminal.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help=HELP,
)
console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)

Root = Annotated[Path, typer.Option("--root", help="the repository to look at", file_okay=False)]
JsonPath = Annotated[Path, typer.Option("--json", help="where the results go, for programs")]
JunitPath = Annotated[Path, typer.Option("--junit", help="where the results go, as JUnit XML")]
Timeout = Annotated[float | None, typer.Option("--timeout-per-file", min=1, help="seconds; default: ci/suites.toml")]
HERE = Path()


@dataclass(frozen=True)
class Repository:
    """The files that every command reads first."""

    root: Path
    catalogue: Catalogue
    registry: Registry
    times: MeasuredTimes

    @classmethod
    def at(cls, root: Path) -> "Repository":
        """Read everything below `root`; raises `CiError`."""
        root = root.resolve()
        catalogue = Catalogue.load(root)
        return cls(root, catalogue, read_registry(root, catalogue), MeasuredTimes.load(root))


def main() -> None:
    """Run one command; a `CiError` becomes a line on stderr and exit status 2."""
    # A log's encoding may lack characters of test names and comments.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except CiError as exc:
        sys.stderr.write(error_lines("ci", str(exc)))
        raise SystemExit(2) from exc
    except OSError as exc:
        message = f"{exc.filename or 'stdout'}: {exc.strerror}" if exc.strerror else str(exc)
        sys.stderr.write(error_lines("ci", message))
        raise SystemExit(2) from exc


@app.command()
def requirements(
    root: Root = HERE,
    write: Annotated[bool, typer.Option("--write", help="rewrite the page's column of tests")] = False,
) -> None:
    """Compare the page of requirements with the tests. A test names the numbers that it covers."""
    path = root / PAGE
    if not path.is_file():
        raise CiError(f"{path} must hold the requirements, but there is no such file; name the repository with --root")
    page, tests = path.read_text(encoding="utf-8"), files_by_number(root)
    fresh = rendered(page, tests)
    if write:
        path.write_text(fresh, encoding="utf-8")
    missing = untested(page, tests)
    for number in missing:
        console.print(f"{PAGE}: no test names {number}")
    if fresh != page and not write:
        console.print(f"{PAGE} is older than the tests; run: python -m ci requirements --write")
    raise typer.Exit(1 if missing or (fresh != page and not write) else 0)


@app.command()
def check(root: Root = HERE) -> None:
    """Check every registration: file, line, problem, remedy."""
    repository = Repository.at(root)
    findings = sorted([*repository.registry.findings, *estimate_findings(repository.registry, repository.times)])
    for finding in findings:
        console.print(Text(str(finding)), soft_wrap=True)
    count = len(repository.registry.files)
    if findings:
        console.print(f"{len(findings)} problems in the registered tests", highlight=False)
        raise typer.Exit(1)
    console.print(f"{count} registered test files, no problems", highlight=False)


@app.command()
def suite(
    hw: Annotated[Hardware, typer.Option(help="what to run on", envvar="CI_HW")] = Hardware.CPU,
    suite: Annotated[str | None, typer.Option(help="a CPU suite; default: all", envvar="CI_SUITE")] = None,
    stage: Annotated[str | None, typer.Option(help="a CUDA stage; default: all", envvar="CI_STAGE")] = None,
    runner_config: Annotated[
        str | None, typer.Option(help="a runner of the stage; default: all", envvar="CI_RUNNER_CONFIG")
    ] = None,
    part: Annotated[str, typer.Option(help="which part of how many, such as 2/4")] = "1/1",
    nightly: Annotated[bool, typer.Option("--nightly", help="also the files of the nightly run")] = False,
    timeout_per_file: Timeout = None,
    continue_on_error: Annotated[bool, typer.Option("--continue-on-error", help="run all files in any case")] = False,
    sharing: Annotated[Sharing, typer.Option(help="which files share one pytest process")] = Sharing.ALL,
    record_times: Annotated[bool, typer.Option("--record-times", help="store the times in ci/measured.json")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="print the files and run nothing")] = False,
    json: JsonPath = JSON_PATH,
    junit: JunitPath = JUNIT_PATH,
    root: Root = HERE,
    pytest_args: Annotated[list[str] | None, typer.Argument(help="after --: options for pytest")] = None,
) -> None:
    """Run the registered tests of one suite, or of all. --hw, --stage and --runner-config say on what."""
    repository = Repository.at(root)
    selector = _selector(repository.catalogue, hw, suite, stage, runner_config, nightly)
    index, parts = _part(part)
    files = parts_of(select(repository.registry, repository.times, selector), parts)[index]
    print_plan(console, files, disabled_files(repository.registry, selector))
    if list_only:
        for file in files:
            console.print(Text(f"{file.seconds:8.2f}  {file.path}"), soft_wrap=True)
        return
    _require_places(repository.root, json, junit)
    options = SessionOptions(
        root=repository.root,
        timeout_s=timeout_per_file or repository.catalogue.timeout_per_file_s,
        stop_on_failure=not continue_on_error,
        pytest_args=tuple(pytest_args or ()),
    )
    result = run_files(files, options, repository.catalogue, sharing=sharing)
    if record_times:
        _record(repository, hw, result)
    _conclude(repository.root, result, files, json, junit)


@app.command("rerun-test")
def rerun_test(
    specs: Annotated[list[str] | None, typer.Argument(help="files, folders, bare file names or node ids")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=REPEAT_MAX, help="rounds, to hunt a flake")] = 1,
    tier: Annotated[Tier | None, typer.Option(help="only this tier of the scripts")] = None,
    request: Annotated[
        str | None, typer.Option(help="the request of a dispatched workflow, instead of specs", envvar="CI_REQUEST")
    ] = None,
    timeout_per_file: Timeout = None,
    json: JsonPath = JSON_PATH,
    junit: JunitPath = JUNIT_PATH,
    root: Root = HERE,
) -> None:
    """Run the named tests here, as /rerun-test does on a runner."""
    repository = Repository.at(root)
    asked = RerunRequest.from_json(request) if request else RerunRequest(tuple(specs or ()), repeat, tier)
    targets = resolve_specs(asked.specs, repository.registry)
    files = _selected(repository, targets)
    _require_places(repository.root, json, junit)
    options = SessionOptions(
        root=repository.root,
        timeout_s=(timeout_per_file or repository.catalogue.timeout_per_file_s) * asked.repeat,
        repeat=asked.repeat,
        nodes=_nodes(targets),
        pytest_args=("--tier", asked.tier.value) if asked.tier else (),
    )
    _conclude(repository.root, run_files(files, options, repository.catalogue), files, json, junit)


@app.command()
def comment(
    tree: Annotated[Path, typer.Option(help="a checkout of the pull request's head; it is read, never run")],
    root: Root = HERE,
) -> None:
    """Answer the comment of GITHUB_EVENT_PATH. Carries the command out, or refuses it with a reason."""
    console.print(Text(handle_comment(root.resolve(), tree.resolve())), soft_wrap=True)


@app.command()
def answer(
    results: Annotated[Path, typer.Option(help="results.json of the run, if it came that far")] = JSON_PATH,
) -> None:
    """Tell the pull request how a dispatched run ended. Reads RUN_RESULT, TICKET and PULL_REQUEST."""
    console.print(Text(answer_result(results)), soft_wrap=True)


def _selector(
    catalogue: Catalogue, hw: Hardware, suite: str | None, stage: str | None, runner: str | None, nightly: bool
) -> Selector:
    wrong = (stage or runner) if hw is Hardware.CPU else suite
    if wrong:
        raise typer.BadParameter(
            f"{wrong!r} does not go with --hw {hw}: cpu has --suite, cuda --stage and --runner-config"
        )
    known = catalogue.cpu_suites if hw is Hardware.CPU else catalogue.cuda_stages
    group = suite or stage
    if group is not None and group not in known:
        raise typer.BadParameter(f"unknown suite or stage {group!r}; use one of: {', '.join(sorted(known))}")
    if runner is not None and runner not in catalogue.runners:
        raise typer.BadParameter(f"unknown runner {runner!r}; use one of: {', '.join(sorted(catalogue.runners))}")
    return Selector(hw, group, runner, nightly, frozenset(catalogue.own_environments))


def _part(text: str) -> tuple[int, int]:
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and 1 <= int(index) <= int(parts)):
        raise typer.BadParameter(f"--part must be I/N with 1 <= I <= N, got {text!r}; write 1/1 for all")
    return int(index) - 1, int(parts)


def _selected(repository: Repository, targets: tuple[SpecTarget, ...]) -> tuple[SelectedFile, ...]:
    files = dict.fromkeys(target.file for target in targets)
    return tuple(
        SelectedFile(file.path, expected_seconds(file, file.registrations[0], repository.times), file.engine_key)
        for file in sorted(files, key=lambda file: (file.engine_key, file.path))
    )


def _nodes(targets: tuple[SpecTarget, ...]) -> dict[str, tuple[str, ...]]:
    nodes: dict[str, tuple[str, ...]] = {}
    for target in targets:
        if target.node:
            nodes[target.file.path] = (*nodes.get(target.file.path, ()), target.node)
    return nodes


def _record(repository: Repository, hardware: Hardware, result: RunResult) -> None:
    clean = [file for file in result.files if file.status is FileStatus.PASSED and file.attempts == 1]
    known = frozenset(file.path for file in repository.registry.files)
    times = repository.times.updated(hardware, ((file.path, file.seconds) for file in clean), known)
    times.save(repository.root)
    for finding in estimate_findings(repository.registry, times):
        console.print(Text(str(finding), style="yellow"), soft_wrap=True)


def _require_places(root: Path, *results: Path) -> None:
    for path in results:
        require_writable(root / path)


def _conclude(root: Path, result: RunResult, files: tuple[SelectedFile, ...], json: Path, junit: Path) -> None:
    write_json(result, root / json)
    write_junit(result, root / junit)
    print_summary(console, result, files)
    if not result.ok:
        raise typer.Exit(1)
