"""A sample shows the text, the depths and the tokens taken, and its page runs nothing of the model."""

from html.parser import HTMLParser
from typing import Any

import pytest
from observers import observer_of

from d3engine import D3, Engine, SamplingParams
from d3engine.cli.sample_page import sample_page
from d3engine.engine.model_directory import model_directory
from d3engine.research.analysis.answers import Answered
from d3engine.research.analysis.report import step_groups, steps_in_words
from d3engine.research.analysis.sample import Guess, Sample, SampleAnswer, SampleToken, guess_layers, take_sample
from d3engine.research.plots import depth_colours
from d3engine.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def demo_sample() -> tuple[Sample, Answered]:
    policy, prompt = (
        D3(alpha=0.9, start=0.7),
        "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:",
    )
    directory = model_directory("demo")
    with Engine("demo", device="cpu", kv_cache_memory_bytes=2**24) as engine:
        params = SamplingParams(temperature=0, max_tokens=24, depth=policy)
        output = engine.generate([prompt], params, use_tqdm=False)[0]
    best = output.outputs[0]
    one = Answered(prompt, output.prompt_token_ids, best.token_ids, [], best.depths, best.text, True)
    layers = guess_layers(16, 4)
    answer = take_sample(observer_of(directory), load_tokenizer(directory), one, policy, layers)
    return Sample(16, [answer]), one


def test_a_sample_has_the_text_the_depths_and_the_tokens_taken(demo_sample: tuple[Sample, Answered]) -> None:
    sample, one = demo_sample
    (answer,) = sample.answers
    tokenizer = load_tokenizer(model_directory("demo"))
    assert "".join(token.text for token in answer.tokens) == one.text
    assert [token.depth for token in answer.tokens] == one.depths
    assert sample.depths == [16, 14, 12, 11]
    for token, token_id in zip(answer.tokens, one.token_ids, strict=True):
        assert [guess.layer for guess in token.guesses] == [3, 7, 11, 15]
        assert token.guesses[-1].top[0][0] == tokenizer.decode([token_id], skip_special_tokens=False)
        ran = {16: [True] * 4, 14: [True, True, False, True], 12: [True, True, False, True]}
        assert [guess.ran for guess in token.guesses] == ran.get(token.depth, [True, True, False, False])
        assert [chance for _, chance in token.guesses[-1].top] == sorted(
            (chance for _, chance in token.guesses[-1].top), reverse=True
        )


class Page(HTMLParser):
    """What a page holds: its tags, and the text outside the guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tokens = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.tokens += dict(attrs).get("class") == "token"


def test_page_shows_each_token_and_runs_nothing_of_the_model(demo_sample: tuple[Sample, Answered]) -> None:
    """The page shows every token and runs nothing of the model's."""
    sample, _ = demo_sample
    hostile = SampleToken("<script>alert(1)</script>\x1b[2J", 11, (Guess(3, True, (("<b>&", 0.5),)),))
    answer = sample.answers[0]
    tokens = (*answer.tokens, hostile)
    text = sample_page(Sample(16, [SampleAnswer(answer.policy, "<i>prompt", tokens)]), "a <title>")
    assert '<meta name="viewport" content="width=device-width' in text  # a phone does not shrink it
    assert "#fff" not in text.split("</style>")[0]  # boxes take the page's own colours, dark or light
    page = Page()
    page.feed(text)
    assert not {"script", "i", "b", "link", "img"} & set(page.tags)
    assert page.tokens == sum(bool(token.text) for token in tokens)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;[2J" in text
    assert "\x1b" not in text
    for back, letters in depth_colours(sample.depths).values():
        assert f"background:{back};color:{letters}" in text


def test_guesses_are_spread_evenly_and_hold_the_last_layer() -> None:
    assert guess_layers(16, 4) == (3, 7, 11, 15)
    assert guess_layers(32, 3) == (9, 20, 31)
    assert guess_layers(2, 9) == (0, 1)


def test_positions_are_grouped_by_doubling_and_cover_all() -> None:
    assert [steps_in_words(group) for group in step_groups(11)] == ["0", "1", "2-3", "4-7", "8-10"]
    assert [place for group in step_groups(37) for place in group] == list(range(37))
    assert step_groups(1) == [range(1)]
