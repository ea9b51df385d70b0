"""Without vLLM and SGLang: nothing imports them, and each adapter says what is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.adapters import adapter_named
from scripted.core.refusals import ScriptDefinitionError

REPOSITORY = Path(__file__).parents[3]
INSTALLED = importlib.util.find_spec("vllm") is not None
without_vllm = pytest.mark.skipif(INSTALLED, reason="vLLM is installed here")


@without_vllm
def test_the_adapter_says_what_is_missing() -> None:
    with pytest.raises(ScriptDefinitionError, match=r"needs an installed vLLM: .*lockstep-engine\[vllm\]"):
        adapter_named("vllm")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")
def test_the_adapter_of_sglang_says_what_is_missing() -> None:
    with pytest.raises(ScriptDefinitionError, match="needs an installed SGLang; `make sglang`"):
        adapter_named("sglang")


def test_only_a_adapter_with_versions_can_be_asked_for_them() -> None:
    done = CliRunner().invoke(app, ["explore", "--version-check"])
    assert done.exit_code != 0
    assert "no versions to check" in str(done.exception or done.output)


def test_the_search_of_other_adapters_does_not_import_vllm() -> None:
    program = (
        "import sys, scripted.cli, scripted.search.campaign, scripted.sdk, scripted.core.adapters as named; "
        "named.adapter_named('lockstep'); "
        "print([name for name in sys.modules if name.split('.')[0] in ('sglang', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
