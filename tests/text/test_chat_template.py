"""Rendering equals transformers' own, and what is malformed is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from d3engine.engine.model_directory import model_directory
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.text.chat_template import (
    ChatPrompts,
    ChatTemplate,
    ChatTemplateError,
    as_conversations,
    load_chat_template,
)
from d3engine.text.tokenizer import load_tokenizer

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set system, turns = none, messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.first and system is not none %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}
        {%- set content = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%Y') %}
{%- set ns = namespace(turns=0) %}
{%- macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- if tools is not none %}
    {{- header('system') + 'Today: ' ~ date ~ '\\n' + tools | map('tojson') | join('\\n') + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- set ns.turns = ns.turns + 1 %}
    {{- header(message.role) + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""
CHATML = """\
{% for message in messages %}
    {% if message.role not in ['system', 'user', 'assistant'] %}{% continue %}{% endif %}
<|im_start|>{{ message['role'] }}
{% if message.role == 'assistant' %}
{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}
{{ message['content'] }}<|im_end|>
{% endif %}

{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

SYSTEM = {"role": "system", "content": 'Be <brief> & "kind".'}
USER = {"role": "user", "content": "  Hi there, 東京 🙂\n"}
ASSISTANT = {"role": "assistant", "content": "Hello. "}
CHATS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Bye"}]]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    limits = arguments.pop("limits", None)
    template = ChatTemplate(source, special_tokens=TOKENS, limits=limits)
    return template.render([USER] if messages is None else messages, **arguments)


Expected = Callable[..., str]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """`expected(source, chat, **options)`: the prompt of transformers."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    return lambda source, chat, **options: tokenizer.apply_chat_template(
        chat, chat_template=source, tokenize=False, **options
    )


class TestRendering:
    @pytest.mark.parametrize("source", [LLAMA2, LLAMA3, CHATML, ZEPHYR], ids=["llama 2", "llama 3", "chatml", "zephyr"])
    @pytest.mark.parametrize("chat", CHATS, ids=len)
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
    def test_a_prompt_equals_that_of_transformers(
        self, expected: Expected, source: str, chat: list[dict[str, str]], add_generation_prompt: bool, tools: Any
    ) -> None:
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        prompt = render(source, chat, **options)
        assert prompt == expected(source, chat, **options)
        assert chat[-1]["content"].strip() in prompt

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].content | replace('Hi', 'Ho') | upper | indent(2) }}"
            "{{ [1, 'a', none, {'k': '<é>'}] | tojson(indent=2) }}",
            "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call twice() %}x{{ 1 + 2 }}{% endcall %}",
            "{% filter upper | trim %} shout {% endfilter %}{% set x | trim %}  y {% endset %}{{ x }}"
            "{% set z %}w{% endset %}{{ z }}",
            "{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }},{{ '-' * a }};{% endfor %}{{ range(3) | list }}"
            "{{ 2 ** 10 }}",
            "{% for item in [1, [2, [3]]] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}",
            "{% block body %}{{ ', '.join(['a', 'b']) }}{% endblock %}{{ 'a b'.split() | last }}"
            "{{ 'aXb'.replace('X', '-') }}",
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}"
            "{% if x is defined %}!{% endif %}",
            "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
            "{{ dict(a=1).items() | list }}",
            "{{ undefined_name }}{{ 7 % 4 }}{{ messages | length }}{% set ns = namespace(found=false) %}"
            "{% set ns.found = true %}{{ ns.found }}",
            "{{ '%s has %05.1f' % ('x', 2) }}{{ '{:>5}|{0[a]}'.format('r') if false else '{:>5}|'.format('r') }}",
            "{{ 'x'.center(7) }}{{ ('abc' | attr('upper'))() }}{{ [[1], [2]] | sum(start=[]) }}{{ 'é'.encode() }}",
        ],
    )
    def test_what_jinja_offers_works_as_in_transformers(self, expected: Expected, source: str) -> None:
        assert render(source, add_generation_prompt=False) == expected(source, [USER])

    def test_variables_win_over_the_special_tokens(self) -> None:
        assert render("{{ bos_token }}{{ mood }}", bos_token="<begin>", mood="calm") == "<begin>calm"

    def test_text_that_is_no_valid_unicode_comes_back_as_it_went(self) -> None:
        assert render("{{ messages[0].content }}", [{"role": "user", "content": "a\ud800b"}]) == "a\ud800b"

    def test_the_callers_messages_are_not_changed(self) -> None:
        with pytest.raises(ChatTemplateError, match="unsafe"):
            render("{{ messages.append(1) }}")


class TestFormOfMessages:
    """Clients and templates write the same things differently."""

    CALL: ClassVar = {"role": "assistant", "content": None, "name": None, "tool_calls": [{"function": {"name": "add"}}]}
    PARTS: ClassVar = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'content' in messages[1] }}{{ messages[1].name is defined }}{{ messages[1] | tojson }}",
            "{% if messages[1].content is defined %}{{ messages[1].content }}{% endif %}",
            "{{ messages[1].content | default('', true) | trim }}{{ messages[1].tool_calls[0].function.name }}",
        ],
    )
    def test_a_key_without_a_value_is_left_out_as_in_transformers(self, expected: Expected, source: str) -> None:
        prompt = render(source, [USER, self.CALL], add_generation_prompt=False)
        assert prompt == expected(source, [USER, self.CALL])
        assert "None" not in prompt

    @pytest.mark.parametrize(
        "source",
        [
            "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}",
            "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
            "{% for p in m['content'] if p.type == 'text' %}<{{ p['text'] }}>{% endfor %}{% endif %}{% endfor %}",
            "{% set content = messages[0].get('content') %}{% for p in content[1:] %}<{{ p.text }}>{% endfor %}",
            "{% macro f(c) %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endmacro %}{{ f(messages[0].content) }}",
            "{{ messages[0].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}",
            "{{ messages[0]['content'][0]['text'] }}",
            "{% for p in (messages[0].content if messages else []) | list %}<{{ p.text }}>{% endfor %}",
        ],
    )
    def test_template_that_loops_parts_gets_them(self, expected: Expected, source: str) -> None:
        """A template that walks through parts gets them as in transformers."""
        chat = [{"role": "user", "content": self.PARTS}]
        prompt = render(source, chat, add_generation_prompt=False)
        assert prompt == expected(source, chat)
        assert "one" in prompt or "two" in prompt
        assert "{" not in prompt

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].content }}",
            "{% for m in messages %}{% set text = m['content'] | trim %}{{ text }}{% endfor %}",
            "{% for call in messages[0].tool_calls or [] %}{{ call }}{% endfor %}{{ messages[0].get('content') }}",
            "{% for line in messages[0].content.split('\\n') %}{{ line }}\n{% endfor %}",
        ],
    )
    def test_template_that_prints_contents_gets_joined_text_parts(self, source: str) -> None:
        """A template that prints a content gets text parts joined by line feeds."""
        assert render(source, [{"role": "user", "content": self.PARTS}]).strip() == "one\ntwo"

    def test_template_that_only_loops_gets_a_string_as_one_part(self) -> None:
        """A template that does nothing but loop over parts gets a string as one part."""
        walk = "{% for p in messages[0].content %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
        assert render(walk, [{"role": "user", "content": "words"}]) == "<words>"
        either = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + walk + "{% endif %}"
        assert render(either, [{"role": "user", "content": "words"}]) == "words"

    @pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages[0].reasoning_content }}",
            "{{ messages[0]['reasoning'] }}",
            "{% if 'thinking' in messages[0] %}{{ messages[0].get('thinking') }}{% endif %}",
            "{{ messages[0].reasoning_content or messages[0].thinking }}",
        ],
    )
    def test_thoughts_of_an_assistant_have_the_templates_name(self, given: str, source: str) -> None:
        """The thoughts of an assistant have the name that the template reads."""
        assert render(source, [{"role": "assistant", "content": "5", given: "2 + 3"}]) == "2 + 3"

    def test_an_assistant_that_only_thinks_needs_no_content(self) -> None:
        message = {"role": "assistant", "content": None, "thinking": "hm"}
        assert render("{{ messages[0].reasoning }}{{ messages[0].content }}", [message]) == "hm"

    def test_two_different_thoughts_of_a_message_are_refused(self) -> None:
        """Two different thoughts of one message are refused by field."""
        message = {"role": "assistant", "content": "5", "reasoning_content": "a", "thinking": "b"}
        with pytest.raises(
            InvalidValueError,
            match=re.escape("messages[0].thinking must be the same as reasoning_content beside it; got 'b'"),
        ):
            render("{{ messages[0].reasoning }}", [message])
        assert render("{{ messages[0].reasoning }}", [message | {"thinking": "a"}]) == "a"


class TestContinuedMessage:
    @pytest.mark.parametrize("source", [LLAMA2, LLAMA3, CHATML, ZEPHYR], ids=["llama 2", "llama 3", "chatml", "zephyr"])
    @pytest.mark.parametrize("words", ["The answer is", "The answer is ", "The answer is:\n"])
    def test_the_prompt_ends_where_the_words_end_as_in_transformers(
        self, expected: Expected, source: str, words: str
    ) -> None:
        chat = [USER, {"role": "assistant", "content": words}]
        prompt = render(source, chat, add_generation_prompt=False, continue_final_message=True)
        assert prompt == expected(source, chat, continue_final_message=True)
        assert prompt.rstrip().endswith(words.rstrip())

    def test_of_text_parts_the_last_is_continued(self) -> None:
        source = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}"
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        chat = [{"role": "assistant", "content": parts}]
        assert render(source, chat, add_generation_prompt=False, continue_final_message=True) == "<one><two"
        assert parts[-1]["text"] == "two"

    @pytest.mark.parametrize(
        ("chat", "add_generation_prompt"),
        [([ASSISTANT], True), ([], False), ([{"role": "assistant", "tool_calls": [{}]}], False)],
        ids=["with a generation prompt", "no message", "no content"],
    )
    def test_what_cannot_be_continued_is_refused(self, chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
        with pytest.raises(InvalidValueError, match="continue_final_message must be false"):
            render(ZEPHYR, chat, add_generation_prompt=add_generation_prompt, continue_final_message=True)

    def test_a_template_that_drops_the_words_is_refused(self) -> None:
        with pytest.raises(ChatTemplateError, match="cannot be continued"):
            render("{{ messages[0].role }}", [ASSISTANT], add_generation_prompt=False, continue_final_message=True)


class TestMalformedMessages:
    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ("hello", "messages"),
            (["hello"], "messages[0]"),
            ([{"content": "x"}], "messages[0].role"),
            ([USER, {"role": 3, "content": "x"}], "messages[1].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": "x", "extra": object()}], "messages[0].extra"),
            ([{"role": "user", "content": "x", 3: "y"}], "messages[0]"),
            ([{"role": "user", "content": "x", "n": 10**5000}], "messages[0].n"),
        ],
    )
    def test_the_error_names_the_field(self, messages: Any, field: str) -> None:
        with pytest.raises(InvalidValueError, match=re.escape(f"{field} must be ")):
            ChatTemplate("").render(messages)

    def test_a_role_that_the_template_does_not_name_is_refused(self) -> None:
        """A template that writes any role's name would show the model one that it has never seen."""
        wizard = [USER, {"role": "wizard", "content": "Abra"}]
        with pytest.raises(InvalidValueError, match=re.escape("messages[1].role must be 'system' or 'user' or")):
            render(ZEPHYR, wizard)
        assert "<|wizard|>\nAbra" in render(ZEPHYR + "{# 'wizard' #}", wizard)

    def test_a_developer_is_the_system_of_templates_without_one(self) -> None:
        chat = [{"role": "developer", "content": "Be brief."}]
        assert render(ZEPHYR, chat).startswith("<|system|>\nBe brief.")
        assert render(ZEPHYR + "{# 'developer' #}", chat).startswith("<|developer|>\nBe brief.")
        assert chat[0]["role"] == "developer"

    def test_objects_with_methods_never_reach_a_template(self) -> None:
        with pytest.raises(InvalidValueError, match=r"helper must be "):
            render("{{ helper }}", helper=Path("x"))

    def test_endless_nesting_is_refused(self) -> None:
        message: dict[str, Any] = {"role": "user", "content": "x"}
        message["self"] = message
        with pytest.raises(InvalidValueError, match="less than 64 deep"):
            ChatTemplate("").render([message])


class TestConversations:
    @pytest.mark.parametrize("messages", [None, 5, "hello", [], {}, USER, iter([USER])])
    def test_what_is_no_list_of_messages_is_refused_by_name(self, messages: Any) -> None:
        with pytest.raises(InvalidValueError, match="messages must be a list of at least one message"):
            as_conversations(messages)

    def test_a_list_is_one_conversation_or_several(self) -> None:
        assert as_conversations([USER]) == [[USER]]
        assert as_conversations(([USER], [SYSTEM, USER])) == [[USER], [SYSTEM, USER]]

    @pytest.mark.parametrize("given", ["", "chat_template.jinja", Path("chat_template.jinja")])
    def test_the_name_of_a_file_is_no_template(self, given: Any) -> None:
        """It would be the whole prompt, without a word of the messages."""
        demo = model_directory("demo")
        prompts = ChatPrompts(demo, load_tokenizer(demo))
        with pytest.raises(InvalidValueError, match="chat_template must be the text of a Jinja template"):
            prompts.token_ids([USER], chat_template=given)


class TestFailingTemplates:
    def test_raise_exception_reaches_the_user_in_the_templates_words(self) -> None:
        with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
            render(LLAMA2, [ASSISTANT])
        assert isinstance(caught.value, InvalidValueError)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 1 / 0 }}",
            "{{ messages[0].content + 1 }}",
            "{{ nothing.at.all }}",
            "{% include 'other' %}",
            "{% import 'os' as os %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_a_failure_inside_a_template_is_an_error_of_ours(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match="that the chat template can render, but it fails: "):
            render(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.format.__globals__.values() }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ dict.__subclasses__() }}",
            "{{ ('{0.__class__.__mro__}'.format)(messages) }}",
            "{{ (namespace | attr('__init__') | attr('__globals__')).values() }}",
            "{{ self._TemplateReference__context.environment }}",
            "{{ namespace(__class__=1) }}",
            "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
            "{{ namespace({'_Namespace__attrs': 1}) }}",
        ],
    )
    def test_a_template_reaches_nothing_of_python(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"unsafe|underscore|no attribute|undefined"):
            render(source)

    @pytest.mark.parametrize(
        "source", ["{% if %}", "{{ 'x' | no_such_filter }}", "{% for x in y %}", "{{" + "(" * 3000]
    )
    def test_a_template_that_does_not_compile_is_a_broken_model(self, source: str) -> None:
        with pytest.raises(ModelFormatError, match="chat template"):
            ChatTemplate(source)


class TestLoading:
    def test_a_directory_without_a_template_has_none(self, tmp_path: Path) -> None:
        assert load_chat_template(tmp_path) is None
        (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        assert load_chat_template(tmp_path) is None

    def test_template_file_wins_over_config_with_special_tokens(self, tmp_path: Path) -> None:
        """The template's file wins over the config, and special tokens are known."""
        config = {"chat_template": "from the config {{ bos_token }}", "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        from_config = load_chat_template(tmp_path)
        assert from_config is not None
        assert from_config.render([USER]) == "from the config <s>"
        (tmp_path / "chat_template.jinja").write_text("from the file {{ bos_token }}", encoding="utf-8")
        from_file = load_chat_template(tmp_path)
        assert from_file is not None
        assert from_file.render([USER]) == "from the file <s>"

    def test_default_or_tools_template_is_taken_of_several(self, tmp_path: Path) -> None:
        """Of several templates the default one is taken, or the one for tools."""
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
        template = load_chat_template(tmp_path)
        assert template is not None
        assert template.render([USER]) == "plain"
        assert template.render([USER], tools=TOOLS) == "tools"

    def test_tools_template_that_transformers_saves_is_read(self, tmp_path: Path) -> None:
        """transformers saves a template for tools as a second file, in a folder."""
        saved = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()))
        saved.chat_template = {"default": "plain", "tool_use": "tools"}
        saved.save_pretrained(tmp_path)
        template = load_chat_template(tmp_path)
        assert template is not None
        assert template.render([USER]) == "plain"
        assert template.render([USER], tools=TOOLS) == "tools"

    @pytest.mark.parametrize("value", [3, [], [{"name": "tool_use", "template": "x"}], [{"name": "default"}], {}])
    def test_a_malformed_template_field_is_refused_by_name(self, tmp_path: Path, value: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}), encoding="utf-8")
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json: chat_template"):
            load_chat_template(tmp_path)

    def test_a_template_file_that_is_no_text_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ModelFormatError, match=r"chat_template\.jinja"):
            load_chat_template(tmp_path)
