"""Log-probabilities that came back with a batch, booked to their requests."""

from __future__ import annotations

from collections.abc import Sequence

from cbasync.io_slot import LogprobBuffers
from cbasync.request import TokenLogprobs
from cbasync.scheduler import Occurrence, SchedulerOutput


def book_logprobs(
    buffers: LogprobBuffers, output: SchedulerOutput, kept: Sequence[Occurrence]
) -> None:
    """Give each request what it asked for, of output tokens and of its prompt."""
    for occurrence in kept:
        request = occurrence.request
        if (count := request.params.logprobs) is not None:
            request.logprobs.append(_entry(buffers, occurrence.rank, count))
    place = buffers.prompt_start
    for occurrence in output.occurrences:
        if occurrence.request.params.prompt_logprobs is not None:
            _book_prompt(buffers, place, occurrence)
        place += occurrence.length


def _book_prompt(buffers: LogprobBuffers, place: int, occurrence: Occurrence) -> None:
    """The row at position p tells how likely the prompt's token p + 1 was."""
    request, start = occurrence.request, occurrence.start
    count = request.params.prompt_logprobs or 0
    last = min(start + occurrence.length, len(request.prompt_token_ids) - 1)
    for position in range(start, last):
        entry = _entry(buffers, place + position - start, count)
        request.prompt_logprobs[position + 1] = entry


def _entry(buffers: LogprobBuffers, row: int, count: int) -> TokenLogprobs:
    ids = buffers.host_ids[row, : 1 + count].tolist()
    values = buffers.host_values[row, : 1 + count].tolist()
    top = dict(zip(ids[1:], values[1:], strict=True))
    return TokenLogprobs(ids[0], values[0], top)
