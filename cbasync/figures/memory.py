"""The expected figures of notebook 03: who is where in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from cbasync.config import EngineConfig
from cbasync.figures.parts import WIDTH, key_svg, picture_svg, rect_svg, words_svg
from cbasync.kv_cache import slot_mapping
from cbasync.palette import IDLE_GROUND, request_tint, shade
from cbasync.steps import record_steps

Held = Mapping[str, tuple[Sequence[int], int]]
"""Request -> its blocks, and how many tokens it has in them, in one step."""
Places = Mapping[int, tuple[str, int]]
"""Place in the cache -> whose token is there, and which one of its tokens."""

# Requests of notebook 03: tokens of the prompt, new tokens.
LENGTHS = {
    "r0": (5, 4),
    "r1": (3, 12),
    "r2": (7, 3),
    "r3": (4, 6),
    "r4": (6, 5),
    "r5": (2, 7),
}
MEMORY = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=9,
    max_model_len=18,
    depth=0,
    prefix_caching=False,
)
SHOWN_STEP = 6
_LIGHT = 3  # the lightest of the shades
_TALL, _TOP = 9.0, 64.0  # pixels of a place, and above the first one


def tint_of(name: str) -> str:
    """The ground of a request, the same one in every figure: r0, r1 and so on."""
    return request_tint(int(name[1:]))


# ----------------------------------------------------------------- 03: places over time


def engine_memory(block_size: int) -> list[Held]:
    """Who holds which blocks, step by step, as the engine runs the requests.

    The cache has 36 places; a block may be as long as the longest request:

    >>> engine_memory(4)[2]["r1"], engine_memory(18)[2]["r1"]
    (((2, 7), 5), ((1,), 5))
    """
    places = MEMORY.num_blocks * MEMORY.block_size
    num_blocks = places // block_size
    config = replace(MEMORY, block_size=block_size, num_blocks=num_blocks)
    held: list[Held] = []
    for step in record_steps(list(LENGTHS.values()), config):
        stops: dict[str, int] = {}
        positions = iter(step.arrays["positions"])
        for name, length in zip(step.requests, step.query_lens, strict=True):
            stops[name] = max(next(positions) for _ in range(length)) + 1
        held.append(
            {name: (step.block_tables[name], stops[name]) for name in step.requests}
        )
    return held


def memory_map_svg(runs: Mapping[str, tuple[int, Sequence[Held]]], places: int) -> str:
    """Runs side by side: a column a step, a line a place, held and used by whom.

    Each run is its block size and what is held in each of its steps:

    >>> one = memory_map_svg({"blocks": (4, [{"r0": ([1], 3)}])}, places=8)
    >>> one.count("<rect"), "blocks: 1 step, 38 % used" in one  # with ground and legend
    (7, True)
    """
    left, gap, bottom = 40.0, 30.0, _TOP + places * _TALL
    columns = sum(len(steps) for _, steps in runs.values())
    wide = min(40.0, (WIDTH - left - 10 - gap * (len(runs) - 1)) / columns)
    parts = [
        *key_svg(left, request_tint(0), "a token is here"),
        *key_svg(left + 150, shade(request_tint(0), _LIGHT), "held, nothing in it"),
        *key_svg(left + 320, IDLE_GROUND, "free"),
    ]
    x = left
    for title, (size, steps) in runs.items():
        parts.append(words_svg(x, _TOP - 18, _summary(title, steps, places)))
        ground = (wide * len(steps), places * _TALL, IDLE_GROUND)
        parts.append(rect_svg(x, _TOP, *ground))
        for before, held in pairwise([{}, *steps]):
            for name, (blocks, tokens) in held.items():
                known = before.get(name, ((), 0))[0]
                for index, block in enumerate(blocks):
                    used = max(0, min(size, tokens - index * size))
                    parts += _block_svg(x, wide, block, size, used, name)
                    if block not in known:
                        y = _TOP + (block + 0.5) * size * _TALL
                        parts.append(words_svg(x + wide / 2, y, name, "middle"))
            x += wide
        x += gap
    for place in range(0, places, 4):
        y = _TOP + (place + 0.5) * _TALL
        parts.append(words_svg(left - 8, y, str(place), "end"))
    parts.append(words_svg(left, bottom + 18, "place in the cache · step by step"))
    return picture_svg(int(bottom + 36), parts)


def _block_svg(
    x: float, wide: float, block: int, size: int, used: int, name: str
) -> list[str]:
    """One block in one step; what is held and empty is light, with an edge."""
    y, tint = _TOP + block * size * _TALL, tint_of(name)
    parts = [rect_svg(x, y, wide - 1, size * _TALL - 1, tint)]
    if used < size:
        y, tall = y + used * _TALL, (size - used) * _TALL
        light = shade(tint, _LIGHT)
        parts.append(rect_svg(x + 1, y, wide - 3, tall - 2, light))
    return parts


def _summary(title: str, steps: Sequence[Held], places: int) -> str:
    tokens = sum(count for held in steps for _, count in held.values())
    share = 100 * tokens / (places * len(steps))
    return f"{title}: {len(steps)} step{'s'[: len(steps) > 1]}, {share:.0f} % used"


# ----------------------------------------------------------------- 03: one step closely


def places_of(held: Held, block_size: int) -> dict[int, tuple[str, int]]:
    """Every token of a step at its place, by the package's slot mapping.

    >>> places_of({"r0": ([7, 2], 5)}, block_size=4)[8]
    ('r0', 4)
    """
    return {
        place: (name, token)
        for name, (blocks, tokens) in held.items()
        for token, place in enumerate(slot_mapping(blocks, 0, tokens, block_size))
    }


def cache_svg(caches: Mapping[str, Places], num_blocks: int, block_size: int) -> str:
    """Caches above one another, place by place: the number of the token that is there.

    >>> picture = cache_svg({"one": {5: ("r0", 1)}}, num_blocks=2, block_size=4)
    >>> picture.count("<rect"), ">block 1<" in picture
    (10, True)
    """
    wide = min(24.0, (WIDTH - 40.0) / (num_blocks * block_size))
    names = sorted({name for places in caches.values() for name, _ in places.values()})
    parts: list[str] = []
    x = 20.0
    for name in names:
        parts += key_svg(x, tint_of(name), name)
        x += 70
    top = 56.0
    for title, places in caches.items():
        parts.append(words_svg(20, top, title))
        for block in range(num_blocks):
            x = 20 + block * block_size * wide
            middle = x + block_size * wide / 2
            parts.append(words_svg(middle, top + 22, f"block {block}", "middle"))
            for offset in range(block_size):
                name, token = places.get(block * block_size + offset, ("", -1))
                left = x + offset * wide
                right = 3 if offset == block_size - 1 else 1
                tint = tint_of(name) if name else IDLE_GROUND
                parts.append(rect_svg(left, top + 34, wide - right, 26, tint))
                if name:
                    center = left + wide / 2 - 1
                    parts.append(words_svg(center, top + 47, str(token), "middle"))
        top += 84
    return picture_svg(int(top - 6), parts)


def _reserved_and_paged() -> str:
    longest, size = MEMORY.max_model_len, MEMORY.block_size
    return memory_map_svg(
        {
            "room for the longest": (longest, engine_memory(longest)),
            f"blocks of {size}": (size, engine_memory(size)),
        },
        MEMORY.num_blocks * size,
    )


def _one_step() -> str:
    size = MEMORY.block_size
    places = places_of(engine_memory(size)[SHOWN_STEP], size)
    title = f"step {SHOWN_STEP}: the number of each token in its own request"
    return cache_svg({title: places}, MEMORY.num_blocks, size)


FIGURES: dict[str, Callable[[], str]] = {
    "memory_map.svg": _reserved_and_paged,
    "block_table.svg": _one_step,
}
