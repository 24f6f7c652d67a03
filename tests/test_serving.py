"""The loop that steps an engine by itself: readers, aborts, errors, shutdown.

Nothing here asserts on time. Where the order of two threads matters a gate holds one of
them back, and threads are joined.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from cbasync.config import EngineConfig
from cbasync.devices import StreamError, ThreadsDevice
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.llm import LLM
from cbasync.request import Request
from cbasync.runner import ScriptedRunner
from cbasync.sampling import SamplingParams
from cbasync.scheduler import Occurrence, Scheduler, SchedulerOutput
from cbasync.serving import EngineLoop, EngineStoppedError, Handle
from tests.oracle import check_invariants

pytestmark = pytest.mark.timeout(20)

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    num_blocks=64,
    max_model_len=128,
    debug=True,
)
PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name != "tqdm_monitor"  # of the progress bars, once a process
    }
    assert not left, f"threads left behind: {left}"


def script(prompt: Sequence[int], count: int, vocab: int = 1000) -> list[int]:
    """What the scripted model answers, worked out one token at a time."""
    tokens = list(prompt)
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        tokens.append((tokens[-1] * 7 + position + 1) % vocab)
    return tokens[len(prompt) :]


def new_loop(kind: type[Engine] = AsyncEngine, **options: Any) -> EngineLoop:
    device = options.pop("device", None) or ThreadsDevice()
    runner = options.pop("runner", None) or ScriptedRunner()
    return EngineLoop(kind(runner, CONFIG, device, **options))


def length(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


class Gate:
    """A scripted model that computes nothing while the gate is shut."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.runner = ScriptedRunner(script=self._script)

    def _script(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        self.opened.wait()
        return (token * 7 + position + 1) % self.runner.vocab_size


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def in_threads(count: int, work: Callable[[int], object]) -> list[object]:
    """Run the same thing in several threads; results or errors, in their order."""
    results: list[object] = [None] * count
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait()
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ------------------------------------------------------------------ start and idle


@pytest.mark.parametrize("kind", [SyncEngine, AsyncEngine])
def test_it_starts_empty_and_answers_what_comes_later(kind: type[Engine]) -> None:
    with new_loop(kind) as loop:
        assert not loop.wait_for(lambda: loop.engine.has_work, timeout=0.1)
        assert loop.submit(PROMPT, length(5)).result().output_token_ids == script(
            PROMPT, 5
        )
    assert loop.engine.is_closed


def test_idle_and_again(gate: Gate) -> None:
    gate.opened.set()
    with new_loop(runner=gate.runner) as loop:
        for start in range(4):
            handle = loop.submit([start], length(3))
            assert list(handle) == script([start], 3)
            assert loop.wait_for(lambda: not loop.engine.has_work)
        assert loop.engine.metrics.num_finished == 4
    check_invariants(loop.engine, [])


def test_nothing_submitted_and_closed() -> None:
    loop = new_loop()
    loop.close()
    assert loop.engine.is_closed
    assert loop.engine.metrics.num_batches == 0


# ------------------------------------------------------------------ readers


def test_several_readers_of_one_request_get_all_of_it(gate: Gate) -> None:
    with new_loop(runner=gate.runner) as loop:
        handle = loop.submit(PROMPT, length(9))
        gate.reached.wait()
        gate.opened.set()
        want = script(PROMPT, 9)
        assert in_threads(5, lambda _: list(handle)) == [want] * 5
        assert list(handle) == want, "who comes late starts from the first token"
        assert handle.result().output_token_ids == want


def test_a_slow_reader_holds_nobody_up() -> None:
    with new_loop() as loop:
        slow = loop.submit(PROMPT, length(20))
        pieces = iter(slow)
        first = next(pieces)
        quick = loop.submit([4, 5], length(20))
        assert list(quick) == script([4, 5], 20)
        slow.result()  # it ends although nobody reads on
        assert [first, *pieces] == script(PROMPT, 20)


def test_tokens_come_before_the_request_has_ended() -> None:
    """The scheduler is held after each batch: a reader has its tokens by then."""
    device = ThreadsDevice()
    turns = threading.Semaphore(0)

    class OneAtATime(Scheduler):
        def schedule(self) -> SchedulerOutput | None:
            turns.acquire()
            return super().schedule()

    loop = new_loop(device=device, scheduler=OneAtATime(CONFIG))
    handle = loop.submit(PROMPT, length(4))
    pieces, got = iter(handle), []
    turns.release()  # launches the first batch, and with depth 1 collects none
    for _ in range(3):
        turns.release()
        got.append(next(pieces))
        assert not handle.request.is_finished
    turns.release(100)
    assert got + list(pieces) == script(PROMPT, 4)
    loop.close()


def test_a_reader_that_leaves_early_disturbs_nobody() -> None:
    with new_loop() as loop:
        handle = loop.submit(PROMPT, length(9))
        for token in handle:
            assert token == script(PROMPT, 1)[0]
            break
        assert list(handle) == script(PROMPT, 9)


def test_a_result_that_takes_too_long(gate: Gate) -> None:
    with new_loop(runner=gate.runner) as loop:
        handle = loop.submit(PROMPT, length(3))
        gate.reached.wait()
        message = r"has not finished within 0.01 s: wait longer or abort\(\) it"
        with pytest.raises(TimeoutError, match=message):
            handle.result(timeout=0.01)
        with pytest.raises(TimeoutError):
            handle.result(timeout=0)
        gate.opened.set()
        assert handle.result(timeout=15).output_token_ids == script(PROMPT, 3)


class HeldUpdate(Scheduler):
    """Stops in the middle of the update phase, once a request has ended in it."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.ended, self.go_on = threading.Event(), threading.Event()

    def update(
        self, output: SchedulerOutput, tokens: Sequence[int]
    ) -> list[Occurrence]:
        return self.after(super().update(output, tokens))

    def after(self, kept: list[Occurrence]) -> list[Occurrence]:
        if any(o.request.is_finished for o in kept):
            self.ended.set()
            self.go_on.wait()
        return kept


def test_a_result_is_only_given_once_all_of_it_is_booked() -> None:
    """Its end is known before its log-probabilities and times are."""
    scheduler = HeldUpdate()
    with new_loop(scheduler=scheduler) as loop:
        handle = loop.submit(PROMPT, length(1), request_id="mine")
        scheduler.ended.wait()
        try:
            with pytest.raises(TimeoutError):
                handle.result(timeout=0)
        finally:
            scheduler.go_on.set()
        assert handle.result().times.finished_us >= 0
        again = loop.submit(PROMPT, length(1), request_id="mine")
        assert again.result().output_token_ids == script(PROMPT, 1)


# ------------------------------------------------------------------ many submitters


@pytest.mark.parametrize("kind", [SyncEngine, AsyncEngine])
def test_submitted_from_many_threads(kind: type[Engine]) -> None:
    with new_loop(kind) as loop:

        def work(number: int) -> object:
            handles = [loop.submit([number, i], length(6)) for i in range(6)]
            return [handle.result().output_token_ids for handle in handles]

        got = in_threads(4, work)
    assert got == [[script([n, i], 6) for i in range(6)] for n in range(4)]
    check_invariants(loop.engine, [])


def test_of_one_id_from_many_threads_only_one_gets_through(gate: Gate) -> None:
    with new_loop(runner=gate.runner) as loop:
        results = in_threads(
            6, lambda n: loop.submit([n + 1], length(4), request_id="mine")
        )
        handles = [r for r in results if isinstance(r, Handle)]
        errors = [r for r in results if isinstance(r, ValueError)]
        assert (len(handles), len(errors)) == (1, 5)
        assert all("request_id 'mine' is in use" in str(error) for error in errors)
        gate.opened.set()
        request = handles[0].result()
        assert request.output_token_ids == script(request.prompt_token_ids, 4)
        assert loop.engine.metrics.num_finished == 1


def test_a_bad_prompt_is_refused_at_once_and_the_loop_goes_on() -> None:
    with new_loop() as loop:
        good = loop.submit(PROMPT, length(9))
        for bad in ([], [1000], [1.5], [1] * 200):
            with pytest.raises(ValueError, match="prompt"):
                loop.submit(bad)  # type: ignore[arg-type]
        assert list(good) == script(PROMPT, 9)


# ------------------------------------------------------------------ abort


@pytest.mark.parametrize("tokens_before", [0, 1, 2, 5])
def test_aborted_after_so_many_tokens(tokens_before: int) -> None:
    with new_loop() as loop:
        handle, neighbour = (loop.submit(PROMPT, length(100)) for _ in range(2))
        pieces = iter(handle)
        got = [next(pieces) for _ in range(tokens_before)]
        handle.abort()
        handle.abort()
        got += pieces
        request = handle.result()
        assert request.finish_reason in ("abort", "length")
        assert got == request.output_token_ids == script(PROMPT, len(got))
        assert list(neighbour) == script(PROMPT, 100)
        handle.abort()  # it has ended: nothing happens
    check_invariants(loop.engine, [handle.request, neighbour.request])


def test_an_abort_while_its_batch_computes(gate: Gate) -> None:
    with new_loop(runner=gate.runner) as loop:
        handle = loop.submit(PROMPT, length(50))
        gate.reached.wait()
        handle.abort()
        gate.opened.set()
        assert handle.result().finish_reason == "abort"
    check_invariants(loop.engine, [handle.request])


def test_an_abort_ends_every_reader(gate: Gate) -> None:
    with new_loop(runner=gate.runner) as loop:
        handle = loop.submit(PROMPT, length(50))
        gate.reached.wait()
        started = threading.Barrier(4)

        def read(number: int) -> object:
            started.wait()
            if number == 3:
                handle.abort()
                gate.opened.set()
                return handle.request.output_token_ids
            return list(handle)

        got = in_threads(4, read)
    assert got[0] == got[1] == got[2] == handle.request.output_token_ids


# ------------------------------------------------------------------ errors


def failing_device(phase: str) -> ThreadsDevice:
    """A machine on which one stream fails with its third op."""
    calls = iter(range(1000))

    def delay(at: str) -> float:
        if at == phase and next(calls) == 2:
            raise OSError("planted")
        return 0.0

    return ThreadsDevice(delay=delay)


@pytest.mark.parametrize("kind", [SyncEngine, AsyncEngine])
@pytest.mark.parametrize("phase", ["h2d", "compute", "d2h"])
def test_an_error_in_a_stream_reaches_every_reader_with_its_cause(
    phase: str, kind: type[Engine]
) -> None:
    with new_loop(kind, device=failing_device(phase)) as loop:
        handles = [loop.submit([i + 1], length(50)) for i in range(6)]

        def read(number: int) -> object:
            handle = handles[number]
            return list(handle) if number % 2 else handle.result()

        errors = in_threads(6, read)
        for number, error in enumerate(errors):
            check_error(error, f"request-{number} was not finished", phase)
        with pytest.raises(EngineStoppedError) as caught:
            loop.submit([1], length(1))
        check_error(caught.value, "", phase)


def check_error(error: object, message: str, phase: str) -> None:
    """Who reads is told what has failed where, down to the first cause."""
    assert isinstance(error, EngineStoppedError), error
    assert message in str(error)
    cause = error.__cause__
    assert isinstance(cause, StreamError)
    assert re.match(rf"{phase} of batch \d+ failed on the {phase} stream", str(cause))
    assert isinstance(cause.__cause__, OSError)
    assert str(cause.__cause__) == "planted"


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("at", ["schedule", "update"])
def test_an_error_of_the_host_reaches_the_readers(
    at: str, error: type[BaseException]
) -> None:
    class Failing(Scheduler):
        pass

    def fail(*_: object) -> None:
        raise error("planted")

    setattr(Failing, at, fail)
    with new_loop(scheduler=Failing(CONFIG)) as loop:
        handle = loop.submit(PROMPT, length(5))
        for read in (handle.result, lambda: list(handle)):
            with pytest.raises(EngineStoppedError) as caught:
                read()
            assert isinstance(caught.value.__cause__, error)
        assert handle.request.finish_reason == "error"


def test_a_request_that_meets_the_failure_on_its_way_in_is_ended_too() -> None:
    """The engine fails after it was asked for its state, and before it has the name."""
    engine = AsyncEngine(ScriptedRunner(), CONFIG, ThreadsDevice())

    class FailingMeanwhile(dict[str, Request]):
        def setdefault(self, *item: Any) -> Any:
            engine.fail(OSError("planted"))
            return super().setdefault(*item)

    engine.requests = FailingMeanwhile()
    request = engine.new_request(PROMPT)
    with engine:
        engine.submit(request)
        assert request.finish_reason == "error"
        assert isinstance(request.error, OSError)
        assert engine.is_over(request)


def test_what_had_ended_before_the_error_stays_good() -> None:
    with new_loop(device=failing_device("compute")) as loop:
        short = loop.submit([4], length(1))
        assert short.result().output_token_ids == script([4], 1)
        with pytest.raises(EngineStoppedError):
            loop.submit(PROMPT, length(50)).result()
        assert list(short) == script([4], 1)
        assert short.result().finish_reason == "length"


# ------------------------------------------------------------------ shutdown


def test_closing_ends_what_runs_and_what_waits(gate: Gate) -> None:
    loop = new_loop(runner=gate.runner)
    handles = [loop.submit([i + 1], length(60)) for i in range(8)]  # 4 run, 4 wait
    gate.reached.wait()
    opener = threading.Thread(target=gate.opened.set)
    opener.start()
    loop.close()
    opener.join()
    for number, handle in enumerate(handles):
        tokens = list(handle)
        assert tokens == script([number + 1], len(tokens))
        assert handle.result().finish_reason == "abort"
    check_invariants(loop.engine, [handle.request for handle in handles])


def test_closing_twice_and_from_several_threads() -> None:
    loop = new_loop()
    handle = loop.submit(PROMPT, length(60))
    assert in_threads(4, lambda _: loop.close()) == [None] * 4
    loop.close()
    assert handle.result().is_finished
    assert loop.engine.is_closed


def test_submitting_after_closing() -> None:
    loop = new_loop()
    loop.close()
    with pytest.raises(EngineStoppedError, match="the loop is closed: make a new one"):
        loop.submit(PROMPT)


def test_many_loops_one_after_the_other() -> None:
    for _ in range(10):
        with new_loop() as loop:
            assert list(loop.submit(PROMPT, length(2))) == script(PROMPT, 2)


def test_an_error_inside_the_with_block_still_closes_the_loop() -> None:
    requests: list[Request] = []

    def fail() -> None:
        with new_loop() as loop:
            requests.append(loop.submit(PROMPT, length(60)).request)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert requests[0].is_finished


# ------------------------------------------------------------------ without a loop


def test_an_answer_that_another_threads_turn_brings_is_booked_first() -> None:
    """Threads that share an LLM step by turns; who waits sees the end only when all of
    the answer is there."""
    held = HeldUpdate()
    with LLM("random-tiny", device="threads") as llm:
        update = llm.engine.scheduler.update

        def hold(output: SchedulerOutput, tokens: Sequence[int]) -> list[Occurrence]:
            return held.after(update(output, tokens))

        llm.engine.scheduler.update = hold  # type: ignore[method-assign]
        ((request,),) = llm._new_requests(
            [PROMPT], SamplingParams(max_tokens=1, logprobs=2), None
        )
        llm.engine.submit(request)
        stepping = threading.Thread(target=llm._run, args=([request], False))
        stepping.start()
        held.ended.wait()
        opener = threading.Timer(0.1, held.go_on.set)
        opener.start()
        llm._run([request], progress=False)
        assert len(request.logprobs) == 1
        assert request.times.finished_us >= 0
        stepping.join()
        opener.join()
