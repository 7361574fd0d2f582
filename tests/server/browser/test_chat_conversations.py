"""The chat's conversations: how they are kept, found, deleted, exported, and which files go along with a question."""

from pathlib import Path
from typing import Any

from browsed_chat import answers, ask_half, ask_whole, ended, press, questions, said, titles
from browsed_page import Open
from written_streams import Script, Scripted, whole


def test_conversations_are_kept_searched_renamed_and_deleted(chat: tuple[Any, Script]) -> None:
    page, script = chat
    for question, answer in (("About apples", "Red fruit"), ("About boats", "They float")):
        script.pieces = whole(answer)
        page.click("#new")
        ask_whole(page, question)
    assert titles(page) == ["About boats", "About apples"]
    page.reload()
    page.wait_for_selector("#conversations .open")
    assert titles(page) == ["About boats", "About apples"]
    page.keyboard.press("Control+k")
    page.keyboard.type("FRUIT")
    assert titles(page) == ["About apples"]
    page.click("#conversations .open")
    assert (questions(page), answers(page)) == (["About apples"], ["Red fruit"])
    page.click("[aria-label='Rename About apples']")
    page.keyboard.type("Fruit")
    page.keyboard.press("Enter")
    page.fill("#search", "")
    assert titles(page) == ["About boats", "Fruit"]
    page.on("dialog", lambda asked: asked.accept())
    page.click("[aria-label='Delete Fruit']")
    page.wait_for_selector("#welcome:visible")
    assert titles(page) == ["About boats"]
    page.reload()
    page.wait_for_selector("#conversations .open")
    assert titles(page) == ["About boats"]


def test_all_conversations_are_deleted_at_once(list_of_two: Any) -> None:
    page = list_of_two
    page.once("dialog", lambda asked: asked.dismiss())
    page.click("#open-settings")
    page.click("#remove-all")
    assert titles(page) == ["Two", "One"]
    page.once("dialog", lambda asked: asked.accept())
    page.click("#remove-all")
    page.wait_for_selector("#welcome:visible")
    assert titles(page) == []
    page.reload()
    page.wait_for_selector("#none-found:visible")
    assert titles(page) == []


def test_what_one_tab_writes_another_shows(open_chat: Open, scripted: Scripted) -> None:
    address, script = scripted
    script.pieces = whole("Yes")
    page = open_chat(address)
    other = page.context.new_page()
    other.goto(address)
    ask_whole(page, "One?")
    other.wait_for_selector("#conversations .open")
    assert titles(other) == ["One?"]


def test_what_two_tabs_ask_in_one_conversation_is_kept(open_chat: Open, scripted: Scripted) -> None:
    """An answer that one tab is writing keeps what another tab has asked and been answered meanwhile."""
    address, script = scripted
    script.pieces = whole("Yes")
    page = open_chat(address)
    ask_whole(page, "One?")
    other = page.context.new_page()
    other.goto(address)
    other.click("#conversations .open")
    ask_half(page, script, "Two?")
    other.wait_for_selector("text=Two?")
    script.pieces, script.waits_at_the_end = whole("Third"), False
    ask_whole(other, "Three?")
    page.wait_for_selector("text=Third")
    page.click("#stop")
    ended(page)
    for tab in (page, other):
        tab.reload()
        tab.click("#conversations .open")
        assert (questions(tab), answers(tab)) == (["One?", "Two?", "Three?"], ["Yes", "Half", "Third"])


def test_files_go_along_as_text_and_what_is_no_text_is_refused(chat: tuple[Any, Script], tmp_path: Path) -> None:
    page, script = chat
    script.pieces = whole("Read")
    (tmp_path / "notes.md").write_text("Use ```fences```.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    page.set_input_files("#choose-files", [tmp_path / "picture.png", tmp_path / "notes.md"])
    page.wait_for_selector("#files li")
    assert page.text_content("#problem") == "picture.png is not a text file in UTF-8."
    ask_whole(page, "What is it?")
    expected = "File `notes.md`:\n````\nUse ```fences```.\n````\n\nWhat is it?"
    assert said(script.bodies[0]) == [("user", expected)]
    assert page.locator(".file summary").text_content() == "notes.md"
    assert not page.locator("#files").is_visible()


def test_a_refused_file_is_said_where_it_is_seen(chat: tuple[Any, Script], tmp_path: Path) -> None:
    page, script = chat
    script.pieces = whole("\n\n".join(["Long"] * 100))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    ask_whole(page, "Anything")
    page.set_input_files("#choose-files", tmp_path / "picture.png")
    page.wait_for_selector("#problem:visible")
    place, height = page.locator("#problem").bounding_box(), page.evaluate("innerHeight")
    assert 0 < place["y"] < place["y"] + place["height"] < height


def test_what_is_exported_is_imported_again_with_its_branches(
    open_chat: Open, scripted: Scripted, tmp_path: Path
) -> None:
    address, script = scripted
    script.pieces = whole("Yes")
    page = open_chat(address)
    ask_whole(page, "One?")
    script.pieces = whole("**No**")
    press(page, "assistant", "Regenerate")
    page.wait_for_selector("text=2/2")
    ended(page)
    with page.expect_download() as begun:
        page.click("#export summary")
        page.click("#export-markdown")
    assert begun.value.suggested_filename == "One.md"
    assert Path(begun.value.path()).read_text() == "# One?\n\n## Question\n\nOne?\n\n## Answer\n\n**No**\n"
    with page.expect_download() as begun:
        page.click("#export-all")
    begun.value.save_as(tmp_path / "conversations.json")
    with page.expect_download() as begun:
        page.click("#export summary")
        page.click("#export-json")
    assert Path(begun.value.path()).read_text() == (tmp_path / "conversations.json").read_text()
    other = open_chat(address)
    other.set_input_files("#choose-import", tmp_path / "conversations.json")
    other.wait_for_selector("#conversations .open")
    assert (titles(other), answers(other)) == (["One?"], ["No"] if other.locator(".plain").count() == 0 else ["**No**"])
    other.get_by_role("button", name="Earlier branch").click()
    assert answers(other) == ["Yes"]
    for text, problem in (("{", "not JSON"), ("{}", "no conversations"), (LOOP, "damaged")):
        (tmp_path / "bad.json").write_text(text)
        other.set_input_files("#choose-import", tmp_path / "bad.json")
        other.wait_for_selector(f"#problem:has-text('{problem}')")
    assert titles(other) == ["One?"]


LOOP = (
    '{"format": "d3engine conversations", "version": 1, "conversations": [{"id": "a", "title": "", "system": "",'
    ' "created": 0, "updated": 0, "current": "b",'
    ' "messages": [{"id": "b", "parent": "b", "role": "user", "content": ""}]}]}'
)
