"""The chat: answers and their branches, over the bundled model or streams that a test writes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from axe import check_with_axe
from browsed_chat import answers, ask, ask_half, ask_whole, ended, press, questions, said, titles
from browsed_page import Open
from demo_server import serving_demo
from serving import HANG_SECONDS
from written_streams import DONE, HOSTILE, Script, Scripted, chunk, delta, whole

from d3engine import AsyncEngine
from d3engine.engine.model_directory import fetched_model

QUESTION = "Tom has 5 pens. Tom finds 3. How many pens does Tom have now?"


def test_chat_answer_is_the_engines_at_the_servers_depth(open_chat: Open, url: str, demo: Any) -> None:
    """A question is answered at the server's own depth, as the engine answers it."""
    page = open_chat(url)
    assert page.locator("#depth").text_content() == "D3, alpha 0.8, start 0.6"
    ask_whole(page, QUESTION)
    output = demo.chat([{"role": "user", "content": QUESTION}], use_tqdm=False)[0]
    answer = output.outputs[0]
    assert " ".join(answers(page)[0].split()) == " ".join(answer.text.split())
    figures = page.locator(".figures").text_content()
    mean = sum(answer.depths) / len(answer.depths)
    assert f"{len(answer.token_ids)} tokens · " in figures
    assert f"{mean:.1f} of 16 layers" in figures
    used = len(output.prompt_token_ids) + len(answer.token_ids)
    assert page.locator("#context").text_content() == f"{used} of 1,024 tokens of context"


def test_chat_edit_and_regenerate_make_branches(chat: tuple[Any, Script]) -> None:
    """An edited question and a regenerated answer are branches."""
    page, script = chat
    script.pieces = whole("First")
    ask_whole(page, "One?")
    script.pieces = whole("Second")
    press(page, "assistant", "Regenerate")
    page.wait_for_selector("text=2/2")
    ended(page)
    assert answers(page) == ["Second"]
    assert script.bodies[0]["messages"] == script.bodies[1]["messages"]
    ask_whole(page, "More?")
    assert said(script.bodies[2]) == [("user", "One?"), ("assistant", "Second"), ("user", "More?")]
    page.locator(".message.assistant").first.get_by_role("button", name="Earlier branch").click()
    assert (questions(page), answers(page)) == (["One?"], ["First"])
    page.locator(".message.assistant").first.get_by_role("button", name="Later branch").click()
    assert (questions(page), answers(page)) == (["One?", "More?"], ["Second", "Second"])
    script.pieces = whole("Third")
    press(page, "user", "Edit")
    page.fill("[aria-label='Edit the question']", "Other?")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Third")
    ended(page)
    assert said(script.bodies[3])[-1] == ("user", "Other?")
    assert questions(page) == ["One?", "Other?"]
    press(page, "user", "Delete this message and all after it")
    assert (questions(page), answers(page)) == (["One?", "More?"], ["Second", "Second"])


def test_models_after_a_failed_answer_are_read_again(chat: tuple[Any, Script]) -> None:
    """A server that was started with another model answers the next question, without a reload of the page."""
    page, script = chat
    script.model_ids, script.error = ["other"], (404, "The model 'scripted' does not exist here.")
    ask_whole(page, "One")
    page.wait_for_selector("#model option[value=other]", state="attached")
    script.error, script.pieces = None, whole("Yes")
    ask_whole(page, "Two")
    assert script.bodies[-1]["model"] == "other"


def test_stop_keeps_what_has_come_and_continue_goes_on_behind_it(chat: tuple[Any, Script]) -> None:
    page, script = chat
    ask_half(page, script, "Anything", "Half of ")
    page.keyboard.press("Escape")
    ended(page)
    assert script.left.wait(HANG_SECONDS)
    assert "stopped" in page.locator(".figures").text_content()
    script.pieces, script.waits_at_the_end = whole("it"), False
    press(page, "assistant", "Continue")
    page.wait_for_selector("text=Half of it")
    ended(page)
    assert script.bodies[1]["continue_final_message"] is True
    assert said(script.bodies[1]) == [("user", "Anything"), ("assistant", "Half of ")]
    assert page.get_by_role("button", name="Continue").count() == 0


def test_an_answer_goes_on_while_another_conversation_is_shown(chat: tuple[Any, Script]) -> None:
    page, script = chat
    ask_half(page, script, "Long?")
    page.click("#new")
    script.waits_at_the_end = False
    script.pieces = whole("Short")
    ask_whole(page, "Quick?")
    assert answers(page) == ["Short"]
    page.click("#conversations >> text=Long?")
    page.wait_for_selector("#stop:visible")
    assert answers(page) == ["Half"]
    page.click("#stop")
    ended(page)


def test_reasoning_and_calls_stand_in_folds(chat: tuple[Any, Script]) -> None:
    page, script = chat
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Bern"}'}}
    script.pieces = [delta(reasoning_content="Let me "), delta(reasoning_content="see."), delta(content="I look.")]
    script.pieces += [delta(tool_calls=[call]), delta(tool_calls=[rest]), delta("tool_calls"), DONE]
    ask_whole(page, "Weather?")
    assert page.locator(".reasoning").get_attribute("open") is None
    assert page.locator(".reasoning > div").text_content() == "Let me see."
    assert answers(page) == ["I look."]
    assert page.locator(".call summary").text_content() == "Calls weather"
    assert page.locator(".call pre").text_content() == '{"city": "Bern"}'
    script.pieces = whole("Fine")
    ask_whole(page, "Go on")
    assert said(script.bodies[1])[1] == ("assistant", "I look.")


@pytest.mark.parametrize("when", ["before", "within"])
def test_chat_error_is_shown_and_kept_with_the_answer(chat: tuple[Any, Script], when: str) -> None:
    """An error is shown in the server's sentence, and kept with the answer."""
    page, script = chat
    sentence = "The engine failed on this <b>request</b>."
    if when == "before":
        script.error = (400, sentence)
    script.pieces = [delta(content="Half"), f"data: {json.dumps({'error': {'message': sentence}})}\n\n".encode(), DONE]
    ask_whole(page, "Anything")
    assert page.locator(".message .error").text_content() == sentence
    assert answers(page) == (["Half"] if when == "within" else [""])


def test_what_a_model_or_a_person_writes_is_never_markup(chat: tuple[Any, Script]) -> None:
    page, script = chat
    evil = "[x](javascript:alert(1)) ![y](http://127.0.0.1:9/pixel.png) <style>*{}</style> [z](http://example.org/)"
    script.pieces = whole(f"{HOSTILE}\n\n{evil}\n\n```html\n{HOSTILE}\n```")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    ask_whole(page, HOSTILE)
    assert page.locator("#messages :is(img, script, style, iframe)").count() == 0
    hrefs = page.locator(".answer a").evaluate_all("all => all.map(({href, rel}) => [href, rel])")
    assert all(href.startswith("http") and rel == "noreferrer" for href, rel in hrefs)
    assert [url for url in asked if "pixel" in url] == []
    assert "broken" not in page.title().removesuffix("d3engine").replace("document.title='broken'", "")


def test_an_edited_question_that_cannot_be_sent_is_not_lost(chat: tuple[Any, Script]) -> None:
    page, script = chat
    script.pieces = whole("Yes")
    ask_whole(page, "One?")
    press(page, "user", "Edit")
    field = "[aria-label='Edit the question']"
    page.fill(field, "Changed?")
    ask_half(page, script, "Two?")
    page.press(field, "Enter")
    assert page.text_content("#problem").startswith("An answer is being written")
    assert page.input_value(field) == "Changed?"
    page.click("#stop")
    ended(page)
    script.pieces, script.waits_at_the_end = whole("Third"), False
    page.press(field, "Enter")
    page.wait_for_selector("text=Third")
    ended(page)
    assert said(script.bodies[2]) == [("user", "Changed?")]
    assert (questions(page), page.locator("#problem").is_visible()) == (["Changed?"], False)


def test_an_edited_answer_is_a_branch_that_goes_on(chat: tuple[Any, Script]) -> None:
    page, script = chat
    script.pieces = whole("It is red.")
    ask_whole(page, "Colour?")
    press(page, "assistant", "Edit")
    page.fill("[aria-label='Edit the answer']", "It is")
    page.keyboard.press("Control+Enter")
    assert answers(page) == ["It is"]
    assert "edited" in page.locator(".figures").text_content()
    script.pieces = whole(" blue.")
    press(page, "assistant", "Continue")
    page.wait_for_selector("text=It is blue.")
    ended(page)
    assert said(script.bodies[1]) == [("user", "Colour?"), ("assistant", "It is")]
    assert script.bodies[1]["continue_final_message"] is True
    page.get_by_role("button", name="Earlier branch").click()
    assert answers(page) == ["It is red."]


def test_how_far_a_long_prompt_is_read_is_shown_until_the_answer(chat: tuple[Any, Script]) -> None:
    page, script = chat
    progress = {"total": 5000, "cache": 0, "processed": 2048}
    chunk = f"data: {json.dumps({'choices': [], 'prompt_progress': progress})}\n\n".encode()
    script.pieces, script.waits_at_the_end = [chunk], True
    ask(page, "Long?")
    page.wait_for_selector("text=Reading the prompt: 2,048 of 5,000 tokens")
    bar = page.locator(".waits progress")
    assert bar.evaluate("bar => [bar.value, bar.max]") == [2048, 5000]
    assert script.bodies[0]["return_progress"] is True
    page.click("#stop")
    ended(page)
    assert not bar.is_visible()
    script.pieces, script.waits_at_the_end = [chunk, *whole("Done")], False
    ask_whole(page, "Again?")
    assert answers(page)[-1] == "Done"
    assert not bar.last.is_visible()


def test_chat_question_cut_by_closing_can_be_answered_again(chat: tuple[Any, Script]) -> None:
    """A question whose answer was cut by closing the page can be answered again."""
    page, script = chat
    ask_half(page, script, "Anything", "Half of ")
    page.reload()
    page.click("#conversations .open")
    assert questions(page) == ["Anything"]
    script.pieces, script.waits_at_the_end = whole("it"), False
    press(page, "assistant", "Regenerate")
    page.wait_for_selector(".answer:has-text('it')")
    ended(page)


def test_compare_depths_opens_the_panes_with_the_last_question(open_chat: Open, url: str) -> None:
    page = open_chat(url)
    ask_whole(page, QUESTION)
    page.click("#compare")
    page.wait_for_selector("#run:enabled")
    assert page.locator(".pane:visible").count() == 2
    assert page.input_value("#prompt") == QUESTION
    page.click("text=Back to the chat")
    page.wait_for_selector("#conversations .open")
    assert titles(page) == [f"{QUESTION[:57].rstrip()}…"]


def test_each_word_is_underlined_in_the_colour_of_its_layers(chat: tuple[Any, Script]) -> None:
    page, script = chat
    script.pieces = [
        chunk("A **bold", [8, 7], [0, 2], [1, 2]),
        chunk(" word** 😀\n\n- it", [7, 6, 5], [8, 15, 19], [3, 4, 5], "stop"),
        DONE,
    ]
    page.click("#underline")
    ask_whole(page, "Anything")
    page.wait_for_function("CSS.highlights.get('depth-5')?.size > 0")
    found = page.evaluate(
        """() => [...CSS.highlights].map(([name, ranges]) => [name, [...ranges].map((range) =>
            range.startContainer.data.slice(range.startOffset, range.endOffset)).join("|")])"""
    )
    words = {name: text for name, text in found if text}
    assert words["depth-8"] == "A"
    assert words["depth-5"].removeprefix("- ") == "it"
    assert "bold word" in words["depth-7"].replace("**", "")
    assert "😀" in words["depth-6"]
    page.click("#underline")
    assert page.evaluate("[...CSS.highlights.values()].every(({ size }) => size === 0)")


@pytest.mark.parametrize("is_there", [True, False])
def test_chat_markdown_is_rendered_or_plain_without_libraries(
    open_tab: Open, scripted: Scripted, *, is_there: bool
) -> None:
    """Markdown is rendered, or shown as plain text where the server has no libraries."""
    from d3engine.server.page_libraries import is_fetched

    if is_there and not is_fetched():
        pytest.skip("the page's libraries are not here: python d3engine/server/page_libraries.py fetches them")
    address, script = scripted
    text = (
        "# Title\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n\nSo $x^2$ and\n\n\\[\\frac{1}{2}\\]\n"
    )
    script.pieces = [delta(content=letter) for letter in text] + [delta("stop"), DONE]
    page = open_tab(permissions=["clipboard-read", "clipboard-write"])
    if not is_there:
        page.route("**/page/vendor/**", lambda route: route.abort())
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    ask_whole(page, "Anything")
    if not is_there:
        assert page.locator(".answer").text_content() == text
        assert "plain text" in page.locator("#notes").text_content()
        return
    page.wait_for_selector(".answer .katex-display")
    assert page.locator(".answer h1").text_content() == "Title"
    assert page.locator(".answer td.right").text_content() == "2"
    assert page.locator(".answer .hljs-built_in").text_content() == "print"
    assert page.locator(".answer .katex").count() == 2
    assert not page.locator("#notes").text_content()
    page.click("[aria-label='Copy the code']")
    page.wait_for_selector(".answer [aria-label=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 900, 1440])
def test_chat_fits_every_screen_without_axe_violations(
    open_chat: Open, scripted: Scripted, width: int, scheme: str
) -> None:
    """Nothing is wider than the screen, and axe finds no violation."""
    address, script = scripted
    script.model_ids = ["a-model-with-a-rather-long-name-as-files-have-them.gguf"]
    text = f"# Title\n\n{'long' * 90}\n\n| {' | '.join('abcdefghijklmn' * 2)} |\n{'|---' * 28}|\n\n"
    text += f"```c\n{'x = 1; ' * 40}\n```\n"
    script.pieces = [delta(reasoning_content="Hm."), delta(content=text), delta("length"), DONE]
    page = open_chat(address, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ask_whole(page, f"Anything {'long' * 90}")
    page.click("#underline")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("header").bounding_box()["height"] < 80  # one line, and on a phone that of the colours
    check_with_axe(page)
    if width < 830:
        assert not page.locator("#sidebar").is_visible()
        page.click("#open-sidebar")
        page.wait_for_selector("#search:focus")
        check_with_axe(page)
        page.click("#close-sidebar")
    for button, dialog in (("#open-settings", "#settings"), ("#show-help", "#help")):
        if width < 830 and button == "#show-help":
            page.click("#open-sidebar")
        page.click(button)
        assert page.locator(dialog).bounding_box()["width"] <= width
        check_with_axe(page)
        page.keyboard.press("Escape")


@pytest.fixture(scope="module")
def real_url() -> Iterator[str]:
    """Where Qwen2.5-Coder-0.5B-Instruct answers, greedily unless it is asked otherwise."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    if not fetched_model("qwen2.5-coder-0.5b").exists():
        pytest.skip("the model is not there: d3engine weights fetch qwen2.5-coder-0.5b")
    engine = AsyncEngine("qwen2.5-coder-0.5b", device="cpu", max_model_len=1024, kv_cache_memory_bytes=2**26)
    with serving_demo(engine, model_names=("qwen",)) as address:
        yield address


@pytest.mark.usefixtures("native_library")
def test_chat_with_a_real_model_stops_at_its_limit_and_goes_on(open_chat: Open, real_url: str) -> None:
    """A real model writes code, stops at its token limit and goes on."""
    page = open_chat(real_url)
    assert page.locator("#depth").text_content() == "full depth"
    page.click("#open-settings")
    page.fill("#sampling-temperature", "0")
    page.fill("#sampling-max_tokens", "24")
    page.keyboard.press("Escape")
    ask_whole(page, "Write a Python function that adds two numbers, without comments.")
    first = page.locator(".answer").text_content()
    assert "24 tokens" in page.locator(".figures").text_content()
    assert "token limit reached" in page.locator(".figures").text_content()
    press(page, "assistant", "Continue")
    ended(page)
    both = page.locator(".answer").text_content()
    assert both.startswith(first.strip())
    assert len(both) > len(first)
    assert "48 tokens" in page.locator(".figures").text_content()
    assert "def " in both
