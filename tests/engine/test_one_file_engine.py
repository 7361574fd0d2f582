"""The engine in one file and the engine give the same tokens: two implementations that share no line."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from d3engine import D3, Engine, FullDepth, LayerTable, SamplingParams, SkipDecode
from d3engine.depth import DepthPolicy
from d3engine.engine.model_directory import fetched_model, model_directory

FILE = Path(__file__).parents[2] / "examples" / "one_file_engine.py"
QUESTION = "Question: Tom has {} pens. Tom finds 3. Ann gives Tom {}. How many pens does Tom have now?\nAnswer:"
PROMPTS = [QUESTION.format(first, second) for first, second in ((5, 2), (70, 11))]
WAKING = [[True] * 16, [True] * 5 + [False] * 4 + [True] * 7, [True] * 7 + [False] * 6 + [True] * 3]
POLICIES: dict[str, DepthPolicy] = {
    "full": FullDepth(),
    "d3": D3(alpha=0.8, start=0.6),
    "slow d3": D3(alpha=0.97, start=0.4),
    "skipdecode": SkipDecode(max_tokens=16, min_layers=6),
    "copied": LayerTable(WAKING, on_skip="copy"),
}


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo(one_file: ModuleType) -> Any:
    return one_file.load(model_directory("demo"))


def depth_of(one_file: ModuleType, name: str) -> Any:
    """Each depth, by the file's own rules where it has them."""
    if name == "full":
        return one_file.full_depth(16)
    if isinstance(policy := POLICIES[name], D3):
        return one_file.d3(16, policy.alpha, policy.start)
    if name == "copied":
        return one_file.Table(WAKING)
    return one_file.Cutoffs(policy.schedule(16).cutoffs.tolist())


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[list[int], list[int]]]]:
    """Tokens and depths of the engine, by policy."""
    with Engine("demo", device="cpu", depth=FullDepth(), kv_cache_memory_bytes=2**24) as engine:
        found = {}
        for name, policy in POLICIES.items():
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, depth=policy)
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            found[name] = [(list(o.outputs[0].token_ids), list(o.outputs[0].depths)) for o in outputs]
    assert len({str(answers) for answers in found.values()}) == len(POLICIES)
    return found


@pytest.mark.parametrize(
    ("blocks", "step_tokens"), [(4096, 256), (4096, 11), (130, 64)], ids=["roomy", "small chunks", "preempted"]
)
def test_tokens_and_depths_are_the_engines_in_one_mixed_batch(
    one_file: ModuleType, demo: Any, expected: dict[str, Any], blocks: int, step_tokens: int
) -> None:
    engine = one_file.Engine(demo, num_blocks=blocks, block_size=8, max_step_tokens=step_tokens)
    sampling = one_file.Sampling(max_tokens=16, ignore_eos=True)
    added = {
        name: [engine.add(demo.tokenizer.encode(prompt).ids, depth_of(one_file, name), sampling) for prompt in PROMPTS]
        for name in POLICIES
    }
    while engine.waiting or engine.running:
        engine.step()
    for name, sequences in added.items():
        assert [(sequence.answer, sequence.depths) for sequence in sequences] == expected[name], name
    assert (engine.num_preemptions > 0) == (blocks == 130)
    assert sorted(engine.pool.free) == list(range(blocks))


def test_a_draw_follows_from_the_seed_and_not_from_the_batch(one_file: ModuleType, demo: Any) -> None:
    sampling = one_file.Sampling(max_tokens=12, temperature=20, top_k=50, top_p=0.95, seed=3, ignore_eos=True)
    prompt = demo.tokenizer.encode(PROMPTS[0]).ids
    (alone,) = one_file.Engine(demo).generate([prompt], sampling=sampling)
    batch = one_file.Engine(demo).generate([prompt[:5], prompt, prompt[:9]], sampling=sampling)
    assert batch[1].answer == alone.answer
    (greedy,) = one_file.Engine(demo).generate([prompt], sampling=one_file.Sampling(max_tokens=12, ignore_eos=True))
    assert alone.answer != greedy.answer


def test_tokens_are_the_engines_with_a_real_model(one_file: ModuleType) -> None:
    """The engine multiplies the packed weights; this file, what they stand for."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    file = fetched_model("qwen2.5-coder-0.5b")
    if not file.exists():
        pytest.skip("the model is not there: d3engine weights fetch qwen2.5-coder-0.5b")
    prompt = "def add(first, second):\n    "
    depths = [FullDepth(), D3(alpha=0.5, start=0.8)]
    params = [SamplingParams(temperature=0, repetition_penalty=1, max_tokens=6, depth=depth) for depth in depths]
    arguments = {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 2**24, "activations": "float32"}
    with Engine("qwen2.5-coder-0.5b", **arguments) as engine:
        outputs = engine.generate([prompt, prompt], params, use_tqdm=False)
    model = one_file.load(file)
    ids = model.tokenizer.encode(prompt).ids
    assert ids == list(outputs[0].prompt_token_ids)
    engine = one_file.Engine(model, num_blocks=512)
    added = [engine.add(ids, depth, one_file.Sampling(max_tokens=6)) for depth in (None, one_file.d3(24, 0.5, 0.8))]
    while engine.running or engine.waiting:
        engine.step()
    expected = [(list(output.outputs[0].token_ids), list(output.outputs[0].depths)) for output in outputs]
    assert [(sequence.answer, sequence.depths) for sequence in added] == expected
    assert expected[0] != expected[1]


def test_the_file_is_short_and_imports_nothing_of_the_engine() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 700
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert not {name for name in modules if name.split(".")[0] in ("d3engine", "kernels", "transformers")}
