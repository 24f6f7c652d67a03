"""Text in, text out: the engine with a model, a tokenizer and manners."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from cbasync.config import EngineConfig
from cbasync.devices import Device, make_device
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.metrics import RunMetrics
from cbasync.model_runner import ModelRunner
from cbasync.models import LoadedModel, load_model
from cbasync.policy import Policy
from cbasync.request import Request, RequestOutput
from cbasync.sampling import SamplingParams, check_params
from cbasync.supported import check_supported
from cbasync.text import Transcript
from cbasync.timeline import Timeline

Prompt = str | Sequence[int]
Message = Mapping[str, str]

ENGINES: dict[str, type[Engine]] = {"sync": SyncEngine, "async": AsyncEngine}

_DEFAULT_MAX_MODEL_LEN = 2048
_BAR_DELAY_S = 2.0  # work shorter than this shows no progress bar


class LLM:
    """A model that answers prompts through one of the engines.

    >>> with LLM("random-tiny") as llm:
    ...     (output,) = llm.generate(["hi"], SamplingParams(max_tokens=3))
    >>> len(output.token_ids), output.finish_reason
    (3, 'length')

    It may be used from several threads: whoever waits for an answer takes a turn at
    stepping the engine, and all of them share its batches.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel = "smollm2",
        *,
        mode: Literal["sync", "async"] = "async",
        device: str | Device = "auto",
        config: EngineConfig | None = None,
        policy: str | Policy = "first-come",
    ) -> None:
        if mode not in ENGINES:
            raise ValueError(
                f"mode is {mode!r}, the engines are {', '.join(ENGINES)}: choose one"
            )
        if config is not None and not config.is_safe:
            raise ValueError(
                f"config has {config.num_slots} slots for depth {config.depth} and "
                f"drops the edges {sorted(config.ablate)}: LLM only runs the complete "
                "schedule, use an engine directly to see it break"
            )
        owned = make_device(device) if isinstance(device, str) else device
        if not isinstance(model, LoadedModel):
            model = load_model(model, device=owned.torch_device)
        self.loaded = model
        max_model_len = config.max_model_len if config else None
        check_supported(model.model, max_model_len=max_model_len)
        runner = ModelRunner(model.model)
        config = config or EngineConfig(
            max_model_len=min(runner.max_positions, _DEFAULT_MAX_MODEL_LEN)
        )
        self.engine = ENGINES[mode](runner, config, owned, policy=policy)
        self._turn = threading.Lock()
        self._transcripts: WeakKeyDictionary[Request, Transcript] = WeakKeyDictionary()

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; results in the order of the prompts.

        A prompt is text or a list of token ids. `params` is one for all or one for
        each; with `n` above 1 a result is the first sample and holds all of them in
        `samples`. `priorities` matter to the priority policy, smaller first. All
        prompts are checked before any of them starts. `progress` shows a bar: always,
        never, or (None) when the work takes a while.
        """
        groups = self._new_requests(prompts, params, priorities)
        requests = [request for group in groups for request in group]
        for request in requests:
            self.engine.submit(request)
        try:
            self._run(requests, progress)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [self._output(group) for group in groups]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer one prompt, piece by piece; the pieces joined are the whole text.

        Several streams may be read by turns: all of them share the batches. Leaving
        the loop early ends the request.
        """
        self._tokenizer("streams")
        ((request, *others),) = self._new_requests([prompt], params, None)
        if others:
            raise ValueError(
                f"n is {1 + len(others)}, a stream has one sample: use generate()"
            )
        self.engine.submit(request)
        pieces = self._pieces(request)
        # A generator that was never begun has no `finally` to run.
        weakref.finalize(pieces, self.engine.abort, request.request_id).atexit = False
        return pieces

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
    ) -> RequestOutput:
        """Answer a conversation: a list of `{"role": ..., "content": ...}`."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the form the model was trained on."""
        tokenizer = self._tokenizer("chat")
        if isinstance(messages, Mapping) or not all(
            isinstance(message, Mapping) for message in messages
        ):
            raise ValueError(
                f"messages is {messages!r}, a list of dicts is needed: write "
                '[{"role": "user", "content": "..."}]'
            )
        if not tokenizer.chat_template:
            raise ValueError(
                f"{self.loaded.name} has no chat template: use generate() with a prompt"
            )
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
        )
        # The template has written the special tokens; they must not come twice.
        return list(tokenizer.encode(str(text), add_special_tokens=False))

    # ------------------------------------------------------------------ parts

    def _new_requests(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int] | None,
    ) -> list[list[Request]]:
        """Checked requests, one group a prompt with a request per sample."""
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(params, Sequence):
            params = [check_params(one) for one in params]
        else:
            params = [check_params(params)] * len(prompts)
        if priorities is None:
            priorities = [0] * len(prompts)
        for name, values in (("params", params), ("priorities", priorities)):
            if len(values) != len(prompts):
                raise ValueError(
                    f"{name} holds {len(values)} entries for {len(prompts)} prompts: "
                    "give one for each"
                )
        return [
            [
                self._new_request(prompt, self._sample_params(one, i), priority)
                for i in range(one.n)
            ]
            for prompt, one, priority in zip(prompts, params, priorities, strict=True)
        ]

    @staticmethod
    def _sample_params(params: SamplingParams, index: int) -> SamplingParams:
        if params.n == 1:
            return params
        return replace(params, n=1, seed=params.seed + index)

    def _new_request(
        self, prompt: Prompt, params: SamplingParams, priority: int
    ) -> Request:
        request = self.engine.new_request(
            self._encode(prompt),
            params,
            eos_token_ids=self.loaded.stop_token_ids,
            priority=priority,
        )
        if params.stop and self.loaded.tokenizer is None:
            self._tokenizer("stop texts")
        if self.loaded.tokenizer is not None:
            transcript = Transcript(
                self.loaded.tokenizer, params.stop, params.min_tokens
            )
            request.on_token = transcript.push
            self._transcripts[request] = transcript
        return request

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return list(self._tokenizer("text prompts").encode(prompt))

    def _tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.loaded.tokenizer is None:
            raise ValueError(
                f"{self.loaded.name} has no tokenizer, {purpose} need one: "
                "give token ids"
            )
        return self.loaded.tokenizer

    def _step(self, waiting_for: Sequence[Request]) -> int:
        """Take a turn, unless another thread's turn has brought the answer."""
        with self._turn:
            if all(self.engine.is_over(request) for request in waiting_for):
                return 0
            return len(self.engine.guarded_step())

    def _run(self, requests: list[Request], progress: bool | None) -> None:
        total = sum(request.params.max_tokens for request in requests)
        bar = tqdm(
            total=total,
            unit="tok",
            disable=None if progress is None else not progress,
            delay=0 if progress else _BAR_DELAY_S,
            leave=False,
        )
        with bar:
            while not all(self.engine.is_over(request) for request in requests):
                bar.update(self._step(requests))
        for request in requests:
            self._raise_error(request)

    @staticmethod
    def _raise_error(request: Request) -> None:
        if request.error is not None:
            raise RuntimeError(
                f"{request.request_id} has no answer, the engine failed or was closed: "
                f"{request.error}"
            ) from request.error

    def _pieces(self, request: Request) -> Iterator[str]:
        transcript = self._transcripts[request]
        shown = 0
        try:
            is_last = False
            while not is_last:
                self._step([request])
                # Asked once: while this waits at a yield, others may step the engine.
                if is_last := self.engine.is_over(request):
                    transcript.close()
                for piece in transcript.pieces[shown:]:
                    shown += 1
                    yield piece
            self._raise_error(request)
        finally:
            self.engine.abort(request.request_id)

    def _output(self, group: list[Request]) -> RequestOutput:
        """One result per prompt; with several samples the first one holds them all."""
        outputs = []
        for request in group:
            text = ""
            if transcript := self._transcripts.get(request):
                transcript.close()
                text = transcript.text
            outputs.append(RequestOutput.of(request, text))
        if len(outputs) == 1:
            return outputs[0]
        return replace(outputs[0], samples=tuple(outputs))

    # ------------------------------------------------------------------ life cycle

    @property
    def timeline(self) -> Timeline:
        """What ran when, on every lane."""
        return self.engine.timeline

    @property
    def metrics(self) -> RunMetrics:
        """What the engine has done so far."""
        return self.engine.metrics

    def close(self) -> None:
        """Give threads, streams and the KV cache back; what still runs is ended."""
        with self._turn:  # not in the middle of another thread's step
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.loaded!r}, {self.engine!r})"
