"""Folders of the chat's conversations: made, filled by menu and by dragging, kept, searched, exported and deleted."""

from pathlib import Path
from typing import Any

import pytest
from axe import check_with_axe
from browsed_chat import ask_whole, titles
from browsed_page import Open
from written_streams import Scripted, whole


def add_folder(page: Any, name: str) -> None:
    page.click("#new-folder")
    page.keyboard.type(name)
    page.keyboard.press("Enter")


def move(page: Any, title: str, folder: str) -> None:
    page.locator("#conversations .item", has_text=title).last.hover()
    page.click(f"[aria-label='Move {title} to a folder']")
    page.locator("#move").get_by_role("button", name=folder, exact=True).click()


def folders(page: Any) -> dict[str, list[str]]:
    """What the list shows: name of each folder -> titles inside; "" -> those in none."""
    found: dict[str, list[str]] = page.evaluate("""() => {
        const texts = (place) => [...place.querySelectorAll(".open")].map((open) => open.textContent);
        const list = document.getElementById("conversations");
        const inside = [...list.querySelectorAll(".folder")].map((folder) =>
            [folder.querySelector(".toggle > span").textContent, texts(folder)]);
        const others = [...list.querySelectorAll(":scope > .item")].flatMap(texts);
        return Object.fromEntries([...inside, ["", others]]);
    }""")
    return found


def reload(page: Any) -> None:
    """When all that was written is kept: transactions of a database end in their order."""
    page.evaluate("""() => new Promise((resolve) => {
        const request = indexedDB.open("d3engine");
        request.onsuccess = () => {
            const last = request.result.transaction(["conversations", "folders"], "readwrite");
            last.oncomplete = () => { request.result.close(); resolve(); };
        };
    })""")
    page.reload()
    page.wait_for_selector("#conversations .item")


def test_folders_are_filled_collapsed_renamed_and_kept(list_of_two: Any) -> None:
    """A folder keeps its name, its conversations and whether it is collapsed, after a reload too."""
    page = list_of_two
    add_folder(page, "Work")
    add_folder(page, "Home")
    move(page, "One", "Work")
    assert folders(page) == {"Home": [], "Work": ["One"], "": ["Two"]}
    page.click(".toggle:has-text('Work')")
    assert folders(page) == {"Home": [], "Work": [], "": ["Two"]}
    reload(page)
    assert folders(page) == {"Home": [], "Work": [], "": ["Two"]}
    assert page.get_attribute(".toggle:has-text('Work')", "aria-expanded") == "false"
    page.click(".toggle:has-text('Work')")
    page.click("[aria-label='Rename the folder Work']")
    page.keyboard.type("Office")
    page.keyboard.press("Enter")
    reload(page)
    assert folders(page) == {"Home": [], "Office": ["One"], "": ["Two"]}
    move(page, "One", "No folder")
    reload(page)
    assert folders(page) == {"Home": [], "Office": [], "": ["Two", "One"]}


def test_a_deleted_folders_conversations_stay(list_of_two: Any) -> None:
    """The question says that the conversations of a folder stay, and they do."""
    page = list_of_two
    add_folder(page, "Work")
    move(page, "Two", "Work")
    said: list[str] = []

    def agree(asked: Any) -> None:
        said.append(asked.message)
        asked.accept()

    page.once("dialog", lambda asked: asked.dismiss())
    page.locator(".folder > .item").hover()
    page.click("[aria-label='Delete the folder Work']")
    assert folders(page) == {"Work": ["Two"], "": ["One"]}
    page.once("dialog", agree)
    page.click("[aria-label='Delete the folder Work']")
    assert said == ["Delete the folder “Work”? Its conversations stay in the list."]
    assert folders(page) == {"": ["Two", "One"]}
    reload(page)
    assert folders(page) == {"": ["Two", "One"]}


def test_conversations_are_dragged_in_and_out(list_of_two: Any) -> None:
    """A conversation is dragged into a folder, and back to the list."""
    page = list_of_two
    add_folder(page, "Work")
    begin: Any = {"x": 8, "y": 8}  # of an entry, whose buttons take room when it is pointed at
    page.locator(".open", has_text="One").drag_to(page.locator(".toggle"), source_position=begin, target_position=begin)
    page.wait_for_selector(".folder .open")
    assert folders(page) == {"Work": ["One"], "": ["Two"]}
    page.locator(".open", has_text="One").drag_to(
        page.locator(".open", has_text="Two"), source_position=begin, target_position=begin
    )
    page.wait_for_selector(".folder .open", state="detached")
    assert folders(page) == {"Work": [], "": ["Two", "One"]}
    assert page.locator(".over").count() == 0
    reload(page)
    assert folders(page) == {"Work": [], "": ["Two", "One"]}


def test_keys_alone_move_a_conversation_into_a_new_folder(list_of_two: Any) -> None:
    """Without a pointer a folder is made, filled, named and collapsed."""
    page = list_of_two
    page.locator(".open", has_text="One").focus()
    page.keyboard.press("Tab")  # pin
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#move").get_by_role("button", name="New folder").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("Work")
    page.keyboard.press("Enter")
    assert folders(page) == {"Work": ["One"], "": ["Two"]}
    assert page.evaluate("document.activeElement.className") == "toggle"
    page.keyboard.press("Enter")
    assert folders(page) == {"Work": [], "": ["Two"]}
    page.keyboard.press("Enter")
    assert folders(page) == {"Work": ["One"], "": ["Two"]}
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "One"


def test_search_finds_through_collapsed_folders(list_of_two: Any) -> None:
    """A search shows what it finds inside of folders, by their names too, and leaves them as they were."""
    page = list_of_two
    add_folder(page, "Work")
    move(page, "One", "Work")
    page.click(".toggle")
    for wanted, found in (
        ("one", {"Work": ["One"], "": []}),
        ("two", {"": ["Two"]}),
        ("work", {"Work": ["One"], "": []}),
    ):
        page.fill("#search", wanted)
        assert folders(page) == found
    page.fill("#search", "")
    assert folders(page) == {"Work": [], "": ["Two"]}


def test_folders_are_exported_and_imported(
    list_of_two: Any, open_chat: Open, scripted: Scripted, tmp_path: Path
) -> None:
    """An export has the folders; an import joins those of the same name, and refuses a damaged one."""
    page = list_of_two
    add_folder(page, "Work")
    add_folder(page, "Empty")
    move(page, "One", "Work")
    with page.expect_download() as begun:
        page.click("#export-all")
    begun.value.save_as(tmp_path / "all.json")
    other = open_chat(scripted[0])
    add_folder(other, "Work")
    for _ in range(2):
        other.set_input_files("#choose-import", tmp_path / "all.json")
        other.wait_for_selector(".folder .open")
        assert folders(other) == {"Empty": [], "Work": ["One"], "": ["Two"]}
    reload(other)
    assert folders(other) == {"Empty": [], "Work": ["One"], "": ["Two"]}
    other.click(".open:has-text('Two')")
    with other.expect_download() as begun:
        other.click("#export summary")
        other.click("#export-json")
    assert '"folders": []' in Path(begun.value.path()).read_text()
    text = (tmp_path / "all.json").read_text()
    (tmp_path / "all.json").write_text(text.replace('"collapsed": false', '"collapsed": 0'))
    other.set_input_files("#choose-import", tmp_path / "all.json")
    other.wait_for_selector("#problem:has-text('A folder of the file is damaged; nothing was imported.')")
    assert folders(other) == {"Empty": [], "Work": ["One"], "": ["Two"]}


def test_import_leaves_a_moved_conversation_in_its_folder(list_of_two: Any, tmp_path: Path) -> None:
    """A conversation that was moved since its export is no other one, and no copy of it is made."""
    page = list_of_two
    with page.expect_download() as begun:
        page.click("#export-all")
    begun.value.save_as(tmp_path / "all.json")
    add_folder(page, "Work")
    move(page, "One", "Work")
    page.set_input_files("#choose-import", tmp_path / "all.json")
    page.wait_for_selector("#status:has-text('2 imported.')", state="attached")
    assert folders(page) == {"Work": ["One"], "": ["Two"]}


def test_folder_of_one_tab_is_shown_by_another(list_of_two: Any, scripted: Scripted) -> None:
    """Another tab shows folders, moves and deletions at once."""
    page = list_of_two
    other = page.context.new_page()
    other.goto(scripted[0])
    other.wait_for_selector("#conversations .item")
    add_folder(page, "Work")
    move(page, "One", "Work")
    other.wait_for_selector(".folder .open:has-text('One')")
    assert folders(other) == {"Work": ["One"], "": ["Two"]}
    page.once("dialog", lambda asked: asked.accept())
    page.locator(".folder > .item").hover()
    page.click("[aria-label='Delete the folder Work']")
    other.wait_for_selector(".folder", state="detached")
    assert folders(other) == {"": ["Two", "One"]}


def test_conversations_of_the_page_without_folders_are_kept(open_tab: Open, scripted: Scripted) -> None:
    """What the page kept before it had folders is there once no tab has that page, and can be moved into one."""
    older = open_tab()
    older.goto(f"{scripted[0]}/page/icon.svg")
    older.evaluate("""() => new Promise((resolve) => {
        const request = indexedDB.open("d3engine", 1);
        request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
        request.onsuccess = () => {
            const old = { id: "a", title: "Old", system: "", created: 1, updated: 1, current: null, messages: [] };
            const put = request.result.transaction("conversations", "readwrite").objectStore("conversations").put(old);
            window.database = request.result;
            put.transaction.oncomplete = () => resolve();
        };
    })""")
    page = older.context.new_page()
    page.goto(scripted[0])
    page.wait_for_selector("#notes:has-text('Another tab has an older page')")
    assert titles(page) == []
    older.evaluate("window.database.close()")
    page.wait_for_selector("#conversations .item")
    assert titles(page) == ["Old"]
    assert not page.text_content("#notes")
    add_folder(page, "Work")
    move(page, "Old", "Work")
    reload(page)
    assert folders(page) == {"Work": ["Old"], "": []}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_folders_fit_every_screen_and_axe_finds_nothing(
    open_chat: Open, scripted: Scripted, scheme: Any, width: int
) -> None:
    """List and menu are within the screen, and axe finds no violation in them."""
    scripted[1].pieces = whole("Yes")
    page = open_chat(
        scripted[0],
        color_scheme=scheme,
        viewport={"width": width, "height": 844},
        has_touch=width < 500,
        is_mobile=width < 500,
    )
    ask_whole(page, "A question that is longer than the list of conversations is wide")
    if width < 500:
        page.click("#open-sidebar")
    add_folder(page, "A folder whose name is longer than the list of conversations is wide")
    page.locator("#conversations .move").click()
    check_with_axe(page)
    page.locator("#move-to button", has_text="A folder").click()
    page.locator(".folder .open").wait_for()
    check_with_axe(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    edge = page.locator("#sidebar").bounding_box()
    for part in page.locator("#conversations button:visible").all():
        box = part.bounding_box()
        assert box["x"] >= edge["x"]
        assert box["x"] + box["width"] <= edge["x"] + edge["width"]
