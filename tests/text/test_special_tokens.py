"""Special tokens are found in whichever file names them, with the ids that transformers gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from small_tokenizers import save_sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from d3engine.errors import ModelFormatError
from d3engine.text.tokenizer import load_tokenizer

SPACE = "\u2581"


def write(directory: Path, name: str, **fields: Any) -> None:
    (directory / name).write_text(json.dumps(fields), encoding="utf-8")


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A tokenizer.json of single bytes in which `<begin>` and `<end>` are pieces like all others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "<begin>", "<end>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("sentencepiece")
    options = {"user_defined_symbols": ["<turn>"], "hard_vocab_limit": False}
    save_sentencepiece(directory, ["the quick brown fox jumps over the lazy dog"] * 4, 300, **options)
    return (directory / "tokenizer.model").read_bytes()


@pytest.fixture
def with_model(sentencepiece_model: bytes, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    return tmp_path


class TestNormalizedSpecialTokens:
    @pytest.fixture
    def llama2(self, tmp_path: Path) -> Path:
        """Built as Llama 2's first tokenizer.json: the normalizer marks spaces, and special tokens pass it too."""
        pieces = ["<unk>", "<s>", "</s>", SPACE, "<", ">", "/", "s", *"abc"]
        model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", fuse_unk=True)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        tokenizer.add_special_tokens([AddedToken(piece, normalized=True) for piece in pieces[:3]])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        write(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        return tmp_path

    def test_one_behind_another_is_found_all_the_same(self, llama2: Path) -> None:
        a, b, space = 8, 9, 3
        tokenizer = load_tokenizer(llama2)
        assert tokenizer.encode("a</s><s>b", add_special_tokens=False) == [space, a, 2, 1, space, b]
        wanted = [1, space, a, space, 2, 1, space, space, b]
        assert tokenizer.encode("<s>a </s><s> b", add_special_tokens=False) == wanted

    def test_files_written_later_are_read_as_transformers_does(self, llama2: Path) -> None:
        """Files that were written later are read as transformers reads them."""
        later = json.loads((llama2 / "tokenizer.json").read_text())
        for token in later["added_tokens"]:
            assert token["normalized"]
            token["normalized"] = False
        oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(later)))
        ours = load_tokenizer(llama2)
        for text in ["<s>a b</s><s>c</s>", "</s></s> a", "a<s >b", "<unk>c"]:
            assert ours.encode(text) == oracle.encode(text)


class TestTokenizerJson:
    FIELDS = (
        {"bos_token": "<begin>", "eos_token": {"content": "<end>", "lstrip": False, "normalized": True}},
        {"bos_token": "<begin>", "pad_token": "<pad>", "additional_special_tokens": ["<a>", "<b>"]},
        {"additional_special_tokens": ["<begin>", "<a>"], "mask_token": {"content": "<mask>", "lstrip": True}},
    )

    @pytest.mark.parametrize("fields", FIELDS, ids=["in the vocabulary", "new", "both"])
    @pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
    def test_each_named_token_is_whole_with_the_transformers_id(
        self, byte_level: Path, fields: dict[str, Any], name: str
    ) -> None:
        """Every named token is whole and has the id of transformers."""
        if name == "tokenizer_config.json":  # there transformers says what its objects are
            is_object = {key for key, value in fields.items() if isinstance(value, dict)}
            fields = {key: own | {"__type": "AddedToken"} if key in is_object else own for key, own in fields.items()}
        write(byte_level, name, **fields)
        ours, theirs = load_tokenizer(byte_level), PreTrainedTokenizerFast.from_pretrained(byte_level)
        text = "x<begin>y <end><pad> <a><b> <mask>z"
        assert ours.encode(text) == theirs.encode(text)
        assert ours.special_ids == set(theirs.all_special_ids)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert len(ours.encode(text)) < len(text)

    @pytest.mark.parametrize("extra", ["<a>", 3, [3], {"image_token": 3}])
    def test_what_is_no_list_of_tokens_is_refused_by_field(self, byte_level: Path, extra: object) -> None:
        write(byte_level, "tokenizer_config.json", extra_special_tokens=extra)
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json: extra_special_tokens must be"):
            load_tokenizer(byte_level)

    @pytest.mark.parametrize("field", ["add_bos_token", "add_eos_token", "add_prefix_space", "legacy"])
    @pytest.mark.parametrize("value", ["false", 1, {}, [False]])
    def test_a_switch_neither_true_nor_false_is_refused(self, byte_level: Path, field: str, value: object) -> None:
        write(byte_level, "tokenizer_config.json", **{field: value})
        with pytest.raises(ModelFormatError, match=rf"{field} must be true, false or null; got"):
            load_tokenizer(byte_level)

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("tokenizer_config.json", {"unk_token": "a\ud800"}),
            ("tokenizer_config.json", {"extra_special_tokens": [{"content": "\udfff"}]}),
            ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": "\ud800"}}}),
            ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}),
            ("added_tokens.json", {"\ud800": 900}),
        ],
    )
    def test_a_token_that_is_no_text_is_refused(self, with_model: Path, name: str, fields: dict[str, object]) -> None:
        write(with_model, name, **fields)
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json|added_tokens\.json"):
            load_tokenizer(with_model)


class TestTokenizerModel:
    TEXT = "the<turn> fox<|end|></s> over<pad><tool>dog"

    def test_added_tokens_json_is_read_as_in_transformers(self, with_model: Path) -> None:
        size = load_tokenizer(with_model).vocab_size
        write(with_model, "added_tokens.json", **{"<|end|>": size + 1, "<tool>": size, "<pad>": size + 2})
        write(with_model, "special_tokens_map.json", eos_token="<|end|>", pad_token="<pad>", bos_token="<s>")
        write(with_model, "tokenizer_config.json", add_bos_token=True, legacy=False, unk_token="<unk>")
        ours, theirs = load_tokenizer(with_model), LlamaTokenizer.from_pretrained(with_model)
        assert ours.eos_token_id == theirs.eos_token_id == size + 1
        assert ours.encode(self.TEXT) == theirs.encode(self.TEXT)
        ids = ours.encode(self.TEXT, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert "<tool>" in ours.decode(ids)

    def test_a_token_that_is_named_only_gets_the_next_id(self, with_model: Path) -> None:
        size = load_tokenizer(with_model).vocab_size
        write(with_model, "special_tokens_map.json", pad_token="<pad>", additional_special_tokens=["<|end|>", "<turn>"])
        tokenizer = load_tokenizer(with_model)
        assert [tokenizer.convert_id_to_token(size + i) for i in range(3)] == ["<pad>", "<|end|>", None]
        ids = tokenizer.encode(self.TEXT, add_special_tokens=False)
        assert ids.count(size) == ids.count(size + 1) == 1
        assert tokenizer.decode(ids) == "the fox over<tool>dog"

    @pytest.mark.parametrize("content", [{"<a>": "3"}, {"<a>": -1}, {"": 500}, {"<a>": True}])
    def test_malformed_added_tokens_are_refused_by_name(self, with_model: Path, content: dict[str, Any]) -> None:
        write(with_model, "added_tokens.json", **content)
        with pytest.raises(ModelFormatError, match=r"added_tokens\.json: must map non-empty tokens to ids"):
            load_tokenizer(with_model)
