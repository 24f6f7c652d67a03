"""Tokens to text: pieces, stop texts across any cut, what is held back and why."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from cbasync.models import load_model
from cbasync.text import StopTexts, Transcript


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, so that a character may take four."""
    loaded = load_model("random-tiny")
    assert loaded.tokenizer is not None
    return loaded.tokenizer


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces; the joined pieces are the text again."""
    ends = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


def first_stop(text: str, stops: list[str]) -> int:
    """Where the stop text starts that is complete first; -1 if none ever is."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return min(found)[1] if found else -1


# Two letters, so that stop texts overlap with themselves and with each other.
_words = st.text("ab", min_size=1, max_size=5)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(_words, max_size=3),
    places=st.lists(st.integers(0, 30), max_size=30),
)
@example(text="abaab", stops=["baab", "aa"], places=[])  # the inner one ends first
@example(text="aab", stops=["ab"], places=[1, 2])  # a wrong start, then the right one
@example(text="ababac", stops=["abac"], places=[1, 2, 3, 4, 5])
def test_stop_texts_cut_where_the_whole_text_would_be(
    text: str, stops: list[str], places: list[int]
) -> None:
    """Any cut into pieces gives what a look at the whole text gives."""
    watch = StopTexts(stops)
    shown, want = "", first_stop(text, stops)
    for piece in cut(text, places):
        shown += watch.push(piece)
        assert text.startswith(shown), "what has been shown cannot be taken back"
    shown += watch.flush()
    assert watch.found == (want >= 0)
    assert shown == (text if want < 0 else text[:want])


@given(text=st.text("ab", max_size=20), stops=st.lists(_words, min_size=1, max_size=3))
def test_no_more_is_held_back_than_a_stop_text_needs(
    text: str, stops: list[str]
) -> None:
    watch = StopTexts(stops)
    shown = so_far = ""
    for letter in text:
        shown += watch.push(letter)
        if watch.found:
            return
        so_far += letter
        held = so_far.removeprefix(shown)
        assert shown + held == so_far
        assert not held or any(stop.startswith(held) for stop in stops)


def test_after_a_stop_nothing_more_is_shown() -> None:
    watch = StopTexts(["x"])
    assert [watch.push(piece) for piece in ("ax", "b", "xx")] == ["a", "", ""]
    assert watch.flush() == ""
    assert watch.found


def test_flush_gives_what_was_held_back_once() -> None:
    watch = StopTexts(["END"])
    assert watch.push("the EN") == "the "
    assert watch.flush() == "EN"
    assert watch.flush() == ""
    assert not watch.found


def test_without_stop_texts_nothing_is_held_back() -> None:
    watch = StopTexts([])
    assert [watch.push(piece) for piece in ("a", "", "bc")] == ["a", "", "bc"]
    assert watch.flush() == ""


# ------------------------------------------------------------------ transcripts


def play(transcript: Transcript, data: bytes) -> int:
    """Push bytes until one ends the request; how many were pushed."""
    for count, token in enumerate(data, start=1):
        if transcript.push(token):
            return count
    return len(data)


@given(
    text=st.text("ab🙂é", max_size=12), stop=st.text("ab🙂é", min_size=1, max_size=3)
)
def test_a_transcript_ends_at_the_byte_that_completes_the_stop_text(
    tokenizer: PreTrainedTokenizerBase, text: str, stop: str
) -> None:
    transcript = Transcript(tokenizer, [stop])
    pushed = play(transcript, text.encode())
    transcript.close()
    place = text.find(stop)
    if place < 0:
        assert transcript.text == text
        assert pushed == len(text.encode())
    else:
        assert transcript.text == text[:place]
        assert pushed == len(text[: place + len(stop)].encode())
    assert "" not in transcript.pieces


@pytest.mark.parametrize("least", range(1, 9))
def test_too_short_to_end(tokenizer: PreTrainedTokenizerBase, least: int) -> None:
    """Before `min_tokens` a stop text is text like any other."""
    transcript = Transcript(tokenizer, ["x"], min_tokens=least)
    pushed = play(transcript, b"axbxcxdx")
    transcript.close()
    end = least + least % 2  # each x is at an even place
    assert pushed == end
    assert transcript.text == "axbxcxdx"[: end - 1]


def test_what_ends_in_the_middle_of_a_character_shows_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    transcript = Transcript(tokenizer, ["zz"])
    play(transcript, b"az" + "🙂".encode()[:2])
    assert transcript.text == "a"
    transcript.close()
    assert transcript.text == "az\N{REPLACEMENT CHARACTER}"
    transcript.close()  # twice adds nothing
    assert transcript.text == "az\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_no_text() -> None:
    loaded = load_model("random-tiny")
    assert loaded.tokenizer is not None
    loaded.tokenizer.add_special_tokens({"eos_token": "<end>"})
    transcript = Transcript(loaded.tokenizer, [])
    for token in (*b"ab", loaded.tokenizer.eos_token_id):
        transcript.push(token)
    transcript.close()
    assert transcript.text == "ab"


def test_closing_after_a_stop_shows_nothing_more(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    transcript = Transcript(tokenizer, ["b"])
    assert play(transcript, b"abc") == 2
    transcript.close()
    assert transcript.text == "a"
