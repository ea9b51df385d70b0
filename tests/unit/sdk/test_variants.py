"""``NAME+SETTING=VALUE`` is an adapter with other defaults, in every place that takes an adapter's name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from scripted.cli.search import _with_classes
from scripted.core.adapters import adapter_named, variant_name
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.core.server_description import ServerDescription
from scripted.sdk.adapter import SchedulerAdapter
from scripted.search.campaign import Campaign
from scripted.search.units import SearchPlan

FIXED = str(Path(__file__).resolve().parents[3] / "examples/your_scheduler/fixed.py")


def test_every_target_has_the_other_defaults_and_says_so() -> None:
    name = variant_name(FIXED, {"blocks": "7", "block_size": "2"})
    schedule = Schedule.parse("batch_tokens=9; 1 start a prompt=4 new=1", of=name)
    assert (schedule.config.blocks, schedule.config.block_size, schedule.config.batch_tokens) == (7, 2, 9)
    assert adapter_named(name).name.endswith("examples/your_scheduler/fixed.py+blocks=7+block_size=2")
    assert str(schedule) == f"adapter={adapter_named(name).name} batch_tokens=9; 1 start a prompt=4 new=1"
    assert Schedule.parse(str(schedule)) == schedule
    assert pickle.loads(pickle.dumps(schedule.config)) == schedule.config
    report = Campaign(SearchPlan(targets=("aborted",), schedules=10, adapter=name)).run()
    assert report.schedules == 10
    assert not report.findings
    assert adapter_named(FIXED).read_config({}).blocks == 12


def test_a_variant_keeps_the_windows_and_the_server_of_its_adapter() -> None:
    fixed, server = _of_a_file(), ServerDescription[Any]()
    adapter = SchedulerAdapter(
        "described",
        config=fixed.configuration,
        machine=lambda config: fixed.new_parts(config, record=False)[0],
        limits=lambda config: fixed.limits_of(config)[0],
        can=lambda config: fixed.limits_of(config)[1],
        windows={"a window of its own": lambda run: bool(run.results)},
        server=server,
    )
    variant = adapter.variant("described+blocks=7", {"blocks": "7"})
    assert variant.read_config({}).blocks == 7
    assert variant.windows == adapter.windows
    assert "a window of its own" in variant.windows
    assert variant.server is server


def _of_a_file() -> SchedulerAdapter:
    adapter = adapter_named(FIXED)
    assert isinstance(adapter, SchedulerAdapter)
    return adapter


def test_what_is_no_setting_or_has_no_variants_is_refused() -> None:
    with pytest.raises(ScriptDefinitionError, match=r"has no setting 'block' .did you mean 'blocks"):
        adapter_named(f"{FIXED}+block=7")
    with pytest.raises(ScriptDefinitionError, match="the adapter lockstep has no variants with other defaults"):
        adapter_named("lockstep+pp_size=2")
    with pytest.raises(ScriptDefinitionError, match="takes no --scheduler; leave it out"):
        _with_classes(FIXED, {"scheduler": "module:Class", "connector": None})
