"""The contract of all stacks, held first by the asynchronous engine itself and by our own server."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from contract import ANSWERED, BEHIND, LEFT, Figures, OnThread, OverOpenAI, Question, check_contract

from d3engine import AsyncEngine, RequestOutput


@pytest.fixture(scope="module")
def client() -> Iterator[AsyncEngine]:
    client = AsyncEngine("demo", **BEHIND)
    yield client
    asyncio.run(client.close())


def test_an_asynchronous_engine_holds_the_contract(client: AsyncEngine, wanted: list[RequestOutput]) -> None:
    check_contract(OnThread(client), wanted)


def test_our_server_holds_the_contract(client: AsyncEngine, wanted: list[RequestOutput]) -> None:
    from serving import serving

    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    with serving(create_app(client, ServerSettings(model_names=("demo",)))) as url:
        check_contract(OverOpenAI(url), wanted)


@dataclass
class Pretended:
    """A stack without an engine: it keeps the contract, but for what a test changes of it."""

    texts: dict[str, str]
    generated: int
    refusal: str = "alpha must be a finite number in (0, 1]; got 2.0"
    asked: list[Question] = field(default_factory=list)

    def answer(self, question: Question) -> str:
        self.asked.append(question)
        if question.prompt not in self.texts:
            raise ValueError(self.refusal)
        return self.texts[question.prompt]

    def leave(self, question: Question) -> None:
        self.asked.append(question)

    def figures(self) -> Figures:
        return Figures(0, self.generated if self.asked else 0)


def pretended(wanted: list[RequestOutput], **changes: Any) -> Pretended:
    texts = {asked.prompt: output.outputs[0].text for asked, output in zip(ANSWERED, wanted, strict=True)}
    generated = sum(len(output.outputs[0].token_ids) for output in wanted) + len(LEFT)
    return Pretended(**({"texts": texts, "generated": generated} | changes))


def test_a_stack_that_breaks_the_contract_is_caught(wanted: list[RequestOutput]) -> None:
    kept = pretended(wanted)
    check_contract(kept, wanted)
    assert len(kept.asked) == 24
    wrong = kept.texts | {ANSWERED[4].prompt: "another"}
    to_the_end = kept.generated + sum(question.max_tokens for question in LEFT)
    with pytest.raises(AssertionError, match="refused by name"):
        check_contract(pretended(wanted, refusal="500"), wanted)
    with pytest.raises(AssertionError, match="answered to their end"):
        check_contract(pretended(wanted, generated=to_the_end), wanted)
    with pytest.raises(AssertionError, match="another"):
        check_contract(pretended(wanted, texts=wrong), wanted)
