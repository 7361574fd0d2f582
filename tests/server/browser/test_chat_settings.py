"""The chat's settings: sampling, models, colours and keys, and what a request has of them."""

from typing import Any

import pytest
from browsed_chat import ask_whole, ended, questions, said
from browsed_page import Open
from written_streams import Script, Scripted, whole

from d3engine import SamplingParams
from d3engine.request.params import BOUNDS


def test_a_request_has_what_was_chosen_and_no_more(chat: tuple[Any, Script]) -> None:
    page, script = chat
    script.pieces = whole("Yes")
    ask_whole(page, "One?")
    assert {*script.bodies[0]} == {"model", "messages", "stream", "stream_options", "return_depths", "return_progress"}
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    for name, value in (("temperature", "0.5"), ("max_tokens", "7"), ("stop", "END\nSTOP")):
        page.fill(f"#sampling-{name}", value)
    page.click("text=Other fields")
    page.fill("#sampling-json", '{"ignore_eos": true}')
    page.keyboard.press("Escape")
    ask_whole(page, "Two?")
    body = script.bodies[1]
    assert (body["temperature"], body["max_tokens"], body["stop"], body["ignore_eos"]) == (
        0.5,
        7,
        ["END", "STOP"],
        True,
    )
    assert said(body) == [("system", "Be brief."), ("user", "One?"), ("assistant", "Yes"), ("user", "Two?")]
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.click("#open-settings")
    assert page.input_value("#sampling-temperature") == "0.5"
    page.click("#reset")
    page.keyboard.press("Escape")
    ask_whole(page, "Three?")
    assert "temperature" not in script.bodies[2]


def test_chat_sends_the_commands_defaults_where_files_name_none(chat: tuple[Any, Script]) -> None:
    """A model whose files name no sampling is asked with the defaults of the command `chat`."""
    page, script = chat
    script.pieces = whole("Yes")
    plain, chats = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, {"temperature": 0.7, "top_p": 0.9}
    props = {"default_generation_settings": {"params": plain}, "d3ext": {"chat_defaults": chats}}
    page.route("**/props", lambda route: route.fulfill(json=props))
    page.reload()
    page.click("#open-settings")
    page.wait_for_selector("#sampling-temperature[placeholder='0.7']")
    page.keyboard.press("Escape")
    ask_whole(page, "One?")
    page.click("#open-settings")
    page.fill("#sampling-temperature", "0.2")
    page.keyboard.press("Escape")
    ask_whole(page, "Two?")
    assert [(body["temperature"], body["top_p"]) for body in script.bodies] == [(0.7, 0.9), (0.2, 0.9)]


def test_chat_empty_fields_show_the_servers_defaults(open_chat: Open, url: str) -> None:
    """Empty fields show the server's defaults, and take its bounds."""
    page = open_chat(url)
    page.click("#open-settings")
    page.wait_for_selector("#sampling-temperature[max='2']")
    assert page.get_attribute("#sampling-temperature", "placeholder") == "0"  # the bundled model's generation_config
    assert page.text_content("#sampling-max_tokens-help").startswith("Maximum tokens to generate; empty: as many as")
    assert page.input_value("#sampling-max_tokens") == ""
    assert page.get_attribute("#sampling-top_k", "step") == "1"


def test_chat_has_a_field_for_every_number_of_sampling(open_chat: Open, url: str) -> None:
    """Each number of `SamplingParams` has a field with the server's words, bounds and default."""
    page = open_chat(url)
    page.click("#open-settings")
    page.wait_for_selector("#sampling-temperature[max='2']")
    page.click("summary:has-text('Penalties')")
    page.click("summary:has-text('Further')")
    shown = page.locator("#fields input:visible").evaluate_all("inputs => inputs.map(({ name }) => name)")
    assert shown[:6] == ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]
    assert {*shown} == {*BOUNDS} - {"n", "logprobs", "prompt_logprobs"}
    assert page.text_content("#sampling-min_p-help").startswith("Drop tokens less likely than this")
    assert page.get_attribute("#sampling-dry_base", "placeholder") == str(SamplingParams.dry_base)


@pytest.mark.parametrize("bad", ["[1]", "{", '{"n": 2}'])
def test_what_cannot_be_sent_is_said_and_the_question_stays(chat: tuple[Any, Script], bad: str) -> None:
    page, script = chat
    page.click("#open-settings")
    page.click("text=Other fields")
    page.fill("#sampling-json", bad)
    page.keyboard.press("Escape")
    page.fill("#prompt", "Anything")
    page.press("#prompt", "Enter")
    assert page.text_content("#problem").startswith("Fields as JSON must be an object")
    assert page.input_value("#prompt") == "Anything"
    assert script.bodies == []


def test_each_model_can_be_chosen_and_stays_chosen(open_chat: Open, scripted: Scripted) -> None:
    address, script = scripted
    script.model_ids, script.pieces = ["small", "large"], whole("Yes")
    page = open_chat(address)
    page.select_option("#model", "large")
    ask_whole(page, "One?")
    assert script.bodies[0]["model"] == "large"
    assert page.locator(".by:visible").text_content() == " · large"
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert page.input_value("#model") == "large"


def test_colours_are_the_systems_until_others_are_chosen(open_chat: Open, scripted: Scripted) -> None:
    page = open_chat(scripted[0], color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#open-settings")
    page.select_option("#theme", "light")
    light = page.evaluate(ground)
    assert light != dark
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == light
    page.goto(f"{scripted[0]}/compare")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.querySelector('.pane')).backgroundColor") == light


def test_keys_begin_edit_and_explain(chat: tuple[Any, Script]) -> None:
    page, script = chat
    script.pieces = whole("Yes")
    page.fill("#prompt", "One")
    page.press("#prompt", "Shift+Enter")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Yes")
    ended(page)
    assert questions(page) == ["One\nmore"]
    page.press("#prompt", "ArrowUp")
    assert page.input_value("[aria-label='Edit the question']") == "One\nmore"
    page.keyboard.press("Escape")
    assert questions(page) == ["One\nmore"]
    page.keyboard.press("Control+Shift+O")
    assert page.locator("#welcome").is_visible()
    page.locator("#prompt").blur()
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()


def test_the_page_asks_for_a_key_where_there_must_be_one(open_tab: Open, scripted: Scripted) -> None:
    address, script = scripted
    script.key = "a-key-of-mine"
    page = open_tab()
    page.goto(address)
    page.fill("#key", script.key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#model option", state="attached")
    assert not page.locator("#key-form").is_visible()
    kept = page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert script.key not in kept
