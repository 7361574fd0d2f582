"""What tests do with the server's chat in a browser, and what they read off it."""

from typing import Any

from written_streams import Script, delta


def ask(page: Any, question: str) -> None:
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")  # when it returns, the page has asked


def ask_whole(page: Any, question: str) -> None:
    """Ask, until the answer has ended."""
    ask(page, question)
    ended(page)


def ask_half(page: Any, script: Script, question: str, text: str = "Half") -> None:
    """Ask, and see the beginning of an answer that goes on."""
    script.pieces, script.waits_at_the_end = [delta(content=text)], True
    ask(page, question)
    page.wait_for_selector(f"text={text.strip()}")


def ended(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def press(page: Any, kind: str, words: str) -> None:
    """Press a button of the last message of a kind, "user" or "assistant"."""
    message = page.locator(f".message.{kind}").last
    message.hover()
    message.get_by_role("button", name=words, exact=True).click()


def questions(page: Any) -> list[str]:
    found: list[str] = page.locator(".question").all_text_contents()
    return found


def answers(page: Any) -> list[str]:
    found: list[str] = page.locator(".answer").all_inner_texts()
    return [text.strip() for text in found]


def titles(page: Any) -> list[str]:
    found: list[str] = page.locator("#conversations .open").all_text_contents()
    return found


def said(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The messages of a request."""
    return [(message["role"], message["content"]) for message in body["messages"]]
