"""Prompts from a file, and the token ids that a model is used to get for them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from cbasync.llm import LLM
from cbasync.sampling import SamplingParams

DEMO_PROMPTS = Path(__file__).parents[1] / "data" / "prompts" / "demo.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file: what is asked, and how long the answer may be."""

    id: str
    prompt: str
    kind: str
    max_tokens: int


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Prompts of a file with one JSON object a line; the demo's own by default."""
    path = DEMO_PROMPTS if path is None else Path(path)
    if not path.is_file():
        raise ValueError(
            f"there is no prompts file {path}: run from a clone of the repository, "
            "which has data/prompts, or give --prompts FILE"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    prompts = [
        _prompt(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompts: put one JSON object on a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    """One prompt, or an error that says what is wrong with its line.

    >>> _prompt('{"prompt": "Hi", "max_tokens": 8}', "p.jsonl, line 3")
    Prompt(id='', prompt='Hi', kind='', max_tokens=8)
    >>> _prompt('{"max_tokens": 8}', "p.jsonl, line 3")
    Traceback (most recent call last):
    ...
    ValueError: p.jsonl, line 3 has no text under 'prompt': give \
{"id", "prompt", "kind", "max_tokens"}
    """
    fields = '{"id", "prompt", "kind", "max_tokens"}'
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): give {fields}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f"{where} has no text under 'prompt': give {fields}")
    max_tokens = entry.get("max_tokens", SamplingParams().max_tokens)
    SamplingParams(max_tokens=max_tokens)  # checks itself
    words = (str(entry.get(name, "")) for name in ("id", "kind"))
    return Prompt(next(words), entry["prompt"], next(words), max_tokens)


def token_ids(llm: LLM, prompt: str, seed: int = 0) -> list[int]:
    """A prompt as the model is used to it: as a chat if it knows chats.

    A model without a tokenizer gets random tokens, one for each word.
    """
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None:
        draw = random.Random(seed)
        vocab_size = llm.engine.runner.vocab_size
        return [draw.randrange(vocab_size) for _ in prompt.split() or [""]]
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    return llm.chat_prompt([{"role": "user", "content": prompt}])
