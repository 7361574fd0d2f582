"""LitServe for real: its own server and a worker process, with an engine in the worker."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("litserve", reason="LitServe is not installed: `make test-integrations` brings it")

import httpx
from contract import HANG_SECONDS, Figures, OverOpenAI, check_contract
from openai import OpenAI
from page_programs import program_with
from stack_programs import ARGUMENTS, free_port, serving_program

from d3engine import RequestOutput

MAIN = 'if __name__ == "__main__":'
WATCHED = """
import dataclasses, json

class Watched(D3LitAPI):
    async def predict(self, body):
        if json.loads(body).get("prompt") == "figures":
            yield json.dumps(dataclasses.asdict(await self.engine.stats()))
        else:
            async for text in super().predict(body):
                yield text

"""
"""What the test puts before the page's program: LitServe has no way to ask a worker how it is."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    changes = {
        MAIN: WATCHED + MAIN,
        'api = D3LitAPI("demo")': f'api = Watched("demo", {ARGUMENTS})',
        "port=8000": f"port={port}",
    }
    program = program_with("LitServe", changes)
    with serving_program(tmp_path_factory.mktemp("litserve"), program, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


class OverLitServe(OverOpenAI):
    """As OpenAI's routes, but for the figures."""

    def figures(self) -> Figures:
        stats: Any = json.loads(self._http.post("/v1/completions", json={"prompt": "figures"}).text)
        return Figures(stats["kv_blocks_in_use"], stats["generated_tokens"])


def test_litserve_holds_the_contract_but_reports_no_leaving(url: str, wanted: list[RequestOutput]) -> None:
    """LitServe holds the contract, but does not report clients that leave to its workers."""
    check_contract(OverLitServe(url), wanted, hears_of_leaving=False)


def test_openais_client_reads_its_stream(url: str, wanted: list[RequestOutput]) -> None:
    from contract import ANSWERED

    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS) as client:
        asked = ANSWERED[1]
        chunks = client.completions.create(
            model="demo",
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            temperature=0,
            stream=True,
            extra_body={"depth": asked.depth},
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted[1].outputs[0].text


def test_a_refusal_names_the_field_in_the_only_event(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": 5}, timeout=HANG_SECONDS)
    assert "prompt must be a string or a list" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
