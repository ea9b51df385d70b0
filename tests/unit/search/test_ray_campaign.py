"""A campaign without Ray, or without a cluster that answers, says what is missing. That on Ray is in ``tests/ray``."""

from __future__ import annotations

import sys

import pytest

from scripted.core.refusals import ScriptDefinitionError
from scripted.search.campaign import Campaign
from scripted.search.units import SearchPlan

TARGETS = ("chunked-alone", "warm-prefix")


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ScriptDefinitionError, match=r"needs Ray, which is not installed; install lockstep-engine\[ray\]"
    ):
        Campaign(SearchPlan(targets=TARGETS, ray="local")).run()


@pytest.mark.usefixtures("restores_signal_handlers")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_where_no_cluster_answers_is_refused_at_once(address: str) -> None:
    pytest.importorskip("ray", reason="Ray is an optional extra")
    with pytest.raises(ScriptDefinitionError, match=f"--ray must be .* a Ray cluster that answers, got '{address}'"):
        Campaign(SearchPlan(targets=TARGETS, ray=address)).run()
