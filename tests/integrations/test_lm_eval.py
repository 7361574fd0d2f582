"""lm-evaluation-harness itself over our engine, offline, against its own HF backend on the same tiny model.

The tasks are made here from a few items: of the public data sets where they lie beside the repository, and of the
generated problems anywhere.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyLlama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner

from d3engine.cli import app
from d3engine.depth import D3, FullDepth
from d3engine.errors import D3EngineError, InvalidValueError
from d3engine.evaluation.accuracy import paired, wilson_interval
from d3engine.evaluation.procedural import all_problems
from d3engine.request.params import SamplingParams
from d3engine.sampling.sampler import Sampler

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'd3engine[eval]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'd3engine[test]'")
pytest.importorskip("datasets", reason="datasets is not installed: pip install 'd3engine[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from d3engine.integrations.lm_eval import D3EngineLM

CACHE = {"kv_cache_memory_bytes": 2**24}
MAX_LENGTH = 191
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and caches of `datasets` that vanish."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    datasets.disable_progress_bars()
    yield
    patch.undo()
    assert before == datasets.config.HF_DATASETS_CACHE


@pytest.fixture(scope="module")
def tiny(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    """A random model over bytes, whose beginning and end tokens are <s> and </s>, with room for 192 tokens."""
    model = tiny_llama(seed=5, bos_token_id=256, eos_token_id=257, max_position_embeddings=MAX_LENGTH + 1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(model.directory)
    return model


@pytest.fixture(scope="module")
def ours(tiny: TinyLlama) -> D3EngineLM:
    return D3EngineLM(str(tiny.directory), depth="full", **CACHE)


@pytest.fixture(scope="module")
def theirs(tiny: TinyLlama) -> HFLM:
    """The harness's own backend, in float32, one request at a time so that padding plays no part."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.directory)
    options = {"device": "cpu", "dtype": torch.float32, "batch_size": 1, "max_length": MAX_LENGTH}
    return HFLM(pretrained=tiny.model, tokenizer=tokenizer, **options)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


# -- request by request -------------------------------------------------------------------------------------------


PAIRS = [
    ("Question: what is it?\nAnswer:", " a pen"),
    ("Question: what is it?\nAnswer:", " a hat"),
    ("ends in a space ", "and goes on"),
    ("", "without any context"),
    ("one", "x"),
    ("<s>has its own beginning", " already"),
    ("too long " * 40, "so its beginning is lost"),
    ("x", "y" * MAX_LENGTH),
]


def test_loglikelihoods_are_those_of_the_hf_backend(ours: D3EngineLM, theirs: HFLM) -> None:
    asked = requests("loglikelihood", *PAIRS)
    found = ours.loglikelihood(asked, disable_tqdm=True)
    wanted = theirs.loglikelihood(asked, disable_tqdm=True)
    for (logprob, greedy), (their_logprob, their_greedy) in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(their_logprob, abs=2e-3, rel=1e-5)
        assert greedy == their_greedy
    assert len({round(logprob, 3) for logprob, _ in found}) == len(PAIRS)


def test_a_continuation_is_greedy_exactly_if_greedy_decoding_gives_it(ours: D3EngineLM, theirs: HFLM) -> None:
    context = "Question: how many?\nAnswer:"
    ids = ours.tok_encode(context)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, depth=FullDepth(), logprobs=2)
    output = ours.engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
    answer = output.token_ids
    assert output.logprobs is not None
    (second,) = (token for token, logprob in output.logprobs[3].items() if logprob.rank == 2)
    other = [*answer[:3], second]
    asked = [(None, ids, continuation) for continuation in (answer, answer[:1], other, [other[3], *answer[1:]])]
    found = ours._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, True, False, False]
    wanted = theirs._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in wanted] == [True, True, False, False]
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-3)


def test_rolling_loglikelihoods_are_those_of_the_hf_backend(ours: D3EngineLM, theirs: HFLM) -> None:
    texts = ["short", "a text of several windows. " * 20, "z" * (MAX_LENGTH - 1), "z" * MAX_LENGTH]
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))
    found = ours.loglikelihood_rolling(asked, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), rel=1e-5)


def test_generated_texts_are_those_of_hf_greedy(ours: D3EngineLM, theirs: HFLM) -> None:
    contexts = ["Question: what?\nAnswer:", "a", "<s>its own beginning", "too long " * 40]
    free = theirs.generate_until(
        requests("generate_until", *((context, {"until": [], "max_gen_toks": 12}) for context in contexts)),
        disable_tqdm=True,
    )
    stops = [text[5:7] for text in free]
    asked = requests(
        "generate_until",
        *((context, {"until": [], "max_gen_toks": 12, "do_sample": False}) for context in contexts),
        *(
            (context, {"until": stop, "max_gen_toks": 12, "temperature": 0.0})
            for context, stop in zip(contexts, stops, strict=True)
        ),
    )
    found = ours.generate_until(asked, disable_tqdm=True)
    assert found == theirs.generate_until(asked, disable_tqdm=True)
    assert found[: len(free)] == free
    assert all(len(cut) < len(whole) for cut, whole in zip(found[len(free) :], free, strict=True))


def test_a_chat_is_rendered_as_the_hf_backend_renders_it(ours: D3EngineLM, theirs: HFLM) -> None:
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " Begin with "}]
    for length, wants_more in ((1, True), (2, False)):
        rendered = ours.apply_chat_template(history[:length], add_generation_prompt=wants_more)
        assert rendered == theirs.apply_chat_template(history[:length], add_generation_prompt=wants_more)
        assert ours.tok_encode(rendered) == theirs.tok_encode(rendered), "BOS must come once"
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT_TEMPLATE
    assert ours.chat_template(False) is None
    assert "/" not in ours.tokenizer_name


def test_answers_run_at_the_depth_of_the_policy_and_are_counted_by_task(tiny: TinyLlama) -> None:
    policy = D3(alpha=0.6, start=0.4)
    model = D3EngineLM(str(tiny.directory), depth="d3", alpha=0.6, start=0.4, **CACHE)
    gen = ("Question: what?\nAnswer:", {"until": [], "max_gen_toks": 12})
    asked = [Instance(request_type="generate_until", doc={}, arguments=gen, idx=0, metadata=("a task", 0, 1))]
    (text,) = model.generate_until(asked, disable_tqdm=True)
    params = SamplingParams(temperature=0, max_tokens=12, depth=policy)
    output = model.engine.generate(["Question: what?\nAnswer:"], params, use_tqdm=False)[0].outputs[0]
    usage = model.usage["a task"]
    assert text == output.text
    assert (usage.work.tokens, usage.work.layers) == (len(output.token_ids), sum(output.depths))
    assert usage.work.layers < 3 * usage.work.tokens
    assert usage.nominal_layers == policy.schedule(3).depths(12).sum()


def test_a_policy_does_not_change_log_likelihoods_and_says_so(
    tiny: TinyLlama, ours: D3EngineLM, caplog: pytest.LogCaptureFixture
) -> None:
    asked = requests("loglikelihood", *PAIRS[:3])
    shallow = D3EngineLM(ours.engine, depth=D3(alpha=0.6, start=0.4))
    with caplog.at_level(logging.WARNING):
        found = shallow.loglikelihood(asked, disable_tqdm=True)
    assert found == ours.loglikelihood(asked, disable_tqdm=True)
    assert "full depth" in caplog.text


def test_what_is_computed_is_handed_to_the_harness_cache_as_it_comes(ours: D3EngineLM) -> None:
    kept: list[tuple[str, tuple[Any, ...], Any]] = []

    class Hook:
        def add_partial(self, kind: str, args: tuple[Any, ...], result: Any) -> None:
            kept.append((kind, tuple(args), result))

    before = ours.cache_hook
    ours.set_cache_hook(Hook())  # type: ignore[arg-type]
    try:
        pair = ("context", " more")
        gen = ("context", {"until": ["q"], "max_gen_toks": 3})
        (score,) = ours.loglikelihood(requests("loglikelihood", pair), disable_tqdm=True)
        (text,) = ours.generate_until(requests("generate_until", gen), disable_tqdm=True)
        (total,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("text",)), disable_tqdm=True)
    finally:
        ours.set_cache_hook(before)
    assert kept == [
        ("loglikelihood", pair, score),
        ("generate_until", gen, text),
        ("loglikelihood_rolling", ("text",), total),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": "d3", "alpha": 0.9}, "start"),
        ({"depth": "deep"}, "policy"),
        ({"alpha": 0.9}, "alpha"),
        ({"depth": "full", "no_such_option": 1}, "no_such_option"),
        ({"batch_size": "many"}, "batch_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_batch_size": 8}, "max_batch_size"),
        ({"max_length": 10_000}, "max_length"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(tiny: TinyLlama, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        D3EngineLM(str(tiny.directory), **CACHE, **arguments)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"until": ["a"], "num_beams": 4}, "num_beams"),
        ({"until": ["a"], "max_gen_toks": MAX_LENGTH}, "max_gen_toks"),
        ({"until": ["a"], "do_sample": True, "temperature": -1.0}, "temperature"),
    ],
)
def test_what_a_task_asks_in_vain_is_refused_by_name(
    ours: D3EngineLM, gen_kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        ours.generate_until(requests("generate_until", ("context", gen_kwargs)), disable_tqdm=True)


def test_an_engine_option_beside_an_open_engine_is_refused(ours: D3EngineLM) -> None:
    with pytest.raises(InvalidValueError, match="pretrained"):
        D3EngineLM(ours.engine, batch_size=4)


class _NoNumbers(Sampler):
    """A sampler that gets nothing but NaN."""

    def __call__(self, logits: torch.Tensor, plan: Any) -> Any:
        return super().__call__(torch.full_like(logits, torch.nan), plan)


def test_an_answer_that_a_fault_ended_is_an_error(tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    model = D3EngineLM(str(tiny.directory), depth="full", **CACHE)
    monkeypatch.setattr(model.engine.sampler, "__class__", _NoNumbers)
    with pytest.raises(D3EngineError, match="fault"):
        model.generate_until(requests("generate_until", ("a", {"until": [], "max_gen_toks": 4})), disable_tqdm=True)
    assert not model.engine.has_unfinished_requests()


# -- the harness itself -------------------------------------------------------------------------------------------


def write_task(folder: Path, name: str, items: list[dict[str, Any]], **fields: Any) -> None:
    """A task of the harness as users write them: a YAML beside a data file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def generation(prompt: str, target: str, until: list[str], tokens: int) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "generation_kwargs": {"until": until, "do_sample": False, "max_gen_toks": tokens},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def choice(prompt: str, choices: str, target: str) -> dict[str, Any]:
    return {
        "output_type": "multiple_choice",
        "doc_to_text": prompt,
        "doc_to_choice": choices,
        "doc_to_target": target,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def evaluate(folder: Path, model: Any, tasks: list[str], **arguments: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments
    )
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    return [sample["resps"] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tasks: list[str]) -> None:
    for task in tasks:
        for own, their in zip(responses(found, task), responses(wanted, task), strict=True):
            if isinstance(own[0][0], str):
                assert own == their
            else:
                pairs = zip(own, their, strict=True)
                assert all(a[0][0] == pytest.approx(b[0][0], abs=2e-3, rel=1e-5) for a, b in pairs)
                assert [a[0][1] for a in own] == [b[0][1] for b in their]
        scores, their_scores = found["results"][task], wanted["results"][task]
        numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
        assert numbers
        assert numbers == pytest.approx({name: their_scores[name] for name in numbers})


def test_the_harness_gives_the_scores_of_its_hf_backend_on_generated_problems(
    tmp_path: Path, tiny: TinyLlama, theirs: HFLM
) -> None:
    """The model by name and arguments, as `simple_evaluate` and `lm_eval --model_args` take them."""
    words = list(islice(all_problems("word-problems", "test", 0), 3))
    swaps = list(islice(all_problems("tracking-shuffled-objects", "test", 0), 3))
    items = [{"q": p.question, "a": str(p.answer), "choices": ["7", str(p.answer), "ball"]} for p in (*words, *swaps)]
    prompt = "Question: {{q}}\nAnswer:"
    write_task(tmp_path, "own_generation", items, **generation(prompt, "{{a}}", ["\n", "e"], 8))
    write_task(tmp_path, "own_choice", items, **choice(prompt, "{{choices}}", "{{choices.index(a)}}"))
    tasks = ["own_generation", "own_choice"]
    arguments = f"pretrained={tiny.directory},depth=full,kv_cache_memory_bytes={2**24}"
    found = evaluate(tmp_path, "d3engine", tasks, model_args=arguments, num_fewshot=0)
    assert_same(found, evaluate(tmp_path, theirs, tasks, num_fewshot=0), tasks)


def test_the_harness_gives_the_scores_of_its_hf_backend_on_items_of_gsm8k_and_bbh(
    tmp_path: Path, shared_data: Path, ours: D3EngineLM, theirs: HFLM
) -> None:
    with (shared_data / "gsm8k" / "test.jsonl").open() as lines:
        gsm8k = [json.loads(line) for line in islice(lines, 3)]
    bbh = json.loads((shared_data / "bbh" / "boolean_expressions.json").read_text())["examples"][:4]
    question, expression = "Question: {{question}}\nAnswer:", "Q: {{input}}\nA:"
    write_task(tmp_path, "own_gsm8k", gsm8k, **generation(question, "{{answer}}", ["Question:", "</s>"], 8))
    write_task(tmp_path, "own_bbh", bbh, **generation(expression, "{{target}}", ["</s>", "Q", "\n\n"], 8))
    write_task(tmp_path, "own_bbh_choice", bbh, **choice(expression, "['True', 'False']", "{{target}}"))
    tasks = ["own_gsm8k", "own_bbh", "own_bbh_choice"]
    assert_same(evaluate(tmp_path, ours, tasks), evaluate(tmp_path, theirs, tasks), tasks)


def test_the_command_compares_policies_on_tasks_of_the_harness(tmp_path: Path) -> None:
    """The bundled model at full depth and far too shallow, on its own problems and on a perplexity."""
    items = [{"q": p.question, "a": str(p.answer)} for p in islice(all_problems("word-problems", "test", 0), 3)]
    fields = generation("Question: {{q}}\nAnswer:", "{{a}}", ["\n"], 64)
    strict = [{"function": "regex", "regex_pattern": "#### (-?[0-9]+)"}, {"function": "take_first"}]
    write_task(tmp_path, "own_words", items, **fields, filter_list=[{"name": "strict", "filter": strict}])
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
    write_task(tmp_path, "own_perplexity", items, **rolling, metric_list=[{"metric": "bits_per_byte"}])
    words = ["eval", "demo", "--tasks", "own_words,own_perplexity", "--include-path", str(tmp_path), "--compare-full"]
    shallow = ["--policy", "d3 alpha=0.5 start=0.3", "--limit", "3", "--kv-cache-memory-bytes", str(2**25)]
    result = CliRunner().invoke(app, [*words, *shallow, "--json"])
    assert result.exit_code == 0, result.output
    full, less = json.loads(result.stdout[result.stdout.index("{\n") :])["harness"]
    exact_match, perplexity = full["metrics"]
    assert (exact_match["task"], exact_match["metric"]) == ("own_words", "exact_match (strict)")
    assert (exact_match["value"], exact_match["questions"]) == (1.0, 3)
    assert exact_match["interval_95"]["low"] == pytest.approx(wilson_interval(3, 3).low)
    assert perplexity["interval_95"] is None
    assert 0 < perplexity["value"] == pytest.approx(less["metrics"][1]["value"])
    assert less["metrics"][0]["value"] < 1
    assert full["generated"]["layers"] == 16 * full["generated"]["tokens"]
    assert 4 * less["generated"]["tokens"] < less["generated"]["layers"] < 8 * less["generated"]["tokens"]
    (difference, of_perplexity), (none, _) = ([m["minus_first"] for m in run["metrics"]] for run in (less, full))
    right = [True] * 3, [True] * round(3 * less["metrics"][0]["value"]) + [False] * 3
    expected = paired(right[0], right[1][:3])  # of three that are all right at first, any order gives the same
    assert difference == asdict(expected)
    assert none is None
    assert of_perplexity is None


def test_tables_and_page_of_the_harness_show_the_paired_difference_also_of_policies_that_draft(tmp_path: Path) -> None:
    items = [{"q": p.question, "a": str(p.answer)} for p in islice(all_problems("word-problems", "test", 0), 2)]
    write_task(tmp_path, "own_words", items, **generation("Question: {{q}}\nAnswer:", "{{a}}", ["\n"], 40))
    page = tmp_path / "page.html"
    words = ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path), "--compare-full"]
    policies = ["--policy", "lossless alpha=0.8 start=0.7", "--kv-cache-memory-bytes", str(2**25)]
    result = CliRunner().invoke(app, [*words, *policies, "--html", str(page)])
    assert result.exit_code == 0, result.output
    interval = paired([False] * 2, [False] * 2).interval
    cell = f"+0.0 ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
    assert cell in result.output
    text = page.read_text()
    assert f"<td>{cell}</td>" in text
    assert text.count("<circle") == 2
    assert re.search(r"Lossless.* \d+\.\d\d +- +\d\.\d{3}x +-", result.output)
    assert "Drafts:" in result.output


def test_without_the_data_of_a_task_one_line_says_what_to_do(tmp_path: Path) -> None:
    write_task(tmp_path, "own_words", [{"q": "?", "a": "1"}], **generation("{{q}}", "{{a}}", ["\n"], 4))
    (tmp_path / "own_words.jsonl").unlink()
    result = CliRunner().invoke(app, ["eval", "demo", "--tasks", "own_words", "--include-path", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = (line for line in result.output.splitlines() if line.startswith("error:"))
    assert "own_words" in line
    assert "--data" in line
    assert "--include-path" in line


def test_a_task_that_the_harness_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # thousands of files
    result = CliRunner().invoke(app, ["eval", "demo", "--tasks", "no_such_task", "--include-path", str(tmp_path)])
    assert result.exit_code == 2
    assert "no_such_task" in result.output
