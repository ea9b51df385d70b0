"""``engine chat``: a chat with a server that runs, or with one that is started for it and ends with it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.chat import ChatError, Conversation, Terminal
from engine.cli.flags import refuse_bad_configuration, warn_of_unread_variables
from engine.errors import StartupError
from engine.launch.preload import PreloadedParent
from engine.settings import ServerSettings
from engine.settings_sources import read_settings

__all__ = ["chat"]

EXIT_FAILED = 1
END_BOUND_S = 5.0


def chat(
    url: Annotated[str | None, typer.Option(help="a server of the OpenAI protocol; unset: one is started")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="its name at the URL, or what to serve; unset: the first listed, or as configured"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="file that sets fields of a server that is started")] = None,
    system: Annotated[str, typer.Option(help="system message")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="most tokens of an answer; unset: the model's room")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.7,
    api_key: Annotated[str | None, typer.Option(envvar="ENGINE_API_KEY", help="bearer key to send")] = None,
) -> None:
    """Talk to a model in the terminal. With no arguments: to the embedded model, on a server of its own."""
    warn_of_unread_variables()
    console = Console(highlight=False)
    try:
        with _server(url, model, config, console) as (server_url, name, own_key):
            conversation = Conversation.open(
                server_url,
                api_key or own_key,
                model=name,
                system=system,
                max_tokens=max_tokens,
                temperature=temperature,
            )
            try:
                Terminal(conversation, console).run()
            finally:
                conversation.close()
    except (ChatError, StartupError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        raise typer.Exit(EXIT_FAILED) from exc


@contextmanager
def _server(
    url: str | None, model: str | None, config: Path | None, console: Console
) -> Iterator[tuple[str, str, str | None]]:
    """A server's URL, the model to ask it for and its key: the one named, or one that lives as long as the block."""
    if url is not None:
        yield url, model or "", None
        return
    with refuse_bad_configuration():
        settings = read_settings({"model": model, "port": "0", "host": "127.0.0.1"}, os.environ, config)
    with _started(settings, console) as started:
        # What its clients call the model is the server's to say.
        yield started, "", None if settings.api_key is None else settings.api_key.get_secret_value()


@contextmanager
def _started(settings: ServerSettings, console: Console) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="engine-chat-") as folder, PreloadedParent.start() as parent:
        with console.status(f"starting {settings.model}"):
            process = parent.serve(settings, Path(folder), Path(folder) / "log")
            url = process.wait_ready(settings.start_timeout_s).base_url
        try:
            yield url
        finally:
            process.terminate()
            process.wait(END_BOUND_S)
            process.close()
