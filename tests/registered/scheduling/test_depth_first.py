"""The policy dfs-weight: prompts that share a cached prefix go one after another, the largest group first.

Goal: the queue is walked like the prefix tree, the heaviest branch first and deeper branches before requests that end,
and a request that shares nothing is not passed over forever. Method: one row, so that the order of starts is the order
of ends; a tree with a small branch that is longer than the large one. Origin: SGLang's schedule policies; atlas pull
request 911. Mutants: longest-branch-first, walk-without-a-bound.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

PAGE = 16
WALK = EngineConfig(chunked_prefill_size=64, max_running_requests=1, schedule_policy="dfs-weight")
TRUNK = [40] * PAGE
LARGE = [*TRUNK, *[41] * PAGE]
SMALL = [*TRUNK, *[42] * (3 * PAGE)]
WALKED = "requests with a match overtake one without"


@scripted(WALK)
def test_the_heaviest_branch_goes_first(t):
    yield from t.warmup_radix([*LARGE, 0])
    yield from t.warmup_radix([*SMALL, 0])
    prompts = {
        "lonely": [33] * 50,
        "trunk": [*TRUNK, 1],
        "large-1": [*LARGE, 1],
        "large-2": [*LARGE, 2],
        "small": [*SMALL, 1],
    }
    requests = {rid: t.start_req(rid=rid, prompt_ids=ids, max_new_tokens=1) for rid, ids in prompts.items()}
    ends = []
    while len(ends) < len(requests):
        yield
        ends += [rid for rid, request in requests.items() if request.finished and rid not in ends]
    assert ends[0] != "small", "the longest match went first, though more requests share another one"
    assert ends == ["large-1", "large-2", "small", "trunk", "lonely"]


@scripted(WALK, must_reach=[WALKED])
def test_a_request_that_shares_nothing_is_not_passed_over_forever(t):
    """B10: fairness has a bound under every policy."""
    yield from t.warmup_radix([*LARGE, 0])
    lonely = t.start_req(prompt_ids=[33] * 50, max_new_tokens=1)
    matching = [t.start_req(prompt_ids=[*LARGE, 50 + i], max_new_tokens=1) for i in range(OVERTAKEN_LIMIT_REQUESTS + 4)]
    yield from t.run_until_finished(lonely)
    before = sum(request.finished for request in matching)
    t.sometimes(WALKED, before > 1)
    assert before == OVERTAKEN_LIMIT_REQUESTS, f"{before} overtook it, the bound is {OVERTAKEN_LIMIT_REQUESTS}"
    yield from t.run_until_all_finished(matching)
