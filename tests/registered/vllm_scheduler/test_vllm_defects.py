"""Each known defect of the installed vLLM: every schedule of its row fails, and passes with the row's fix.

Goal: a row says what is there, and its fix mends it and nothing less. Method: each row's schedules without and with
the edits of its fix. Mutant: each row's fix taken away is the release itself, in which the schedules fail.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.versions import installed_version

from scripted.core.defects import Defect
from tests.defect_rows import rows_of, unlike

register_cpu_ci(est_time=15, suite="vllm-cpu")


@pytest.mark.parametrize("defect", rows_of("vllm", installed_version()), ids=lambda defect: defect.id)
def test_a_defect_is_there_and_its_fix_mends_it(defect: Defect) -> None:
    assert unlike(defect, "vllm") == []
