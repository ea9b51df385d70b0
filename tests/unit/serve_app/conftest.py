"""The routes of one engine, by their methods' public ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.frontend.app import build_app
