"""An engine that runs by itself: a loop in a thread, requests from any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence

from cbasync.engine import Engine
from cbasync.request import Request
from cbasync.sampling import SamplingParams


class EngineStoppedError(RuntimeError):
    """The loop has ended before the request did; a known cause is chained."""


class Handle:
    """One request in a running loop, for any number of readers.

    Iterating gives the tokens as they come and ends with the request. Each iteration
    starts from the first token.
    """

    def __init__(self, request: Request, loop: EngineLoop) -> None:
        self.request = request
        self._loop = loop

    def __iter__(self) -> Iterator[int]:
        place = 0

        def has_more() -> bool:
            return len(self.request.output_token_ids) > place or self._is_over()

        while True:
            self._loop.wait_for(has_more)
            tokens = self.request.output_token_ids[place:]
            yield from tokens
            place += len(tokens)
            if self._is_over() and place == len(self.request.output_token_ids):
                self._raise_error()
                return

    def result(self, timeout: float | None = None) -> Request:
        """Wait for the request's end; TimeoutError after `timeout` seconds."""
        if not self._loop.wait_for(self._is_over, timeout):
            raise TimeoutError(
                f"{self.request!r} has not finished within {timeout} s: "
                "wait longer or abort() it"
            )
        self._raise_error()
        return self.request

    def abort(self) -> None:
        """End the request now; what it has so far stays."""
        self._loop.abort(self.request)

    def _is_over(self) -> bool:
        return self._loop.engine.is_over(self.request)

    def _raise_error(self) -> None:
        if self.request.error is not None:
            raise EngineStoppedError(
                f"{self.request.request_id} was not finished"
            ) from self.request.error


class EngineLoop:
    """Steps an engine in a thread of its own, and sleeps while there is nothing to do.

    >>> from cbasync.devices import ThreadsDevice
    >>> from cbasync.engine import AsyncEngine
    >>> from cbasync.runner import ScriptedRunner
    >>> engine = AsyncEngine(ScriptedRunner(vocab_size=10), device=ThreadsDevice())
    >>> with EngineLoop(engine) as loop:
    ...     handle = loop.submit([1, 2, 3], SamplingParams(max_tokens=4))
    ...     list(handle)
    [4, 2, 9, 9]

    It may start with nothing queued, go idle and start again. An error in a step ends
    every request and reaches every reader with its cause.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._work, name="cbasync-loop", daemon=True
        )
        self._thread.start()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        eos_token_ids: Collection[int] = (),
        priority: int = 0,
    ) -> Handle:
        """Queue a prompt, from any thread; refused here if it could never run."""
        request = self.engine.new_request(
            prompt_token_ids,
            params,
            request_id=request_id,
            eos_token_ids=eos_token_ids,
            priority=priority,
        )
        with self._changed:
            cause = self.engine.error
            if self._stopping or cause is not None:
                state = "is closed" if cause is None else f"has failed ({cause!r})"
                raise EngineStoppedError(f"the loop {state}: make a new one") from cause
            self.engine.submit(request)
            self._changed.notify_all()
        return Handle(request, self)

    def abort(self, request: Request) -> None:
        """Ask for a request's end."""
        with self._changed:
            self.engine.abort(request.request_id)
            self._changed.notify_all()

    def wait_for(
        self, condition: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        """Sleep until a step has made the condition true; False after `timeout` s."""
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def close(self) -> None:
        """End what still runs, then the loop, then the engine."""
        with self._changed:
            self._stopping = True
            for name in list(self.engine.requests):
                self.engine.abort(name)
            self._changed.notify_all()
        self._thread.join()
        if self.engine.error is None:
            self.engine.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.engine.has_work or self._stopping)
                if not self.engine.has_work:
                    return
            try:
                self.engine.guarded_step()
            except BaseException:
                # Every request has been told why; who reads a handle is told there.
                self._end()
                return
            with self._changed:
                self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.engine.close()

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
