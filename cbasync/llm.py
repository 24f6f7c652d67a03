"""Text in, text out: the engine with a model, a tokenizer and manners."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from cbasync.config import EngineConfig
from cbasync.devices import Device, make_device
from cbasync.engine import AsyncEngine, Engine, SyncEngine
from cbasync.model_runner import ModelRunner
from cbasync.models import LoadedModel, load_model
from cbasync.request import Request, RequestOutput
from cbasync.sampling import SamplingParams
from cbasync.supported import check_supported
from cbasync.timeline import Timeline

Prompt = str | Sequence[int]
Message = Mapping[str, str]

ENGINES: dict[str, type[Engine]] = {"sync": SyncEngine, "async": AsyncEngine}

_DEFAULT_MAX_MODEL_LEN = 2048
_BAR_DELAY_S = 2.0  # work shorter than this shows no progress bar
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class LLM:
    """A model that answers prompts through one of the engines.

    >>> with LLM("random-tiny") as llm:
    ...     (output,) = llm.generate(["hi"], SamplingParams(max_tokens=3))
    >>> len(output.token_ids), output.finish_reason
    (3, 'length')
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LoadedModel = "smollm2",
        *,
        mode: Literal["sync", "async"] = "async",
        device: str | Device = "auto",
        config: EngineConfig | None = None,
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
        runner = ModelRunner(model.model)
        config = config or EngineConfig(
            max_model_len=min(runner.max_positions, _DEFAULT_MAX_MODEL_LEN)
        )
        check_supported(model.model, max_model_len=config.max_model_len)
        self.engine = ENGINES[mode](runner, config, owned)

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; results in the order of the prompts.

        A prompt is text or a list of token ids. `params` is one for all or one for
        each. All prompts are checked before any of them starts. `progress` shows a
        bar: always, never, or (None) when the work takes a while.
        """
        requests = self._new_requests(prompts, params)
        for request in requests:
            self.engine.submit(request)
        try:
            self._run(requests, progress)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [self._output(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Answer one prompt, piece by piece; the pieces joined are the whole text.

        Several streams may be read by turns: all of them share the batches. Leaving
        the loop early ends the request.
        """
        (request,) = self._new_requests([prompt], params)
        self.engine.submit(request)
        return self._pieces(request)

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
    ) -> list[Request]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"params holds {len(params)} entries for {len(prompts)} prompts: "
                "give one for all or one for each"
            )
        return [
            self.engine.new_request(
                self._encode(prompt),
                one,
                eos_token_ids=self.loaded.stop_token_ids,
            )
            for prompt, one in zip(prompts, params, strict=True)
        ]

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
            while not all(request.is_finished for request in requests):
                bar.update(len(self.engine.step()))

    def _pieces(self, request: Request) -> Iterator[str]:
        detokenizer = Detokenizer(self._tokenizer("streams"))
        try:
            while True:
                known = request.output_token_ids
                for token in known[detokenizer.num_tokens :]:
                    if piece := detokenizer.push(token):
                        yield piece
                if request.is_finished:
                    break
                self.engine.step()
            if rest := detokenizer.flush():
                yield rest
        finally:
            self.engine.abort(request.request_id)

    def _output(self, request: Request) -> RequestOutput:
        text = ""
        if self.loaded.tokenizer is not None:
            text = str(
                self.loaded.tokenizer.decode(
                    request.output_token_ids, skip_special_tokens=True
                )
            )
        return RequestOutput.of(request, text)

    # ------------------------------------------------------------------ life cycle

    @property
    def timeline(self) -> Timeline:
        """What ran when, on every lane."""
        return self.engine.timeline

    def close(self) -> None:
        """Give threads, streams and the KV cache back."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.loaded!r}, {self.engine!r})"


class Detokenizer:
    """Turns tokens into text as they come, never a part of a character.

    Only the newest tokens are decoded again with each push: the ones since the last
    piece, behind the few that decide about white space before them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self._context = 0  # decoding starts here
        self._emitted = 0  # tokens whose text has been handed out

    @property
    def num_tokens(self) -> int:
        """Tokens pushed so far."""
        return len(self.token_ids)

    def push(self, token: int) -> str:
        """Add a token; the new text, empty while a character is incomplete."""
        self.token_ids.append(token)
        return self._piece(hold_back=True)

    def flush(self) -> str:
        """Whatever was held back."""
        return self._piece(hold_back=False)

    def _piece(self, hold_back: bool) -> str:
        former = self._decode(self._context, self._emitted)
        text = self._decode(self._context, len(self.token_ids))
        if hold_back and text.endswith(_REPLACEMENT):
            return ""
        self._context, self._emitted = self._emitted, len(self.token_ids)
        return text[len(former) :]

    def _decode(self, start: int, stop: int) -> str:
        ids = self.token_ids[start:stop]
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
