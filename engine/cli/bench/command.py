"""``engine bench``: from flags to a benchmark's tables and file, and the comparison of two of them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.cli.bench.goodput import find_goodput, goodput_table
from engine.cli.bench.plan import Arrivals, BenchPlan
from engine.cli.bench.results import BenchResult, comparison_table, read_result, result_tables, write_result
from engine.cli.bench.run import BenchError, run_bench
from engine.cli.flags import refuse_bad_configuration, warn_of_unread_variables
from lockstep.errors import error_lines
from lockstep.output_files import require_writable, write_output

EXIT_FAILED = 1
DEFAULT_URL = "http://127.0.0.1:30000"
DEFAULT_CLIENTS = 8

bench_app = typer.Typer(
    help="Load-test an OpenAI-compatible server, and show what clients see.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@bench_app.callback()
def bench(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="the server")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="model name; unset: the first one that the server lists")] = "",
    chat: Annotated[bool, typer.Option(help="use /v1/chat/completions instead of /v1/completions")] = False,
    arrivals: Annotated[
        Arrivals | None, typer.Option(help="when requests arrive; unset: poisson with --rate, else closed")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="requests, or conversations, per second, for poisson and constant arrivals")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help=f"concurrent clients, for closed arrivals; unset: {DEFAULT_CLIENTS}")
    ] = None,
    requests: Annotated[int, typer.Option(help="measured requests")] = 100,
    warmup: Annotated[int, typer.Option(help="unmeasured requests before the measured ones")] = 4,
    prefix_words: Annotated[int, typer.Option(help="words of the common prefix of all synthetic prompts")] = 0,
    input_words: Annotated[int, typer.Option(help="words of each synthetic prompt after the prefix")] = 128,
    output_tokens: Annotated[int, typer.Option(help="output tokens of each synthetic request")] = 128,
    turns: Annotated[
        int, typer.Option(help="requests in a conversation, each with the whole conversation before it")
    ] = 1,
    think_s: Annotated[float, typer.Option(help="seconds between a reply and the next turn")] = 0.0,
    long_percent: Annotated[float, typer.Option(help="percentage of first prompts that have --long-words")] = 0.0,
    long_words: Annotated[int, typer.Option(help="words of the long prompts, instead of --input-words")] = 0,
    slo_first_ms: Annotated[
        float | None, typer.Option(help="limit in milliseconds for a request's first token to count as good")
    ] = None,
    slo_gap_ms: Annotated[
        float | None, typer.Option(help="limit in milliseconds for each gap between its tokens")
    ] = None,
    goodput: Annotated[
        bool,
        typer.Option(
            "--goodput", help="find the highest rate, from --rate on, at which 99 % of requests keep the limits"
        ),
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(help="send ignore_eos, so that all replies have full length")] = True,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="seed of prompts and of poisson arrivals")] = 0,
    recording: Annotated[
        str | None, typer.Option(help='file with lines like {"prompt": "..", "max_tokens": 9, "at_s": 0.5}')
    ] = None,
    request_timeout_s: Annotated[float, typer.Option(help="maximum seconds without data from the server")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="ENGINE_API_KEY", help="bearer key to send")] = None,
    json: Annotated[
        Path | None, typer.Option(help="file to which plan, versions, numbers and records are also written")
    ] = None,
) -> None:
    """Load-test an OpenAI-compatible server, and show what clients see."""
    if context.invoked_subcommand is not None:
        return
    warn_of_unread_variables()
    if arrivals is None:
        arrivals = Arrivals.CLOSED if rate is None else Arrivals.POISSON
    with refuse_bad_configuration():
        require_writable("--json", json)
        plan = BenchPlan(
            url=url,
            model=model,
            chat=chat,
            arrivals=arrivals,
            rate_per_s=rate,
            clients=DEFAULT_CLIENTS if clients is None and arrivals is Arrivals.CLOSED else clients,
            requests=requests,
            warmup=warmup,
            prefix_words=prefix_words,
            input_words=input_words,
            output_tokens=output_tokens,
            turns=turns,
            think_s=think_s,
            long_words=long_words,
            long_percent=long_percent,
            slo_first_ms=slo_first_ms,
            slo_gap_ms=slo_gap_ms,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            recording=recording,
            request_timeout_s=request_timeout_s,
        )
        if goodput:
            _search(plan, api_key, json)
            return
        result = _run(plan, api_key)
    _show(result, json)


@bench_app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="a result of engine bench --json")],
    second: Annotated[Path, typer.Argument(help="another one")],
) -> None:
    """Show two results side by side, with the change between them."""
    with refuse_bad_configuration():
        table = comparison_table(read_result(first), read_result(second), (first.name, second.name))
    Console().print(table)


def _run(plan: BenchPlan, api_key: str | None) -> BenchResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # On stderr, so that a pipe gets only the tables.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=plan.requests)
        try:
            return asyncio.run(run_bench(plan, api_key, lambda _: progress.advance(task)))
        except BenchError as exc:
            sys.stderr.write(error_lines("error", str(exc)))
            raise typer.Exit(EXIT_FAILED) from exc


def _search(plan: BenchPlan, api_key: str | None, json: Path | None) -> None:
    found = find_goodput(plan, lambda tried: _run(tried, api_key))
    Console().print(goodput_table(found))
    if json is not None:
        write_output(json, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if not found.goodput_per_s:
        raise typer.Exit(EXIT_FAILED)


def _show(result: BenchResult, json: Path | None) -> None:
    console = Console()
    for table in result_tables(result):
        console.print(table)
    if json is not None:
        write_result(result, json)
    if result.summary.failed:
        raise typer.Exit(EXIT_FAILED)
