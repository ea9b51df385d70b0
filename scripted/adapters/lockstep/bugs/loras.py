"""Mutants of LoRA adapters: whose KV is shared, which LoRA makes room, when one is unloaded, who waits for one."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["LORAS"]

_TESTS: Final = "tests/registered/loras"


LORAS: Final = (
    Mutant(
        name="prefix-shared-between-loras",
        origin="vLLM issue 3264 and pull request 8240",
        bug="a prefix is found by its tokens alone, so a request reads KV that another LoRA has computed",
        signature="it hit KV that the model itself had computed",
        test=f"{_TESTS}/test_loras_and_prefixes.py::test_equal_prompts_of_two_loras_share_nothing",
        target="engine.memory.kv:KVMemory.admit",
        cut="self.tree.match(prefix, lora)",
        becomes="self.tree.match(prefix)",
    ),
    Mutant(
        name="lora-known-by-its-name",
        origin="vLLM issues 30931 and 42125",
        bug="a LoRA that is loaded again under its old name is taken for the old one, and finds KV of its weights",
        signature="it hit KV of the weights that were unloaded",
        test=f"{_TESTS}/test_loras_and_prefixes.py::test_a_name_with_other_weights_begins_anew",
        target="engine.scheduler.loras:Loras._load",
        cut="version = self._counters.lora_loads + 1",
        becomes=(
            'versions = self.__dict__.setdefault("versions", {})\n'
            "    version = versions.setdefault(lora.name, self._counters.lora_loads + 1)"
        ),
    ),
    Mutant(
        name="unload-ignores-what-is-in-flight",
        origin="SGLang issue 8162 and Dynamo pull request 11520",
        bug="an unload looks at the queues only, and drops a LoRA whose last chunk is in flight",
        signature="the LoRA was unloaded under a request in flight",
        test=f"{_TESTS}/test_loras_unloaded.py::test_an_unload_sees_what_is_in_no_queue",
        target="engine.scheduler.loras:Loras._users_of",
        cut="self._books.live()",
        becomes="(*self._books.waiting, *self._books.running.values())",
    ),
    Mutant(
        name="eviction-ignores-a-split-prompt",
        origin="SGLang issue 23141, pull requests 25078 and 25567",
        bug="the LoRAs in use are those of decoding requests, so that of a partly prefilled prompt makes room",
        signature="the LoRA of a split prompt made room",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_split_prompt_keeps_its_lora",
        target="engine.scheduler.loras:Loras._place_for",
        cut="self._books.live() if request.lease is not None",
        becomes="self._books.running.values()",
    ),
    Mutant(
        name="lora-waits-for-ever",
        origin="SGLang pull request 15129",
        bug="requests of resident LoRAs start before one that lacks its LoRA without a bound",
        signature="it starved",
        test=f"{_TESTS}/test_loras_in_turn.py::test_passing_over_a_request_without_lora_has_a_bound",
        target="engine.scheduler.planner:Planner._admit",
        cut="other.overtaken += 1",
        becomes="other.overtaken += not other.lacks_lora",
    ),
    Mutant(
        name="lora-blocks-the-queue",
        origin="vLLM pull request 15422, SGLang pull request 14795",
        bug="a request that waits for a place for its LoRA stops all that come after it",
        signature="it held up a request that needs no LoRA",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_request_without_lora_holds_no_other_up",
        target="engine.scheduler.planner:Planner._admissions",
        cut="continue",
        becomes="return",
    ),
    Mutant(
        name="failed-change-of-loras-is-booked",
        origin="the other side: stages change together or not at all",
        bug="a load that failed, or an unload, is booked: the stages still hold the LoRA that was to be dropped",
        signature="the LoRA that was to make room is lost",
        test=f"{_TESTS}/test_loras_in_turn.py::test_a_load_that_fails_changes_nothing",
        target="engine.scheduler.loras:Loras.finish",
        cut=(
            "lora.leaving = False\n"
            "        if launched.victim is not None:\n"
            "            launched.victim.version = change.drop"
        ),
        becomes="del self.known[lora.name]",
    ),
    Mutant(
        name="unload-waits-for-ever",
        origin="SGLang issue 36894: an unload that never returns",
        bug="an unload that waits for requests never gives up",
        signature="it waited beyond its time",
        test=f"{_TESTS}/test_loras_unloaded.py::test_an_unload_gives_up_in_time",
        target="engine.scheduler.loras:Loras.answer_due",
        cut=" and now < self.deadline",
    ),
)
