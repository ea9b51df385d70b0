"""``engine route``: one address in front of several ``engine serve`` processes."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from engine.cli.flags import refuse_bad_configuration, warn_of_unread_variables
from engine.core.routing.placement import Rules
from engine.process.settings_sources import read_settings

DEFAULT_PORT = 8000
RULES = Rules()


class Policy(StrEnum):
    """The rule by which an engine is chosen."""

    PREFIX = "prefix"
    ROUND_ROBIN = "round-robin"


def route(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="URLs of the engines, as http://HOST:PORT")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = DEFAULT_PORT,
    policy: Annotated[Policy, typer.Option(help="rule by which an engine is chosen")] = Policy.PREFIX,
    balance_percent: Annotated[
        int,
        typer.Option(min=100, help="maximum load, in percent of the mean, at which an engine is chosen for a prefix"),
    ] = RULES.balance_percent,
    balance_slack: Annotated[
        int, typer.Option(min=0, help="the same limit in requests above the mean; the larger limit applies")
    ] = RULES.balance_slack,
    patience_s: Annotated[
        float, typer.Option(min=0.1, help="seconds that each engine has to answer its part of a call to all engines")
    ] = 10.0,
    update_patience_s: Annotated[
        float, typer.Option(min=0.1, help="seconds that each engine has for a weight update")
    ] = 600.0,
    period_s: Annotated[float, typer.Option(min=0.05, help="seconds between two checks of each engine")] = 1.0,
) -> None:
    """Route requests to engines by their cached prefixes. Keys and limits come from the environment, as for serve."""
    from engine.cluster.router.engines import RouterPlan
    from engine.cluster.router.process import run_router  # slow imports, which --help and wrong flags do not need

    warn_of_unread_variables()
    with refuse_bad_configuration():
        settings = read_settings({"host": host, "port": port}, os.environ)
        rules = Rules(balance_percent=balance_percent, balance_slack=balance_slack, by_prefix=policy is Policy.PREFIX)
        plan = RouterPlan(
            urls=tuple(url.rstrip("/") for url in urls),
            rules=rules,
            period_s=period_s,
            answer_s=patience_s,
            change_s=update_patience_s,
        )
    raise typer.Exit(run_router(settings, plan))
