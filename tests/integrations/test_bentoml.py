"""BentoML for real: `bentoml serve` with our app in a service of the page's."""

from pathlib import Path

import pytest

pytest.importorskip("bentoml", reason="BentoML is not installed: `make test-integrations` brings it")

from contract import OverOpenAI, check_contract
from page_programs import program_with
from stack_programs import ARGUMENTS, free_port, serving_program

from d3engine import RequestOutput


def test_bentoml_holds_the_contract(tmp_path: Path, wanted: list[RequestOutput]) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    program = program_with("BentoML", {'asgi_app("demo")': f'asgi_app("demo", {ARGUMENTS})'})
    command = ("-m", "bentoml", "serve", "program:D3", "--host", "127.0.0.1", "--port", str(port))
    with serving_program(tmp_path, program, f"{url}/openai/ready", command):
        stack = OverOpenAI(url, completions="/openai/v1/completions", metrics="/openai/metrics")
        check_contract(stack, wanted)
