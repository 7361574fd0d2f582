"""GSM8K and BBH read from files: prompts, examples, splits and the rules for an answer."""

import json
from pathlib import Path

import pytest

from d3engine.errors import D3EngineError, InvalidValueError
from d3engine.research.evaluation.bbh import load_bbh
from d3engine.research.evaluation.catalogue import are_generated, depth_questions, from_files, generated, harness_length
from d3engine.research.evaluation.gsm8k import final_number, load_gsm8k
from d3engine.research.evaluation.word_problems import Split

OWN_PROMPT = """BENCHMARK DATA
-----
Do what is asked.

Q: Which is first?
Options:
(A) one
A: Let's think step by step.
One comes first. So the answer is (A).

Q: Is 1 + 1 = 2?
A: Let's think step by step.
It is. So the answer is hidden. No: 1 + 1 = 2. So the answer is yes.

Q: Sort: b a
A: Let's think step by step.
So the answer is a b."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of the data sets, with a few items of our own."""
    root = tmp_path_factory.mktemp("data")
    (root / "gsm8k").mkdir()
    (root / "bbh" / "cot-prompts").mkdir(parents=True)
    for name, count in (("train", 31), ("test", 5)):
        lines = [{"question": f"{name} {i}?", "answer": f"It is {i}.\n#### {1000 + i:,}"} for i in range(count)]
        (root / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for task in ("colours", "sorting"):
        examples = [{"input": f"{task} {i}", "target": f"({'AB'[i % 2]})"} for i in range(4)]
        (root / "bbh" / f"{task}.json").write_text(json.dumps({"canary": "c", "examples": examples}))
        (root / "bbh" / "cot-prompts" / f"{task}.txt").write_text(OWN_PROMPT)
    return root


def test_a_gsm8k_prompt_is_examples_and_then_the_question(folder: Path) -> None:
    benchmark = load_gsm8k(folder, split="test", shots=3, seed=0)
    assert len(benchmark.questions) == 5
    for number, question in enumerate(benchmark.questions):
        *examples, last = question.prompt.split("\n\n")
        assert last == f"Question: test {number}?\nAnswer:"
        assert len(set(examples)) == 3
        for example in examples:
            asked, answer = example.removeprefix("Question: train ").split("?\nAnswer: ")
            assert answer == f"It is {asked}.\n#### {1000 + int(asked):,}"
            assert int(asked) % 10, "an example of the validation split"
    assert len({question.prompt.rpartition("\n\n")[0] for question in benchmark.questions}) > 1
    assert (benchmark.max_tokens, "Question:" in benchmark.stop) == (1024, True)


def test_gsm8k_examples_follow_the_seed_without_the_question(folder: Path) -> None:
    """GSM8K examples follow the seed and never are the question."""

    def prompts(seed: int, split: Split = "test", shots: int = 3) -> list[str]:
        benchmark = load_gsm8k(folder, split=split, shots=shots, seed=seed)
        return [question.prompt for question in benchmark.questions]

    assert prompts(0) == prompts(0) != prompts(1)
    for prompt in prompts(0, split="train", shots=20):
        *examples, last = prompt.split("\n\n")
        assert len(examples) == 20
        assert not any(example.startswith(last) for example in examples)


def test_gsm8k_validation_split_is_each_tenth_training_line(folder: Path) -> None:
    """The validation split of GSM8K is every tenth training line."""
    benchmark = load_gsm8k(folder, split="validation", shots=0, seed=0, limit=3)
    assert [one.prompt for one in benchmark.questions] == [f"Question: train {i}?\nAnswer:" for i in (0, 10, 20)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 1,234", "1234"),
        ("#### -5. Question", "-5"),
        ("#### 7 and #### 8", "7"),
        ("#### 2.50", "2.50"),
        ("####7", None),
        ("The answer is 7", None),
    ],
)
def test_the_number_of_an_answer_is_what_follows_the_first_mark(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_an_answer_to_gsm8k_is_right_by_its_number_alone(folder: Path) -> None:
    question = load_gsm8k(folder, split="test", shots=0, seed=0).questions[2]
    assert question.is_right(" Another way. #### 1002")
    assert question.is_right("#### 1,002.")
    assert not question.is_right("#### 1003")
    assert not question.is_right("1002")


def test_bbh_prompt_has_the_examples_without_their_thought(folder: Path) -> None:
    """A BBH prompt has the published examples without their thought."""
    benchmark = load_bbh(folder, split="test", shots=3, tasks=["sorting"])
    assert benchmark.questions[1].prompt == (
        "Do what is asked.\n\nQ: Which is first?\nOptions:\n(A) one\nA: (A)\n\nQ: Is 1 + 1 = 2?\nA: yes\n\n"
        "Q: Sort: b a\nA: a b\n\nQ: sorting 1\nA:"
    )
    assert benchmark.questions[1].is_right(" (B) ")
    assert not benchmark.questions[1].is_right(" (B) is it")


def test_bbh_without_names_is_all_tasks_scored_by_task(folder: Path) -> None:
    """BBH without names is all its tasks, and scores are cut by task."""
    benchmark = load_bbh(folder, split="test", shots=1, limit=2)
    assert list(benchmark.tasks) == ["colours", "sorting"]
    assert [question.prompt[-13:-3] for question in benchmark.questions] == [
        f"{task} {i}"[-10:] for task in (": colours", ": sorting") for i in range(2)
    ]
    assert benchmark.by_task([True, False, True, True]) == {"colours": (True, False), "sorting": (True, True)}


def test_names_become_benchmarks_in_their_order(folder: Path) -> None:
    found = from_files(["bbh/sorting", "gsm8k"], folder, split="test", seed=0, limit=2, shots=None)
    assert [(benchmark.name, list(benchmark.tasks)) for benchmark in found] == [
        ("bbh", ["sorting"]),
        ("gsm8k", ["gsm8k"]),
    ]
    assert all(len(benchmark.questions) == 2 for benchmark in found)
    assert found[1].questions[0].prompt.count("Question:") == 4
    (own,) = generated(["word-sorting"], split="test", seed=0, limit=None, shots=None)
    assert len(own.questions) == 500
    assert are_generated(["word-sorting", "word-problems"])
    assert not are_generated(["arc_easy"])


def test_what_the_files_do_not_have_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    given = {"split": "test", "seed": 0, "limit": None, "shots": None}
    for names, where, message in (
        (["poetry"], folder, "--tasks"),
        (["bbh/poetry"], folder, "bbh/poetry"),
        (["bbh", "bbh/sorting"], folder, "--tasks"),
        (["gsm8k"], folder / "nowhere", "--data"),
        (["bbh"], tmp_path, "--data"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            from_files(names, where, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="--split"):
        load_bbh(folder, split="validation", shots=3)
    with pytest.raises(InvalidValueError, match="num-fewshot"):
        load_bbh(folder, split="test", shots=4)
    with pytest.raises(InvalidValueError, match="--tasks"):
        are_generated(["word-sorting", "arc_easy"])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text('{"question": "no answer"}\n')
    with pytest.raises(D3EngineError, match=r"train\.jsonl"):
        load_gsm8k(tmp_path, split="train", shots=0, seed=0)
    (tmp_path / "bbh" / "cot-prompts").mkdir(parents=True)
    (tmp_path / "bbh" / "task.json").write_text("[]")
    prompt = tmp_path / "bbh" / "cot-prompts" / "task.txt"
    for text in ("no rule", "-----\nTask\n\nQ: a\nA: no thought"):
        prompt.write_text(text)
        with pytest.raises(D3EngineError, match=r"task\.txt"):
            load_bbh(tmp_path, split="test", shots=1)
    prompt.write_text(OWN_PROMPT)
    with pytest.raises(D3EngineError, match=r"task\.json"):
        load_bbh(tmp_path, split="test", shots=1)


def test_published_files_have_three_examples_and_right_answers(shared_data: Path) -> None:
    """The published files have three examples, and answers that are right."""
    bbh = load_bbh(shared_data, split="test", shots=3)
    assert len(bbh.tasks) == 27
    assert len(bbh.questions) == 6511
    for task, questions in bbh.tasks.items():
        _, *examples, last = questions[0].prompt.split("\n\nQ: ")
        assert len(examples) == 3, task
        assert all("step by step" not in example and len(example.split("\nA: ")[1]) < 100 for example in examples), task
        assert last.endswith("\nA:")
    gsm8k = load_gsm8k(shared_data, split="test", shots=3, seed=0)
    assert len(gsm8k.questions) == 1319
    assert len(load_gsm8k(shared_data, split="validation", shots=0, seed=0).questions) == 748
    with (shared_data / "gsm8k" / "test.jsonl").open() as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    assert all(question.is_right(f" {answer}") for question, answer in zip(gsm8k.questions, answers, strict=True))
    assert not any(gsm8k.questions[0].is_right(answer) for answer in answers[1:10])


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("gsm8k", 1024), ("gsm8k_cot", 1024), ("bbh_fewshot", 200), ("bbh", 200), ("bbhx", 7), ("arc_easy", 7)],
)
def test_answers_to_the_papers_tasks_have_its_lengths(name: str, tokens: int) -> None:
    """Answers to the paper's tasks have its lengths in the harness too."""
    assert harness_length(name, otherwise=7) == tokens


def test_depth_is_set_by_validation_questions_and_each_bbh_task(folder: Path) -> None:
    """A depth is set by validation questions, and for BBH by some of each task."""
    (gsm8k,) = from_files(["gsm8k"], folder, split="test", seed=0, limit=None, shots=1)
    found = depth_questions(gsm8k, folder, seed=0, shots=1, most=2)
    assert [question.prompt.split("\n\n")[-1] for question in found] == [
        "Question: train 0?\nAnswer:",
        "Question: train 10?\nAnswer:",
    ]
    (bbh,) = from_files(["bbh"], folder, split="test", seed=0, limit=None, shots=1)
    assert depth_questions(bbh, folder, seed=0, shots=1, most=4) == bbh.questions[::2]
    assert depth_questions(bbh, folder, seed=0, shots=1, most=None) == bbh.questions, "no more than are asked"
    (words,) = generated(["word-problems"], split="test", seed=0, limit=3, shots=None)
    own = depth_questions(words, None, seed=0, shots=None, most=5)
    assert len(own) == 5
    assert not {one.prompt for one in own} & {one.prompt for one in words.questions}
