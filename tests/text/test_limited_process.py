"""A hostile template ends in an error instead of a full machine, and the process that it ran in is replaced."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.text import limited_process
from d3engine.text.chat_template import ChatTemplate, ChatTemplateError
from d3engine.text.limited_process import LimitedProcessError, ProcessLimits, _Children
from d3engine.text.limited_worker import read_frame, write_frame

USER = {"role": "user", "content": "Hi"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TIGHT = ProcessLimits(seconds=0.2, memory_bytes=100 * 1024**2, characters=100_000)


def render(source: str, limits: ProcessLimits | None = None) -> str:
    return ChatTemplate(source, limits=limits).render([USER])


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Children]:
    """Processes of this test alone."""
    own = _Children()
    monkeypatch.setattr(limited_process, "_children", own)
    yield own
    own.close()


def process_of(children: _Children) -> int:
    """The pid of the one process that has been started and idles."""
    (child,) = children._idle
    return child._process.pid


class TestLimits:
    @pytest.mark.parametrize(
        "source",
        [
            ENDLESS,
            "{{ ([range(100000)] * 100000) | map('sum') | list | length }}",
            "{% set x = range(100000) | list %}{{ range(100000, 200000) | select('in', x) | list | length }}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{{ 10 ** (messages | length * 10 ** 9) }}",
        ],
        ids=["loops", "items inside a filter", "comparisons", "macros", "one operation"],
    )
    def test_endless_work_ends_after_its_processor_time(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"more than 0\.2 seconds of processor time"):
            render(source, TIGHT)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'a' * 10 ** 12 }}",
            "{{ '%999999999999d' % 3 }}",
            "{{ '{:999999999}'.format(3) }}",
            "{{ (['a'] * 100000) | map('replace', 'a', 'x' * 190000) | list | length }}",
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        ],
        ids=["product", "%", "format", "filter", "doubling"],
    )
    def test_a_value_without_bound_ends_at_the_memory_limit(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match="more than 100 MiB of memory"):
            render(source, ProcessLimits(memory_bytes=100 * 1024**2))

    @pytest.mark.parametrize(
        "source",
        [
            "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}{% endfor %}"
            "{{ ([ns.x] * 2000) | tojson(indent=32) | length }}",
        ],
        ids=["nested lists", "indented JSON"],
    )
    def test_what_takes_time_and_memory_ends_at_one_of_them(self, source: str) -> None:
        with pytest.raises(ChatTemplateError, match=r"of processor time|of memory"):
            render(source, TIGHT)

    def test_the_text_has_a_limit_of_its_own(self) -> None:
        with pytest.raises(ChatTemplateError, match="writes more than 100000 characters"):
            render("{% for i in range(9999) %}0123456789012{% endfor %}", TIGHT)
        assert len(render("{{ '🙂' * 100000 }}", TIGHT)) == 100_000

    def test_a_source_beyond_the_limit_is_not_even_read(self) -> None:
        with pytest.raises(ModelFormatError, match="11 characters, more than 10"):
            ChatTemplate("x" * 11, limits=ProcessLimits(characters=10))

    def test_compilation_has_the_same_limits(self) -> None:
        with pytest.raises(ModelFormatError, match=r"to compile it takes more than .* of (processor time|memory)"):
            ChatTemplate("{{ a }}" * 14_000, limits=TIGHT)

    @pytest.mark.parametrize("field", ["characters", "seconds", "memory_bytes"])
    def test_limits_that_would_limit_nothing_are_refused(self, field: str) -> None:
        with pytest.raises(InvalidValueError, match=f"{field} must be "):
            ProcessLimits(**{field: -1})

    @pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps, which every macOS has")
    def test_memory_the_kernel_does_not_limit_is_watched_outside(
        self, monkeypatch: pytest.MonkeyPatch, children: _Children
    ) -> None:
        """Memory is watched from outside where the kernel does not limit it."""
        monkeypatch.setattr(limited_process, "_KERNEL_LIMITS_MEMORY", False)
        hoards = (
            "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% for j in range(100) %}"
            "{% set ns.x = [ns.x, 'y' * 2000 ~ i] %}{% set pause = range(2000) | sum %}{% endfor %}{% endfor %}"
        )
        with pytest.raises(ChatTemplateError, match="more than 20 MiB of memory"):
            render(hoards, ProcessLimits(memory_bytes=20 * 1024**2))

    def test_time_is_watched_outside_where_no_timer_is(
        self, monkeypatch: pytest.MonkeyPatch, children: _Children
    ) -> None:
        """As on Windows: the parent reads the processor time of the child, here a made-up one."""
        template, seconds = ChatTemplate(ENDLESS, limits=ProcessLimits(seconds=60)), iter(range(0, 100_000, 50))
        monkeypatch.setattr(limited_process, "_KERNEL_LIMITS_MEMORY", False)
        monkeypatch.setattr(limited_process, "usage_of", lambda pid: (0, float(next(seconds))))
        with pytest.raises(ChatTemplateError, match="more than 60 seconds of processor time"):
            template.render([USER])


class TestProcess:
    def test_one_process_serves_one_rendering_after_another(self, children: _Children) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        first = process_of(children)
        assert [template.render([USER]) for _ in range(3)] == ["Hi"] * 3
        assert process_of(children) == first

    def test_a_template_that_fails_leaves_the_process_alive(self, children: _Children) -> None:
        template = ChatTemplate("{{ 1 / messages | length - 1 / 0 }}")
        first = process_of(children)
        with pytest.raises(ChatTemplateError, match="division by zero"):
            template.render([USER])
        assert process_of(children) == first

    def test_a_process_that_went_beyond_a_limit_is_replaced(self, children: _Children) -> None:
        hostile = ChatTemplate("{{ 'a' * 10 ** 12 }}", limits=TIGHT)
        first = process_of(children)
        with pytest.raises(ChatTemplateError):
            hostile.render([USER])
        assert render("{{ messages[0].content }}") == "Hi"
        assert process_of(children) != first

    def test_a_process_that_somebody_killed_while_idle_is_replaced(self, children: _Children) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        os.kill(process_of(children), signal.SIGKILL)
        children._idle[0]._process.wait()
        assert template.render([USER]) == "Hi"

    def test_one_that_dies_at_work_is_named_as_such(self, children: _Children, monkeypatch: pytest.MonkeyPatch) -> None:
        template = ChatTemplate(ENDLESS)
        pid = process_of(children)

        def write_and_kill(descriptor: int, message: dict[str, Any]) -> None:
            write_frame(descriptor, message)
            os.kill(pid, signal.SIGKILL)

        with monkeypatch.context() as patched:
            patched.setattr(limited_process, "write_frame", write_and_kill)
            with pytest.raises(LimitedProcessError, match="ended with status -9"):
                template.render([USER])
        assert render("{{ messages[0].content }}") == "Hi"

    def test_time_without_a_processor_does_not_count(self, children: _Children) -> None:
        template = ChatTemplate("{{ messages[0].content }}", limits=ProcessLimits(seconds=0.2))
        pid = process_of(children)
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        assert template.render([USER]) == "Hi"

    def test_a_silent_process_is_given_up_in_the_end(
        self, children: _Children, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        os.kill(process_of(children), signal.SIGSTOP)
        monkeypatch.setattr(ProcessLimits, "patience_seconds", 0.1)
        with pytest.raises(LimitedProcessError, match=r"silent for 0\.1 s"):
            template.render([USER])

    def test_ctrl_c_ends_it_and_misplaces_no_answer(self, children: _Children, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C ends the process, so that no answer goes to the wrong question."""
        template = ChatTemplate("{{ messages[0].content }}")

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(limited_process, "read_frame", interrupted)
            with pytest.raises(KeyboardInterrupt):
                template.render([USER])
        assert template.render([{"role": "user", "content": "later"}]) == "later"

    def test_threads_render_together_each_its_own(self, children: _Children) -> None:
        template = ChatTemplate("{% for i in range(2000) %}{% endfor %}{{ messages[0].content }}")
        words = [str(i) for i in range(40)]
        with ThreadPoolExecutor(8) as pool:
            texts = pool.map(lambda word: template.render([{"role": "user", "content": word}]), words)
            assert list(texts) == words
        assert 1 <= len(children._idle) <= limited_process._MOST_CHILDREN

    def test_it_never_imports_torch_and_has_no_way_to_the_terminal(self, children: _Children) -> None:
        # Asked in a child of the same kind: what is imported there before the first request.
        code = "import sys; from d3engine.text import template_sandbox, limited_worker; print('torch' in sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout == "False\n"

    def test_a_fork_starts_processes_of_its_own(self) -> None:
        code = """
import os
from d3engine.text import limited_process as process
from d3engine.text.chat_template import ChatTemplate

template = ChatTemplate("{{ messages[0].content }}")
say = lambda: template.render([{"role": "user", "content": str(os.getpid())}])
assert say() == str(os.getpid())
first = process._children._idle[0]._process.pid
if not os.fork():
    assert say() == str(os.getpid())
    os._exit(process._children._idle[0]._process.pid == first)
assert os.wait()[1] == 0
assert say() == str(os.getpid())
assert process._children._idle[0]._process.pid == first
"""
        run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "")

    @pytest.mark.parametrize("executable", ["/nowhere/python", sys.executable])
    def test_where_none_can_be_started_nothing_is_rendered(
        self, children: _Children, monkeypatch: pytest.MonkeyPatch, executable: str
    ) -> None:
        monkeypatch.setattr(sys, "executable", executable)
        monkeypatch.setattr(limited_process, "_import_paths", lambda: [])
        with pytest.raises(LimitedProcessError, match=r"cannot be started: .*(nowhere|No module named)"):
            ChatTemplate("x")

    @pytest.mark.parametrize(("max_bytes", "cut"), [(10, 0), (1000, 5), (1000, 100)])
    def test_a_frame_that_is_too_large_or_cut_short_is_no_answer(self, max_bytes: int, cut: int) -> None:
        reading, writing = os.pipe()
        write_frame(writing, {"text": "é\ud800" * 10})
        whole = os.read(reading, 1000)
        os.write(writing, whole[: len(whole) - cut])
        os.close(writing)
        with pytest.raises(EOFError):
            read_frame(reading, max_bytes)
        os.close(reading)
