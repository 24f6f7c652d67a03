"""Policies: who goes first, who gives way, and one of your own."""

from __future__ import annotations

import pytest

from cbasync.config import EngineConfig
from cbasync.devices import SimDevice
from cbasync.engine import AsyncEngine
from cbasync.llm import LLM
from cbasync.mutants import EVEN_COSTS
from cbasync.policy import POLICIES, Policy, make_policy
from cbasync.request import Request, RequestStatus
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput

# name, prompt length, priority: in the order of submission.
WORKLOAD = [("a", 6, 2), ("b", 2, 5), ("c", 4, 0), ("d", 2, 2)]
ORDER = {
    "first-come": ["a", "b", "c", "d"],
    "priority": ["c", "a", "d", "b"],
    "shortest-prompt": ["b", "d", "c", "a"],
}


class LongestLast:
    """One of your own: requests that want many tokens let the others pass."""

    name = "longest-last"

    def key(self, request: Request) -> tuple[int, int]:
        return (request.params.max_tokens, request.arrival)


def scheduler(policy: str | Policy, **changes: int) -> Scheduler:
    values = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 16, "max_model_len": 64}
    return Scheduler(EngineConfig(**(values | changes)), policy)  # type: ignore[arg-type]


def request(
    name: str, prompt: int, priority: int = 0, arrival: int = 0, max_tokens: int = 8
) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    ids = list(range(1, prompt + 1))
    return Request(name, ids, params, priority=priority, arrival=arrival)


def names(output: SchedulerOutput | None) -> list[str]:
    assert output is not None
    return [o.request.request_id for o in output.occurrences]


def fill(s: Scheduler) -> None:
    for arrival, (name, prompt, priority) in enumerate(WORKLOAD):
        s.add(request(name, prompt, priority, arrival))


def test_every_policy_is_tried_here() -> None:
    assert set(ORDER) == set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_requests_enter_in_the_order_of_the_policy(policy: str) -> None:
    s = scheduler(policy)
    fill(s)
    assert names(s.schedule()) == ORDER[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_when_seats_are_few_the_first_of_the_policy_have_them(policy: str) -> None:
    s = scheduler(policy, max_num_seqs=2)
    fill(s)
    assert names(s.schedule()) == ORDER[policy][:2]
    assert [r.request_id for r in s.waiting] == ORDER[policy][2:]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_comes_later_is_put_in_its_place(policy: str) -> None:
    """The order in which the scheduler hears of them does not matter."""
    s = scheduler(policy)
    for arrival, (name, prompt, priority) in reversed(list(enumerate(WORKLOAD))):
        s.add(request(name, prompt, priority, arrival))
        s.schedule()
    assert [r.request_id for r in s.running] == ORDER[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_last_of_the_policy_gives_its_blocks_up(policy: str) -> None:
    """Five blocks are full, and the first of all is the first to need a sixth."""
    s = scheduler(policy, num_blocks=5)
    fill(s)
    first = s.schedule()
    assert names(first) == ORDER[policy]
    assert s.blocks.pool.num_free == 0
    victim = s.running[-1]
    assert victim.request_id == ORDER[policy][-1]
    while s.num_preemptions == 0:
        output = s.schedule()
        assert output is not None
        s.update(output, [0] * output.num_sampled)
    assert victim.status is RequestStatus.WAITING
    assert victim.num_preemptions == 1
    assert victim.blocks.block_ids == []
    assert [r.request_id for r in s.running] == ORDER[policy][:-1]


def test_an_urgent_newcomer_goes_before_who_runs_but_takes_no_seat() -> None:
    s = scheduler("priority", max_num_seqs=2, max_num_batched_tokens=64)
    fill(s)
    assert names(s.schedule()) == ["c", "a"]
    s.add(request("now", 3, priority=-1, arrival=9))
    assert names(s.schedule()) == ["c", "a"]  # both seats are taken
    assert s.waiting[0].request_id == "now"
    s.abort(s.running[0])
    assert s.schedule() is not None
    assert [r.request_id for r in s.running] == ["now", "a"]
    assert names(s.schedule()) == ["now", "a"]


def test_a_preempted_request_waits_in_the_place_of_its_arrival() -> None:
    s = scheduler("first-come", num_blocks=4, max_num_seqs=2)
    for arrival, name in enumerate("abc"):
        s.add(request(name, 7, arrival=arrival))
    first, second = s.schedule(), s.schedule()
    assert first is not None
    assert second is not None
    s.update(first, [1, 1])
    s.schedule()
    assert [r.request_id for r in s.waiting] == ["b", "c"]


def test_a_policy_of_your_own() -> None:
    s = scheduler(LongestLast())
    for arrival, tokens in enumerate([9, 3, 6]):
        s.add(request(f"{tokens} tokens", 2, arrival=arrival, max_tokens=tokens))
    assert names(s.schedule()) == ["3 tokens", "6 tokens", "9 tokens"]


def test_make_policy_takes_names_and_objects() -> None:
    mine = LongestLast()
    assert make_policy(mine) is mine
    for name, kind in POLICIES.items():
        assert type(make_policy(name)) is kind
        assert kind.name == name


def test_an_unknown_policy_is_refused() -> None:
    message = "policy is 'fair', the policies are first-come, priority, shortest-prompt"
    with pytest.raises(ValueError, match=message):
        make_policy("fair")
    with pytest.raises(ValueError, match=message):
        scheduler("fair")
    with pytest.raises(ValueError, match=message):
        LLM("random-tiny", policy="fair")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_of_the_policy_also_ends_first(policy: str) -> None:
    """Through a whole engine that has one seat."""
    config = EngineConfig(max_num_seqs=1, num_blocks=8)
    engine = AsyncEngine(
        ScriptedRunner(),
        config,
        SimDevice(costs=EVEN_COSTS),
        Scheduler(config, policy),
    )
    with engine:
        requests = [
            engine.add_request(
                [1] * prompt,
                SamplingParams(max_tokens=3),
                request_id=name,
                priority=priority,
            )
            for name, prompt, priority in WORKLOAD
        ]
        engine.run()
    in_order = sorted(requests, key=lambda request: request.times.finished_us)
    assert [r.request_id for r in in_order] == ORDER[policy]


def test_priorities_reach_the_engine_through_llm() -> None:
    config = EngineConfig(max_num_seqs=1, num_blocks=8)
    with LLM("random-tiny", device="sim", config=config, policy="priority") as llm:
        outputs = llm.generate(
            ["aa", "bb", "cc"], SamplingParams(max_tokens=2), priorities=[3, 1, 2]
        )
        waits = [output.metrics.queue_ms for output in outputs]
        assert sorted(waits) == [waits[1], waits[2], waits[0]]
        with pytest.raises(ValueError, match="priorities holds 1 entries for 2"):
            llm.generate(["a", "b"], priorities=[1])
