"""Gives what is left of the budget to whoever comes next."""

from typing import Any

Request = dict[str, Any]  # with name, waited_ms, prompt_left and output_left


def plan(budget: int, seats: int, requests: list[Request]) -> list[list[Any]]:
    """The next batch as [name, tokens] pairs, best first.

    At most `budget` tokens and at most `seats` requests. A request that still reads its
    prompt takes 1 to prompt_left tokens, any other one takes exactly 1. The list of
    requests is in the order of arrival.
    """
    batch: list[list[Any]] = []
    for request in sorted(requests, key=urgency):
        if budget == 0 or len(batch) == seats:
            break
        tokens = min(request["prompt_left"] or request["output_left"], budget)
        batch.append([request["name"], tokens])
        budget -= tokens
    return batch


def urgency(request: Request) -> float:
    """What is left, in steps; a step less for every 20 ms of waiting. Smallest first.

    Who wants little goes first, so that the line gets short. Whoever waits becomes more
    urgent all the time, so that nobody waits for ever.
    """
    left = request["output_left"] + 0.2 * request["prompt_left"]
    return float(left - 0.05 * request["waited_ms"])
