"""`d3engine generate` on the bundled model: what goes to stdout and stderr, colours, the demo, refusals."""

import io
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from invoking import invoke, refused, succeed
from rich.console import Console

from benchmarks.lora import write_random_adapter
from d3engine.cli.answers import Answer, _raise_fault, readable_bytes, run_answers
from d3engine.cli.terminal import DepthColours, Writer, safe_text
from d3engine.depth import D3, EarlyExit, FullDepth, Lossless
from d3engine.depth.labels import policy_in_words
from d3engine.engine.call_lock import held_back
from d3engine.engine.engine import Engine
from d3engine.engine.model_directory import model_directory
from d3engine.errors import D3EngineError
from d3engine.request.outputs import CompletionOutput
from d3engine.request.params import SamplingParams
from d3engine.research.evaluation.word_problems import extract_answer, problems

PROMPT = "Question: Tom has 5 pens. Tom finds 3. Tom buys 2. How many pens does Tom have now?\nAnswer:"
D3_FLAGS = ["--depth", "d3 alpha=0.9 start=0.6"]
SMALL = ["--max-num-seqs", "4", "--kv-cache-memory-bytes", str(2**24), "--device", "cpu"]
COLOURS = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": None}


PLAIN = {"FORCE_COLOR": None, "COLORTERM": None}


def generate(*arguments: str, stdin: str | None = None, env: dict[str, Any] = PLAIN) -> Any:
    return succeed(["generate", *arguments, *SMALL], input=stdin, env=env)


def refusal(*arguments: str, **settings: Any) -> str:
    return refused(["generate", *arguments], **settings)


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine("demo", device="cpu", max_num_seqs=4, kv_cache_memory_bytes=2**24) as engine:
        yield engine


def answer_of(engine: Engine, prompt: str, **params: Any) -> CompletionOutput:
    return engine.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def test_stdout_gets_the_text_alone_and_stderr_the_summary(engine: Engine) -> None:
    expected = answer_of(engine, PROMPT, temperature=0, max_tokens=12, depth=D3(alpha=0.9, start=0.6))
    result = generate("demo", PROMPT, "--max-tokens", "12", *D3_FLAGS)
    assert result.stdout == expected.text + "\n"
    mean = sum(expected.depths) / 12
    assert re.search(rf"^12 tokens, {mean:.2f} of 16 layers per token, [\d.]+ tokens/s", result.stderr, re.M)
    assert "KV cache saved: " in result.stderr
    assert "KV cache saved: " not in generate("demo", PROMPT, "--max-tokens", "2", "--depth", "full").stderr


def test_generate_notes_an_unused_chat_template_on_stderr(tmp_path: Path, engine: Engine) -> None:
    """A chat template is not used, and stderr names the options that use it."""
    directory = shutil.copytree(model_directory("demo"), tmp_path / "a model")
    (directory / "prompt_form.json").unlink()
    expected = answer_of(engine, "Tom has", temperature=0, max_tokens=4).text
    shown = (
        "note: continued as plain text; --chat asks by the model's chat template, and d3engine chat"
        f" '{directory}' talks to it"
    )
    for options in ([], ["--json"]):
        result = generate(str(directory), "Tom has", "--max-tokens", "4", *options)
        assert (json.loads(result.stdout)["text"] if options else result.stdout.rstrip("\n")) == expected
        assert "".join(shown.split()) in "".join(result.stderr.split())  # however the terminal wraps it
    for quiet in ("--raw-prompt", "-q"):
        assert "chat template" not in generate(str(directory), "Tom has", "--max-tokens", "1", quiet).stderr
    (directory / "chat_template.jinja").unlink()
    assert "chat template" not in generate(str(directory), "Tom has", "--max-tokens", "1").stderr


def test_chat_asks_by_the_template(tmp_path: Path, engine: Engine) -> None:
    directory = shutil.copytree(model_directory("demo"), tmp_path / "model")
    (directory / "chat_template.jinja").write_text("Question: {{ messages[0].content }}\nAnswer:")
    expected = answer_of(engine, "Question: Tom has 5 pens.\nAnswer:", temperature=0, max_tokens=8).text
    result = generate(str(directory), "Tom has 5 pens.", "--chat", "--max-tokens", "8")
    assert result.stdout.rstrip("\n") == expected
    assert "note: continued" not in result.stderr
    whole = json.loads(generate(str(directory), "Tom has 5 pens.", "--chat", "--max-tokens", "8", "--json").stdout)
    assert (whole["prompt"], whole["text"]) == ("Tom has 5 pens.", expected)
    assert "--raw-prompt" in refusal(str(directory), "Tom", "--chat", "--raw-prompt")
    (directory / "chat_template.jinja").unlink()
    assert "--chat must be absent" in refusal(str(directory), "Tom", "--chat")
    (directory / "config.json").unlink()
    assert "config.json is missing" in refusal(str(directory), "Tom", "--chat")
    assert "--chat must be given with a prompt (d3engine chat demo" in refusal("demo", "--chat")


def test_stdin_and_a_file_are_prompts_too(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    texts = {
        generate("demo", PROMPT, "--max-tokens", "5").stdout,
        generate("demo", "-", "--max-tokens", "5", stdin=PROMPT + "\n").stdout,
        generate("demo", "--prompt-file", str(path), "--max-tokens", "5").stdout,
        generate("demo", "-", "--max-tokens", "5", stdin=f"\ufeff{PROMPT}\n").stdout,
    }
    assert len(texts) == 1


def test_generate_bare_question_is_asked_in_the_trained_form() -> None:
    """A bare question is asked in the form that the model was trained on, and stderr says so."""
    whole = generate("demo", PROMPT)
    assert extract_answer(whole.stdout) == 10
    assert "note: " not in whole.stderr
    for question in (PROMPT.removesuffix("\nAnswer:"), PROMPT[10:].removesuffix("\nAnswer:")):
        bare = generate("demo", question)
        assert bare.stdout == whole.stdout
        assert 'the form that the model was trained on, "Question: ...\\nAnswer:"; --raw-prompt' in bare.stderr
    report = json.loads(generate("demo", question, "--json", "--max-tokens", "2").stdout)
    assert report["prompt"] == PROMPT


def test_a_raw_prompt_is_asked_as_it_is(engine: Engine) -> None:
    bare = PROMPT.removesuffix("\nAnswer:")
    expected = answer_of(engine, bare, temperature=0, max_tokens=4)
    result = generate("demo", bare, "--raw-prompt", "--max-tokens", "4")
    assert result.stdout == expected.text + "\n"
    assert "note: " not in result.stderr


def test_a_draft_models_policy_is_not_said_to_be_certified() -> None:
    """What stderr says of d3.json is of the policy that is in it."""
    own, drafted = (
        generate("demo", PROMPT, "--max-tokens", "4", *more).stderr for more in ([], ["--draft-model", "demo"])
    )
    assert own.startswith("depth from d3.json: D3, alpha 0.8, start 0.6 (found safe for word-problems")
    assert "d3.json" not in drafted
    assert "tokens/s" in drafted


def test_several_prompts_and_answers_come_in_order_under_headers() -> None:
    sampling = ["--n", "2", "--temperature", "1", "--seed", "5", "--max-tokens", "3"]
    lines = generate("demo", PROMPT, "Question:", *sampling).stdout.splitlines()
    headers = [line for line in lines if line.startswith("[")]
    told = [f"[{prompt}/2, answer {answer} of 2" for prompt in (1, 2) for answer in (1, 2)]
    assert [header.split("]")[0] for header in headers] == told


def test_a_seed_repeats_what_was_drawn() -> None:
    drawn = [
        generate("demo", "Question:", "--temperature", "2", "--max-tokens", "8", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sampling_flags_reach_the_engine(engine: Engine) -> None:
    whole = answer_of(engine, PROMPT, temperature=0, max_tokens=40).text
    assert " = " in whole
    stopped = generate("demo", PROMPT, "--max-tokens", "40", "--stop", " = ", "--stop", "never").stdout
    assert stopped == whole.split(" = ")[0] + "\n"
    shown = generate("demo", PROMPT, "--max-tokens", "40", "--stop", " = ", "--include-stop-str-in-output").stdout
    assert shown == whole.split(" = ")[0] + " = \n"
    report = json.loads(generate("demo", PROMPT, "--max-tokens", "60", "--ignore-eos", "--json").stdout)
    assert (len(report["tokens"]), report["finish_reason"]) == (60, "length")


def test_an_adapter_answers_in_place_of_the_model(engine: Engine, tmp_path: Path) -> None:
    """Of a rank that a request could not bring."""
    write_random_adapter(tmp_path / "adapter", engine.config, rank=20, size=0.15)
    with Engine("demo", lora_modules={"own": str(tmp_path / "adapter")}, max_lora_rank=20) as other:
        params = SamplingParams(temperature=0, max_tokens=12, depth=FullDepth())
        wanted = other.generate(PROMPT, params, use_tqdm=False, lora_request="own")[0].outputs[0].text
    flags = ["--temperature", "0", "--max-tokens", "12", "--depth", "full", "--raw-prompt"]
    assert generate("demo", PROMPT, *flags, "--lora", str(tmp_path / "adapter")).stdout == wanted + "\n"
    assert generate("demo", PROMPT, *flags).stdout != wanted + "\n"
    assert refusal("demo", PROMPT, "--lora", str(tmp_path)) == f"error: {tmp_path / 'adapter_config.json'} is missing\n"


def test_json_holds_every_token_with_its_depth(engine: Engine) -> None:
    expected = answer_of(engine, PROMPT, temperature=0, max_tokens=9, depth=D3(alpha=0.9, start=0.6))
    report = json.loads(generate("demo", PROMPT, "--max-tokens", "9", "--json", *D3_FLAGS).stdout)
    assert [token["token_id"] for token in report["tokens"]] == expected.token_ids
    assert [token["depth"] for token in report["tokens"]] == expected.depths == [16, 14, 12, 11, 10, 9, 9, 9, 9]
    assert "".join(token["text"] for token in report["tokens"]) == report["text"] == expected.text
    assert report["mean_layers"] == pytest.approx(sum(expected.depths) / 9)
    assert (report["prompt"], report["num_layers"]) == (PROMPT, 16)


def test_generate_uncertified_depth_is_noted_unless_quiet() -> None:
    """A depth that was never certified is noted on stderr unless `-q` is given."""
    said = "D3, alpha 0.9, start 0.6 was never certified for this model"
    assert generate("demo", PROMPT, "--max-tokens", "2", *D3_FLAGS).stderr.count(said) == 1
    for flags in ([*D3_FLAGS, "-q"], [], ["--depth", "d3 alpha=0.8 start=0.6"], ["--depth", "full"]):
        assert "certified" not in generate("demo", PROMPT, "--max-tokens", "2", *flags).stderr


def test_a_depth_suffix_stands_behind_every_token() -> None:
    text = generate("demo", PROMPT, "--max-tokens", "6", "--depth-suffix", *D3_FLAGS).stdout
    plain = generate("demo", PROMPT, "--max-tokens", "6", *D3_FLAGS).stdout
    assert re.findall(r"\[(\d+)\]", text) == ["16", "14", "12", "11", "10", "9"]
    assert re.sub(r"\[\d+\]", "", text) == plain


def test_colour_changes_no_letter_and_has_a_legend() -> None:
    plain = generate("demo", PROMPT, "--max-tokens", "8", "--color-depth", *D3_FLAGS).stdout
    assert "\x1b" not in plain
    assert "layers run" not in plain
    coloured = generate("demo", PROMPT, "--max-tokens", "8", "--color-depth", *D3_FLAGS, env=COLOURS).stdout
    legend, text = coloured.split("\n", 1)
    assert without_colour(legend).split() == ["layers", "run:", "16", "14", "12", "11", "10", "9", "of", "16"]
    assert " " + without_colour(text) == plain
    assert len(set(re.findall(r"48;2;[\d;]+", text))) == 6  # one colour for each depth


def test_no_color_is_obeyed() -> None:
    env = {**COLOURS, "NO_COLOR": "1"}
    text = generate("demo", PROMPT, "--max-tokens", "8", "--color-depth", *D3_FLAGS, env=env).stdout
    assert " " + text == generate("demo", PROMPT, "--max-tokens", "8", *D3_FLAGS).stdout


@pytest.mark.parametrize("width", [30, 80, 200])
def test_the_legend_fits_its_line(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=width, no_color=False)
    DepthColours(range(40, 81), console).legend(80)
    shown = without_colour(console.file.getvalue())  # type: ignore[attr-defined]
    assert len(shown.rstrip("\n")) <= width
    assert " 80 " in shown
    assert " 40 " in shown


def test_letters_can_be_read_on_every_colour() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False)
    colours = DepthColours(range(1, 33), console)
    for depth in range(1, 33):
        style = colours.style(depth)
        assert style is not None
        assert style.color is not None
        assert style.bgcolor is not None
        light, dark = sorted((_luminance(style.color), _luminance(style.bgcolor)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # the contrast that WCAG 2 asks for


def _luminance(colour: Any) -> float:
    parts = [part / 255 for part in colour.get_truecolor()]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_that_could_steer_a_terminal_is_made_safe() -> None:
    assert safe_text("a\x1b[2Jb\x07\r\n\tc\x9bd\x7f\u202ee\u2066") == "a[2Jb\n\tcde"
    assert safe_text("äöü 日本 👩‍👩‍👧 é") == "äöü 日本 👩‍👩‍👧 é"


def test_a_terminal_gets_safe_text_and_a_pipe_gets_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    Writer(Console(file=terminal, force_terminal=True, no_color=True)).write("a\x1b[31mb\nc")
    assert terminal.getvalue() == "a[31mb\nc"
    Writer(Console(file=io.StringIO(), force_terminal=False)).write("a\x1b[31mb")
    assert capsys.readouterr().out == "a\x1b[31mb"


def test_writer_strips_the_leading_space_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer begins without its leading space on a terminal, and with it in a pipe."""
    answers = (" one two\n  three\n", "four")
    for is_terminal in (True, False):
        terminal = io.StringIO()
        writer = Writer(Console(file=terminal, force_terminal=is_terminal, no_color=True))
        for answer in answers:
            for character in answer:
                writer.write(character)
            writer.end_line()
        if is_terminal:
            assert terminal.getvalue() == "one two\n  three\n\nfour\n"
        else:
            assert capsys.readouterr().out == " one two\n  three\nfour"


def test_wrapped_text_keeps_to_the_width_and_loses_no_word() -> None:
    terminal = io.StringIO()
    writer = Writer(Console(file=terminal, force_terminal=True, width=20, no_color=True), wrap=True, indent="  ")
    writer.write_words("one two three four five six seven eight nine ten")
    lines = terminal.getvalue().splitlines()
    assert all(len(line) <= 20 and line.startswith("  ") for line in lines)
    assert " ".join(terminal.getvalue().split()) == "one two three four five six seven eight nine ten"


def test_writer_indents_a_wrapped_answer_with_or_without_space() -> None:
    """A wrapped answer begins at the indent whether or not its text begins with a space."""
    for answer in (" one two", "one two"):
        written = io.StringIO()
        writer = Writer(Console(file=written), wrap=True, indent="  ")
        writer.write(answer[:4])
        writer.write(answer[4:])
        assert written.getvalue() == "  one two"


def test_the_demo_answers_a_held_out_problem_twice_and_checks_it() -> None:
    result = generate("--problem-seed", "1", env={"NO_COLOR": "1"})
    problem = next(problems("test", 1))
    assert problem.question in " ".join(result.stdout.split())
    verdicts = re.findall(rf"(RIGHT|WRONG), it is {problem.answer}", result.stdout)
    assert len(verdicts) == 2
    assert "Full depth: every token runs all 16 layers." in result.stdout
    assert "16.00 of 16 layers per token" in result.stdout
    assert "fewer layers per token" in result.stdout
    told = " ".join(result.stdout.split())
    speed, turns = r"(as fast|[\d.]+x (faster|slower))", r"\((median of \d turns|one turn each)\)"
    assert re.search(rf"at its end, and was {speed} {turns}; from its second token on, {speed}\.", told)


def test_the_demo_in_json_says_whether_the_answers_are_right() -> None:
    reports = [json.loads(line) for line in generate("demo", "--json", *D3_FLAGS).stdout.splitlines()]
    answer = next(problems("test", 0)).answer
    assert [report["depth"]["policy"] for report in reports] == ["full", "d3"]
    for report in reports:
        assert report["answer"] == answer
        assert report["right"] == (extract_answer(report["text"]) == answer)
    assert reports[0]["kv_bytes_saved"] == 0 < reports[1]["kv_bytes_saved"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "1"], "^1 token, .*, cut at the length limit$"),
        (["--max-tokens", "5", "--n", "2", "--temperature", "1"], "^10 tokens, .*, 2 of 2 answers cut at the length"),
        (["--max-tokens", "12", "--stop", "1"], "^[0-9]+ tokens, (?!.*cut at)"),
    ],
)
def test_the_summary_says_which_answers_their_length_has_ended(arguments: list[str], words: str) -> None:
    assert re.search(words, generate("demo", "Ana has 9 cups. 1 2 1 2", *arguments).stderr, re.M)


def test_the_demo_at_full_depth_alone_answers_once() -> None:
    text = generate("demo", "--depth", "full", "--max-tokens", "4").stdout
    assert text.count("layers per token") == 1
    assert "no answer was given" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hello world"], "the prompt comes after it"),
        (["demo", "x", "--problem-seed", "1"], "--problem-seed"),
        (["", "x"], "model must be 'demo'"),
        (["demo", "--n", "2"], "--n"),
        (["demo", "x", "--temperature", "-1"], "--temperature"),
        (["demo", "x", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "x", "--dtype", "int3"], "--dtype"),
        (["demo", "x", "--max-model-len", "99999"], "--max-model-len"),
        (["demo", "x", "--admission-interval", "0"], "--admission-interval"),
        (["demo", "x", "--alpha", "0.9"], "--alpha"),
        (["demo", "x", "--depth-suffix", "--color-depth"], "--depth-suffix"),
        (["demo", "--prompt-file", "/does/not/exist"], "--prompt-file"),
        (["demo", "-", "-"], "stdin"),
        (["demo", "word " * 2000], "prompt"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    last = refusal(*arguments, input="").splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_tokens_joined_are_the_text_however_it_is_cut(engine: Engine) -> None:
    for stop in (None, " = ", "makes 5", "."):
        params = SamplingParams(temperature=0, max_tokens=20, stop=stop)
        shown: list[str] = []
        run_ = run_answers(engine, [PROMPT], params, lambda answer, to=shown: to.extend(t.text for t in answer.take()))
        answer = run_.answers[0]
        assert "".join(shown) == answer.text == "".join(token.text for token in answer.tokens())
        assert answer.text == answer_of(engine, PROMPT, temperature=0, max_tokens=20, stop=stop).text
        assert [token.depth for token in answer.tokens()] == answer.depths


def test_run_answers_hands_over_new_tokens_alone_each_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step hands over its new tokens, and leaves those before them alone."""
    held: list[int] = []
    step = engine.step

    def spy(**how: bool) -> Any:
        outputs = step(**how)
        held.extend(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return outputs

    monkeypatch.setattr(engine, "step", spy)
    monkeypatch.setattr(Answer, "tokens", None)  # goes through all there is
    shown: list[str] = []
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    run_ = run_answers(engine, [PROMPT], params, lambda answer: shown.extend(t.text for t in answer.take()))
    assert len(run_.depths) == 30
    assert held == [1] * 30
    assert "".join(shown) == run_.answers[0].text


def test_run_answers_ctrl_c_ends_an_answer_after_its_step(engine: Engine) -> None:
    """Ctrl-C ends an answer after its step, and the engine goes on."""

    def interrupt(answer: Answer) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    cut = run_answers(engine, [PROMPT], SamplingParams(temperature=0, max_tokens=20), interrupt)
    assert cut.interrupted
    assert len(cut.depths) == 1
    assert cut.summary().startswith("interrupted, 1 token,")
    assert signal.getsignal(signal.SIGINT) is before
    assert not engine.has_unfinished_requests()
    assert len(answer_of(engine, PROMPT, temperature=0, max_tokens=3).token_ids) == 3


def test_ctrl_c_ends_the_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from d3engine.cli import answers

    take = answers.Answer.take

    def take_and_interrupt(answer: Answer) -> Any:
        signal.raise_signal(signal.SIGINT)
        return take(answer)

    monkeypatch.setattr(answers.Answer, "take", take_and_interrupt)
    result = invoke(["generate", "demo", PROMPT, *SMALL])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("interrupted, 1 token,")
    assert result.stdout.endswith("\n")


def test_run_answers_time_limit_ends_an_answer_after_its_step(engine: Engine) -> None:
    """A time limit ends an answer after its step, and the engine goes on."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    try:
        params = SamplingParams(temperature=0, max_tokens=20)
        with pytest.raises(TimeoutError):
            run_answers(engine, [PROMPT], params, lambda answer: signal.raise_signal(signal.SIGALRM))
    finally:
        assert signal.signal(signal.SIGALRM, before) is late
    assert not engine.has_unfinished_requests()
    assert len(answer_of(engine, PROMPT, temperature=0, max_tokens=3).token_ids) == 3


def test_a_second_ctrl_c_does_not_wait() -> None:
    with held_back() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.seen
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupt.forget_ctrl_c()


def test_a_fault_of_an_answer_is_told(engine: Engine) -> None:
    answer = Answer("prompt-0", 0, engine.tokenizer, True)
    answer.update(CompletionOutput(0, "", [], None, None, "abort", "ValueError: bad", []), [])
    with pytest.raises(D3EngineError, match="bad"):
        _raise_fault(answer)


def test_policies_have_short_titles() -> None:
    assert policy_in_words(FullDepth()) == "Full depth"
    assert policy_in_words(D3(alpha=0.9, start=0.6)) == "D3, alpha 0.9, start 0.6"
    assert policy_in_words(D3(alpha=0.9, start=0.6, tail=2)) == "D3, alpha 0.9, start 0.6, tail 2"
    assert policy_in_words(EarlyExit(0.9, "cosine", every=2)) == "Early exit, threshold 0.9, confidence cosine, every 2"
    assert policy_in_words(Lossless(D3(0.9, 0.6), 8)) == "Lossless D3, draft (D3, alpha 0.9, start 0.6), draft length 8"
    title = policy_in_words(D3(0.8, 0.5, bridges="/a" * 40 + "/b.safetensors"))
    path = title.removeprefix("D3, alpha 0.8, start 0.5, bridges ")
    assert path.startswith("... ")
    assert path.endswith("/a/b.safetensors")
    assert len(path) == 60


def test_bytes_are_readable() -> None:
    told = {0: "0 bytes", 1023: "1023 bytes", 2048: "2.0 KiB", 3 * 2**20: "3.0 MiB", 5 * 2**30: "5.0 GiB"}
    assert {count: readable_bytes(count) for count in told} == told
