"""Tokens to text as they come: whole characters, and ends at stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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


class StopTexts:
    """Watches a text grow and finds the first stop text, over any cut into pieces.

    >>> stop = StopTexts(["END"])
    >>> [stop.push(piece) for piece in ("a E", "ND b",)]
    ['a ', '']
    >>> stop.found
    True

    What might be the beginning of a stop text is held back until it is not:

    >>> stop = StopTexts(["END"])
    >>> [stop.push(piece) for piece in ("a E", "N", "x")], stop.found
    (['a ', '', 'ENx'], False)
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.found = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Add a piece; the text that is safe to show."""
        if self.found:
            return ""
        text = self._held + piece
        found = [
            (place + len(stop), place)
            for stop in self.texts
            if (place := text.find(stop)) >= 0
        ]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)[1]]  # the one complete first, as letter by letter
        keep = max((_overlap(text, stop) for stop in self.texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`.

    >>> _overlap("the EN", "END"), _overlap("ENE", "END"), _overlap("x", "END")
    (2, 1, 0)
    """
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Transcript:
    """The text of one request as it grows; ends the request at a stop text.

    Given to the engine as `Request.on_token`, it sees each token once, when the host
    learns of it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        min_tokens: int = 0,
    ) -> None:
        self.pieces: list[str] = []
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopTexts(stop)
        self._min_tokens = min_tokens
        self._closed = False

    @property
    def text(self) -> str:
        """All that is safe to show so far."""
        return "".join(self.pieces)

    def push(self, token: int) -> bool:
        """Add a token; True if a stop text is complete."""
        piece = self._detokenizer.push(token)
        if len(self._detokenizer.token_ids) < self._min_tokens:
            self._add(piece)  # too short to end, so nothing to hold back
            return False
        self._add(self._stop.push(piece))
        return self._stop.found

    def close(self) -> None:
        """Show what was held back, once the request has ended."""
        if not self._closed and not self._stop.found:
            self._add(self._stop.push(self._detokenizer.flush()) + self._stop.flush())
        self._closed = True

    def _add(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
