"""Matrices that stay in a checkpoint's bfloat16 under float32 activations: float32's answers in half of the bytes."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeLlama, MakePrompts
from quantized_weights import SCHEMES
from safetensors.torch import load_file, save_file
from tiny_models import save_random, save_without_layer
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM
from watching import watch

from d3engine import D3, LLM, Distilled, EarlyExit, Engine, FullDepth, LayerTable, Lossless, SamplingParams, Speculative
from d3engine.cli.engine_options import ENGINE
from d3engine.engine import resolve
from d3engine.engine.device import resolve_dtype
from d3engine.engine.resolve import kept_by_default, resolve_weight_dtype
from d3engine.engine.settings import ExecutorKind
from d3engine.errors import InvalidValueError
from d3engine.executor import bridging
from d3engine.kernels import reference
from d3engine.kernels.bf12 import PackedWeight
from d3engine.kernels.bfloat16_pairs import PairsWeight
from d3engine.kernels.native.bf12 import packed
from d3engine.kernels.quantized import Int8Weight
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import NEURONS, Student, write_student
from d3engine.model.weights import LlamaWeights, in_layout, load_weights, random_weights
from d3engine.research.analysis.answers import open_model
from weights_tools.quantize import quantize_model

Rounded = Callable[..., Path]
LAYOUTS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_hidden_layers": 6},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
}
WAKING = [[0, 1, 2, 3, 4, 5], [0, 5], [0, 1, 5], [0, 2, 4]]
POLICIES = [
    FullDepth(),
    D3(0.8, 0.4),
    LayerTable(WAKING, on_skip="copy"),
    LayerTable(WAKING, on_skip="project"),
    EarlyExit(threshold=0.02, min_layer=1),
    Lossless(D3(0.8, 0.4), 4),
]
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "max_num_seqs": 8}


def rounded(source: Path, target: Path, dtype: torch.dtype = torch.bfloat16, **changes: torch.dtype) -> Path:
    """The model with its tensors in `dtype`, as config.json says then; `changes` names tensors of another one."""
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: tensor.to(changes.get(name, dtype)) for name, tensor in tensors.items()}, target / "model.safetensors"
    )
    return target


@pytest.fixture(scope="module")
def directory(tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`directory(layout)`: a tiny model of bfloat16."""
    made: dict[str, Path] = {}

    def make(layout: str = "grouped heads") -> Path:
        if layout not in made:
            made[layout] = rounded(tiny_llama(**LAYOUTS[layout]).directory, tmp_path_factory.mktemp("rounded"))
        return made[layout]

    return make


def load(directory: Path, weight_dtype: torch.dtype | None = None) -> LlamaWeights:
    config = ModelConfig.from_directory(directory)
    return load_weights(
        directory, config, dtype=torch.float32, weight_dtype=weight_dtype, device="cpu", show_progress=False
    )


def answers(engine: Engine, prompts: list[list[int]], policies: list[Any]) -> list[Any]:
    """Tokens, depths and log-probabilities of every prompt under every policy, all in one batch."""
    asked = [(prompt, policy) for prompt in prompts for policy in policies]
    params = [SamplingParams(temperature=0, max_tokens=14, logprobs=0, depth=policy) for _, policy in asked]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in asked], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.depths) == (other.token_ids, other.depths)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_matrices_give_float32_tokens_in_all_policies(
    directory: Rounded, make_prompts: MakePrompts, layout: str
) -> None:
    """bfloat16 matrices give the tokens of float32 under every kind of policy."""
    policies = POLICIES if layout == "grouped heads" else [FullDepth(), D3(0.8, 0.4)]
    prompts = make_prompts([3, 17, 9])
    found = []
    for name in ("float32", "bfloat16"):
        with Engine(directory(layout), weight_dtype=name, **OPTIONS) as engine:
            together = answers(engine, prompts, policies)
            assert_alike(answers(engine, prompts[:1], policies[1:2]), together[1:2])
            found.append(together)
    assert_alike(*found)
    assert len({tuple(answer.token_ids) for answer in found[0]}) > 3, "answers that agree by chance would prove nothing"


@pytest.mark.parametrize(("scheme", "lm_head"), [*((scheme, "float") for scheme in SCHEMES), ("int4", "int8")])
def test_quantized_model_keeps_its_float_matrices_in_bfloat16(
    directory: Rounded, make_prompts: MakePrompts, scheme: str, lm_head: str, tmp_path: Path
) -> None:
    """A float head is one with the embedding; where all matrices are quantized, no bit changes."""
    quantize_model(directory("tied"), tmp_path / "out", scheme, lm_head=lm_head, show_progress=False)
    found = []
    for name in ("float32", "bfloat16"):
        with Engine(tmp_path / "out", weight_dtype=name, **OPTIONS) as engine:
            weights = engine.executor.model.weights
            assert weights.has_float_matrices == (lm_head == "float")
            if lm_head == "float":
                assert str(weights.embedding.dtype) == f"torch.{name}"
                assert weights.lm_head is weights.embedding
            found.append(answers(engine, make_prompts([5, 11]), [FullDepth(), D3(0.8, 0.4)]))
    assert_alike(*found)
    assert lm_head == "float" or found[0] == found[1]


def test_a_second_model_drafts_from_bfloat16_matrices_too(
    tiny_llama: MakeLlama, make_prompts: MakePrompts, tmp_path: Path
) -> None:
    tiny = tiny_llama(num_hidden_layers=6)
    (tmp_path / "small").mkdir()
    source, small = rounded(tiny.directory, tmp_path / "model"), save_without_layer(tiny, 2, tmp_path / "small")
    with Engine(source, weight_dtype="bfloat16", depth=Speculative(small, 3), **OPTIONS) as engine:
        drafts = engine.executor._draft_model.model.weights  # type: ignore[union-attr]
        assert (drafts.dtype, drafts.weight_dtype) == (torch.float32, torch.bfloat16)
        ours = answers(engine, make_prompts([3, 12]), [None])
        assert engine.stats().drafted_tokens > 0
    with Engine(source, weight_dtype="float32", depth=FullDepth(), **OPTIONS) as engine:
        theirs = answers(engine, make_prompts([3, 12]), [None])
    assert [one.token_ids for one in ours] == [other.token_ids for other in theirs]


def test_matrices_take_half_of_the_bytes_and_the_cache_as_many(directory: Rounded) -> None:
    wide, narrow = load(directory("biases")), load(directory("biases"), torch.bfloat16)
    vectors = [tensor for layer in wide.layers for tensor in layer.tensors() if tensor.dim() == 1]
    kept = sum(tensor.nbytes for tensor in [*vectors, wide.final_norm])
    assert narrow.nbytes - kept == (wide.nbytes - kept) / 2
    sizes = []
    for name in ("float32", "bfloat16"):
        with Engine(directory("biases"), weight_dtype=name, kv_cache_memory_bytes=2**20, **OPTIONS) as engine:
            pool: Tensor = engine.executor.pool
            sizes.append((engine.settings.block_bytes, engine.stats().kv_blocks_total, pool.dtype, pool.nbytes))
    assert sizes[0] == sizes[1]
    assert sizes[0][2] == torch.float32


def test_what_needs_no_change_lies_in_the_bfloat16_file(directory: Rounded, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = watch(monkeypatch, torch, "empty", lambda shape, **options: (tuple(shape), options["dtype"]))
    load(directory(), torch.bfloat16)
    matrices = {shape for shape, dtype in allocated if dtype == torch.bfloat16}
    assert matrices == {(128, 48), (160, 48)}  # query, key and value; gate and up
    assert {shape for shape, dtype in allocated if dtype == torch.float32} == {(48,)}  # the norms


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_no_more_than_a_piece_of_a_matrix_is_ever_wide(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(5000, 1024).bfloat16()
    weights = watch(monkeypatch, reference.F, "linear", lambda x, weight, bias=None: (weight.dtype, weight.numel()))
    x, out = torch.randn(num_tokens, 1024), torch.zeros(num_tokens, 5000)
    reference.linear_residual(x, matrix, None, out)
    torch.testing.assert_close(out, x @ matrix.float().t(), rtol=1e-4, atol=1e-3)
    assert {dtype for dtype, _ in weights} == {torch.float32}
    assert sum(size for _, size in weights) == matrix.numel()
    assert max(size for _, size in weights) <= 2**20


def test_multiplied_embedding_keeps_every_bit_of_the_product(tmp_path: Path) -> None:
    """An embedding that is multiplied keeps every bit of the product."""
    sizes: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = GraniteConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, embedding_multiplier=11.7)
    (tmp_path / "float32").mkdir()
    source = rounded(save_random(tmp_path / "float32", GraniteForCausalLM(config)).directory, tmp_path / "bfloat16")
    wide, narrow = load(source), load(source, torch.bfloat16)
    assert torch.equal(wide.embedding, narrow.embedding)
    assert narrow.weight_dtype == torch.bfloat16


# -- what is chosen ------------------------------------------------------------------------------------------------


def chosen(
    directory: Path,
    dtype: str,
    weights: str,
    device: str = "cpu",
    executor: ExecutorKind = "native",
    widens: bool = True,
) -> tuple[torch.dtype, torch.dtype]:
    config, there = ModelConfig.from_directory(directory), torch.device(device)
    computed = resolve_dtype(dtype, config, there)
    kept = kept_by_default(dtype, directory, config, executor)
    return computed, resolve_weight_dtype(weights, dtype=computed, device=there, kept=kept, widens=widens)


def test_auto_leaves_matrices_in_a_dtype_decoding_can_read(
    directory: Rounded, tiny_llama: MakeLlama, tmp_path: Path
) -> None:
    """`auto` leaves matrices in a dtype that decoding reads as it lies."""
    source = tiny_llama(**LAYOUTS["grouped heads"]).directory
    mixed = rounded(source, tmp_path / "mixed", **{"lm_head.weight": torch.float32})
    half = rounded(source, tmp_path / "half", torch.float16)
    norms = {name: torch.float32 for name in load_file(source / "model.safetensors") if "norm" in name}
    wide_norms = rounded(source, tmp_path / "norms", **norms)
    assert chosen(directory(), "auto", "auto", executor="eager") == (torch.float32, torch.float32)
    for bfloat16 in (directory(), wide_norms):
        assert chosen(bfloat16, "auto", "auto") == (torch.float32, torch.bfloat16)
    assert chosen(half, "auto", "auto") == (torch.float32, torch.float16)
    for other in (source, mixed):  # whose matrices would lose bits
        assert chosen(other, "auto", "auto") == (torch.float32, torch.float32)
    assert chosen(directory(), "float32", "auto") == (torch.float32, torch.float32)
    assert chosen(directory(), "auto", "float32") == (torch.float32, torch.float32)
    assert chosen(directory(), "auto", "auto", "cuda", "graphs") == (torch.bfloat16, torch.bfloat16)


def test_native_engine_keeps_a_checkpoints_bfloat16(directory: Rounded) -> None:
    """An engine that decodes natively keeps a checkpoint's bfloat16."""
    with Engine(directory(), **OPTIONS) as engine, Engine(directory(), enforce_eager=True, **OPTIONS) as eager:
        decodes_natively = engine.stats().executor.startswith("native")
        assert engine.weight_dtype == (torch.bfloat16 if decodes_natively else torch.float32)
        assert eager.weight_dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "given", "allowed"),
    [
        ("auto", "int8", "auto, float32, bfloat16, float16 on cpu with dtype=float32"),
        ("float32", torch.float64, "auto, float32, bfloat16, float16 on cpu"),
        ("bfloat16", "float32", "auto, bfloat16 on cpu with dtype=bfloat16"),
        ("auto", 16, "auto, float32"),
    ],
)
def test_weight_dtype_that_cannot_be_multiplied_is_refused(
    directory: Rounded, dtype: str, given: Any, allowed: str
) -> None:
    """A dtype of matrices that cannot be multiplied is refused."""
    with pytest.raises(InvalidValueError, match=f"weight_dtype must be one of {allowed}"):
        Engine(directory(), dtype=dtype, weight_dtype=given, **OPTIONS)


def test_triton_and_a_gpu_multiply_only_what_is_as_wide(directory: Rounded) -> None:
    with pytest.raises(InvalidValueError, match="one of auto, float32 on cuda"):
        chosen(directory(), "float32", "bfloat16", device="cuda")
    with pytest.raises(InvalidValueError, match="one of auto, float32 on cpu"):
        chosen(directory(), "float32", "bfloat16", widens=False)
    assert chosen(directory(), "auto", "auto", executor="eager", widens=False) == (torch.float32, torch.float32)


def test_ready_weights_say_what_their_matrices_are_held_in(directory: Rounded) -> None:
    """Ready weights say themselves what their matrices are held in."""
    weights = load(directory(), torch.bfloat16)
    with Engine(directory(), weights=weights, **OPTIONS) as engine:
        assert (engine.dtype, engine.weight_dtype) == (torch.float32, torch.bfloat16)
    allowed = r"weights must be torch\.float32 on cpu; got 'torch\.float32 with matrices in torch\.bfloat16 on cpu'"
    with pytest.raises(InvalidValueError, match=allowed):
        Engine(directory(), weights=weights, weight_dtype="float32", **OPTIONS)
    config = ModelConfig.from_directory(directory())
    made = random_weights(config, dtype=torch.float32, weight_dtype=torch.bfloat16, device="cpu", seed=0)
    assert (made.dtype, made.weight_dtype, made.lm_head.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


def test_weight_dtype_is_an_option_everywhere_and_is_logged(
    directory: Rounded, caplog: pytest.LogCaptureFixture
) -> None:
    """Every interface takes the dtype of matrices, and the log has it."""
    caplog.set_level(logging.INFO, "d3engine")
    with LLM(str(directory()), weight_dtype="half", **OPTIONS) as llm:
        assert llm.weight_dtype == torch.float16
    assert "6 layers, float32 with matrices in float16 on cpu" in caplog.text
    engine, _ = open_model(str(directory()), {"weight_dtype": "bfloat16", **OPTIONS})
    assert engine.weight_dtype == torch.bfloat16
    assert ENGINE["weight_dtype"][0] == "--weight-dtype"


# -- packed --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_matrices_give_bfloat16_answers_in_all_policies(
    directory: Rounded, make_prompts: MakePrompts, layout: str
) -> None:
    """Packed matrices give the very answers of bfloat16 under every kind of policy."""
    policies = POLICIES if layout == "grouped heads" else [FullDepth(), D3(0.8, 0.4)]
    prompts = make_prompts([3, 17, 70])
    found = []
    for packs in (False, True):
        with Engine(directory(layout), weight_compression="bf12" if packs else "none", **OPTIONS) as engine:
            weights = engine.executor.model.weights
            assert isinstance(weights.layers[0].qkv, PackedWeight) == packs
            assert isinstance(weights.lm_head, PackedWeight) == packs
            assert (weights.embedding.dtype, weights.weight_dtype) == (torch.bfloat16, torch.bfloat16)
            found.append(answers(engine, prompts, policies))
    assert found[0] == found[1]
    assert len({tuple(answer.token_ids) for answer in found[0]}) > 3


@pytest.mark.usefixtures("native_library")
def test_only_what_is_in_bfloat16_is_packed(directory: Rounded, tmp_path: Path) -> None:
    quantize_model(directory("tied"), tmp_path / "out", "int8", lm_head="float", show_progress=False)
    with Engine(tmp_path / "out", weight_compression="bf12", **OPTIONS) as engine:
        weights = engine.executor.model.weights
        assert isinstance(weights.lm_head, PackedWeight)
        assert weights.embedding.dtype == torch.bfloat16
        assert isinstance(weights.layers[0].down, Int8Weight)
        assert engine.stats().executor.startswith("native")


@pytest.mark.usefixtures("native_library")
def test_ready_weights_are_packed_too_and_the_log_tells_it(
    directory: Rounded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "d3engine")
    weights = load(directory(), torch.bfloat16)
    with Engine(directory(), weights=weights, weight_compression="bf12", **OPTIONS) as engine:
        assert isinstance(engine.executor.model.weights.layers[-1].down, PackedWeight)
    assert "float32 with matrices in bfloat16 on cpu, packed into 12 bits" in caplog.text
    again = in_layout(in_layout(weights, packed), packed)
    assert (again.weight_dtype, again.has_float_matrices) == (torch.bfloat16, True)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"enforce_eager": True, "weight_dtype": "bfloat16"}, "none where the native library does not decode"),
        ({"dtype": "bfloat16"}, "none where the native library does not decode"),
        *(
            (
                {"weight_dtype": name},
                f'none where matrices are {name} (weight_dtype="bfloat16" would make them bfloat16)',
            )
            for name in ("float32", "float16")
        ),
    ],
)
def test_packing_is_refused_where_nobody_would_read_it(
    directory: Rounded, options: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(InvalidValueError, match=f"weight_compression must be {re.escape(allowed)}; got 'bf12'"):
        Engine(directory(), weight_compression="bf12", **options, **OPTIONS)
    with pytest.raises(InvalidValueError, match="weight_compression must be one of none, bf12; got 'yes'"):
        Engine(directory(), weight_compression="yes", **OPTIONS)


# -- activations in bfloat16 ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounded_rows_answer_alone_as_in_a_batch(
    directory: Rounded, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """By default where the processor multiplies bfloat16 numbers; answers are near those of exact rows."""
    monkeypatch.setattr(resolve, "adds_bfloat16_pairs", lambda isa: True)
    monkeypatch.setattr(resolve, "ROUNDED_HIDDEN_SIZE", 0)
    policies, prompts = [FullDepth(), D3(0.8, 0.4), Lossless(D3(0.8, 0.4), 4)], make_prompts([3, 70, 9])
    with Engine(directory(layout), **OPTIONS) as engine:
        weights = engine.executor.model.weights
        assert engine.settings.activations == "bfloat16"
        assert isinstance(weights.layers[0].qkv, PairsWeight)
        assert isinstance(weights.lm_head, PairsWeight)
        assert (weights.embedding.dtype, weights.weight_dtype) == (torch.bfloat16, torch.bfloat16)
        together = answers(engine, prompts, policies)
        engine.reset_prefix_cache()
        for nth, prompt in enumerate(prompts):
            assert answers(engine, [prompt], policies) == together[3 * nth : 3 * nth + 3]
    for one in range(0, 9, 3):  # drafts change nothing
        assert together[one].token_ids == together[one + 2].token_ids
        assert together[one].cumulative_logprob == together[one + 2].cumulative_logprob
    with Engine(directory(layout), activations="float32", **OPTIONS) as engine:
        exact = answers(engine, prompts, [FullDepth()])
    firsts = [(one.logprobs[0], other.logprobs[0]) for one, other in zip(together[::3], exact, strict=True)]
    apart = [abs(one[key].logprob - other[key].logprob) for one, other in firsts for key in one.keys() & other.keys()]
    assert 0 < max(apart) < 0.1


@pytest.mark.usefixtures("native_library")
def test_a_student_meets_rounded_rows_as_its_model(
    directory: Rounded, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of which every neuron stays, with the model's own down matrix: the same bits, and no second copy is read."""
    monkeypatch.setattr(resolve, "adds_bfloat16_pairs", lambda isa: True)
    monkeypatch.setattr(bridging, "load_weights", lambda *given, **options: pytest.fail("the weights are read again"))
    source, file = directory(), tmp_path / "student.safetensors"
    weights, config = load(source, torch.bfloat16), ModelConfig.from_directory(source)
    own = {NEURONS: torch.arange(config.intermediate_size), "down": weights.layers[1].down}
    sizes = config.num_layers, config.hidden_size
    write_student(Student(fingerprint(source), *sizes, (), {1: own}), file)  # type: ignore[dict-item]
    policy = Distilled(student=str(file))
    with Engine(source, activations="bfloat16", depth=policy, **OPTIONS) as engine:
        full, found = answers(engine, make_prompts([9]), [FullDepth(), policy])
        ((_, student),) = engine.executor._students.made()  # type: ignore[attr-defined]
    held = student.model.weights.layers[1]
    assert isinstance(held.gate_up, PairsWeight)
    assert isinstance(held.down, PairsWeight)
    assert (found.token_ids, found.cumulative_logprob) == (full.token_ids, full.cumulative_logprob)


@pytest.mark.usefixtures("native_library")
def test_the_float_head_of_a_quantized_model_stays_exact(
    directory: Rounded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its other matrices meet float32 rows, and so does what is left of bfloat16."""
    monkeypatch.setattr(resolve, "adds_bfloat16_pairs", lambda isa: True)
    monkeypatch.setattr(resolve, "ROUNDED_HIDDEN_SIZE", 0)
    quantize_model(directory("tied"), tmp_path / "out", "int8", lm_head="float", show_progress=False)
    with Engine(tmp_path / "out", **OPTIONS) as engine:
        assert engine.settings.activations == "float32"
        assert not isinstance(engine.executor.model.weights.lm_head, PairsWeight)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    "options", [{"weight_dtype": "float32"}, {"weight_compression": "bf12"}, {"enforce_eager": True}]
)
def test_rounded_rows_are_refused_without_their_matrices(
    directory: Rounded, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Of other matrices, and where another executor decodes."""
    monkeypatch.setattr(resolve, "adds_bfloat16_pairs", lambda isa: True)
    allowed = "activations must be auto or float32 but for matrices held as bfloat16, on a CPU.*; got 'bfloat16'"
    with pytest.raises(InvalidValueError, match=allowed):
        Engine(directory(), activations="bfloat16", **options, **OPTIONS)


@pytest.mark.usefixtures("native_library")
def test_the_old_name_of_the_argument_works_for_a_release(directory: Rounded) -> None:
    with pytest.warns(DeprecationWarning, match="pack_weights is now weight_compression='bf12'"):
        engine = Engine(directory(), pack_weights=True, **OPTIONS)  # type: ignore[call-arg]
    assert engine.settings.weight_compression == "bf12"
    with pytest.warns(DeprecationWarning, match="weight_compression='none'"):
        llm = LLM(directory(), pack_weights=False, **OPTIONS)
    assert llm.settings.weight_compression == "none"
