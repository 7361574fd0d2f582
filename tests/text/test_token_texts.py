"""What a token reads as in its place: the bytes of all that a text shows are the text's."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, made_tokenizer

from d3engine import Engine, SamplingParams
from d3engine.text.detokenizer import TokenTexts
from d3engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=[*KINDS, "llama 2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return made_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text("ab é日🙂 \n<", max_size=6), max_size=3), skip=st.booleans(), cut=st.integers(0, 12))
def test_bytes_of_a_texts_tokens_are_the_texts(tokenizer: Tokenizer, texts: list[str], skip: bool, cut: int) -> None:
    """Of prompt and answer together, whatever is cut in halves between them, and with special ids on the way."""
    special = sorted(tokenizer.special_ids)[:1]
    ids = [i for text in texts for i in (*special, *tokenizer.encode(text, add_special_tokens=False))]
    hidden = tokenizer.special_ids if skip else frozenset()
    placed = TokenTexts(tokenizer).placed(ids[:cut], skip_special_tokens=skip)
    joined = b""
    for place, token in enumerate(ids):
        found, as_bytes = placed.at(place, token)
        assert found == as_bytes.decode("utf-8", errors="replace")
        joined += b"" if token in hidden else as_bytes
        if place >= cut:
            placed.grow(token, place)
    assert joined.decode("utf-8") == tokenizer.decode(ids, skip_special_tokens=skip)


def test_logprobs_of_an_engine_have_the_prompts_and_answers_text() -> None:
    """Log-probabilities of an engine say what prompt and answer read as."""
    # A half of a character has its byte and U+FFFD, a word its space, but not where it begins a text.
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1)
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        tokenizer = engine.get_tokenizer()
        prompts = ["Question: é 🙂 has 3.\nAnswer:", [1], [1, 2, *tokenizer.encode(" 5 + 3", add_special_tokens=False)]]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        alone = engine.generate(prompts[0], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        prompt = list(zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True))
        for tokens, text in (
            (prompt, tokenizer.decode(output.prompt_token_ids)),
            (list(zip(answer.token_ids, answer.logprobs, strict=True)), answer.text),
        ):
            shown = [row[token] for token, row in tokens if row is not None and token not in tokenizer.special_ids]
            assert b"".join(entry.bytes or b"" for entry in shown).decode("utf-8") == text
            assert all((entry.bytes or b"").decode("utf-8", "replace") == entry.decoded_token for entry in shown)
    assert outputs[0].outputs[0].text == alone[0].outputs[0].text
    assert outputs[0].outputs[0].text[0] == " "  # it goes on behind the prompt
    prompt_texts = [next(iter(row.values())).decoded_token for row in outputs[0].prompt_logprobs or [] if row]
    assert ("\ufffd", "\ufffd") in pairwise(prompt_texts)


def test_alternatives_read_as_in_the_chosen_tokens_place() -> None:
    """Alternatives read as they would in the place of the chosen token."""
    # All that begin with a space keep it, unless nothing stands before them.
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=64, skip_special_tokens=True)
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        pieces = engine.get_tokenizer().convert_id_to_token
        within, first = engine.generate(["Question: Tom", [1]], params, use_tqdm=False)
    for output, shown in ((within, " "), (first, "")):
        assert output.outputs[0].logprobs is not None
        begun = {token: entry for token, entry in output.outputs[0].logprobs[0].items() if pieces(token)[0] == "\u2581"}
        assert begun
        for token, entry in begun.items():
            assert entry.decoded_token == pieces(token).replace("\u2581", " ").replace(" ", shown, 1)
