"""The form that a model without a chat template was trained to answer in, for whoever types a bare question.

The one idea: the form is data of the model, `prompt_form.json` beside its weights, and never a rule of the engine's:
`Engine` takes every prompt as it is, and a face for people may ask for the form.
"""

from __future__ import annotations

from dataclasses import dataclass

from d3engine.errors import ModelFormatError
from d3engine.model.source import ModelSource, files_of

PROMPT_FORM_FILE = "prompt_form.json"
_MAX_CHARACTERS = 1000


@dataclass(frozen=True)
class PromptForm:
    """What stands before a question and after it, such as "Question: " and "\\nAnswer:"."""

    before: str
    after: str

    def complete(self, text: str) -> str:
        """The question in `text` in the model's form, whether or not one half of the form is there already.

        A text that holds both a question and the beginning of its answer is left as it is, and so is one without a
        question: whoever writes these continues a text of his own.
        """
        if self.after in text:
            return text
        question = text.strip().removeprefix(self.before.strip()).removesuffix(self.after.strip()).strip()
        return f"{self.before}{question}{self.after}" if question else text

    def __str__(self) -> str:
        return f"{self.before}...{self.after}"


def load_prompt_form(model: ModelSource) -> PromptForm | None:
    """The form that a model directory names; None for one that names none.

    Raises `ModelFormatError` for a file that is no such form.
    """
    files = files_of(model)
    if not files.has(PROMPT_FORM_FILE):
        return None
    found = files.read_json_object(PROMPT_FORM_FILE)
    is_form = set(found) == {"before", "after"} and all(_is_short_text(value) for value in found.values())
    if not is_form or not found["after"].strip():
        allowed = f'"before" and "after", texts of at most {_MAX_CHARACTERS} characters, and "after" not empty'
        raise ModelFormatError(f"{files.place(PROMPT_FORM_FILE)} must hold {allowed}")
    return PromptForm(**found)


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS
