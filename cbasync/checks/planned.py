"""The package's engine with a learner's policy: the same batches, real tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbasync.checks.policy_machine import STEP_MS, TOKEN_MS, Job, Plan, Run, View
from cbasync.config import EngineConfig
from cbasync.devices.costs import CostModel, PhaseCost
from cbasync.devices.sim import SimDevice
from cbasync.engine import Engine, SyncEngine
from cbasync.request import Request
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Scheduler, SchedulerOutput

COSTS = CostModel(
    name="policy",
    compute=PhaseCost(fixed_us=1000 * STEP_MS, per_token_us=1000 * TOKEN_MS),
    note="only computing takes time",
)


class PlannedScheduler(Scheduler):
    """A scheduler that asks `plan` who gets how many tokens; the rest is inherited."""

    def __init__(
        self, config: EngineConfig, plan: Plan, seats: int, now_us: Callable[[], float]
    ) -> None:
        super().__init__(config)
        self.plan, self.seats, self.now_us = plan, seats, now_us
        self._shares: dict[str, int] = {}

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        here = sorted(self.running + self.waiting, key=self.policy.key)
        views = [self._view(request) for request in here]
        self._shares = dict(self.plan(budget, self.seats, views)) if views else {}
        running = self.running
        for request in running:
            if share := self._shares.get(request.request_id, 0):
                # The inherited method serves all who run, in order.
                self.running = [request]
                super()._schedule_running(output, share)
        self.running = running
        return budget - output.num_tokens

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        for request in list(self.waiting):
            if share := self._shares.get(request.request_id, 0):
                # And this one admits from the front.
                self.waiting.remove(request)
                self.waiting.insert(0, request)
                super()._admit_waiting(output, share)
        self.waiting.sort(key=self.policy.key)

    def _view(self, request: Request) -> View:
        waited_us = self.now_us() - request.times.submitted_us
        prompt = len(request.prompt_token_ids)
        outputs = len(request.output_token_ids) + request.num_pending_tokens
        return {
            "name": request.request_id,
            "waited_ms": round(waited_us / 1000, 3),
            "prompt_left": max(0, prompt - request.num_computed_tokens),
            "output_left": request.params.max_tokens - outputs,
        }


def serve(
    plan: Plan, jobs: Sequence[Job], budget: int, seats: int
) -> tuple[Run, dict[str, list[int]]]:
    """What the engine does with these jobs, and the tokens that each one gets.

    >>> from cbasync.checks.policy_machine import first_come
    >>> run, tokens = serve(first_come, [Job("a", 0.0, 10, 3)], budget=8, seats=2)
    >>> run.batches, run.latency_ms, len(tokens["a"])
    ([{'a': 8}, {'a': 2}, {'a': 1}, {'a': 1}], {'a': 40.6}, 3)
    """
    device = SimDevice(costs=COSTS, order="issue")
    config = EngineConfig(
        max_num_seqs=len(jobs),  # who rests keeps what it has: all may be running
        max_num_batched_tokens=budget,
        num_blocks=sum(1 + (job.prompt + job.output) // 16 for job in jobs),
        depth=0,
        prefix_caching=False,  # the policy's machine knows nothing of it
    )
    scheduler = PlannedScheduler(config, plan, seats, device.now_us)
    waiting = sorted(jobs, key=lambda job: job.arrival_ms)
    requests: dict[str, Request] = {}
    run = Run()
    with SyncEngine(ScriptedRunner(), config, device, scheduler) as engine:
        while waiting or engine.has_work:
            if not engine.has_work:
                idle_us = 1000 * waiting[0].arrival_ms - device.now_us()
                device.machine.advance(max(0.0, idle_us))
            while waiting and 1000 * waiting[0].arrival_ms <= device.now_us():
                job = waiting.pop(0)
                requests[job.name] = _submit(engine, job)
            output = engine.schedule()
            assert output is not None, "a plan that lets nobody go on"
            run.starts_ms.append(device.now_us() / 1000)
            run.batches.append(
                {o.request.request_id: o.length for o in output.occurrences}
            )
            engine.launch(output)
            engine.collect()
    run.latency_ms = {
        job.name: round(requests[job.name].times.finished_us / 1000 - job.arrival_ms, 3)
        for job in jobs
    }
    return run, {name: r.output_token_ids for name, r in requests.items()}


def _submit(engine: Engine, job: Job) -> Request:
    request = engine.add_request(
        [1 + n % 99 for n in range(job.prompt)],
        SamplingParams(max_tokens=job.output),
        request_id=job.name,
    )
    request.times.submitted_us = 1000 * job.arrival_ms  # while a batch was running
    return request
