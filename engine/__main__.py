"""``python -m engine`` is the ``engine`` command."""

from __future__ import annotations

from engine.cli import main

main()
