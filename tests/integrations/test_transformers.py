"""An engine in the place of a model of transformers: the same tokens as the model itself, or a refusal by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from bad_values import assert_refused, bad_values
from tiny_models import TinyLlama

if TYPE_CHECKING:
    from d3engine.integrations.transformers import D3ForCausalLM

PROMPTS = torch.tensor([[256, 72, 101, 108, 108, 111], [257, 257, 256, 72, 105, 33], [257, 256, 97, 98, 99, 100]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def ours(tiny: TinyLlama) -> Iterator[D3ForCausalLM]:
    from d3engine import FullDepth
    from d3engine.integrations.transformers import D3ForCausalLM

    model = D3ForCausalLM.from_pretrained(tiny.directory, depth=FullDepth(), kv_cache_memory_bytes=2**24)
    yield model
    model.close()


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyLlama) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.directory)


@pytest.fixture(scope="module")
def ends(tiny: TinyLlama) -> list[int]:
    """Tokens that the model itself writes sooner in one answer than in another."""
    answers = tiny.model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=12, pad_token_id=257)[:, 6:].tolist()
    return [answers[1][3], answers[2][6]]


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 12},
        {"max_length": 15},
        {},
        {"max_new_tokens": 12, "repetition_penalty": 1.4, "do_sample": False},
        {"max_new_tokens": 16, "ends": True},
        {"max_new_tokens": 16, "ends": True, "min_new_tokens": 9},
        {"max_length": 20, "ends": True, "min_length": 17, "use_cache": True, "num_beams": 1, "logits_processor": []},
    ],
)
def test_greedy_tokens_are_those_of_the_model_itself_row_by_row(
    tiny: TinyLlama, ours: D3ForCausalLM, ends: list[int], asked: dict[str, Any]
) -> None:
    asked = dict(asked)
    if asked.pop("ends", False):
        asked |= {"eos_token_id": ends, "pad_token_id": 0}
    else:
        asked |= {"pad_token_id": 257}
    if "repetition_penalty" in asked:  # of which transformers makes padding a part
        ids, mask = PROMPTS[:1], MASK[:1]
    else:
        ids, mask = PROMPTS, MASK
    want = tiny.model.generate(ids, attention_mask=mask, **asked)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **asked), want)
    assert torch.equal(ours.generate(input_ids=ids, attention_mask=mask, **asked), want)


def test_a_config_says_the_same_and_arguments_go_before_it(tiny: TinyLlama, ours: D3ForCausalLM) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=5, pad_token_id=257, return_dict_in_generate=True)
    want = tiny.model.generate(PROMPTS, attention_mask=MASK, generation_config=config)
    got = ours.generate(PROMPTS, config, attention_mask=MASK)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    assert ours.generate(PROMPTS, config, attention_mask=MASK, max_new_tokens=2).sequences.shape == (3, 8)


def test_padding_is_told_by_its_id_where_there_is_no_mask(tiny: TinyLlama, ours: D3ForCausalLM) -> None:
    padded = torch.where(MASK.bool(), PROMPTS, 0)
    want = tiny.model.generate(padded, max_new_tokens=6, pad_token_id=0)
    assert torch.equal(ours.generate(padded, max_new_tokens=6, pad_token_id=0), want)


def test_stop_strings_end_where_transformers_ends(tiny: TinyLlama, ours: D3ForCausalLM, tokenizer: Any) -> None:
    ids = PROMPTS[:1]
    plain = tokenizer.decode(ours.generate(ids, max_new_tokens=20)[0, 6:])
    stop = [plain[len(plain) // 2 :][:2], "never written"]
    asked: dict[str, Any] = {"max_new_tokens": 20, "stop_strings": stop, "tokenizer": tokenizer, "pad_token_id": 257}
    want = tiny.model.generate(ids, **asked)
    assert want.shape[1] < 26
    assert torch.equal(ours.generate(ids, **asked), want)


def test_answers_to_each_row_are_drawn_apart_by_torchs_seed(ours: D3ForCausalLM) -> None:
    """Several answers to each row are drawn apart, and again by torch's seed."""

    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        asked: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 3}
        return ours.generate(PROMPTS, attention_mask=MASK, max_new_tokens=8, **asked)

    found = draw()
    assert found.shape == (9, 14)
    assert torch.equal(found[:, :6], PROMPTS.repeat_interleave(3, dim=0))
    assert len(torch.unique(found[:3], dim=0)) == 3
    assert torch.equal(draw(), found)


class Streamed:
    """What a streamer was given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_what_transformers_gives_it(tiny: TinyLlama, ours: D3ForCausalLM, ends: list[int]) -> None:
    from d3engine import InvalidValueError

    asked: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": ends, "pad_token_id": 0}
    theirs, own = Streamed(), Streamed()
    want = tiny.model.generate(PROMPTS[2:], attention_mask=MASK[2:], streamer=theirs, **asked)
    assert torch.equal(ours.generate(PROMPTS[2:], attention_mask=MASK[2:], streamer=own, **asked), want)
    assert (own.puts, own.ended) == (theirs.puts, theirs.ended)
    with pytest.raises(InvalidValueError, match="streamer must be for one row"):
        ours.generate(PROMPTS, streamer=Streamed())


def test_transformers_own_pipeline_runs_on_it(
    tiny: TinyLlama, ours: D3ForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import pipeline
    from transformers.pipelines import base

    complaints: list[str] = []
    monkeypatch.setattr(base.logger, "error", complaints.append)

    asked: list[tuple[Any, dict[str, Any]]] = [
        ("Hello", {}),
        (["Hello", "a longer one", "x"], {"batch_size": 3}),
        ("Hello", {"return_full_text": False, "stop_sequence": "e"}),
        ([{"role": "user", "content": "Hello"}], {}),
    ]
    pipes = [pipeline("text-generation", model=model, tokenizer=tokenizer) for model in (tiny.model, ours)]
    assert not complaints
    for texts, options in asked:
        theirs, own = (pipe(texts, max_new_tokens=10, do_sample=False, **options) for pipe in pipes)
        assert own == theirs
    assert "LlamaForCausalLM" in repr(pipes[1])


def test_a_call_may_bring_its_own_depth(ours: D3ForCausalLM) -> None:
    from d3engine import D3, SamplingParams

    policy = D3(0.5, 0.4)
    params = SamplingParams(temperature=0, max_tokens=10, depth=policy)
    want = ours.engine.generate(PROMPTS[0].tolist(), params, use_tqdm=False)[0].outputs[0].token_ids
    full = ours.generate(PROMPTS[:1], max_new_tokens=10)[0, 6:].tolist()
    assert ours.generate(PROMPTS[:1], max_new_tokens=10, depth=policy)[0, 6:].tolist() == want != full


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"num_return_sequences": 2}, "n"),
        ({"attention_mask": torch.tensor([[0] * 6, [1] * 6, [1] * 6])}, "prompt"),
        *bad_values(num_beams=[4], no_repeat_ngram_size=[2], bad_words_ids=[[[1]]], output_scores=[True]),
        *bad_values(prompt_lookup_num_tokens=[3], logits_processor=[[print]], stopping_criteria=[[print]]),
        *bad_values(assistant_model=[object()], past_key_values=[object()], cache=[object()]),
        *bad_values(max_new_tokens=[500], max_length=[500, 6], temprature=[1.0], synced_gpus=[True]),
        *bad_values(generation_config=[{"max_new_tokens": 3}], token_type_ids=[torch.ones(3, 6)], input_ids=[PROMPTS]),
        *bad_values(attention_mask=[torch.tensor([row] * 3) for row in ([1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1])]),
    ],
)
def test_what_it_cannot_honour_is_refused_by_name(ours: D3ForCausalLM, asked: dict[str, Any], named: str) -> None:
    with assert_refused(named):
        ours.generate(PROMPTS, **asked)


def test_each_generation_config_field_is_read_refused_or_moot() -> None:
    """Every field of a generation config is read, or refused, or asks for nothing."""
    from transformers import GenerationConfig

    from d3engine.integrations.transformers import IGNORED, READ_FIELDS, UNSUPPORTED

    fields = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert fields - READ_FIELDS - set(UNSUPPORTED) - IGNORED == set()
    assert READ_FIELDS | IGNORED | set(UNSUPPORTED) <= fields | {"early_stopping", "low_memory"}
    assert len(READ_FIELDS) + len(IGNORED) + len(UNSUPPORTED) == len(READ_FIELDS | IGNORED | set(UNSUPPORTED))


def test_gguf_file_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """A GGUF file, whose config transformers cannot read, is refused before an engine opens it."""
    from d3engine.integrations.transformers import D3ForCausalLM

    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with assert_refused("model", "since transformers reads its config.json"):
        D3ForCausalLM(tmp_path / "model.gguf")


def test_it_is_asked_as_a_model_is(tiny: TinyLlama, ours: D3ForCausalLM) -> None:
    from d3engine import InvalidValueError

    assert ours.config.to_dict() == tiny.model.config.to_dict() | {"_name_or_path": str(tiny.directory)}
    assert (ours.device, ours.dtype, ours.training) == (torch.device("cpu"), torch.float32, False)
    assert ours.eval().to("cpu").to(device="cpu", dtype=torch.float32).train(False).requires_grad_(False) is ours
    for ask in (lambda: ours.to("cuda"), lambda: ours.to(torch.bfloat16), lambda: ours.train(), lambda: ours(PROMPTS)):
        with pytest.raises(InvalidValueError):
            ask()
