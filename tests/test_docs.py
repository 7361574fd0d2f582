"""What the README and docs say is true: their Python runs, their commands parse, their links lead somewhere."""

import ast
import json
import re
import shlex
import tomllib
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import typer
from page_programs import printed
from typer.testing import CliRunner

import d3engine
from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.cli import app
from d3engine.depth import DepthPolicy
from d3engine.depth.policy import POLICIES
from d3engine.engine.model_directory import FETCHED
from d3engine.research.evaluation.word_problems import extract_answer
from d3engine.utils.environment import VARIABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
RUNNABLE = re.compile(r"<!-- runnable -->\n```python\n(.*?)```", re.DOTALL)
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MADE = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)


def name_of(page: Path) -> str:
    """A page as the tests name it: its path under docs, or README.md."""
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def commands(program: str) -> list[str]:
    """The lines of the pages' shell blocks that call a program."""
    blocks = [block.replace("\\\n", "") for page in PAGES for block in SHELL.findall(page.read_text())]
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split()[:1] == [program]]


WITH_PYTHON = [page for page in PAGES if RUNNABLE.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": page.stem}
    given = set(names)
    for number, block in enumerate(RUNNABLE.findall(page.read_text()), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec", dont_inherit=True), names)
        shown = capsys.readouterr().out
        assert [said.pattern for said in printed(block) if not said.search(shown)] == [], shown
    assert set(names) - given - {"__builtins__"}, "no block ran, or none defined anything"


def test_what_a_comment_says_is_printed_is_read() -> None:
    (list_of_depths,) = printed("print(depths)  # layers of each token: [16, 12, ...]")
    assert list_of_depths.search("[16, 12, 10, 9]")
    assert not list_of_depths.search("[16, 11, 10, 9]")
    assert printed("print(text)  # in words alone\nx = 3  # [3]") == []


def test_the_pages_have_python_to_run_and_commands_to_parse() -> None:
    assert len(WITH_PYTHON) >= 15
    assert len(commands("d3engine")) >= 100


@pytest.mark.parametrize("page", sorted([*DOCS.glob("how-to/*.md"), *DOCS.glob("tutorials/*.md")]), ids=name_of)
def test_a_page_that_is_followed_begins_with_what_to_do(page: Path) -> None:
    first = page.read_text().splitlines()[:24]
    assert any(line.startswith(("```", "![")) for line in first)


def words(text: str) -> int:
    """Words by hand: those that have two letters, outside of code and made tables, a link's address left out."""
    text = MADE.sub("", text)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return sum(bool(re.search("[A-Za-z]{2}", word)) for word in text.split())


def test_pages_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
    followed = [*DOCS.glob("how-to/*.md"), *DOCS.glob("tutorials/*.md")]
    assert [(page.name, words(page.read_text())) for page in followed if words(page.read_text()) > 600] == []
    assert sum(words(page.read_text()) for page in PAGES) <= 25_000


def test_an_entry_of_the_changelog_is_one_line() -> None:
    """Entries of at most 120 characters stand under the headings of Keep a Changelog, in this version's section."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("## "))
    assert lines[first].startswith(f"## [{d3engine.__version__}] - ")
    kinds = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    below = lines[first + 4 :]
    assert [line for line in below if line and not line.startswith(("- ", "## ", "### ", "#### "))] == []
    assert [line for line in below if len(line) > 120 or (line.startswith("- ") and not line.endswith("."))] == []


def test_the_tables_of_the_code_are_whole() -> None:
    from tools.docs_reference import MARK, TABLES, on_page_markdown

    with_tables = [page for page in PAGES if MARK.search(page.read_text())]
    assert {name for page in with_tables for name in MARK.findall(page.read_text())} == set(TABLES)
    site = "\n".join(on_page_markdown(page.read_text()) for page in with_tables)
    assert not MARK.search(site)
    assert all(f"| `{one.name}` |" in site for one in VARIABLES)
    assert {"### d3engine serve", "### d3engine bridge fit"} <= set(site.splitlines())
    assert "| `--kv-cache-dtype` |" in site
    assert "| `d3engine:layers_run_total` | counter |" in site
    assert "| `EngineDeadError` | `RuntimeError` |" in site
    assert "| 503 | Service Unavailable | `server_error` | `overloaded_error` |" in site


def test_the_page_of_routes_has_every_route_and_field() -> None:
    """Each link to a body leads to its heading."""
    from d3engine.server.app import ROUTES
    from d3engine.server.schemas.requests import ChatRequest
    from tools.docs_reference import http

    lines = list(http())
    headings = {line.lstrip("# ") for line in lines if line.startswith("#")}
    routes = {(method, route.path.replace(":path}", "}")) for route in ROUTES for method in route.methods or ()}
    assert {f"{method} {path}" for method, path in routes if method != "HEAD"} <= headings
    assert {f"| `{name}`" for name in ChatRequest.__struct_encode_fields__} <= {line.split(" |")[0] for line in lines}
    linked = {anchor for line in lines for anchor in re.findall(r"\(#(\w+)\)", line)}
    assert linked <= {heading.lower() for heading in headings}
    assert "| `temperature` | number (0.0 to 2.0) |  |" in lines
    assert "| `top_p` | number (above 0.0, at most 1.0) |  |" in lines
    assert "| `stop_token_ids` | list (at most 256 values) of integer (at least 0) |  |" in lines
    assert '| `tool_choice` | `"none"` or `"auto"` or `"required"` or [NamedTool](#namedtool) |  |' in lines


def test_words_that_people_type_lead_to_a_page() -> None:
    headings = "\n".join(heading for page in PAGES for heading in HEADING.findall(page.read_text())).lower()
    typed = ("quickstart", "install", "out of memory", "slow", "chat", "serve", "gguf", "json", "exit codes", "metrics")
    assert [word for word in typed if word not in headings] == []
    assert "docker" in (DOCS / "tutorials" / "first-answer.md").read_text().lower()


@pytest.fixture(scope="module")
def program() -> Any:
    """`d3engine` as click has it, which takes ten times longer to make than a line takes to parse."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("line", sorted(set(commands("d3engine"))))
def test_a_command_of_the_pages_parses(line: str, program: Any) -> None:
    words, command = shlex.split(line, comments=True)[1:], program
    context = command.make_context("d3engine", list(words))
    while hasattr(command, "get_command") and words and not words[0].startswith("-"):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"there is no command {name}"
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize(
    "line", [line for line in commands("d3engine") if line.split()[1] in ("schedule", "paper", "plan")]
)
def test_a_command_that_needs_no_model_runs(line: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:])
    assert result.exit_code == 0, result.output


ASKED = [line for line in commands("d3engine") if line.startswith("d3engine generate demo ")]


def test_a_question_to_the_bundled_model_gets_the_right_answer() -> None:
    """The questions of the pages add; so does this test, and the working must be what a person would write."""
    assert len(ASKED) >= 3
    for line in ASKED:
        words = shlex.split(line, comments=True)[1:]
        first, *others = map(int, re.findall(r"\d+", words[2]))
        totals = list(accumulate(others, initial=first))
        working = [
            f"Adding {more} makes {old} + {more} = {old + more}." for more, old in zip(others, totals, strict=False)
        ]
        answer = " ".join([*working, f"#### {totals[-1]}"])
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)["text"] if "--json" in words else result.stdout
        assert shown.strip() == answer, line


@pytest.mark.parametrize("depth", [FullDepth(), "auto", D3(alpha=0.9, start=0.6)], ids=["full", "own", "deeper"])
def test_prompt_in_the_python_of_pages_is_answered_right(depth: DepthPolicy | str) -> None:
    """A prompt in the Python of the pages gets the right answer."""
    trees = [ast.parse(block) for page in PAGES for block in RUNNABLE.findall(page.read_text())]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    prompts = sorted(text for text in texts if isinstance(text, str) and text.startswith("Question:"))
    assert prompts
    assert all(prompt.endswith("\nAnswer:") for prompt in prompts)
    with Engine("demo", depth=depth, device="cpu", kv_cache_memory_bytes=2**24) as engine:
        answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert extract_answer(answer.outputs[0].text) == sum(map(int, re.findall(r"\d+", prompt))), prompt


def test_every_test_that_a_page_names_exists() -> None:
    named = [name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())]
    assert len(named) >= 10
    missing = [(file, name) for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_the_table_of_policies_names_its_tests_and_every_policy() -> None:
    """Each number leads to a footnote with a test, each footnote is used, and no *yes* stands without one."""
    page = (DOCS / "reference" / "policies.md").read_text()
    lines = page.split("## Properties")[1].split("\n## ")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    notes = dict(re.findall(r"^(\d+)\. ((?:.|\n {4})+)", "\n".join(lines), re.MULTILINE))
    used = set(re.findall(r"\[(\d+)\]", " ".join(cell for row in [header, *rows] for cell in row)))
    assert used == set(notes)
    without_test = [number for number, text in notes.items() if "`tests/" not in text]
    assert [title for title in header if any(f"[{number}]" in title for number in without_test)] == ["CUDA graphs [11]"]
    assert len(without_test) == 1
    assert {len(row) for row in rows} == {len(header)}
    assert [cell for row in rows for cell in row if not cell.startswith(("yes", "no", "`"))] == []
    assert [cell for row in rows for cell in row if cell.startswith("yes") and "[" not in cell] == []
    classes = {re.findall(r"`(\w+)`", row[0])[0] for row in rows}
    assert {policy.__name__ for policy in POLICIES.values()} == classes | {"LayerTable"}
    listed = page.split("\n## ")[0]
    assert [name for name, policy in POLICIES.items() if f"| `{policy.__name__}(" not in listed] == []
    assert [name for name in POLICIES if name != "table" and f"`{name}` |" not in listed] == []


RUNS_A_MODEL = ("generate", "chat", "serve", "batch", "integrations")
KEEPS_ANSWERS = ("auto", "full", "lossless", "self-speculative", "draft-and-verify", "speculative", "lookup")


@pytest.mark.parametrize("line", [one for one in sorted(set(commands("d3engine"))) if one.split()[1] in RUNS_A_MODEL])
def test_commands_of_pages_skip_layers_of_the_bundled_model(line: str) -> None:
    """A command of the pages skips layers of no model but the bundled one."""
    # Tried on another model it gives that model's answers; bridges and students are made for a model.
    words = shlex.split(line, comments=True)
    depth = words[words.index("--depth") + 1] if "--depth" in words else "auto"
    is_bundled = not any(word in FETCHED or "path/to" in word or "owner/" in word for word in words)
    assert is_bundled or depth.split()[0] in KEEPS_ANSWERS or "bridges=" in depth or "distilled" in depth


def test_python_of_pages_skips_layers_of_the_bundled_model() -> None:
    """Python of pages and examples skips layers of no model but the bundled one."""
    files = [*PAGES, *(ROOT / "examples").glob("*.py")]
    exact = "FullDepth|Lossless|Speculative|SelfSpeculative|depth"
    engine = re.compile(rf"(?:Engine|LLM|from_pretrained)\((?!\s*\"demo\")[^()]*depth=(?!{exact})")
    assert [file.name for file in files if engine.search(file.read_text())] == []


def test_no_help_names_a_setting_of_d3(program: Any) -> None:
    """It would be typed for a model that breaks under it."""
    texts, waiting = [], [program]
    while waiting:
        command = waiting.pop()
        texts += [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
        if hasattr(command, "list_commands"):  # which are loaded one by one
            context = command.make_context(None, [], resilient_parsing=True)
            waiting += [command.get_command(context, name) for name in command.list_commands(context)]
    assert len(texts) > 500
    assert [text for text in texts if re.search(r"alpha[ =]0?\.\d", text)] == []


def test_a_command_that_does_not_exist_does_not_parse(program: Any) -> None:
    context = program.make_context("d3engine", ["generate", "--no-such-flag"])
    generate = program.get_command(context, "generate")
    with pytest.raises(Exception, match="no-such-flag"):
        generate.make_context("generate", ["--no-such-flag"], parent=context)


def test_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {line.split()[1] for line in commands("make")}
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_to_files_and_their_headings(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether the file of a link is there, and the heading that it names behind `#`."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists() or not anchor:
        return target.exists()
    return anchor in {anchor_of(heading) for heading in HEADING.findall(target.read_text())}


def anchor_of(heading: str) -> str:
    """As MkDocs makes it, and GitHub where no dash stands between spaces."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def layers_of_the_architecture() -> list[list[str]]:
    """The rows of its table of layers."""
    page = (DOCS / "explanation" / "architecture.md").read_text().split("| layer | what it knows |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [sorted(re.findall(r"`(\w+)`", cell)) for cell in cells]


def test_every_place_that_the_architecture_names_exists() -> None:
    names = [name for layer in layers_of_the_architecture() for name in layer]
    assert len(names) > 10
    places = [(ROOT / folder / name, ROOT / folder / f"{name}.py") for name in names for folder in ("d3engine", ".")]
    found = {path.stem for pair in places for path in pair if path.exists()}
    assert set(names) - found == set()
    page = (DOCS / "explanation" / "architecture.md").read_text()
    paths = re.findall(r"`((?:d3engine|depth|model|executor|scheduling|engine|kernels)/[\w/]+(?:\.py|/))`", page)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists() and not (ROOT / "d3engine" / path).exists()] == []


def test_the_reference_has_every_public_name() -> None:
    described = re.findall(r"^::: ([\w.]+)$", "\n".join(page.read_text() for page in REFERENCE), re.MULTILINE)
    public = {f"d3engine.{name}" for name in d3engine.__all__ if name != "__version__"}
    assert public - set(described) == set()


def test_the_architecture_has_the_layers_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert layers_of_the_architecture() == [sorted(layer.split(" | ")) for layer in contract["layers"]]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_lines_fit_a_narrow_screen_but_for_tables(page: Path) -> None:
    """A page can be read on a narrow screen where it is no table or command."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "![")) and "`tests/" not in line]
    assert [line for line in lines if len(line) > 120] == []
