"""``engine stage``: one stage of a server on this machine, until the server ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.cli.flags import refuse_bad_configuration
from engine.core.errors import ConfigError
from engine.process.links.endpoint import parse_endpoint
from engine.process.links.secret import read_secret
from engine.server.placement.messages import StageOrder

DEFAULT_TIMEOUT_S = 600.0
MAX_NODE_CHARS = 80


def stage(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="the server's --stage-listen address")],
    secret_file: Annotated[
        Path, typer.Option(metavar="FILE", help="file with the run's secret; /dev/stdin is allowed")
    ],
    number: Annotated[
        int | None, typer.Option("--stage", min=0, help="number of the stage to run; unset: the first free one")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="address to which the previous stage connects; unset: any free port of the interface that reaches the "
            "server",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="address to give to the previous stage instead, behind a NAT or relay"),
    ] = None,
    model: Annotated[str, typer.Option(help="path of the checkpoint on this machine; unset: as on the server")] = "",
    node: Annotated[
        str, typer.Option(help="this machine's name in errors, including those that clients see; unset: its host name")
    ] = "",
    timeout_s: Annotated[
        float, typer.Option(min=0, help="maximum seconds to wait for a server that does not listen yet")
    ] = DEFAULT_TIMEOUT_S,
) -> None:
    """Run one stage of a server on this machine. The server was started with `engine serve --placement join`."""
    from engine.server.launch.agent import run_agent  # slow imports, which --help and wrong flags do not need

    with refuse_bad_configuration():
        _check_node(node)
        secret = read_secret(secret_file)
        order = StageOrder(
            join=parse_endpoint(join, "--join"),
            stage=number,
            listen=parse_endpoint(listen, "--listen") if listen else None,
            advertise=parse_endpoint(advertise, "--advertise") if advertise else None,
            model=model,
            node=node,
            timeout_s=timeout_s,
        )
    raise typer.Exit(run_agent(order, secret))


def _check_node(node: str) -> None:
    if not node.isprintable() or ":" in node or len(node) > MAX_NODE_CHARS:
        raise ConfigError(
            f"--node must be up to {MAX_NODE_CHARS} printable characters without a colon, "
            f"got {node[:MAX_NODE_CHARS]!r}; give a short name"
        )
