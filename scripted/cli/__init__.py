"""The ``scripted`` command."""

from scripted.cli.main import app, main

__all__ = ["app", "main"]
