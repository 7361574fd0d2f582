"""What every stack must answer; the harness offline, and one tiny model behind our adapter and behind its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:  # what may be missing: the test files skip without it; and transformers, which imports Triton
    from lm_eval.models.huggingface import HFLM
    from tiny_models import TinyLlama

    from d3engine import RequestOutput
    from d3engine.integrations.lm_eval import D3EngineLM

MAX_LENGTH = 191
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and caches of `datasets` that vanish."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True, raising=False)
    datasets.disable_progress_bars()
    yield
    patch.undo()
    assert before == datasets.config.HF_DATASETS_CACHE


@pytest.fixture(scope="module")
def tiny(tiny_llama: Callable[..., TinyLlama]) -> TinyLlama:
    """A random model over bytes, whose beginning and end tokens are <s> and </s>, with room for 192 tokens."""
    from transformers import PreTrainedTokenizerFast

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
def address() -> Iterator[str]:
    """Where a server of the bundled model answers, whose template knows of tools."""
    from demo_server import demo_server

    with demo_server(with_tools=True) as address:
        yield address


@pytest.fixture(scope="module")
def url(address: str) -> str:
    """The base of OpenAI's routes there."""
    return f"{address}/v1"


@pytest.fixture(scope="session")
def wanted() -> list[RequestOutput]:
    """What the bundled model answers to the questions of the contract, in an engine of the test's own."""
    from contract import answers_wanted

    from d3engine import Engine

    with Engine("demo", device="cpu", num_threads=1, kv_cache_memory_bytes=2**25) as engine:
        return answers_wanted(engine)


@pytest.fixture(scope="module")
def ours(tiny: TinyLlama) -> D3EngineLM:
    from d3engine.integrations.lm_eval import D3EngineLM

    return D3EngineLM(str(tiny.directory), depth="full", kv_cache_memory_bytes=2**24)


@pytest.fixture(scope="module")
def theirs(tiny: TinyLlama) -> HFLM:
    """The harness's own backend, in float32, one request at a time so that padding plays no part."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.directory)
    options = {"device": "cpu", "dtype": torch.float32, "batch_size": 1, "max_length": MAX_LENGTH}
    return HFLM(pretrained=tiny.model, tokenizer=tokenizer, **options)
