"""The server that a check asks, as the check's command line names it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def asked_server(does: str | None, arguments: Sequence[str] | None = None) -> tuple[str, str]:
    """The server's URL and its model's name. A check reads them before it imports its client: usage needs no client."""
    parser = argparse.ArgumentParser(description=does)
    parser.add_argument("url", help="address of the server, such as http://127.0.0.1:30000")
    parser.add_argument("model", help="name of the model that it serves")
    asked = parser.parse_args(arguments)
    return asked.url, asked.model
