"""A real model's GGUF file: SmolLM2-135M-Instruct holds, reads and says what transformers' own loader makes of it.
`d3engine weights fetch smollm2` gets it; without it these tests are skipped."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf_files import many_texts
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_oracle import assert_same_tokens, greedy_after

from d3engine import Engine, SamplingParams
from d3engine.engine.model_directory import fetched_directory
from d3engine.model.gguf_file import open_gguf
from d3engine.model.source import open_checkpoint
from d3engine.text.tokenizer import load_tokenizer

QUESTIONS = [
    "What is the capital of France?",
    "How much is 101 plus 707?",
    "Name three colours.",
    "Write a sentence about the moon.",
    "What does the word 'quiet' mean?",
    "def add(a, b):",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in a folder of its own: transformers would take tokenizer.json from beside it."""
    found = sorted(fetched_directory("smollm2").glob("*.gguf"))
    if not found:
        pytest.skip("SmolLM2's GGUF file is not there: d3engine weights fetch smollm2 --overwrite")
    link = tmp_path_factory.mktemp("smollm2") / "model.gguf"
    link.symlink_to(found[0])
    return link


@pytest.fixture(scope="module", autouse=True)
def header_read_once() -> Iterator[None]:
    """transformers reads the 100 thousand texts of a header, which takes seconds, for each thing that it loads."""
    # The names of all tensors it lists anew for each module of a model.
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@pytest.fixture(scope="module")
def oracle(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()


def test_weights_are_transformers_to_the_bit(source: Path, oracle: Any) -> None:
    """Of every fifth layer, and of what is in none; the answers below come from all."""
    expected = {name: tensor for name, tensor in oracle.state_dict().items() if name != "lm_head.weight"}  # tied
    with open_checkpoint(source) as checkpoint:
        assert checkpoint.entries.keys() == expected.keys()
        for name, tensor in expected.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) % 5 == 0:
                assert torch.equal(checkpoint.read(name), tensor), name


def test_greedy_answers_of_six_chats_are_transformers(source: Path, oracle: Any) -> None:
    with Engine(source, device="cpu", dtype="float32", max_model_len=256) as engine:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = engine.chat(chats, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert len(outputs) == len(QUESTIONS)
    assert outputs[0].outputs[0].text == "The capital of France is Paris."
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert_same_tokens(ids, greedy_after(oracle, output.prompt_token_ids, ids))
        assert len(ids) == 8 or ids[-1] in (0, 2), output.prompt


def test_smollm2_token_ids_are_the_published_tokenizers(source: Path) -> None:
    """Token ids are the published tokenizer's; transformers differ only before numbers."""
    metadata = open_gguf(source).metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    published = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    published.pre_tokenizer = pre_tokenizers.Sequence(steps)
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    published.add_special_tokens([AddedToken(token, normalized=False) for token in controls])
    ours, theirs = load_tokenizer(source), AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    differing = []
    for text in many_texts():
        ids = ours.encode(text)
        assert ids == published.encode(text).ids, text
        if ids != theirs.encode(text):
            differing.append(text)
    assert differing
    for text in map(without_space_before_numbers, differing):
        assert ours.encode(text) == theirs.encode(text), text


def without_space_before_numbers(text: str) -> str:
    """What SmolLM2's vocabulary lets the two differ on: no token of it has two digits."""
    kept: list[str] = []
    for character in text:
        while kept and kept[-1].isspace() and unicodedata.category(character)[0] == "N":
            kept.pop()
        kept.append(character)
    return "".join(kept)
