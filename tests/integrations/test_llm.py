"""`LLM` and `chat` take vLLM's arguments, and refuse by name what has no counterpart."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_values import assert_refused, bad_values
from loops import on_a_loop

from d3engine import LLM, AsyncEngine, Engine, InvalidValueError, PromptLookup, SamplingParams
from d3engine.engine.model_directory import model_directory

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{{ greeting | default('') }}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add"}}
SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 2**24, "max_num_seqs": 4}
ASKED = [{"role": "user", "content": "Hi"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "I am"}]
CONTINUED = {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_directory("demo"), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(model=str(directory), **SMALL) as llm:
        yield llm


def written(llm: LLM, messages: Any = ASKED, **arguments: Any) -> str:
    """The prompt that a conversation becomes, as text without BOS."""
    return llm.get_tokenizer().decode(llm.chat_prompt(messages, **arguments)["prompt_token_ids"])


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ({}, "[user]Hi[end][assistant]"),
        ({"add_generation_prompt": False}, "[user]Hi[end]"),
        ({"tools": [TOOL]}, '[{"type": "function", "function": {"name": "add"}}][user]Hi[end][assistant]'),
        ({"chat_template_kwargs": {"greeting": "Hello."}}, "Hello.[user]Hi[end][assistant]"),
        ({"chat_template": "{{ bos_token }}Q: {{ messages[0].content }}"}, "Q: Hi"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "[user]Hi[end][assistant]I am[end]"),
        (CONTINUED, "[user]Hi[end][assistant]I am"),
    ],
)
def test_each_argument_of_chat_reaches_the_template(llm: LLM, arguments: dict[str, Any], prompt: str) -> None:
    assert written(llm, **arguments) == prompt


def test_chat_answers_the_prompt_that_its_arguments_make(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    arguments: dict[str, Any] = {"tools": [TOOL], "chat_template_kwargs": {"greeting": "Hello."}}
    outputs = llm.chat([ASKED, BEGUN], params, use_tqdm=False, **arguments)
    prompts = [llm.chat_prompt(messages, **arguments) for messages in (ASKED, BEGUN)]
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [o.outputs for o in outputs] == [o.outputs for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        *bad_values(chat_template=[5, "{% if %}"], chat_template_kwargs=[["x"], {"tools": []}], tools=["add"]),
        *bad_values(add_generation_prompt=[1], continue_final_message=["yes", True]),  # with a generation prompt
        ({"chat_template": "{{ messages.__class__.__mro__ }}"}, "messages"),
        ({"chat_template_kwargs": {"greeting": print}}, "greeting"),
        ({"tools": [print]}, r"tools\[0\]"),
    ],
)
def test_what_chat_cannot_use_is_refused_by_name(llm: LLM, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^{field}"):
        llm.chat(ASKED, use_tqdm=False, **arguments)


def test_template_of_the_caller_has_the_limits_of_the_models(llm: LLM) -> None:
    """A template of the caller has the limits of the model's own."""
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidValueError, match=r"^messages"):
        llm.chat(ASKED, chat_template=endless, use_tqdm=False)


def test_model_without_template_or_tokenizer_says_so(tmp_path: Path) -> None:
    """A model without a template or a tokenizer says what is missing."""
    shutil.copytree(model_directory("demo"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with Engine(tmp_path / "model", **SMALL) as engine, pytest.raises(InvalidValueError, match=r"^chat_template"):
        engine.chat(ASKED, use_tqdm=False)
    with Engine("demo", skip_tokenizer_init=True, **SMALL) as engine:
        for call in (engine.get_tokenizer, lambda: engine.chat(ASKED)):
            with pytest.raises(InvalidValueError, match=r"^skip_tokenizer_init"):
                call()


def test_an_llm_is_an_engine_with_vllms_arguments() -> None:
    same: dict[str, Any] = {"tensor_parallel_size": 1, "trust_remote_code": False, "tokenizer_mode": "auto"}
    same |= {"quantization": None, "enable_chunked_prefill": True, "seed": None, "dtype": "float", "max_model_len": 64}
    with LLM("demo", **same, **SMALL) as llm, Engine("demo", dtype="float32", max_model_len=64, **SMALL) as engine:
        assert isinstance(llm, Engine)
        assert (llm.dtype, llm.max_model_len, llm.depth) == (engine.dtype, engine.max_model_len, engine.depth)
        assert llm.get_default_sampling_params() == engine.default_sampling_params
        prompts = ["Tom has 5 pens.", "Tom"]
        answers = [each.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False) for each in (llm, engine)]
        assert [o.outputs for o in answers[0]] == [o.outputs for o in answers[1]]


@pytest.mark.parametrize(
    ("given", "named"),
    bad_values(pipeline_parallel_size=[2, True], tensor_parallel_size=[0], trust_remote_code=[True], max_seq_len=[3])
    + bad_values(quantization=["awq"], swap_space=[4], limit_mm_per_prompt=[{"image": 1}]),
)
def test_argument_without_a_counterpart_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    """An argument without a counterpart is refused by its name."""
    with assert_refused(named):
        LLM("demo", **given)


OTHERS: list[tuple[str, Any]] = [
    ("prompt_adapter_request", object()),
    ("tokenization_kwargs", {"truncation": True}),
    ("mm_processor_kwargs", {"crops": 4}),
    ("trace_headers", {"traceparent": "00"}),
    ("data_parallel_rank", 0),
]
"""What vLLM's calls take and these do not."""
ASKING_FOR_NOTHING: dict[str, Any] = {
    "lora_request": None,
    "tokenization_kwargs": None,
    "mm_processor_kwargs": {},
    "chat_template_content_format": "auto",
}


@pytest.mark.parametrize(("argument", "value"), [*OTHERS, ("priority", [1])])
def test_call_argument_without_a_counterpart_is_refused(llm: LLM, argument: str, value: Any) -> None:
    """An argument of a call without a counterpart is refused by its name."""
    calls = [lambda given: llm.generate("Tom", use_tqdm=False, **given), lambda given: llm.chat(ASKED, **given)]
    if argument != "priority":
        calls.append(lambda given: llm.add_request("a", "Tom", **given))
    for call in calls:
        with assert_refused(argument, f"^{argument} must be"):
            call({argument: value})
        with pytest.raises(TypeError, match="unexpected keyword argument 'some_argument'"):
            call({"some_argument": None})
    assert not llm.has_unfinished_requests()


def test_an_argument_of_a_call_that_asks_for_nothing_is_taken(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    plain = llm.generate("Tom", params, use_tqdm=False)
    assert llm.generate("Tom", params, use_tqdm=False, **ASKING_FOR_NOTHING)[0].outputs == plain[0].outputs
    assert llm.chat(ASKED, params, use_tqdm=False, **ASKING_FOR_NOTHING)[0].finished


@on_a_loop
async def test_the_engine_for_many_callers_refuses_them_alike() -> None:
    async with AsyncEngine("demo", **SMALL) as engine:
        for face in (engine, engine.sync()):
            for argument, value in OTHERS:
                with pytest.raises(InvalidValueError, match=f"^{argument} must be"):
                    face.generate("Tom", **{argument: value})
                with pytest.raises(InvalidValueError, match=f"^{argument} must be"):
                    await all_of(face.chat(ASKED, **{argument: value}))
        params = SamplingParams(temperature=0, max_tokens=2)
        assert (await all_of(engine.generate("Tom", params, lora_request=None)))[-1].finished


async def all_of(answer: Any) -> list[Any]:
    return [output async for output in answer] if hasattr(answer, "__aiter__") else list(answer)


def test_speculative_config_is_the_engines_own() -> None:
    with LLM("demo", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **SMALL) as llm:
        assert llm.depth == PromptLookup(4)


def test_embeddings_are_vllms_outputs(llm: LLM) -> None:
    first, second = llm.embed(["Tom has", "Ann has 3"], use_tqdm=False)
    assert first.finished
    assert first.prompt_token_ids == llm.get_tokenizer().encode("Tom has")
    assert first.outputs.hidden_size == len(first.outputs.embedding) == llm.config.hidden_size
    expected = Engine.embed(llm, ["Tom has", "Ann has 3"], pooling="last", use_tqdm=False)
    assert [first.outputs.embedding, second.outputs.embedding] == expected.tolist()
    with pytest.raises(InvalidValueError, match="pooling_params must be None"):
        llm.embed("Tom", pooling_params=object())  # type: ignore[arg-type]


def test_scores_are_vllms_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from d3engine.integrations import llm as module
    from d3engine.request.scoring import judgement

    monkeypatch.setattr(module, "ANSWERS", ("Tom", "pens"))
    found = llm.score("Pens?", ["Tom has 5 pens.", "How many?"], use_tqdm=False)
    assert [0 < one.outputs.score < 1 for one in found] == [True, True]
    assert found[1].prompt_token_ids == llm.chat_prompt(judgement("Pens?", "How many?"))["prompt_token_ids"]
    pairs = llm.score(["Pens?", "Pens?"], ["Tom has 5 pens.", "How many?"], use_tqdm=False)
    assert [one.outputs.score for one in pairs] == pytest.approx([one.outputs.score for one in found], abs=1e-5)
    wrong: list[Any] = [("a list of texts", [], "a"), ("as many as data_2", ["a", "b"], ["c"]), ("texts", "a", [5])]
    for words, queries, documents in wrong:
        with pytest.raises(InvalidValueError, match=words):
            llm.score(queries, documents, use_tqdm=False)
