"""Encoding equals the tokenizer's own reference, decoding survives any id, and BOS comes exactly once."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from small_tokenizers import LLAMA2, byte_fallback, save_sentencepiece, train_byte_level
from tokenizers import processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.text.chat_template import ChatPrompts
from d3engine.text.tokenizer import DecoderKind, Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
    "def main(argument):\n    return argument + 1\n",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "Größe, naïve café, 東京 日本語",
] * 4
# No runs of spaces: transformers 5 turns tokenizer.model into merges that split those otherwise.
TEXTS = ["Hello world", "café naïve", "日本語 🙂 text", "a\nb\tc", "x", "", "\n", "12+89", "e\u0301 ﬁ"]


def write_config(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture(scope="module")
def byte_level_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json built like Llama 3's: byte-level BPE, special tokens behind the vocabulary."""
    tokenizer = train_byte_level(CORPUS, 400)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def byte_level(byte_level_file: Path, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_file.read_bytes())
    write_config(tmp_path, bos_token="<|begin_of_text|>", eos_token={"__type": "AddedToken", "content": "<|eot_id|>"})
    return tmp_path


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece(directory, CORPUS, 360)
    return directory / "tokenizer.model"


@pytest.fixture
def small_model(sentencepiece_file: Path, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file.read_bytes())
    return tmp_path


@pytest.fixture
def llama2(tmp_path: Path) -> Path:
    if not (LLAMA2 / "tokenizer.model").is_file():
        pytest.skip("shared/data/llama2/tokenizer.model is not here")
    (tmp_path / "tokenizer.model").write_bytes((LLAMA2 / "tokenizer.model").read_bytes())
    write_config(
        tmp_path,
        add_bos_token=True,
        add_eos_token=False,
        bos_token={"__type": "AddedToken", "content": "<s>"},
        eos_token="</s>",
        unk_token="<unk>",
        legacy=False,
        tokenizer_class="LlamaTokenizer",
    )
    return tmp_path


def set_field(directory: Path, **fields: Any) -> None:
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_config(directory, **{**config, **fields})


class TestTokenizerJson:
    def test_encoding_equals_transformers(self, byte_level: Path) -> None:
        ours, theirs = load_tokenizer(byte_level), PreTrainedTokenizerFast.from_pretrained(byte_level)
        for text in [*TEXTS, "  two  spaces ", "<|begin_of_text|>Hi<|eot_id|>there"]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)

    def test_bos_comes_from_the_post_processor_exactly_once(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert tokenizer.encode("Hi").count(tokenizer.bos_token_id) == 1
        templated = tokenizer.encode("<|begin_of_text|>Hi", add_special_tokens=False)
        assert templated == tokenizer.encode("Hi")

    @pytest.mark.parametrize("wanted", [True, False])
    def test_post_processor_outweighs_the_config(self, byte_level: Path, wanted: bool) -> None:
        """The post-processor outweighs the config, as in transformers."""
        set_field(byte_level, add_bos_token=wanted, add_eos_token=wanted)
        ours, theirs = load_tokenizer(byte_level), PreTrainedTokenizerFast.from_pretrained(byte_level)
        assert ours.encode("Hi there") == theirs.encode("Hi there")

    def test_names_and_ids_of_special_tokens_are_known(self, byte_level: Path) -> None:
        tokenizer = load_tokenizer(byte_level)
        assert tokenizer.special_tokens == {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        assert tokenizer.convert_id_to_token(tokenizer.eos_token_id) == "<|eot_id|>"
        assert len(tokenizer.special_ids) == 3
        assert tokenizer.vocab_size == max(tokenizer.special_ids) + 1
        assert tokenizer.kind is DecoderKind.BYTE_LEVEL

    def test_padding_and_truncation_in_the_file_change_no_prompt(self, byte_level: Path) -> None:
        """Padding and truncation in the file do not touch a prompt."""
        plain = load_tokenizer(byte_level).encode("one two three four five")
        trained = tokenizers.Tokenizer.from_file(str(byte_level / "tokenizer.json"))
        trained.enable_truncation(3)
        trained.enable_padding(length=50)
        trained.save(str(byte_level / "tokenizer.json"))
        assert load_tokenizer(byte_level).encode("one two three four five") == plain

    def test_tokenizer_json_is_preferred_to_tokenizer_model(self, byte_level: Path) -> None:
        (byte_level / "tokenizer.model").write_bytes(b"not read at all")
        assert load_tokenizer(byte_level).kind is DecoderKind.BYTE_LEVEL

    def test_byte_fallback_pipeline_and_its_bytes_are_recognised(self, tmp_path: Path) -> None:
        """A byte-fallback pipeline is recognised, and its byte tokens too."""
        byte_fallback(["<unk>", "<0x0A>", "\u2581a"], strip=True).save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        assert (ours.kind, ours.strips_first_space) == (DecoderKind.BYTE_FALLBACK, True)
        assert [ours.is_byte_fallback(i) for i in range(-1, 5)] == [False, False, True, False, False, False]
        assert ours.decode([2, 1, 2]) == "a\n a"


class TestTokenizerModel:
    def test_encoding_equals_transformers(self, llama2: Path) -> None:
        ours, theirs = load_tokenizer(llama2), LlamaTokenizer.from_pretrained(llama2)
        for text in [*TEXTS, "<s>[INST] Hi [/INST] yes </s><s>[INST] no [/INST]", "a</s>b", "<unk>x"]:
            assert ours.encode(text) == theirs.encode(text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)

    def test_legacy_puts_a_space_behind_every_special_token(self, llama2: Path) -> None:
        """`legacy` puts a space behind every special token, as in transformers."""
        text = "<s>[INST] Hi [/INST] yes </s><s>[INST] no [/INST]"
        modern = load_tokenizer(llama2).encode(text)
        set_field(llama2, legacy=True)
        legacy = load_tokenizer(llama2).encode(text)
        assert legacy == LlamaTokenizer.from_pretrained(llama2).encode(text)
        assert legacy != modern

    def test_plain_text_is_encoded_as_by_sentencepiece(self, small_model: Path, sentencepiece_file: Path) -> None:
        reference = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_file.read_bytes())
        tokenizer = load_tokenizer(small_model)
        for text in [*TEXTS, *CORPUS[:4], "  spaces   inside ", " one", "trail  ", "a   b    c", "\u2581x"]:
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)

    def test_bos_is_added_by_default_and_eos_is_not(self, small_model: Path) -> None:
        tokenizer = load_tokenizer(small_model)
        bare = tokenizer.encode("Hello", add_special_tokens=False)
        assert tokenizer.encode("Hello") == [tokenizer.bos_token_id, *bare]

    def test_add_bos_token_and_add_eos_token_are_honoured(self, small_model: Path) -> None:
        write_config(small_model, add_bos_token=False, add_eos_token=True)
        tokenizer = load_tokenizer(small_model)
        bare = tokenizer.encode("Hello", add_special_tokens=False)
        assert tokenizer.encode("Hello") == [*bare, tokenizer.eos_token_id]

    def test_a_template_that_writes_bos_gives_it_exactly_once(self, small_model: Path) -> None:
        tokenizer = load_tokenizer(small_model)
        assert tokenizer.encode("<s>Hello", add_special_tokens=False).count(tokenizer.bos_token_id) == 1
        chats = ChatPrompts(small_model, tokenizer)
        found = chats.token_ids([{"role": "user", "content": "Hello"}], chat_template="<s>{{ messages[0].content }}")
        assert found == tokenizer.encode("<s>Hello", add_special_tokens=False)

    def test_add_prefix_space_false_adds_no_space_either_way(self, small_model: Path) -> None:
        """`add_prefix_space` false encodes and decodes without the space."""
        prefixed = load_tokenizer(small_model).encode("the", add_special_tokens=False)
        write_config(small_model, add_prefix_space=False)
        tokenizer = load_tokenizer(small_model)
        ids = tokenizer.encode("the", add_special_tokens=False)
        assert ids != prefixed
        assert tokenizer.decode(prefixed) == " the"
        assert tokenizer.decode(ids) == "the"

    def test_added_special_tokens_are_one_id_hidden_in_decoding(self, small_model: Path) -> None:
        """Added special tokens are one id, and hidden in decoding."""
        size = load_tokenizer(small_model).vocab_size
        added = {
            str(size): {"content": "<|im_end|>", "special": True},
            str(size + 1): {"content": "<tool>", "special": False},
        }
        write_config(small_model, added_tokens_decoder=added, eos_token="<|im_end|>")
        tokenizer = load_tokenizer(small_model)
        ids = tokenizer.encode("Hi<|im_end|><tool>", add_special_tokens=False)
        assert ids[-2:] == [size, size + 1]
        assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (size, size + 2)
        assert tokenizer.decode(ids) == "Hi<tool>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "Hi<|im_end|><tool>"

    @pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
    def test_added_token_that_cannot_be_honoured_is_refused(self, small_model: Path, flag: str) -> None:
        """An added token that cannot be honoured is refused by name."""
        write_config(small_model, added_tokens_decoder={"900": {"content": "<x>", flag: True}})
        with pytest.raises(ModelFormatError, match=rf"added token 900: {flag}"):
            load_tokenizer(small_model)

    def test_an_added_token_that_contradicts_the_model_is_refused(self, small_model: Path) -> None:
        write_config(small_model, added_tokens_decoder={"1": {"content": "<other>"}})
        with pytest.raises(ModelFormatError, match=r"'<other>', tokenizer\.model has '<s>'"):
            load_tokenizer(small_model)

    def test_decoding_any_ids_equals_transformers(self, llama2: Path) -> None:
        ours, theirs = load_tokenizer(llama2), LlamaTokenizer.from_pretrained(llama2)
        choice = random.Random(0)
        for _ in range(200):
            # Half of the ids are specials and byte pieces, where decoders differ.
            ids = [choice.randrange(choice.choice([260, 32000])) for _ in range(choice.randrange(12))]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


class TestBothKinds:
    @pytest.fixture(params=["byte_level", "small_model"])
    def directory(self, request: pytest.FixtureRequest) -> Path:
        directory: Path = request.getfixturevalue(request.param)
        return directory

    @pytest.fixture
    def tokenizer(self, directory: Path) -> Tokenizer:
        return load_tokenizer(directory)

    def test_text_survives_encoding_and_decoding(self, tokenizer: Tokenizer) -> None:
        for text in [*TEXTS, "  leading", "trailing  ", "\n\nlines\n"]:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_every_id_of_the_vocabulary_decodes(self, tokenizer: Tokenizer) -> None:
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
        assert all(isinstance(text, str) for text in texts)
        assert tokenizer.convert_id_to_token(tokenizer.vocab_size - 1) is not None

    def test_ids_beyond_the_vocabulary_decode_to_nothing(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("Hello")
        padded = [tokenizer.vocab_size, *ids, tokenizer.vocab_size + 100, -1]
        assert tokenizer.decode(padded) == tokenizer.decode(ids) == "Hello"
        assert tokenizer.convert_id_to_token(tokenizer.vocab_size) is None
        assert tokenizer.convert_id_to_token(-1) is None
        assert not tokenizer.is_byte_fallback(tokenizer.vocab_size)

    def test_special_tokens_are_hidden_only_when_asked(self, tokenizer: Tokenizer) -> None:
        ids = [*tokenizer.encode("Hi"), tokenizer.eos_token_id]
        assert tokenizer.decode(ids) == "Hi"
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert shown.startswith(tokenizer.special_tokens["bos_token"])
        assert shown.endswith(tokenizer.special_tokens["eos_token"])

    def test_a_lone_surrogate_is_refused_by_name(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidValueError, match=r"prompt must be "):
            tokenizer.encode("bad \ud800 text")

    def test_an_eos_token_outside_the_vocabulary_is_refused_by_name(self, directory: Path) -> None:
        write_config(directory, eos_token="<nowhere>")
        with pytest.raises(ModelFormatError, match="eos_token '<nowhere>'"):
            load_tokenizer(directory)

    @pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token": 3}'])
    def test_a_broken_tokenizer_config_is_refused_by_name(self, directory: Path, content: str) -> None:
        (directory / "tokenizer_config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json"):
            load_tokenizer(directory)

    def test_special_tokens_map_is_read_where_the_config_is_silent(self, directory: Path) -> None:
        eos = load_tokenizer(directory).special_tokens["eos_token"]
        (directory / "tokenizer_config.json").unlink(missing_ok=True)
        fields = {"eos_token": {"content": eos}}
        (directory / "special_tokens_map.json").write_text(json.dumps(fields), encoding="utf-8")
        tokenizer = load_tokenizer(directory)
        assert tokenizer.convert_id_to_token(tokenizer.eos_token_id) == eos


class TestBrokenDirectories:
    def test_directory_without_tokenizer_names_the_files_it_needs(self, tmp_path: Path) -> None:
        """A directory without tokenizer files says which are looked for."""
        with pytest.raises(ModelFormatError, match=r"neither tokenizer\.json nor tokenizer\.model"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"model": 1}'])
    def test_a_broken_tokenizer_json_is_refused_by_name(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"junk" * 10, b"\x00" * 50])
    def test_a_broken_tokenizer_model_is_refused_by_name(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"tokenizer\.model"):
            load_tokenizer(tmp_path)

    def test_a_truncated_tokenizer_model_is_refused_by_name(self, small_model: Path) -> None:
        path = small_model / "tokenizer.model"
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(ModelFormatError, match=r"tokenizer\.model"):
            load_tokenizer(small_model)
