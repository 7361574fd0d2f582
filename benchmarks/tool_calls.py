"""How many calls of functions a model makes by itself, and how many of them parse and satisfy their schemas.

    python -m benchmarks.tool_calls MODEL --json FILE

Each of 60 prompts is asked by POST /v1/chat/completions with twelve functions and no `tool_choice`, half of them as
streams. A call counts as valid if its function is one of the twelve, its arguments parse, and jsonschema finds them to
satisfy that function's schema; as right if the prompt was written for that function. Answers that `--max-tokens` cuts
within a call are counted by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from rich.console import Console
from tqdm import tqdm

from benchmarks.report import environment, tell

SHOWN = 120
"""Characters of an answer in text that the report has."""
FILE = Path(__file__).parent / "tool_prompts.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=60, help="ask the first N alone")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--at-once", type=int, default=4, help="requests in flight")
    parser.add_argument("--max-model-len", type=int, help="tokens of a conversation (as many as the model has)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", help="write the report to this file")
    given = parser.parse_args(arguments)
    asked = json.loads(FILE.read_text(encoding="utf-8"))
    answers = asyncio.run(answered(given, asked["tools"], asked["prompts"][: given.prompts]))
    counts: Counter[str] = Counter()
    rows = [judged(prompt, answer, asked["tools"], counts) for prompt, answer in answers]
    named = [given.model, f"--prompts={given.prompts}", f"--max-tokens={given.max_tokens}"]
    report = {
        "environment": environment("benchmarks.tool_calls", [*named, f"--temperature={given.temperature}"]),
        "counts": dict(counts),
        "answers": rows,
    }
    tell(report, show, width=100, file=given.json)


async def answered(
    given: argparse.Namespace, tools: list[dict[str, Any]], prompts: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each prompt with the message that answers it and its finish reason, from an app in this process."""
    from d3engine import AsyncEngine
    from d3engine.server.app import create_app
    from d3engine.server.settings import ServerSettings

    engine = AsyncEngine(given.model, max_model_len=given.max_model_len, max_num_seqs=given.at_once)
    places = asyncio.Semaphore(given.at_once)
    bar = tqdm(total=len(prompts), unit="prompt")

    async def ask(number: int, prompt: dict[str, Any]) -> dict[str, Any]:
        body = {
            "messages": [{"role": "user", "content": prompt["prompt"]}],
            "tools": tools,
            "temperature": given.temperature,
            "max_tokens": given.max_tokens,
            "seed": number,
            "stream": bool(number % 2),
        }
        async with places:
            found = await client.post("/v1/chat/completions", json=body, timeout=None)
        bar.update()
        found.raise_for_status()
        return of_stream(found.text) if number % 2 else found.json()["choices"][0]

    try:
        app: Any = create_app(engine, ServerSettings(model_names=("model",)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    finally:
        await engine.close()
        bar.close()
    return list(zip(prompts, answers, strict=True))


def of_stream(text: str) -> dict[str, Any]:
    """The whole choice of a stream's events."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = None
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        reason = choice["finish_reason"] or reason
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


def judged(
    prompt: dict[str, Any], choice: dict[str, Any], tools: list[dict[str, Any]], counts: Counter[str]
) -> dict[str, Any]:
    """One row of the report; adds to the counts."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    is_cut = bool(calls) and choice["finish_reason"] == "length"
    counts["prompts"] += 1
    counts["answers with calls"] += bool(calls)
    counts["answers cut within a call"] += is_cut
    whole = calls[:-1] if is_cut else calls
    row: dict[str, Any] = {"prompt": prompt["prompt"], "calls": calls}
    if not calls:
        row["text"] = (choice["message"]["content"] or "")[:SHOWN]
    for call in whole:
        fault = fault_of(call, schemas)
        counts["calls"] += 1
        counts["calls that parse"] += fault is None or not fault.startswith("no JSON")
        counts["calls that are valid"] += fault is None
        if fault is not None:
            row["fault"] = fault
    counts["answers that call the right function"] += bool(calls) and calls[0]["name"] == prompt["function"]
    return row


def fault_of(call: dict[str, str], schemas: dict[str, Any]) -> str | None:
    """What is wrong with a call; None where nothing is."""
    if call["name"] not in schemas:
        return "no such function"
    try:
        found = json.loads(call["arguments"])
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator(
        schemas[call["name"]], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return next((error.message for error in checker.iter_errors(found)), None)


def show(report: dict[str, Any], console: Console) -> None:
    for name, count in report["counts"].items():
        console.print(f"{count:5}  {name}")
    for row in report["answers"]:
        if "fault" in row:
            console.print(f"       {row['prompt']}: {row['fault']}", style="red")


if __name__ == "__main__":
    main()
