"""A GGUF file is a model like any directory: it answers as what it would be converted to, and is refused alike."""

import json
import random
import re
import shutil
import struct
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import SMALL, bpe_keys, sentencepiece_keys, sentencepiece_model, write_gguf
from safetensors.torch import load_file
from typer.testing import CliRunner

from d3engine import D3, Engine, FullDepth, SamplingParams, Speculative
from d3engine.cli import app
from d3engine.engine.draft_model import load_draft_weights
from d3engine.engine.engine_config import EngineConfig
from d3engine.engine.model_directory import default_sampling_params, fetched_model, model_directory
from d3engine.engine.resolve import multiplies_bytes, resolve_settings
from d3engine.errors import D3EngineError, InvalidValueError, ModelFormatError
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, StackedWeight
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.gguf_file import TENSOR_TYPES, GGUFFile, open_gguf
from d3engine.model.source import open_checkpoint
from d3engine.model.weights import load_weights
from d3engine.text.infill import infill_format
from d3engine.utils.files import CONFIG_BYTES
from d3engine.weights_tools.convert import convert_gguf
from d3engine.weights_tools.quantize import quantize_model

TOKENIZERS = {"gpt2": bpe_keys(), "llama": sentencepiece_keys(sentencepiece_model())}
KINDS: dict[str, dict[str, Any]] = {
    "every type in turn": {"types": TENSOR_TYPES, "tokenizer": TOKENIZERS["gpt2"]},
    "float16": {"types": ("F16",), "tokenizer": TOKENIZERS["gpt2"], **SMALL},
    "as SmolLM2's": {"types": ("Q8_0", "Q4_1"), "tied": True, "tokenizer": TOKENIZERS["gpt2"], **SMALL},
    "k-quants": {"types": ("Q4_K", "Q6_K"), "layers": 1, "tokenizer": TOKENIZERS["llama"]},
}
PROMPTS = ["What is a block?", "depth:  12 34", "<|im_start|>x", "é漢"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
CONVERSATION = [{"role": "user", "content": "hello"}]


def engine_of(model: Path, **arguments: Any) -> Engine:
    arguments = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 4} | arguments
    return Engine(model, **arguments)


def answers(model: Path, **arguments: Any) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and answers, those of a conversation last where the model has a chat template."""
    with engine_of(model, **arguments) as engine:
        outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        if "<|im_start|>" in engine.get_tokenizer().special_tokens.values():
            outputs += engine.chat(CONVERSATION, GREEDY, use_tqdm=False)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file, and the directory that it was converted to."""
    folder = tmp_path_factory.mktemp("pair")
    file = write_gguf(folder / "model.gguf", **KINDS[request.param])
    convert_gguf(file, folder / "model", show_progress=False)
    return file, folder / "model"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", tokenizer=TOKENIZERS["gpt2"], **SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_file_answers_as_what_it_is_converted_to(pair: tuple[Path, Path], dtype: str) -> None:
    """An engine on a GGUF file answers as one on what it is converted to."""
    file, directory = pair
    assert answers(file, dtype=dtype) == answers(directory, dtype=dtype)
    assert ModelConfig.from_directory(file).eos_token_ids == ModelConfig.from_directory(directory).eos_token_ids


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("types", "held"),
    [
        (("Q4_K", "Q6_K"), "as they are"),
        (("Q8_0",), "as they are"),
        (("BF16",), "bfloat16"),
        (("F16",), "float16"),
        (("F32",), "float32"),
        (("BF16", "F32"), "float32"),
    ],
)
def test_matrices_on_a_cpu_lose_nothing_worth_having(tmp_path: Path, types: tuple[str, ...], held: str) -> None:
    """Matrices are held on a CPU in what loses nothing worth having."""
    sizes = {"layers": 1} if "Q4_K" in types else SMALL
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], **(sizes | {"types": types}))
    for arguments, expected in (
        ({}, held),
        ({"weight_dtype": "float32"}, "float32"),
        ({"dtype": "float32"}, "float32"),
    ):
        with engine_of(file, **arguments) as engine:
            weights = engine.executor.model.weights
            is_in_blocks = isinstance(weights.layers[0].down, BlockWeight | BlockLanesWeight)
            assert is_in_blocks == (expected == "as they are")
            if expected != "as they are":
                assert (str(engine.dtype), str(weights.weight_dtype)) == ("torch.float32", f"torch.{expected}")


@pytest.mark.usefixtures("native_library")
def test_gates_of_two_types_are_rounded(tmp_path: Path) -> None:
    """Gates and what they let through are rounded where they are of two types."""
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], **(SMALL | {"types": ("Q4_0", "F32")}))
    with engine_of(file) as engine:
        (layer,) = engine.executor.model.weights.layers
    assert isinstance(layer.gate_up, torch.Tensor)
    assert layer.gate_up.dtype == torch.bfloat16
    assert isinstance(layer.qkv, StackedWeight)


@pytest.mark.usefixtures("native_library")
def test_gguf_file_rounded_to_bfloat16_answers_as_a_directory(tmp_path: Path) -> None:
    """Rounded to bfloat16 a file answers as a directory of the same values."""
    file = write_gguf(tmp_path / "model.gguf", **KINDS["k-quants"])
    convert_gguf(file, tmp_path / "model", dtype="bfloat16", show_progress=False)
    assert answers(file, weight_dtype="bfloat16") == answers(tmp_path / "model")


def test_both_have_one_fingerprint(pair: tuple[Path, Path]) -> None:
    file, directory = pair
    assert fingerprint(file) == fingerprint(directory)


def test_a_chat_follows_the_template_of_the_file(small: Path) -> None:
    with engine_of(small) as engine:
        ids = engine.chat_prompt(CONVERSATION, add_generation_prompt=False)["prompt_token_ids"]
        assert engine.get_tokenizer().decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>\n"


def test_a_template_next_to_a_file_without_one_is_read(tmp_path: Path) -> None:
    """A file's own template wins: one folder may hold the files of several models."""
    given = {"tokenizer": TOKENIZERS["gpt2"], **SMALL}
    without = write_gguf(tmp_path / "without.gguf", leave=("tokenizer.chat_template",), **given)
    own = write_gguf(tmp_path / "own.gguf", **given)
    with engine_of(without) as engine, pytest.raises(InvalidValueError, match="has no chat template"):
        engine.chat_prompt(CONVERSATION)
    with engine_of(own) as engine:
        expected = engine.chat_prompt(CONVERSATION)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    with engine_of(own) as engine:
        assert engine.chat_prompt(CONVERSATION) == expected
    with engine_of(without) as engine:
        hello = engine.get_tokenizer().encode("hello!", add_special_tokens=False)
        assert engine.chat_prompt(CONVERSATION) == {"prompt_token_ids": hello}


def test_a_file_says_how_its_authors_sample_it(tmp_path: Path) -> None:
    own = {"temp": 0.2, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.1}
    changes = {f"general.sampling.{name}": value for name, value in own.items()}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], changes=changes, **SMALL)
    convert_gguf(file, tmp_path / "model", show_progress=False)
    for source in (file, tmp_path / "model"):
        with engine_of(source) as engine:
            params = engine.default_sampling_params
            assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.2, 0.9, 20, 0.05)
            assert params.repetition_penalty == 1.1
    with engine_of(write_gguf(tmp_path / "other.gguf", tokenizer=TOKENIZERS["gpt2"], **SMALL)) as engine:
        assert engine.default_sampling_params == SamplingParams()
    wrong = {"general.sampling.temp": "hot"}
    refused = write_gguf(tmp_path / "wrong.gguf", tokenizer=TOKENIZERS["gpt2"], changes=wrong, **SMALL)
    with pytest.raises(ModelFormatError, match=r"temperature must be .*; got 'hot'"):
        engine_of(refused)


def test_no_tensor_is_kept_while_the_next_one_is_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    read = GGUFFile.read

    def counted(file: GGUFFile, name: str) -> Any:
        nonlocal most
        values = read(file, name)
        alive.append(weakref.ref(values))
        most = max(most, sum(reference() is not None for reference in alive))
        return values

    monkeypatch.setattr(GGUFFile, "read", counted)
    config = ModelConfig.from_directory(small)
    load_weights(small, config, dtype=pytest.importorskip("torch").bfloat16, device="cpu", show_progress=False)
    assert len(alive) == 12
    assert most == 1


def test_quantized_gguf_file_is_its_conversion_quantized(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Quantizing a GGUF file is quantizing what it is converted to, but that 16 bits of an embedding are enough."""
    found = []
    for number, source in enumerate(pair):
        quantize_model(source, tmp_path / str(number), "int8", show_progress=False)
        found.append(load_file(tmp_path / str(number) / "model.safetensors"))
    of_file, of_directory = found
    with open_checkpoint(pair[0]) as checkpoint:
        types = {name: entry.type_name for name, entry in checkpoint.entries.items()}
    assert of_file.keys() == of_directory.keys()
    for name, tensor in of_file.items():
        assert torch.equal(tensor, of_directory[name].to(tensor.dtype)), name
        assert tensor.dtype != torch.float32 or name not in types or types[name] == "F32"
    assert answers(tmp_path / "0")


def test_a_gguf_file_drafts_for_another_model(small: Path, tmp_path: Path) -> None:
    plain = answers(small, depth=FullDepth())
    assert answers(small, depth=Speculative(str(small), 3)) == plain
    other = TOKENIZERS["gpt2"] | {"tokenizer.ggml.tokens": [*TOKENIZERS["gpt2"]["tokenizer.ggml.tokens"][:-1], "<no>"]}
    stranger = write_gguf(tmp_path / "stranger.gguf", tokenizer=other, **SMALL)
    with pytest.raises(InvalidValueError, match=r"draft_model must be a model whose tokenizer .*\(1 tokens differ\)"):
        engine_of(small, depth=Speculative(str(stranger), 3))


@pytest.mark.usefixtures("native_library")
@pytest.mark.skipif(not multiplies_bytes(), reason="the processor multiplies no bytes")
def test_blocks_of_a_draft_model_are_rounded_to_q4_0(tmp_path: Path) -> None:
    """A draft model's layers take 4.5 bits a weight; its head stays as it is, and no answer changes."""
    sizes = {name: value for name, value in SMALL.items() if name != "types"}
    file = write_gguf(tmp_path / "draft.gguf", tokenizer=TOKENIZERS["gpt2"], types=("Q8_0",), **sizes)
    settings = resolve_settings(EngineConfig(model=file, device="cpu", max_model_len=64))
    weights = load_draft_weights(str(file), settings, None).weights
    held = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert {getattr(matrix, "type_name", None) for matrix in held} == {"Q4_0"}
    assert getattr(weights.lm_head, "type_name", None) == "Q8_0"
    assert answers(file, depth=Speculative(str(file), 3)) == answers(file, depth=FullDepth())


def test_auto_reads_a_fitting_d3_json_next_to_the_file(small: Path) -> None:
    """Auto reads the d3.json next to the file if it is for these weights."""
    assert engine_of(small).depth == FullDepth()
    beside = small.parent / "d3.json"
    beside.write_text(json.dumps({"depth": D3(0.9, 0.5).describe(), "fingerprint": fingerprint(small)}))
    assert engine_of(small).depth == D3(0.9, 0.5)
    another = write_gguf(small.parent / "another.gguf", tokenizer=TOKENIZERS["gpt2"], **(SMALL | {"types": ("Q4_0",)}))
    with pytest.raises(ModelFormatError, match=r"d3\.json was calibrated on other weights"):
        engine_of(another)
    assert engine_of(another, depth=FullDepth()).depth == FullDepth()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "MODEL", "hello", "--max-tokens", "3", "--max-model-len", "32"],
        ["chat", "MODEL", "--max-tokens", "3", "--max-model-len", "64"],
        ["schedule", "--model", "MODEL", "--depth", "auto"],
        ["weights", "inspect", "MODEL"],
        ["weights", "verify", "MODEL"],
        ["weights", "quantize", "MODEL", "OUT", "--scheme", "int4"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_take_a_gguf_file_for_a_model(small: Path, tmp_path: Path, arguments: list[str]) -> None:
    given = [{"MODEL": str(small), "OUT": str(tmp_path / "out")}.get(word, word) for word in arguments]
    result = CliRunner().invoke(app, given, input="hello\n")
    assert result.exit_code == 0, result.output


def test_inspection_tells_the_types_and_bytes_of_the_file(small: Path) -> None:
    result = CliRunner().invoke(app, ["weights", "inspect", str(small), "--json"])
    tensors = {tensor["name"]: tensor for tensor in json.loads(result.output)["tensors"]}
    down = tensors["model.layers.*.mlp.down_proj.weight"]
    assert (down["dtype"], down["nbytes"], down["values"]) == ("Q8_0", 32 * 34, 32 * 32)
    assert tensors["model.norm.weight"]["dtype"] == "F32"


# -- what cannot be loaded ---------------------------------------------------------------------------------------------


def test_file_of_another_kind_is_refused_by_what_may_be(tmp_path: Path) -> None:
    """A file of another kind is refused by what a model may be."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidValueError, match=r"model must be .*a GGUF file.*; got '.*notes\.txt'"):
        Engine(tmp_path / "notes.txt")


def test_folder_stands_for_its_one_gguf_or_q4_k_m(small: Path, tmp_path: Path) -> None:
    """A folder without safetensors stands for a GGUF file by the rule of a repository, and names them otherwise."""
    folder = tmp_path / "download"
    folder.mkdir()
    for name in ("tiny-Q8_0.gguf", "mmproj-F16.gguf", "config.json"):
        shutil.copy(small, folder / name)
    assert model_directory(folder) == folder / "tiny-Q8_0.gguf"
    assert answers(folder) == answers(small)
    shutil.copy(small, folder / "tiny-Q2_K.gguf")
    named = "model must be one of the GGUF files in this folder: tiny-Q2_K.gguf, tiny-Q8_0.gguf; got "
    with pytest.raises(InvalidValueError, match=named):
        Engine(folder)
    shutil.copy(small, folder / "tiny-Q4_K_M.gguf")
    for beside in ("student.safetensors", "bridges.safetensors"):  # of depth train, calibrate and bridge fit
        (folder / beside).touch()
    assert model_directory(str(folder)) == folder / "tiny-Q4_K_M.gguf"
    (folder / "model.safetensors").touch()
    assert model_directory(folder) == folder


def test_a_gguf_file_needs_no_suffix(small: Path) -> None:
    blob = small.rename(small.parent / "sha256-0123")
    assert len(answers(blob)) > 0


CLAIMS: dict[str, dict[str, Any]] = {
    "2^31 layers": {"llama.block_count": 2**31},
    "10,001 layers": {"llama.block_count": 10_001},
    "2^32 - 1 heads": {"llama.attention.head_count": 2**32 - 1},
    "no heads": {"llama.attention.head_count": 0},
    "2^31 positions": {"llama.context_length": 2**31},
    "wide layers": {"llama.feed_forward_length": 2**31 - 1},
    "wide states": {"llama.embedding_length": 2**31 - 2},
    "an epsilon that is none": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "an infinite base": {"llama.rope.freq_base": float("inf")},
    "no tokens": {"tokenizer.ggml.tokens": [""]},
    "merges of nothing": {"tokenizer.ggml.merges": ["", " ", "a  b"]},
    "an id out of range": {"tokenizer.ggml.bos_token_id": 2**32 - 1},
    "BOS without an id": {"tokenizer.ggml.bos_token_id": None},
    "an unknown pre-tokenizer": {"tokenizer.ggml.pre": "viking"},
    "no tokenizer": {"tokenizer.ggml.model": None},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_that_cannot_be_kept_is_an_error_of_ours(tmp_path: Path, claim: str) -> None:
    changes = {key: value for key, value in CLAIMS[claim].items() if value is not None}
    absent = tuple(key for key, value in CLAIMS[claim].items() if value is None)
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], changes=changes, leave=absent, **SMALL)
    with pytest.raises(D3EngineError):
        Engine(file, device="cpu")


def test_a_chat_template_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "x" * (CONFIG_BYTES + 1)}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], changes=template, **SMALL)
    with engine_of(file) as engine, pytest.raises(ModelFormatError, match=r"chat_template\.jinja would have more than"):
        engine.chat(CONVERSATION)


def test_a_cut_file_ends_in_an_error_of_ours(small: Path) -> None:
    whole = small.read_bytes()
    cut = small.parent / "cut.gguf"
    for length in [0, 3, 24, *random.Random(0).sample(range(25, len(whole) - 64), 12)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            engine_of(cut)


def test_changed_bytes_end_in_errors_of_ours_or_in_a_model(small: Path) -> None:
    whole, rng, refused = small.read_bytes(), random.Random(1), 0
    for _ in range(40):
        raw = bytearray(whole)
        raw[rng.randrange(24, 12_000)] ^= 1 << rng.randrange(8)
        small.write_bytes(raw)
        try:
            engine_of(small).close()
        except D3EngineError:
            refused += 1
    assert 0 < refused < 40


def test_values_that_are_not_finite_are_refused_by_their_tensor(small: Path) -> None:
    raw, place = bytearray(small.read_bytes()), open_gguf(small).tensors["blk.0.attn_q.weight"].offset
    raw[place : place + 2] = struct.pack("<e", float("nan"))  # the scale of its first block
    small.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=r"small\.gguf: tensor '.*q_proj.weight' holds NaN or infinity"):
        engine_of(small)


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = GGUFFile.read

    def replaced(file: GGUFFile, name: str) -> Any:
        copy = small.with_name("copy")
        copy.write_bytes(small.read_bytes())
        copy.replace(small)
        return read(file, name)

    monkeypatch.setattr(GGUFFile, "read", replaced)
    with pytest.raises(ModelFormatError, match=r"small\.gguf has changed since its header was read"):
        engine_of(small)


@pytest.mark.parametrize(("kind", "pooling"), [(0, None), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_of_a_file_is_read_and_converted(tmp_path: Path, kind: int, pooling: str | None) -> None:
    changes = {"llama.pooling_type": kind}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], changes=changes, **SMALL)
    convert_gguf(file, tmp_path / "model")
    for model in (file, tmp_path / "model"):
        with engine_of(model) as engine:
            assert engine.own_pooling == pooling
            found = engine.embed(PROMPTS, use_tqdm=False)
            assert (found == engine.embed(PROMPTS, pooling=pooling or "mean", use_tqdm=False)).all()


def test_a_file_that_ranks_is_refused(tmp_path: Path) -> None:
    changes = {"llama.pooling_type": 4}
    file = write_gguf(tmp_path / "model.gguf", tokenizer=TOKENIZERS["gpt2"], changes=changes, **SMALL)
    with pytest.raises(ModelFormatError, match=r"llama\.pooling_type must be absent or 0 or 1 or 2 or 3"):
        engine_of(file)


def test_a_qwen3_reranker_is_read_as_the_model_that_answers(tmp_path: Path) -> None:
    """llama.cpp repeats the rows of its head for yes and no; they are not enough where the head is another matrix."""
    keys = dict(TOKENIZERS["gpt2"])
    words = len(keys["tokenizer.ggml.tokens"])
    for name, more in (("tokens", ["yes", "no"]), ("token_type", [4, 4])):
        keys[f"tokenizer.ggml.{name}"] = keys[f"tokenizer.ggml.{name}"] + more
    options = SMALL | {"architecture": "qwen3", "tokenizer": keys, "vocab_size": words + 2, "tied": True}
    plain = write_gguf(tmp_path / "plain.gguf", **options)
    rows = open_gguf(plain).read_rows("token_embd.weight", words, 2)
    changes = {"llama.pooling_type": 4, "llama.classifier.output_labels": ["yes", "no"]}
    files = [
        write_gguf(tmp_path / f"{nth}.gguf", changes=changes, extra={"cls.output.weight": head}, **options)
        for nth, head in enumerate((rows, rows[::-1].copy()))
    ]
    assert answers(files[0]) == answers(plain)
    with pytest.raises(ModelFormatError, match=r"'cls\.output\.weight' alone is there: take a file with 'output\.weig"):
        engine_of(files[1])


def test_model_name_brings_sampling_and_both_ends_of_text() -> None:
    """The name brings the authors' sampling and both ends of text."""
    file = fetched_model("qwen2.5-coder-0.5b")
    if not file.exists():
        pytest.skip("the model is not there: d3engine weights fetch qwen2.5-coder-0.5b")
    params = default_sampling_params(file)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.7, 0.8, 20, 1.1)
    assert sorted(ModelConfig.from_directory(file).eos_token_ids) == [151643, 151645]


def test_infill_example_of_the_docs_has_the_answer_they_give() -> None:
    """The page's request is answered by what the page says, under the model's own sampling defaults."""
    if not fetched_model("qwen2.5-coder-0.5b").exists():
        pytest.skip("the model is not there: d3engine weights fetch qwen2.5-coder-0.5b")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "from-ollama.md").read_text()
    ((given, answer),) = re.findall(r'^`({"prompt".*})` is answered by `(.+?)`', page, re.M)
    asked = json.loads(given)
    with Engine("qwen2.5-coder-0.5b", device="cpu", max_model_len=256, kv_cache_memory_bytes=2**24) as engine:
        form = infill_format(engine.get_tokenizer())
        assert form is not None
        prompt = form.prompt(engine.get_tokenizer(), asked["prompt"], asked["suffix"])
        more = {"temperature": asked["temperature"], "max_tokens": 16, "stop_token_ids": form.ends}
        params = replace(engine.default_sampling_params, **more)
        (output,) = engine.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].text.rstrip() == answer
