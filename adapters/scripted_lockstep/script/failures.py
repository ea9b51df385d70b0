"""The errors of scripts on the engine, with the configuration on which they happened."""

from __future__ import annotations

import msgspec

from engine.core.config import EngineConfig
from scripted.core.base_adapter import config_text
from scripted.report.failure import FailureReport, ScriptError
from scripted.report.failure import error_of as error_of_report
from scripted_lockstep.configs import config_values


def error_of(report: FailureReport, config: EngineConfig, mutant: str | None) -> ScriptError:
    """Make the error of a report, with the configuration of the run."""
    return error_of_report(msgspec.structs.replace(report, config=config_text(config_values(config)), mutant=mutant))
