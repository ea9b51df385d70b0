"""Errors for wrong arguments of a command: rule and remedy in our wording, not the library's."""

from __future__ import annotations

from typing import Any, Final

import typer.core
from pydantic import ValidationError

from lockstep.broken_rules import broken_rule

# Keyed by a part of the library's own sentence.
_REMEDIES: Final = {
    "Got unexpected extra argument": "a flag takes one value: give the flag again for another",
    "does not take a value": "a switch is --name or --no-name",
    "No such command": "--help lists the commands",
}


class WordedGroup(typer.core.TyperGroup):
    """A group of commands whose errors all have a remedy."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Each version of the library has another class of errors."""
        try:
            return super().invoke(ctx)
        except Exception as exc:
            if hasattr(exc, "format_message"):
                exc.__dict__["message"] = _worded(exc)
            raise


def command_app(name: str, about: str) -> typer.Typer:
    """Make the application of a command with subcommands."""
    return typer.Typer(
        name=name,
        cls=WordedGroup,
        help=about,
        no_args_is_help=True,
        # Plain text, because boxes would cut long flags in a narrow terminal.
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def _worded(exc: Any) -> str:
    if isinstance(exc.__cause__, ValidationError):
        error = exc.__cause__.errors()[0]
        rule = broken_rule(error["type"], error.get("ctx"))
        return rule if error["type"] == "value_error" else f"{rule}, got {error['input']!r}"
    message = str(exc.message)
    remedy = next(
        (remedy for said, remedy in _REMEDIES.items() if said in message and "Did you mean" not in message), None
    )
    return message if remedy is None else f"{message.rstrip('.')}; {remedy}"
