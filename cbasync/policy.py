"""Who goes first: policies are an order on requests, nothing else.

A policy gives each request a key; smaller keys go first. The scheduler serves running
requests and admits waiting ones in this order, and takes blocks from the last.
"""

from __future__ import annotations

from typing import Any, Protocol

from cbasync.request import Request


class Policy(Protocol):
    """An order on requests. The key of a request must not change while it lives."""

    name: str

    def key(self, request: Request) -> Any:
        """What requests are sorted by; never equal for two requests."""


class FirstCome:
    """In the order of submission."""

    name = "first-come"

    def key(self, request: Request) -> tuple[int, ...]:
        """Its number in the order of submission."""
        return (request.arrival,)


class PriorityFirst:
    """By `priority`, smaller first; in the order of submission among equals."""

    name = "priority"

    def key(self, request: Request) -> tuple[int, ...]:
        """Urgency, then arrival."""
        return (request.priority, request.arrival)


class ShortestPromptFirst:
    """Short prompts overtake long ones, which may starve if short ones keep coming."""

    name = "shortest-prompt"

    def key(self, request: Request) -> tuple[int, ...]:
        """Length of the prompt, then arrival."""
        return (len(request.prompt_token_ids), request.arrival)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FirstCome, PriorityFirst, ShortestPromptFirst)
}


def make_policy(policy: str | Policy) -> Policy:
    """A policy by its name, or one of your own as it is.

    >>> make_policy("fairest")
    Traceback (most recent call last):
    ...
    ValueError: policy is 'fairest', the policies are first-come, priority, \
shortest-prompt: choose one or write your own
    """
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(
            f"policy is {policy!r}, the policies are {', '.join(POLICIES)}: "
            "choose one or write your own"
        )
    return POLICIES[policy]()
