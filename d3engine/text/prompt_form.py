import sys

from d3engine.text import prompts as _new

setattr(_new, "PromptForm", _new.QuestionTemplate)  # noqa: B010
setattr(_new, "load_prompt_form", _new.load_question_template)  # noqa: B010
setattr(_new, "PROMPT_FORM_FILE", _new.QUESTION_TEMPLATE_FILE)  # noqa: B010
sys.modules[__name__] = _new
