"""The demo model's text files: its tokenizer.json, chat template and question template.

`python -m d3engine.weights_tools.demo_text DIRECTORY` writes them anew next to a tokenizer.model.
"""

import argparse
import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from d3engine.research.evaluation.word_problems import MAX_NUMBER, PROMPT_PREFIX, PROMPT_SUFFIX
from d3engine.text.tokenizer import SPACE_MARK

NUMBERS = [f"{SPACE_MARK}{number}" for number in range(MAX_NUMBER + 1)]
"""Tokens that are never split or merged, with the space before them."""

CHAT_TEMPLATE = f"""\
{{#- The model was trained on one question at a time: of a conversation the last question stands alone. -#}}
{{%- set last = namespace(question=none, answer=none) -%}}
{{%- for message in messages -%}}
    {{%- if message.role == "user" -%}}
        {{%- set last.question = message.content -%}}
        {{%- set last.answer = none -%}}
    {{%- elif message.role == "assistant" -%}}
        {{%- set last.answer = message.content -%}}
    {{%- elif message.role != "system" -%}}
        {{{{- raise_exception("knows the roles system, user and assistant alone") -}}}}
    {{%- endif -%}}
{{%- endfor -%}}
{{%- if tools -%}}
    {{{{- raise_exception("knows nothing of tools") -}}}}
{{%- elif last.question is none -%}}
    {{{{- raise_exception("needs a message of the user") -}}}}
{{%- endif -%}}
{{{{- bos_token ~ {json.dumps(PROMPT_PREFIX)} ~ last.question -}}}}
{{%- if last.answer is not none -%}}
    {{{{- {json.dumps(PROMPT_SUFFIX + " ")} ~ last.answer -}}}}
{{%- elif add_generation_prompt -%}}
    {{{{- {json.dumps(PROMPT_SUFFIX)} -}}}}
{{%- endif -%}}
"""


def text_files(tokenizer_model: bytes, max_positions: int) -> dict[str, str]:
    """The content of each text file, by name."""
    config = {
        # Not LlamaTokenizer, for which transformers would take only tokenizer.json's vocabulary and rebuild the rest.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,
        "model_max_length": max_positions,
        **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    }
    return {
        "tokenizer.json": tokenizer_json(tokenizer_model),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "prompt_form.json": json.dumps({"before": PROMPT_PREFIX, "after": PROMPT_SUFFIX}, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def tokenizer_json(tokenizer_model: bytes) -> str:
    """A tokenizer.json with the same ids as a sentencepiece BPE model whose user-defined tokens are `NUMBERS`.

    For stacks that read only this file, such as transformers.
    """
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model)
    vocabulary = {model.id_to_piece(i): i for i in range(model.piece_size())}
    special = [token for token, i in vocabulary.items() if model.is_control(i) or model.is_unknown(i)]
    bytes_ = {token for token, i in vocabulary.items() if model.is_byte(i)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(model, vocabulary.keys() - bytes_ - {*special, *NUMBERS}),
            byte_fallback=True,
            unk_token="<unk>",
            ignore_merges=True,  # numbers are in the vocabulary and are no merge of other tokens
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    numbers = "|".join(sorted((token for token in NUMBERS if token in vocabulary), key=len, reverse=True))
    # The second splits a text that spells a byte token ("<0x41>"), which would otherwise become that token.
    splits = [Regex(numbers), Regex("<(?=0x[0-9A-F]{2}>)")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated") for split in splits])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return str(tokenizer.to_str(pretty=True)) + "\n"


def _merges(model: sentencepiece.SentencePieceProcessor, tokens: set[str]) -> list[tuple[str, str]]:
    """Every pair of tokens whose union is a token, in sentencepiece's order of merges."""
    pairs = [
        (token[:cut], token[cut:])
        for token in sorted(tokens, key=lambda token: -model.get_score(model.piece_to_id(token)))
        for cut in range(1, len(token))
    ]
    return [(left, right) for left, right in pairs if left in tokens and right in tokens]


def main() -> None:
    """Write the text files of a model that `train_demo` has made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a model directory with tokenizer.model and config.json")
    directory = parser.parse_args().directory
    max_positions = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    for name, content in text_files((directory / "tokenizer.model").read_bytes(), max_positions).items():
        (directory / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
