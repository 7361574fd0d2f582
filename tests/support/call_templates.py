"""Chat templates after those of real models, small: how each shows functions, writes calls, and asks for reasoning."""

_ROUND = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
_SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"
_BEGIN = "{% if add_generation_prompt %}Answer:{% endif %}"
_EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
_NO_CALLS = "{% if m.tool_calls %}{{ raise_exception('calls cannot be written') }}{% endif %}"
_MARKS = {
    name: f"<\uff5ctool\u2581{word}\uff5c>"
    for name, word in (
        ("calls", "calls\u2581begin"),
        ("call", "call\u2581begin"),
        ("sep", "sep"),
        ("end", "call\u2581end"),
        ("ends", "calls\u2581end"),
    )
}

QWEN = (
    "{%- if tools %}{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}"
    '{{- \'\\n</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\' }}'
    "{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
QWEN_CODER = (
    f"{_SHOWN}{_ROUND}{_EACH}"
    "{{- '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments.items() %}"
    "{{- '<parameter=' + k + '>\\n' }}{{ v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}"
    f"{{% endfor %}}{{{{- '</function>\\n</tool_call>' }}}}{{% endfor %}}\n{{% endfor %}}{_BEGIN}"
)
LLAMA = (
    f"{_SHOWN}{_ROUND}{_EACH}"
    '{{ \'{"name": "\' + f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}{{ "}" }}'
    f"{{% endfor %}}\n{{% endfor %}}{_BEGIN}"
)
PYTHONIC = (
    f"{_SHOWN}{_ROUND}{{% if m.tool_calls %}}[{{% endif %}}{_EACH}"
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}{% if m.tool_calls %}]{% endif %}\n{% endfor %}"
    f"{_BEGIN}"
)
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    f"{_ROUND}{{% if m.tool_calls %}}[TOOL_CALLS] [{{% endif %}}"
    "{% for call in m.tool_calls or [] %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric, with length 9!') }}"
    '{% endif %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}'
    f"{{% if m.tool_calls %}}]{{% endif %}}\n{{% endfor %}}{_BEGIN}"
)
MISTRAL_V11 = (
    f"{_SHOWN}{_ROUND}{_EACH}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}{{% endfor %}}\n"
    f"{{% endfor %}}{_BEGIN}"
)
GRANITE = (
    f"{_SHOWN}{_ROUND}{{% if m.tool_calls %}}<|tool_call|>[{{% endif %}}{_EACH}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}'
    f"{{% if m.tool_calls %}}]{{% endif %}}\n{{% endfor %}}{_BEGIN}"
    "{% if thinking %}Write 'Here is my thought process:' and 'Here is my response:'.{% endif %}"
)
PHI4_MINI = (
    "{% for m in messages %}"
    + _NO_CALLS
    + "<|{{ m.role }}|>{{ m.content or '' }}"
    + (
        "{% if loop.first and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
)
DEEPSEEK = (
    "{% for m in messages %}{{ m.role }}: {{ (m.content or '').split('</think>')[-1] }}"
    f"{{% if m.tool_calls %}}{_MARKS['calls']}{{% endif %}}{{% for call in m.tool_calls or [] %}}"
    f"{{{{ '{_MARKS['call']}' + call.type + '{_MARKS['sep']}' + call.function.name + '\\n```json\\n' +"
    f" call.function.arguments + '\\n```' + '{_MARKS['end']}' }}}}{{% endfor %}}"
    f"{{% if m.tool_calls %}}{_MARKS['ends']}{{% endif %}}\n{{% endfor %}}"
    "{% if add_generation_prompt %}Answer:<think>\n{% endif %}"
)
"""Arguments are joined as texts, and tools are not shown."""

TEMPLATES = {"hermes": QWEN, "qwen3_coder": QWEN_CODER, "llama3_json": LLAMA, "pythonic": PYTHONIC, "mistral": MISTRAL}
TEMPLATES |= {"mistral_v11": MISTRAL_V11, "granite": GRANITE, "phi4_mini_json": PHI4_MINI, "deepseek_v3": DEEPSEEK}
"""By the name of the format that each shows."""
