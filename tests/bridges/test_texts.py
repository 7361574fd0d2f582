"""What bridges are fitted on is read from files: only what was picked is turned into tokens."""

import json
from pathlib import Path

import pytest

from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError
from d3engine.research.bridges.texts import TextReader, shuffled
from d3engine.text.tokenizer import load_tokenizer

LINES = [
    {"question": "Tom has 2 pens and finds 3. How many?", "answer": "5"},
    {"text": "Ann buys 3 cups. Ann sells 1."},
    {"messages": [{"role": "user", "content": "Tom has 2 pens."}]},
]


@pytest.fixture
def reader() -> TextReader:
    return TextReader(model_directory("demo"), load_tokenizer(model_directory("demo")), max_tokens=12)


def written(tmp_path: Path, *lines: object) -> Path:
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "texts.jsonl"


def test_only_the_texts_that_were_picked_are_encoded(reader: TextReader, tmp_path: Path) -> None:
    path = written(tmp_path, *(LINES[nth % 2] | {"nth": nth} for nth in range(50)))
    encoded: list[str] = []
    encode = reader.tokenizer.encode
    reader.tokenizer.encode = lambda text, **options: (encoded.append(text), encode(text, **options))[1]  # type: ignore[method-assign]
    picked = shuffled(reader.lines(path, "--text"), 3, seed=1)
    assert encoded == []
    texts = [reader.encode(line) for line in picked]
    assert len(encoded) == len(texts) == 3
    assert all(0 < len(text) <= 12 for text in texts)
    assert reader.tokenizer.decode(texts[0]) in encoded[0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["no object"], "a line is no JSON object"),
        ({"question": "without an answer"}, "a line has question"),
        ({}, "a line has nothing"),
    ],
    ids=str,
)
def test_line_without_text_is_refused_anyway(reader: TextReader, tmp_path: Path, line: object, complaint: str) -> None:
    """A line that holds no text is refused, whether it is picked or not."""
    with pytest.raises(InvalidValueError, match=f"--text must be a file of text.*{complaint}"):
        reader.lines(written(tmp_path, *LINES, line), "--text")


def test_messages_unfit_for_the_template_are_refused_with_file(reader: TextReader, tmp_path: Path) -> None:
    """Messages that the chat template cannot read are refused with their file."""
    (line,) = reader.lines(written(tmp_path, {"messages": 3}), "--held-out")
    with pytest.raises(InvalidValueError, match=r"--held-out must be a file of text.*texts\.jsonl"):
        reader.encode(line)
