"""Assignment 2: a policy that hands out the tokens of the next batch."""

from typing import Any

Request = dict[str, Any]  # with name, waited_ms, prompt_left and output_left


def plan(budget: int, seats: int, requests: list[Request]) -> list[list[Any]]:
    """The next batch as [name, tokens] pairs, best first.

    At most `budget` tokens and at most `seats` requests. A request that still reads its
    prompt takes 1 to prompt_left tokens, any other one takes exactly 1. The list of
    requests is in the order of arrival.
    """
    raise NotImplementedError
