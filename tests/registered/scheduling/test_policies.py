"""The order in which waiting requests are served.

Goal: first come first served, longest prefix match and priority order as named, with ties in order of arrival. Method:
one row, so that the order of starts is the order of ends; a queue that only the policy can reorder. Origin: B10, B17.
Mutants: longest-prefix-is-not-asked, priority-is-upside-down, newest-goes-first, the-unmatched-starve,
low-priority-starves, a-backlog-overtakes-the-urgent.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

CHUNK = 64
FCFS = EngineConfig(chunked_prefill_size=CHUNK, max_running_requests=1)
LPM = EngineConfig(chunked_prefill_size=CHUNK, max_running_requests=1, schedule_policy="lpm")
PRIORITY = EngineConfig(chunked_prefill_size=CHUNK, max_running_requests=1, schedule_policy="priority")


@scripted(FCFS, tiers=("sim",))
def test_first_come_first_served(t):
    requests = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=2, priority=i) for i in range(4)]
    ends = yield from _order_of_ends(t, requests)
    assert ends == [0, 1, 2, 3]


@scripted(LPM)
def test_longest_prefix_match(t):
    prefix = list(range(40, 40 + 48))
    yield from t.warmup_radix(prefix)
    prompts = [[33] * 50, [34] * 50, [*prefix, 35], [*prefix[:16], 36]]
    requests = [t.start_req(prompt_ids=prompt, max_new_tokens=2) for prompt in prompts]
    ends = yield from _order_of_ends(t, requests)
    assert ends[0] == 2, "the cached prompt had to wait"
    assert ends == [2, 3, 0, 1]


@scripted(LPM, must_reach=["requests with a match overtake one without"])
def test_a_request_without_a_match_is_not_overtaken_forever(t):
    """B10: fairness has a bound under every policy."""
    prefix = list(range(40, 40 + 48))
    yield from t.warmup_radix(prefix)
    lonely = t.start_req(prompt_ids=[33] * 50, max_new_tokens=1)
    matching = [
        t.start_req(prompt_ids=[*prefix, 50 + i], max_new_tokens=1) for i in range(OVERTAKEN_LIMIT_REQUESTS + 4)
    ]
    yield from t.run_until_finished(lonely)
    before = sum(request.finished for request in matching)
    t.sometimes("requests with a match overtake one without", before > 1)
    assert before == OVERTAKEN_LIMIT_REQUESTS, f"{before} overtook it, the bound is {OVERTAKEN_LIMIT_REQUESTS}"
    yield from t.run_until_all_finished(matching)


@scripted(PRIORITY, must_reach=["urgent requests overtake one that is not"])
def test_a_request_of_low_priority_is_not_overtaken_forever(t):
    """B10: the one that has waited longest takes its turn."""
    patient = t.start_req(prompt_len=10, max_new_tokens=1)
    urgent = [t.start_req(prompt_len=10, max_new_tokens=1, priority=1) for _ in range(OVERTAKEN_LIMIT_REQUESTS + 4)]
    yield from t.run_until_finished(patient)
    before = sum(request.finished for request in urgent)
    t.sometimes("urgent requests overtake one that is not", before > 1)
    assert before == OVERTAKEN_LIMIT_REQUESTS, f"{before} overtook it, the bound is {OVERTAKEN_LIMIT_REQUESTS}"
    yield from t.run_until_all_finished(urgent)


@scripted(PRIORITY, tiers=("sim",))
def test_a_backlog_of_low_priority_takes_one_turn_at_a_time(t):
    """B10, B17: urgent requests stay urgent behind any backlog."""
    patient = [t.start_req(prompt_len=10, max_new_tokens=1) for _ in range(5)]
    urgent = [t.start_req(prompt_len=10, max_new_tokens=1, priority=1) for _ in range(3 * OVERTAKEN_LIMIT_REQUESTS)]
    ends = yield from _order_of_ends(t, [*patient, *urgent])
    turns = [place for place, end in enumerate(ends) if end < len(patient)]
    every = OVERTAKEN_LIMIT_REQUESTS + 1
    assert turns[:3] == [every - 1, 2 * every - 1, 3 * every - 1], f"low priority was served at places {turns}"
    assert [end for end in ends if end < len(patient)] == list(range(len(patient)))


@scripted(PRIORITY, tiers=("sim",))
def test_highest_priority_first(t):
    requests = [t.start_req(prompt_len=10, max_new_tokens=2, priority=priority) for priority in (0, -1, 3, 3)]
    ends = yield from _order_of_ends(t, requests)
    assert ends[0] == 2, "the urgent request had to wait"
    assert ends == [2, 3, 0, 1]


def _order_of_ends(t, requests):
    ends = []
    while len(ends) < len(requests):
        yield
        ends += [i for i, r in enumerate(requests) if r.finished and i not in ends]
    return ends
