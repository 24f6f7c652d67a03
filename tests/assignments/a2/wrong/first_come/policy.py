"""In the order of arrival, as they come."""

from typing import Any

Request = dict[str, Any]  # with name, waited_ms, prompt_left and output_left


def plan(budget: int, seats: int, requests: list[Request]) -> list[list[Any]]:
    """The next batch as [name, tokens] pairs, best first.

    At most `budget` tokens and at most `seats` requests. A request that still reads its
    prompt takes 1 to prompt_left tokens, any other one takes exactly 1. The list of
    requests is in the order of arrival.
    """
    batch: list[list[Any]] = []
    for request in requests:
        if budget == 0 or len(batch) == seats:
            break
        tokens = min(request["prompt_left"] or 1, budget)
        batch.append([request["name"], tokens])
        budget -= tokens
    return batch
