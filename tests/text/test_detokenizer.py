"""Streamed text equals the full decode for any ids; a stop string never leaks, whatever the token borders."""

from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, made_tokenizer
from tokenizers import decoders

from d3engine.errors import InvalidValueError
from d3engine.text.detokenizer import Detokenizer
from d3engine.text.tokenizer import DecoderKind, FastTokenizer, Tokenizer

MANY = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module", params=[*KINDS, "llama 2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made_tokenizer("byte level", tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made_tokenizer("byte fallback", tmp_path_factory.mktemp("byte_fallback"))


def byte_ids(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Return one id for each byte."""
    if tokenizer.kind is DecoderKind.BYTE_LEVEL:
        table = {tokenizer.decode([i]): i for i in range(tokenizer.vocab_size)}
        return [table[chr(byte)] for byte in text]
    table = {tokenizer.convert_id_to_token(i): i for i in range(tokenizer.vocab_size)}
    return [table[f"<0x{byte:02X}>"] for byte in text]


def any_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids at all: uniform ones, ids beyond the vocabulary, specials and bytes, and encoded text."""
    uniform = st.integers(0, tokenizer.vocab_size + 3)
    low = st.integers(0, min(300, tokenizer.vocab_size - 1))
    runs = st.lists(st.one_of(uniform, low, st.sampled_from([*tokenizer.special_ids])), max_size=8)
    words = st.text("ab é日🙂 \n\ufffd", max_size=6).map(tokenizer.encode)
    return st.lists(st.one_of(runs, words), max_size=5).map(lambda parts: list(chain(*parts)))


def stream(detokenizer: Detokenizer, ids: Iterable[int]) -> str:
    """Return the joined deltas, having checked that `text` always equals them."""
    shown = ""
    for token_id in ids:
        shown += detokenizer.append(token_id)
        assert detokenizer.text == shown
    return shown + detokenizer.finish()


def complete_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Return the text of a prompt up to a character that it begins and does not complete."""
    if tokenizer.kind is DecoderKind.BYTE_LEVEL:  # a token may complete one character and begin another
        return tokenizer.decode(ids, skip_special_tokens=skip).rstrip("\ufffd")
    texts = (tokenizer.decode(ids[:end], skip_special_tokens=skip) for end in range(len(ids), -1, -1))
    return next(text for text in texts if not text.endswith("\ufffd"))


def occurrences(text: str, stops: Iterable[str]) -> set[tuple[int, str]]:
    return {(i, stop) for stop in stops for i in range(len(text)) if text.startswith(stop, i)}


def expect(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], min_tokens: int, skip: bool
) -> tuple[str, str | None, int]:
    """Return text, stop reason and ids consumed, by decoding everything anew at every token."""
    passed: set[tuple[int, str]] = set()
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=skip)
        found = occurrences(text, stops) - passed
        if length <= min_tokens:
            passed |= found
        elif found:
            start, stop = min(found, key=lambda match: (match[0] + len(match[1]), stops.index(match[1])))
            return text[:start], stop, length
    return tokenizer.decode(ids, skip_special_tokens=skip), None, len(ids)


class TestStreamedText:
    @MANY
    @given(data=st.data(), skip=st.booleans())
    def test_joined_deltas_equal_the_full_decode(self, tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
        ids = data.draw(any_ids(tokenizer))
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert stream(detokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert (detokenizer.num_tokens, detokenizer.stop_reason) == (len(ids), None)

    @settings(max_examples=150, deadline=None)
    @given(text=st.binary(max_size=12))
    @example(text=b"\xf0\x9f\x99\x82")
    @example(text=b"\xe6\x97A\xa5")
    @example(text=b"\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80")
    def test_any_bytes_one_a_token_stream_as_they_decode(
        self, byte_level: Tokenizer, byte_fallback: Tokenizer, text: bytes
    ) -> None:
        fallback = byte_ids(byte_fallback, text)
        assert stream(Detokenizer(byte_fallback), fallback) == byte_fallback.decode(fallback)
        ids = list(text)  # the first 256 ids are the byte alphabet, if not in the bytes' order
        assert stream(Detokenizer(byte_level), ids) == byte_level.decode(ids)

    def test_a_character_is_shown_once_its_last_byte_is_there(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("🙂")
        assert len(ids) > 1
        detokenizer = Detokenizer(byte_level)
        deltas = [detokenizer.append(token_id) for token_id in ids]
        assert deltas == [""] * (len(ids) - 1) + ["🙂"]

    def test_a_run_of_byte_pieces_is_shown_once_it_has_ended(self, byte_fallback: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_fallback)
        assert detokenizer.extend(byte_ids(byte_fallback, b"ok\n")) == ""
        word = byte_fallback.vocab_size - 2
        assert detokenizer.append(word) == "ok\nb"

    def test_an_invalid_byte_spoils_the_run_it_joins(self, byte_fallback: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_fallback)
        assert stream(detokenizer, byte_ids(byte_fallback, b"ok\xff")) == "\ufffd\ufffd\ufffd"

    def test_an_unfinished_character_is_flushed_at_the_end(self, tokenizer: Tokenizer) -> None:
        if tokenizer.kind is DecoderKind.OTHER:
            pytest.skip("this tokenizer has no bytes")
        ids = tokenizer.encode("🙂", add_special_tokens=False)[:-1]
        detokenizer = Detokenizer(tokenizer)
        assert "\ufffd" not in detokenizer.extend(ids)
        assert detokenizer.finish().endswith("\ufffd")
        assert detokenizer.finish() == ""

    def test_only_the_first_space_of_all_is_stripped(self, byte_fallback: Tokenizer) -> None:
        space, word = byte_fallback.vocab_size - 5, byte_fallback.vocab_size - 3
        detokenizer = Detokenizer(byte_fallback)
        assert detokenizer.append(byte_fallback.encode("<s>")[0]) == ""
        assert [detokenizer.append(i) for i in (space, space, word)] == ["", " ", " a"]

    def test_ids_are_looked_up_a_bounded_number_of_times(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work = 0
        decode, look_up = tokenizer.decode, tokenizer.convert_id_to_token

        def counted_decode(token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
            nonlocal work
            work += len(list(token_ids))
            return decode(token_ids, skip_special_tokens)

        def counted_look_up(token_id: int) -> str | None:
            nonlocal work
            work += 1
            return look_up(token_id)

        monkeypatch.setattr(tokenizer, "decode", counted_decode)
        monkeypatch.setattr(tokenizer, "convert_id_to_token", counted_look_up)
        ids = [i % tokenizer.vocab_size for i in range(1500)]
        stream(Detokenizer(tokenizer, stop=["never to be found"]), ids)
        assert work <= 16 * len(ids)

    def test_appending_after_finish_is_an_error(self, byte_level: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_level)
        detokenizer.finish()
        with pytest.raises(RuntimeError, match="after finish"):
            detokenizer.append(1)


class TestStopStrings:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), skip=st.booleans(), include=st.booleans(), min_tokens=st.sampled_from([0, 0, 1, 3, 6]))
    def test_text_ends_where_full_decoding_finds_the_stop_string(
        self, tokenizer: Tokenizer, data: st.DataObject, skip: bool, include: bool, min_tokens: int
    ) -> None:
        """Text ends where decoding everything anew finds the stop string."""
        ids = data.draw(any_ids(tokenizer))
        full = tokenizer.decode(ids, skip_special_tokens=skip).replace("\ufffd", "")
        cuts = st.tuples(st.integers(0, max(len(full) - 1, 0)), st.integers(1, 4))
        inside = cuts.map(lambda cut: full[cut[0] : cut[0] + cut[1]])
        stops = data.draw(st.lists(st.one_of(inside, st.text("ab\n é", min_size=1, max_size=3)), max_size=3))
        stops = [stop for stop in stops if stop]
        text, reason, consumed = expect(tokenizer, ids, stops, min_tokens, skip)
        detokenizer = Detokenizer(
            tokenizer, stop=stops, skip_special_tokens=skip, include_stop_str_in_output=include, min_tokens=min_tokens
        )
        shown = stream(detokenizer, ids)
        assert (detokenizer.stop_reason, detokenizer.num_tokens) == (reason, consumed)
        assert shown == text + (reason if include and reason else "")

    @settings(max_examples=100, deadline=None)
    @given(
        text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)
    )
    def test_no_more_is_held_back_than_could_begin_a_stop_string(
        self, byte_level: Tokenizer, text: str, stops: list[str]
    ) -> None:
        detokenizer = Detokenizer(byte_level, stop=stops)
        letters = {letter: byte_level.encode(letter)[0] for letter in "ab"}
        for length, letter in enumerate(text, start=1):
            detokenizer.append(letters[letter])
            if detokenizer.stop_reason is not None:
                break
            seen = text[:length]
            prefixes = {stop[:end] for stop in stops for end in range(len(stop))}
            held = max(len(prefix) for prefix in prefixes if seen.endswith(prefix))
            assert detokenizer.text == seen[: length - held]

    def test_a_stop_string_across_token_borders_does_not_leak(self, byte_level: Tokenizer) -> None:
        letters = [byte_level.encode(letter)[0] for letter in "go!##Q: more"]
        detokenizer = Detokenizer(byte_level, stop=["#Q:"])
        assert [detokenizer.append(letter) for letter in letters] == ["g", "o", "!", "", "#"] + [""] * 7
        assert (detokenizer.text, detokenizer.stop_reason, detokenizer.num_tokens) == ("go!#", "#Q:", 7)
        assert detokenizer.finish() == ""

    def test_a_false_start_is_shown_as_soon_as_it_is_known(self, byte_level: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_level, stop=["abab!"])
        letters = [byte_level.encode(letter)[0] for letter in "ababab?"]
        deltas = [detokenizer.append(letter) for letter in letters]
        assert deltas == ["", "", "", "", "ab", "", "abab?"]

    @pytest.mark.parametrize("spoilt", [b"ok\xff", b"ok\xe6"], ids=["a byte that is none", "half a character"])
    def test_stop_string_in_a_spoiled_run_is_found_in_its_text(self, byte_fallback: Tokenizer, spoilt: bytes) -> None:
        """What was searched while the run was valid says nothing of the text that it settles as."""
        detokenizer = Detokenizer(byte_fallback, stop=["\ufffd"])
        assert detokenizer.extend([*byte_ids(byte_fallback, spoilt), byte_fallback.vocab_size - 2]) == ""
        assert (detokenizer.stop_reason, detokenizer.text) == ("\ufffd", "")

    def test_a_newline_written_as_a_byte_piece_stops_at_once(self, byte_fallback: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_fallback, stop=["\n"])
        assert detokenizer.extend(byte_ids(byte_fallback, b"ok\nmore")) == "ok"
        assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("\n", 3)

    def test_stop_string_is_not_found_in_a_stripped_space(self, byte_fallback: Tokenizer) -> None:
        """A stop string is not found in the space that decoding strips."""
        detokenizer = Detokenizer(byte_fallback, stop=[" x"])
        ids = byte_ids(byte_fallback, b" x x")
        assert detokenizer.extend(ids) == "x"
        assert detokenizer.num_tokens == len(ids)

    def test_stop_string_completed_within_min_tokens_is_text(self, byte_level: Tokenizer) -> None:
        """A stop string completed in the first `min_tokens` is ordinary text."""
        letters = [byte_level.encode(letter)[0] for letter in "a.b.c"]
        detokenizer = Detokenizer(byte_level, stop=["."], min_tokens=3)
        assert detokenizer.extend(letters) == "a.b"
        assert detokenizer.num_tokens == 4

    def test_stop_string_counts_from_the_token_after_min_tokens(self, byte_level: Tokenizer) -> None:
        """A stop string counts from the token after the first `min_tokens`."""
        letters = [byte_level.encode(letter)[0] for letter in "ab."]
        assert Detokenizer(byte_level, stop=["."], min_tokens=2).extend(letters) == "ab"
        assert Detokenizer(byte_level, stop=["."], min_tokens=3).extend(letters) == "ab."

    def test_stop_string_begun_within_min_tokens_counts_at_its_end(self, byte_level: Tokenizer) -> None:
        """A stop string that only ends after the first `min_tokens` counts."""
        letters = [byte_level.encode(letter)[0] for letter in "ab#Q:c"]
        assert Detokenizer(byte_level, stop=["#Q:"], min_tokens=4).extend(letters) == "ab"

    @pytest.mark.parametrize(
        ("stops", "text", "reason"),
        [
            (["the cat", "he"], "t", "he"),  # it begins later, and is completed first
            (["e", "he", "the"], "th", "e"),  # completed at the same place: the one listed first
            (["the", "he", "e"], "", "the"),
        ],
    )
    def test_first_completed_of_several_stop_strings_wins(
        self, byte_level: Tokenizer, stops: list[str], text: str, reason: str
    ) -> None:
        """Of several stop strings of one token, the one completed first wins."""
        (the,) = byte_level.encode("the")
        detokenizer = Detokenizer(byte_level, stop=stops)
        assert (detokenizer.append(the), detokenizer.stop_reason) == (text, reason)

    def test_held_text_is_flushed_when_no_stop_string_came(self, byte_level: Tokenizer) -> None:
        detokenizer = Detokenizer(byte_level, stop=["end!"])
        letters = [byte_level.encode(letter)[0] for letter in "the en"]
        assert (detokenizer.extend(letters), detokenizer.finish()) == ("the ", "en")

    @pytest.mark.parametrize("stop", ["a string", [""], ["ok", ""]])
    def test_an_empty_or_bare_stop_string_is_refused_by_name(self, byte_level: Tokenizer, stop: list[str]) -> None:
        with pytest.raises(InvalidValueError, match=r"stop must be "):
            Detokenizer(byte_level, stop=stop)


class TestTextAfterAPrompt:
    @MANY
    @given(data=st.data(), skip=st.booleans())
    def test_prompt_and_answer_read_as_the_whole(self, tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
        words = st.text("ab é日🙂 \n", max_size=8).map(tokenizer.encode)
        ids = data.draw(st.lists(words, max_size=3).map(lambda parts: list(chain(*parts))))
        cut = data.draw(st.integers(0, len(ids)))
        assume(cut < len(ids))
        answer = stream(Detokenizer(tokenizer, prompt_token_ids=ids[:cut], skip_special_tokens=skip), ids[cut:])
        assert complete_text(tokenizer, ids[:cut], skip) + answer == tokenizer.decode(ids, skip_special_tokens=skip)

    @MANY
    @given(data=st.data())
    def test_text_is_that_of_a_decode_stream_of_tokenizers(
        self, byte_level: Tokenizer, byte_fallback: Tokenizer, data: st.DataObject
    ) -> None:
        """The text is what a decode stream of tokenizers makes of it."""
        # vLLM reads answers by this stream, begun with the prompt's ids.
        tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
        assert isinstance(tokenizer, FastTokenizer)
        ids = tokenizer.encode(data.draw(st.text("ab é日🙂 \n", max_size=12)))
        cut = data.draw(st.integers(0, len(ids)))
        # Begun inside a character it says the text before once more, which prompt and answer together would not be.
        assume(not tokenizer.decode(ids[:cut]).endswith("\ufffd"))
        oracle = decoders.DecodeStream(ids=ids[:cut], skip_special_tokens=True)
        expected = "".join(oracle.step(tokenizer._tokenizer, token_id) or "" for token_id in ids[cut:])
        assert stream(Detokenizer(tokenizer, prompt_token_ids=ids[:cut]), ids[cut:]) == expected

    def test_the_first_space_of_an_answer_is_kept(self, byte_fallback: Tokenizer) -> None:
        begin, word = byte_fallback.encode("<s>")[0], byte_fallback.vocab_size - 3  # "▁a"
        assert Detokenizer(byte_fallback, prompt_token_ids=[begin, word]).append(word) == " a"
        assert Detokenizer(byte_fallback, prompt_token_ids=[begin]).append(word) == "a"
        assert Detokenizer(byte_fallback, prompt_token_ids=[begin], skip_special_tokens=False).append(word) == " a"

    def test_a_character_that_the_prompt_begins_is_completed(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a🙂b", add_special_tokens=False)
        for cut in range(1, len(ids)):
            text = stream(Detokenizer(tokenizer, prompt_token_ids=ids[:cut]), ids[cut:])
            assert complete_text(tokenizer, ids[:cut], skip=True) + text == tokenizer.decode(ids)
            assert "\ufffd" not in text

    def test_what_a_prompt_leaves_unfinished_is_no_answer_by_itself(self, byte_level: Tokenizer) -> None:
        ids = byte_level.encode("🙂")[:-1]
        assert Detokenizer(byte_level, prompt_token_ids=ids).finish() == ""
