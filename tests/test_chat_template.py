"""Rendering equals transformers' own, and a hostile template ends in an error instead of a full machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from d3engine.chat_template import ChatTemplate, ChatTemplateError, RenderLimits, load_chat_template
from d3engine.errors import InvalidValueError, ModelFormatError

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
    limits = arguments.pop("limits", RenderLimits(characters=100_000, steps=100_000))
    template = ChatTemplate(source, special_tokens=TOKENS, limits=limits)
    return template.render([USER] if messages is None else messages, **arguments)


@pytest.fixture(scope="module")
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)


class TestRendering:
    @pytest.mark.parametrize("source", [LLAMA2, LLAMA3, CHATML, ZEPHYR], ids=["llama 2", "llama 3", "chatml", "zephyr"])
    @pytest.mark.parametrize("chat", CHATS, ids=len)
    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
    def test_a_prompt_equals_that_of_transformers(
        self,
        transformers_tokenizer: PreTrainedTokenizerFast,
        source: str,
        chat: list[dict[str, str]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        expected = transformers_tokenizer.apply_chat_template(
            chat, chat_template=source, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert render(source, chat, add_generation_prompt=add_generation_prompt, tools=tools) == expected
        assert chat[-1]["content"].strip() in expected

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
        ],
    )
    def test_what_jinja_offers_works_as_in_transformers(
        self, transformers_tokenizer: PreTrainedTokenizerFast, source: str
    ) -> None:
        expected = transformers_tokenizer.apply_chat_template([USER], chat_template=source, tokenize=False)
        assert render(source, add_generation_prompt=False) == expected

    def test_variables_win_over_the_special_tokens(self) -> None:
        assert render("{{ bos_token }}{{ mood }}", bos_token="<begin>", mood="calm") == "<begin>calm"

    def test_text_parts_are_joined_by_line_feeds(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"

    def test_an_assistant_that_only_calls_tools_needs_no_content(self) -> None:
        message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
        assert render("{{ messages[0].content }}{{ messages[0].tool_calls[0].function.name }}", [message]) == "Noneadd"

    def test_one_template_renders_again_and_again(self) -> None:
        template = ChatTemplate(ZEPHYR, special_tokens=TOKENS, limits=RenderLimits(steps=20))
        assert {template.render([USER]) for _ in range(10)} == {template.render([USER])}

    def test_the_callers_messages_are_not_changed(self) -> None:
        with pytest.raises(ChatTemplateError, match="unsafe"):
            render("{{ messages.append(1) }}")


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
        ],
    )
    def test_the_error_names_the_field(self, messages: Any, field: str) -> None:
        with pytest.raises(InvalidValueError, match=re.escape(f"{field} must be ")):
            ChatTemplate("").render(messages)

    def test_objects_with_methods_never_reach_a_template(self) -> None:
        with pytest.raises(InvalidValueError, match=r"helper must be "):
            render("{{ helper }}", helper=Path("x"))

    def test_endless_nesting_is_refused(self) -> None:
        message: dict[str, Any] = {"role": "user", "content": "x"}
        message["self"] = message
        with pytest.raises(InvalidValueError, match="less than 64 deep"):
            ChatTemplate("").render([message])


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
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.format.__globals__ }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ self._TemplateReference__context.environment }}",
            "{% include 'other' %}",
            "{% import 'os' as os %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ '%10d' % 3 }}",
            "{{ 'x'.center(10) }}",
            "{{ '{}'.format(1) }}",
            "{{ 'x' | attr('upper') }}",
            "{{ (1).to_bytes(10) }}",
            "{{ [[1]] | sum(start=[]) }}",
        ],
    )
    def test_a_failure_inside_a_template_is_an_error_of_ours(self, source: str) -> None:
        with pytest.raises((ChatTemplateError, ModelFormatError)) as caught:
            render(source)
        assert caught.value.__suppress_context__

    @pytest.mark.parametrize(
        "source", ["{% if %}", "{{ 'x' | no_such_filter }}", "{% for x in y %}", "{{" + "(" * 3000]
    )
    def test_a_template_that_does_not_compile_is_a_broken_model(self, source: str) -> None:
        with pytest.raises(ModelFormatError, match="chat template"):
            ChatTemplate(source)


class TestHostileTemplates:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) if i < 0 %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
            "{% block b %}{% if caller %}{% endif %}{% for i in range(9) %}{{ self.b() }}{% endfor %}{% endblock %}",
        ],
    )
    def test_work_without_output_ends_at_the_step_limit_or_the_recursion_limit(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"2000 steps|recursion"):
            render(source, limits=RenderLimits(steps=2000))

    def test_time_ends_a_template(self) -> None:
        with pytest.raises(ChatTemplateError, match="0 seconds"):
            render("{{ 'a' | upper }}", limits=RenderLimits(seconds=0))

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(9999) %}0123456789012{% endfor %}",
            "{{ 'a' * 10 ** 12 }}",
            "{{ [1] * 10 ** 12 }}",
            "{{ 10 ** 12 * 'a' }}",
            "{{ 'x' | replace('', 'y' * 99999) }}",
            "{{ ('x' * 9999).replace('x', 'y' * 9999) }}",
            "{{ ('y' * 9999).join(range(9999)) }}",
            "{{ ('y' * 9999).join('x' * 9999) }}",
            "{{ range(9999) | join('y' * 9999) }}",
            "{{ (['x' * 999] * 999) | join }}",
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
            "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
            "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            "{% macro f() %}{% for i in range(9999) %}0123456789012{% endfor %}{% endmacro %}{{ f() }}",
            "{% set x %}{% for i in range(9999) %}{{ 'y' * 9999 }}{% endfor %}{% endset %}",
            "{% set x %}{% for i in range(9999) %}{% filter replace('x', 'y' * 999) %}x{% endfilter %}"
            "{% endfor %}{% endset %}",
        ],
    )
    def test_what_grows_without_bound_ends_at_the_character_limit(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match="100000 characters"):
            render(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{% macro f(n) %}{{ f(n - 1, varargs, varargs) if n else varargs | length }}{% endmacro %}{{ f(60, 1) }}",
            "{% macro f(n) %}{{ f(n - 1, a=kwargs, b=kwargs) if n else kwargs | count }}{% endmacro %}{{ f(60, a=1) }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"
            "{% set ns.x = cycler(ns.x, ns.x).items %}{% endfor %}{{ ns.x | length }}",
        ],
        ids=["positional", "named", "cycler"],
    )
    def test_values_that_nest_only_through_the_arguments_of_calls_are_measured_as_they_are_passed(
        self, source: str
    ) -> None:
        # 2 ** 60 items, of which only the outer two are ever written: no result that the guard sees is large, but
        # one `tojson` or comparison, a single step, would take all time and memory.
        with pytest.raises(ChatTemplateError, match="100000 characters"):
            render(source)

    @pytest.mark.parametrize(
        "source", ["{{ 10 ** (10 ** 10) }}", "{{ 2 ** 99999 }}", "{{ 2 ** -1 }}", "{{ 2.0 ** 9 }}"]
    )
    def test_a_power_beyond_any_use_is_refused(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match="powers of 4096 bits"):
            render(source)

    @pytest.mark.parametrize(
        "source",
        ["{{ [1] | tojson(indent=10 ** 9) }}", "{{ 'a\nb' | indent(10 ** 9) }}", "{{ 'a\nb' | indent(' ' * 99) }}"],
    )
    def test_an_indentation_beyond_any_use_is_refused(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match="width of 32"):
            render(source)

    def test_a_namespace_is_never_written_with_its_content(self) -> None:
        source = "{% set a = namespace(x='secret') %}{% set b = namespace(l=a, r=a) %}{{ b }}{{ b | string }}"
        assert render(source) == "<namespace><namespace>"

    def test_a_source_beyond_the_limit_is_not_compiled(self) -> None:
        with pytest.raises(ModelFormatError, match="11 characters, more than 10"):
            ChatTemplate("x" * 11, limits=RenderLimits(characters=10))


class TestLoading:
    def test_a_directory_without_a_template_has_none(self, tmp_path: Path) -> None:
        assert load_chat_template(tmp_path) is None
        (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        assert load_chat_template(tmp_path) is None

    def test_the_file_wins_over_the_config_and_special_tokens_are_known(self, tmp_path: Path) -> None:
        config = {"chat_template": "from the config {{ bos_token }}", "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        from_config = load_chat_template(tmp_path)
        assert from_config is not None
        assert from_config.render([USER]) == "from the config <s>"
        (tmp_path / "chat_template.jinja").write_text("from the file {{ bos_token }}", encoding="utf-8")
        from_file = load_chat_template(tmp_path)
        assert from_file is not None
        assert from_file.render([USER]) == "from the file <s>"

    def test_of_several_templates_the_default_one_is_taken(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
        template = load_chat_template(tmp_path)
        assert template is not None
        assert template.render([USER]) == "plain"

    @pytest.mark.parametrize("value", [3, [], [{"name": "tool_use", "template": "x"}], [{"name": "default"}], {}])
    def test_a_malformed_template_field_is_refused_by_name(self, tmp_path: Path, value: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}), encoding="utf-8")
        with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json: chat_template"):
            load_chat_template(tmp_path)

    def test_a_template_file_that_is_no_text_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ModelFormatError, match=r"chat_template\.jinja"):
            load_chat_template(tmp_path)
