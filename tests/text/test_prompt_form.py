"""A bare question is asked in the form that a model's directory names; every other prompt is left as it is."""

import json
from pathlib import Path

import pytest

from d3engine.engine.model_directory import model_directory
from d3engine.errors import ModelFormatError
from d3engine.research.evaluation.word_problems import format_prompt
from d3engine.text.prompts import QUESTION_TEMPLATE_FILE, QuestionTemplate, load_question_template
from d3engine.weights_tools.demo_trainer import DemoConfig, DemoModel, export

QUESTION = "Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?"
WHOLE = f"Question: {QUESTION}\nAnswer:"
FORM = QuestionTemplate("Question: ", "\nAnswer:")


@pytest.mark.parametrize(
    "text", [QUESTION, f"  {QUESTION}\n", f"Question: {QUESTION}", f"Question:{QUESTION}", f"{QUESTION} Answer:", WHOLE]
)
def test_question_comes_into_the_form_from_either_half_of_it(text: str) -> None:
    """A question comes into the prompt's form, whichever half of it is there."""
    assert FORM.complete(text) == WHOLE


@pytest.mark.parametrize("text", ["Question:", " Question: ", "", f"{WHOLE} Adding 3", f"{WHOLE} 8\n\n{WHOLE}"])
def test_text_without_question_or_with_answer_begun_is_kept(text: str) -> None:
    """A text without a question, or with the beginning of an answer, is left alone."""
    assert FORM.complete(text) == text


def test_the_bundled_model_names_the_form_that_it_was_trained_in(tmp_path: Path) -> None:
    form = load_question_template(model_directory("demo"))
    assert form is not None
    assert form.complete(QUESTION) == format_prompt(QUESTION) == WHOLE
    tokenizer = (model_directory("demo") / "tokenizer.model").read_bytes()
    export(DemoModel(DemoConfig(layers=1)), tokenizer, {}, tmp_path)
    assert load_question_template(tmp_path) == form


def test_a_model_without_the_file_has_no_form(tmp_path: Path) -> None:
    assert load_question_template(tmp_path) is None


@pytest.mark.parametrize(
    "contents",
    [
        {"before": "Question: "},
        {"before": "Question: ", "after": " "},
        {"before": 1, "after": "\nAnswer:"},
        {"before": "x" * 1001, "after": "\nAnswer:"},
        {"before": "", "after": "A:", "also": ""},
    ],
)
def test_a_file_that_holds_no_form_is_refused(tmp_path: Path, contents: object) -> None:
    (tmp_path / QUESTION_TEMPLATE_FILE).write_text(json.dumps(contents))
    with pytest.raises(ModelFormatError, match=r'prompt_form.json must hold "before" and "after"'):
        load_question_template(tmp_path)
