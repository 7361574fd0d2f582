"""The bundled model's text files: every tokenizer gives the ids that the model was trained with."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from transformers import AutoTokenizer

from d3engine.depth.policy import calibrated_for
from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.source import files_of
from d3engine.research.evaluation.procedural import all_problems
from d3engine.text.chat_template import load_chat_template
from d3engine.text.prompts import load_question_template
from d3engine.text.tokenizer import FastTokenizer, SentencePieceTokenizer, load_tokenizer
from d3engine.text.tokenizer_files import read_tokenizer_config
from d3engine.weights_tools.demo_text import text_files

DEMO = model_directory("demo")
TRAPS = [
    "",
    " ",
    "   three  spaces   ",
    "5",
    " 5",
    "05 5 100 1000",
    "5\u2581 5\u25815",
    "<0x41> 5<0x41> 6",
    "5<unk>",
    "a</s> 5<s> b",
    "é日🙂\u200d\ufeff\x00",
    "\n\n\tx\r\n",
    "Question: Tom has 5 pens.\nAnswer:",
    " Adding 3 makes 5 + 3 = 8.\n#### 8",
]


@pytest.fixture(scope="module")
def trained() -> SentencePieceTokenizer:
    """What the model was trained with."""
    files = files_of(DEMO)
    return SentencePieceTokenizer(files, files.read_bytes("tokenizer.model"), read_tokenizer_config(files))


def texts() -> Iterator[str]:
    """Texts that the model knows, traps, and heaps of pieces of both."""
    yield from TRAPS
    known = [problem.solved for problem in islice(all_problems("word-problems", "test", 5), 200)]
    yield from known
    random_ = random.Random(3)
    parts = [*TRAPS, *(word for text in known for word in text.split()), *"abes #=+\u2581"]
    for _ in range(2000):
        yield random_.choice(("", " ")).join(random_.choices(parts, k=random_.randrange(12)))


def test_demo_tokenizer_json_equals_its_tokenizer_model(trained: SentencePieceTokenizer) -> None:
    """tokenizer.json gives the ids of tokenizer.model, and decodes any ids as it does."""
    ours = load_tokenizer(DEMO)
    assert isinstance(ours, FastTokenizer), "tokenizer.json comes first, as everywhere"
    assert ours.vocab_size == trained.vocab_size
    assert ours.special_ids == trained.special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (trained.bos_token_id, trained.eos_token_id)
    for text in texts():
        for add_special_tokens in (True, False):
            assert ours.encode(text, add_special_tokens) == trained.encode(text, add_special_tokens), text
    random_ = random.Random(4)
    for _ in range(300):
        ids = random_.choices(range(ours.vocab_size), k=random_.randrange(12))
        for skip in (True, False):
            assert ours.decode(ids, skip) == trained.decode(ids, skip), ids


def test_transformers_gives_the_same_ids_and_texts() -> None:
    ours, theirs = load_tokenizer(DEMO), AutoTokenizer.from_pretrained(DEMO)
    for text in islice(texts(), 400):
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False), text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
    messages = [{"role": "user", "content": "Tom has 5 pens."}]
    template = load_chat_template(DEMO)
    assert template is not None
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == template.render(messages)


def test_demo_files_are_the_trainers_and_calibration_fits_them() -> None:
    """The files are those that the trainer writes, and the calibration is of these weights."""
    for name, content in text_files((DEMO / "tokenizer.model").read_bytes(), 1024).items():
        if name != "tokenizer.json":  # another version of `tokenizers` may write the same otherwise
            assert (DEMO / name).read_text(encoding="utf-8") == content, name
    assert calibrated_for(DEMO) == fingerprint(DEMO)


def prompt_of(*turns: tuple[str, str], **arguments: Any) -> str:
    template = load_chat_template(DEMO)
    assert template is not None
    return template.render([{"role": role, "content": content} for role, content in turns], **arguments)


def test_demo_chat_question_has_the_form_of_training() -> None:
    """A question of a chat is asked in the form that the model was trained in."""
    question, tokenizer, form = (
        "Tom has 5 pens. Tom finds 3. How many?",
        load_tokenizer(DEMO),
        load_question_template(DEMO),
    )
    assert form is not None
    ids = tokenizer.encode(prompt_of(("user", question)), add_special_tokens=False)
    assert ids == tokenizer.encode(form.complete(question))


def test_of_a_conversation_the_last_question_stands_alone() -> None:
    alone = prompt_of(("user", "What is left?"))
    assert prompt_of(("system", "Be brief."), ("user", "Hi"), ("assistant", "8"), ("user", "What is left?")) == alone
    begun = prompt_of(
        ("user", "Hi"), ("assistant", "Adding 3"), add_generation_prompt=False, continue_final_message=True
    )
    assert begun == "<s>Question: Hi\nAnswer: Adding 3"
    assert prompt_of(("user", "Hi"), add_generation_prompt=False) == "<s>Question: Hi"


@pytest.mark.parametrize(
    ("turns", "arguments", "said"),
    [
        ((("system", "Be brief."),), {}, "needs a message of the user"),
        ((("tool", "8"),), {}, "roles system, user and assistant alone"),
        ((("user", "Hi"),), {"tools": [{"type": "function"}]}, "knows nothing of tools"),
    ],
)
def test_what_the_model_was_never_shown_is_refused(turns: Any, arguments: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        prompt_of(*turns, **arguments)
