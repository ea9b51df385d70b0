"""The ``scripted`` command: runs one script and keeps its trace, shows traces, the gallery and the demo.

Owns the command line and the exit status: 0 for success, 1 if a script did not pass, 2 for a wrong command.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lockstep.errors import LockstepError, error_lines
from lockstep.output_files import print_every_character, require_writable, told_of, write_output
from lockstep.usage_errors import command_app
from scripted.cli.console import ADAPTER_OPTION
from scripted.cli.findings import findings_app
from scripted.cli.offers import HasDemo, HasExamples, HasGallery
from scripted.cli.search import add_commands
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import switched_on
from scripted.core.phrases import printable
from scripted.core.refusals import HarnessError, ScriptDefinitionError

if TYPE_CHECKING:
    from scripted.shell import WebShell

EXIT_FAILED = 1
EXIT_USAGE = 2
DEFAULT_PAGE = Path("out/flush_race.html")

app = command_app("scripted", "Find races in LLM schedulers, and keep them as tests.")
gallery_app = typer.Typer(
    rich_markup_mode=None, help="Races of real engines, each with the mutant that brings it back."
)
app.add_typer(gallery_app, name="gallery")
app.add_typer(findings_app, name="findings")


_STAGES = "pipeline stages: --set pp_size=N; lockstep's default: 4"
SETTING_OPTION = typer.Option(
    "--set", metavar="FIELD=VALUE", help="set a field of the adapter's configuration; can be repeated"
)


class Tier(StrEnum):
    """Where a script runs: simulated in this process, or on a real server."""

    SIM = "sim"
    SERVER = "server"


class Invariants(StrEnum):
    """When the engine's books are audited."""

    STEP = "step"
    END = "end"


TierOption = Annotated[Tier | None, typer.Option(help="where to run; default: sim, if the script supports it")]


def main() -> None:
    """Run one command; a wrong command prints one line on stderr and exits with status 2."""
    print_every_character()
    try:
        app()
    except (LockstepError, HarnessError, ScriptDefinitionError) as exc:
        _refuse(str(exc))
    except OSError as exc:
        _refuse(told_of(exc) + ("; check the path" if isinstance(exc, FileNotFoundError) else ""))


@app.command()
def run(
    spec: Annotated[str, typer.Argument(metavar="FILE::NAME", help="a script decorated with @scripted(config)")],
    tier: TierOption = None,
    arg: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="a parameter of the script")] = None,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch on a bug of the gallery")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="write every step, for `scripted view`")] = None,
    invariants: Annotated[
        Invariants | None,
        typer.Option(help="when to check invariants; default: after each step, with a mutant at the end"),
    ] = None,
) -> None:
    """Run one script once. Print how it ended, or the report of its failure."""
    from scripted.cli.single_run import show_run

    require_writable("--trace", trace)
    every_step = (invariants or (Invariants.END if mutant else Invariants.STEP)) is Invariants.STEP
    if not show_run(spec, tier=tier, given=arg or (), mutant=mutant, every_step=every_step, trace=trace):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def vet(
    spec: Annotated[str, typer.Argument(metavar="FILE[::NAME]", help="scripts decorated with @scripted(config)")],
    arg: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="a parameter of the script")] = None,
) -> None:
    """Show which bugs of the gallery a script notices.

    Each assertion is also negated. The exit status is 1 if a script notices only what an empty script notices, or if
    one of its assertions can never fail.
    """
    from scripted.cli.single_run import vet as vet_scripts

    if not vet_scripts(spec, arg or ()):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def view(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE", help="one run, or several to compare")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="where to write the page; default: beside the trace"),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a trace for ui.perfetto.dev instead of a page")
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="open the page at this step; a long run shows the steps around it")
    ] = None,
) -> None:
    """Show runs as one HTML page, or as a Perfetto trace. The page needs no other file."""
    from scripted.report.timeline import render_timeline, to_perfetto
    from scripted.report.trace import read_trace

    runs = [read_trace(path) for path in traces]
    if perfetto is None:
        written = output or traces[0].with_suffix(".html")
        try:
            page = render_timeline(runs, step=step)
        except ValueError as exc:
            _refuse(f"--{exc}")
        write_output(written, page)
    else:
        if step is not None:
            _refuse("--step is for the page, and the Perfetto trace has all steps; leave out one of the two")
        if len(runs) > 1 or output is not None:
            _refuse("--perfetto takes one trace and no --output; give the page and the Perfetto trace a command each")
        written = perfetto
        write_output(written, to_perfetto(runs[0]))
    shown = [f"{printable(trace.header.title)} ({len(trace.log.steps)} steps)" for trace in runs]
    typer.echo(f"{written}: {', '.join(shown)}")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="name of the test, in lower case: flush_meets_abort")],
    folder: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="folder of the test")] = Path(
        "tests/registered"
    ),
    pp_size: Annotated[int | None, typer.Option(help=_STAGES)] = None,
    setting: Annotated[list[str] | None, SETTING_OPTION] = None,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Write a race test that passes. Prints the command that runs it; change it into your own."""
    from scripted.cli.new import new_test, write_lint_rules
    from scripted.report.new_files import command_of

    settings = _settings({"pp_size": pp_size}, setting)
    path = new_test(name, folder=folder, settings=settings, adapter=adapter)
    typer.echo(f"{path} is written; run it:\n{command_of(path)}")
    if (rules := write_lint_rules(folder)) is not None:
        typer.echo(f"{rules} is written: ruff's rules that find tests of nothing")
    typer.echo(f"and see what it would notice:\nscripted vet {path}")


@app.command()
def shell(
    pp_size: Annotated[int | None, typer.Option(help=_STAGES)] = None,
    async_depth: Annotated[
        int | None,
        typer.Option(help="microbatches in flight beyond one per stage: --set pp_async_depth=N; lockstep's default: 2"),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(help="prompt tokens per chunk: --set chunked_prefill_size=N; lockstep's default: 64")
    ] = None,
    setting: Annotated[list[str] | None, SETTING_OPTION] = None,
    tier: Annotated[Tier, typer.Option(help="sim only: a saved session runs in both tiers")] = Tier.SIM,
    mutant: Annotated[str | None, typer.Option(metavar="NAME", help="switch on a bug of the adapter")] = None,
    web: Annotated[
        bool, typer.Option("--web", help="open a page for the browser, with the timeline beside the shell")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the page; 0 picks a free one")] = 0,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Debug a scheduler by hand, step by step. Also reads a session: scripted shell < session.txt."""
    from scripted.cli.single_run import console
    from scripted.shell import DebugSession, FilePrompt, TerminalPrompt, WebPrompt, WebShell

    if tier is not Tier.SIM:
        _refuse("the shell runs in the sim tier only; save the session and run its file with pytest --tier server")
    known = adapter_named(adapter)
    with switched_on(known, mutant):
        pass  # an unknown name is refused before anything runs
    given = {"pp_size": pp_size, "pp_async_depth": async_depth, "chunked_prefill_size": chunk}
    examples = known.example_settings if isinstance(known, HasExamples) else {}
    config = known.read_config({**examples, **_settings(given, setting)})
    if web:
        page = WebPrompt()
        with WebShell(DebugSession(known, config, page, page.console, mutant=mutant), page, port) as shell:
            _serve_page(shell)
        return
    prompt = TerminalPrompt() if sys.stdin.isatty() else FilePrompt(sys.stdin, typer.echo)
    session = DebugSession(known, config, prompt, console, mutant=mutant)
    if not session.run() or (session.refused and isinstance(prompt, FilePrompt)):
        raise typer.Exit(EXIT_FAILED)


def _serve_page(shell: WebShell) -> None:
    from scripted.cli.single_run import console

    console.print(
        f"{shell.url}\nopen it in a browser of this machine; quit there or Ctrl-C here ends it", soft_wrap=True
    )
    shell.session.run()
    shell.prompt.end()


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="where to write the timeline page")
    ] = DEFAULT_PAGE,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Show the flush race on four real stage processes. Runs with the bug switched on, and without it."""
    known = adapter_named(adapter)
    if not isinstance(known, HasDemo):
        _refuse(f"the adapter {adapter} has no demo; leave --adapter out")
    require_writable("--output", output)
    if not known.run_demo(output):
        raise typer.Exit(EXIT_FAILED)


@gallery_app.callback(invoke_without_command=True)
def gallery(context: typer.Context) -> None:
    """List the gallery, when no command is given."""
    if context.invoked_subcommand is None:
        list_mutants()


@gallery_app.command("list")
def list_mutants(adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER) -> None:
    """List every mutant with its bug, origin and test."""
    for mutant in _gallery_of(adapter).mutants.values():
        typer.echo(f"{mutant.name}\n  bug:    {mutant.bug}\n  origin: {mutant.origin}")
        typer.echo(f"  dies:   {mutant.signature}\n  test:   {mutant.test}")


@gallery_app.command("run")
def run_mutants(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a mutant of the gallery")] = None,
    everything: Annotated[bool, typer.Option("--all", help="every mutant")] = False,
    tier: Annotated[Tier | None, typer.Option(help="default: every tier that the test names")] = None,
    adapter: Annotated[str, ADAPTER_OPTION] = DEFAULT_ADAPTER,
) -> None:
    """Run a mutant's test without and with the mutant. It must pass without it, and fail with it as the bug did."""
    from scripted.cli.single_run import show_mutant

    if (name is None) != everything:
        _refuse("give the name of one mutant, or --all; `scripted gallery list` shows them")
    gallery = _gallery_of(adapter)
    chosen = tuple(gallery.mutants.values()) if name is None else (gallery.mutant_named(name),)
    caught = [show_mutant(mutant, tier, adapter) for mutant in chosen]
    if not all(caught):
        raise typer.Exit(EXIT_FAILED)


def _gallery_of(adapter: str) -> HasGallery:
    known = adapter_named(adapter)
    if not isinstance(known, HasGallery):
        _refuse(f"the adapter {adapter} has no gallery; docs/adapter_sdk.md says how to give it mutants")
    return known


def _settings(options: Mapping[str, int | None], pairs: Sequence[str] | None) -> dict[str, str]:
    """Return the settings from ``--set``, and from options that abbreviate one."""
    settings = {name: str(value) for name, value in options.items() if value is not None}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator:
            _refuse(f"--set takes FIELD=VALUE, got {pair!r}; write --set page_size=4")
        settings[name] = value
    return settings


add_commands(app, gallery_app)


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(error_lines("scripted", why))
    raise SystemExit(EXIT_USAGE)
