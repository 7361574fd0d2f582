"""The text of growing sequences, with stop strings, and of single tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol, TypeAlias

from d3engine.errors import require
from d3engine.text.tokenizer import SPACE_MARK, DecoderKind, Tokenizer, byte_of_token, text_of_byte_run
from d3engine.text.tokenizer_files import bytes_of_token


class Detokenizer:
    """The text of one sequence, given every generated id in order.

    The text continues that of `prompt_token_ids`: a space in front of it stays, and a character of which the prompt has
    only the first bytes belongs to the output. Without a prompt it is `decode` of the ids alone.

    With `stop` strings the text ends before the first of them (after it with `include_stop_str_in_output`). A stop
    string counts at the token whose text completes it, if that comes after the first `min_tokens` tokens; one completed
    earlier is ordinary text. Of several completed by one token the first completed wins, and of those that end at the
    same place the one listed first.
    """

    # Text is settled once no later token can change it; text that may still change (half a character, a run of byte
    # tokens) is tentative. Stop strings are matched in both, but only settled text that cannot begin one is returned.
    # So the joined deltas are exactly `tokenizer.decode(ids)`, and each token is decoded a constant number of times.

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        require(not isinstance(stop, str) and all(stop), "stop", stop, "a list of non-empty strings")
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = _open_stream(tokenizer)
        self._stream.follow([i for i in prompt_token_ids if i not in self._hidden_ids])
        self._has_answer = False
        self._stops = [_StopString(text) for text in stop]
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._shown: list[str] = []
        self._held = ""
        self._searched: list[str] = []  # tentative text that was already searched for stop strings
        self._num_searched = 0
        self._finished = False
        self.num_tokens = 0
        """Ids consumed; after a stop the last of them is the one that completed the stop string."""
        self.stop_reason: str | None = None
        """The stop string that was reached."""

    @property
    def text(self) -> str:
        """All the text that is safe to show so far: the deltas, joined."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def append(self, token_id: int) -> str:
        """Take one generated id and return the text that became safe to show, often "".

        Once a stop string was reached ids are no longer consumed. Raises `RuntimeError` after `finish`.
        """
        if self.stop_reason is not None:
            return ""
        if self._finished:
            raise RuntimeError("Detokenizer.append() was called after finish()")
        self.num_tokens += 1
        if token_id in self._hidden_ids:
            return ""
        self._has_answer = True
        return self._take(self._stream.push(token_id))

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take several ids, up to one that completes a stop string; return the text that became safe."""
        return "".join([self.append(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text still held back, when generation ended for another reason than a stop string."""
        if self._finished or self.stop_reason is not None:
            return ""
        self._finished = True
        # A character that the prompt left unfinished is no output.
        return self._emit(self._held + (self._stream.flush() if self._has_answer else ""))

    def _take(self, settled: str) -> str:
        if not self._stops:
            return self._emit(settled)
        found = self._find_stop(settled)
        text = self._held + settled
        if found is not None:
            start, stop = found
            end = start + (len(stop) if self._include_stop else 0)
            self.stop_reason, self._held = stop, ""
            return self._emit((text + self._stream.tentative())[:end])
        safe = len(text) - max(stop.held() for stop in self._stops)
        self._held = text[safe:]
        return self._emit(text[:safe])

    def _find_stop(self, settled: str) -> tuple[int, str] | None:
        """Return where in held + settled + tentative text the stop string starts that ends first, and it."""
        skip = self._forget_searched(settled)
        searched = self._num_searched
        fresh = self._stream.tentative(searched)
        offset = len(self._held)
        found = []
        for stop in self._stops:
            ends = [offset + end for end in stop.settle(settled) if end > skip]
            ends += [offset + len(settled) + searched + end for end in stop.try_on(fresh, searched > 0)]
            found += [(end, stop.text) for end in ends]
        self._searched.append(fresh)
        self._num_searched += len(fresh)
        if self.num_tokens <= self._min_tokens or not found:
            return None
        end, text = min(found, key=lambda match: match[0])  # of equal ones the first
        return end - len(text), text

    def _forget_searched(self, settled: str) -> int:
        """Return how many settled characters were searched while tentative, and reset."""
        if not settled and self._stream.has_tentative:
            return 0
        # A run that turned out invalid settles as other text, which is searched again. One that settles unchanged must
        # not count twice: before min_tokens its stop strings were ignored.
        searched = "".join(self._searched)
        self._searched, self._num_searched = [], 0
        return len(searched) if settled.startswith(searched) else 0

    def _emit(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


class _StopString:
    """One stop string, matched in constant amortised time a character (Knuth, Morris and Pratt 1977).

    The state is the length of the longest prefix of the stop string that the text ends with: at full length
    the stop string has been reached, and otherwise exactly that many characters must be held back.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0]
        for char in text[1:]:
            self._borders.append(self._next(self._borders[-1], char))
        self._settled = 0
        self._tentative = 0

    def settle(self, text: str) -> list[int]:
        """Advance over settled text; return the lengths of it at which the stop string was complete."""
        self._settled, ends = self._run(self._settled, text)
        return ends

    def try_on(self, text: str, goes_on: bool) -> list[int]:
        """As `settle`, over tentative text that continues the last one (or else the settled text)."""
        self._tentative, ends = self._run(self._tentative if goes_on else self._settled, text)
        return ends

    def held(self) -> int:
        """Return how many settled characters could still be the beginning of the stop string."""
        return self._borders[-1] if self._settled == len(self.text) else self._settled

    def _run(self, state: int, text: str) -> tuple[int, list[int]]:
        ends: list[int] = []
        # Most text has no character of a stop string; then the search is one `find`.
        start = 0 if state else text.find(self.text[0])
        if start < 0:
            return 0, ends
        for length, char in enumerate(text[start:], start=start + 1):
            state = self._next(state, char)
            if state == len(self.text):
                ends.append(length)
        return state, ends

    def _next(self, state: int, char: str) -> int:
        if state == len(self.text):
            state = self._borders[-1]
        while state and self.text[state] != char:
            state = self._borders[state - 1]
        return state + (self.text[state] == char)


class _Stream(Protocol):
    """The decoder of one sequence: ids in, settled text out."""

    @property
    def has_tentative(self) -> bool:
        """Whether `tentative()` would return any text."""
        return False

    def follow(self, earlier: Sequence[int]) -> None:
        """Continue after these ids, before the first push: their text is known, but for an unfinished character."""

    def push(self, token_id: int) -> str:
        """Take an id; return the text that no later id can change."""

    def flush(self) -> str:
        """Return the rest, as `decode` reads it when no id follows."""

    def tentative(self, start: int = 0) -> str:
        """Return the text of the pending ids as of now, complete characters only, from character `start` on."""
        return ""


def _open_stream(tokenizer: Tokenizer) -> _Stream:
    if tokenizer.kind is DecoderKind.BYTE_LEVEL:
        return _ByteLevelStream(tokenizer)
    if tokenizer.kind is DecoderKind.BYTE_FALLBACK:
        return _ByteFallbackStream(tokenizer)
    return _WindowStream(tokenizer)


class _ByteLevelStream(_Stream):
    """Bytes of each token through an incremental UTF-8 decoder, which holds back incomplete characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def follow(self, earlier: Sequence[int]) -> None:
        tokens = (self._tokenizer.convert_id_to_token(token_id) or "" for token_id in reversed(earlier))
        self._decoder.decode(_last_bytes(map(bytes_of_token, tokens)))

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes_of_token(self._tokenizer.convert_id_to_token(token_id) or ""))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _last_bytes(backwards: Iterable[bytes]) -> bytes:
    """Return the last bytes of a text, given its parts from the end: enough to see an unfinished character."""
    end = b""
    for part in backwards:
        end = part + end
        if len(end) >= 3:  # of a character of four bytes
            break
    return end


def _unfinished(end: bytes) -> bytes:
    """Return the bytes at the end of a text that begin a character and do not complete it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(end)
    return decoder.getstate()[0]


def _strict_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="strict")


class _ByteFallbackStream(_Stream):
    """Tokens as they come, but a run of byte tokens only once it has ended: one bad byte spoils all of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._strip = tokenizer.strips_first_space
        self._run = bytearray()
        self._characters: list[str] = []  # the run's text so far, while it is valid
        self._valid = True
        self._decoder = _strict_decoder()

    @property
    def has_tentative(self) -> bool:
        return len(self._characters) > self._stripped()

    def follow(self, earlier: Sequence[int]) -> None:
        tokens = (self._tokenizer.convert_id_to_token(token_id) for token_id in reversed(earlier))
        run = (byte_of_token(token) for token in tokens if token is not None)
        end = _last_bytes(bytes([byte]) for byte in takewhile(lambda byte: byte is not None, run) if byte is not None)
        rest = _unfinished(end)
        texts = filter(None, (self._tokenizer.convert_id_to_token(token_id) for token_id in earlier))
        has_text = next(islice(texts, len(rest), None), None) is not None
        self._strip = self._strip and not has_text
        for byte in rest:
            self._run.append(byte)
            self._read(byte)

    def push(self, token_id: int) -> str:
        token = self._tokenizer.convert_id_to_token(token_id)
        if token is None:
            return ""
        byte = byte_of_token(token)
        if byte is None:
            return self._settle(self._end_run() + token.replace(SPACE_MARK, " "))
        self._run.append(byte)
        self._read(byte)
        return ""

    def flush(self) -> str:
        return self._settle(self._end_run())

    def tentative(self, start: int = 0) -> str:
        return "".join(self._characters[self._stripped() + start :])

    def _read(self, byte: int) -> None:
        if not self._valid:
            return
        try:
            self._characters.extend(self._decoder.decode(bytes([byte])))
        except UnicodeDecodeError:
            self._valid, self._characters = False, []

    def _end_run(self) -> str:
        if not self._run:
            return ""
        text = text_of_byte_run(bytes(self._run))
        self._run, self._characters, self._valid, self._decoder = bytearray(), [], True, _strict_decoder()
        return text

    def _settle(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _stripped(self) -> int:
        return int(self._strip and self._characters[:1] == [" "])


class _WindowStream(_Stream):
    """For any other decoder: pending ids are decoded after a few earlier ones, whose text is cut off.

    Exact for decoders whose text at a token depends on a few tokens before it only.
    """

    _CONTEXT = 4
    _MOST_PENDING = 16  # tokens to wait for a complete character, so that endless garbage costs no more

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def follow(self, earlier: Sequence[int]) -> None:
        known = [i for i in earlier[-self._CONTEXT - self._MOST_PENDING :] if self._tokenizer.convert_id_to_token(i)]
        for split in range(len(known), max(len(known) - self._MOST_PENDING, 0), -1):
            context = known[max(split - self._CONTEXT, 0) : split]
            if not self._tokenizer.decode(context, skip_special_tokens=False).endswith("\ufffd"):
                self._context, self._pending = context, known[split:]
                return
        self._context = known[-self._CONTEXT :]

    def push(self, token_id: int) -> str:
        if self._tokenizer.convert_id_to_token(token_id) is None:
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte_fallback(token_id):
            return ""
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self._MOST_PENDING:
            return ""
        self._context = (self._context + self._pending)[-self._CONTEXT :]
        self._pending = []
        return text

    def flush(self) -> str:
        text, self._pending = self._pending_text(), []
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return both[len(before) :]


TokenText: TypeAlias = tuple[str, bytes]
"""A token's text and its bytes; the text has U+FFFD for a partial character."""


class TokenTexts:
    """The text and bytes of one tokenizer's single tokens, cached."""

    # The bytes of a text's tokens, joined, are the bytes of the text, even where tokens cut characters in halves.
    # `Tokenizer.decode` of one id differs: it drops the space at a text's beginning.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._within: dict[int, TokenText] = {}
        self._first: dict[int, TokenText] = {}

    def of(self, token_id: int, *, is_first: bool = False) -> TokenText:
        """What the token adds to a text; with `is_first`, at the beginning of a text.

        Special tokens read as spelled, and ids beyond the vocabulary are empty. With `DecoderKind.OTHER` half a
        character has the bytes of U+FFFD.

        Raises `TokenizerError` where the tokenizer's own library fails on the id.
        """
        known = self._first if is_first else self._within
        if token_id not in known:
            found = self._bytes(token_id, is_first)
            known[token_id] = found.decode("utf-8", errors="replace"), found
        return known[token_id]

    def placed(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> PlacedTexts:
        """The texts of tokens at the places of this prompt and of its output."""
        hidden = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        return PlacedTexts(self, prompt_token_ids, hidden)

    def _bytes(self, token_id: int, is_first: bool) -> bytes:
        tokenizer = self._tokenizer
        token = tokenizer.convert_id_to_token(token_id)
        if token is None:
            return b""
        if tokenizer.kind is DecoderKind.BYTE_LEVEL:
            return bytes_of_token(token)
        byte = byte_of_token(token) if tokenizer.is_byte_fallback(token_id) else None
        if byte is not None or tokenizer.kind is DecoderKind.BYTE_FALLBACK:
            text = token.replace(SPACE_MARK, " ").encode("utf-8") if byte is None else bytes([byte])
            return text.removeprefix(b" ") if is_first and tokenizer.strips_first_space else text
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        twice = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return (alone if is_first or not twice.startswith(alone) else twice[len(alone) :]).encode("utf-8")


class PlacedTexts:
    """The texts of tokens at the places of one prompt and its output; `hidden` ids are in no text."""

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._texts = texts
        self._hidden = hidden
        shown = (place for place, token in enumerate(prompt_token_ids) if token not in hidden)
        self._begins = next(shown, len(prompt_token_ids))

    def at(self, place: int, token_id: int) -> TokenText:
        """A token's text at this place, counted from the prompt's first token."""
        return self._texts.of(token_id, is_first=place <= self._begins)

    def grow(self, token_id: int, place: int) -> None:
        """Record that the output has this token at this place."""
        if place == self._begins and token_id in self._hidden:
            self._begins += 1
