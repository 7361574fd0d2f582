"""Students: generated tokens run other weights than their prompts, and are those of a slow oracle that does so with
transformers' own layers over one cache, alone and in a batch with everything else."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import MakeEngine, MakeLlama
from gguf_files import SMALL, bpe_keys, write_gguf
from kinds_of_engine import maker
from peft_adapters import ADAPTERS, save_adapter
from stepping import greedy
from trained_students import LAYERS, NARROW, SIZE, SKIPPED, TOKENS, WIDTHS, Trained
from transformers_oracle import assert_answers

from d3engine import Distilled, Engine, FullDepth, SamplingParams, SelfSpeculative, Width
from d3engine.depth import DepthPolicy, policy_from_dict
from d3engine.engine import resolve
from d3engine.engine.executors import build_executor
from d3engine.errors import InvalidValueError, ModelFormatError
from d3engine.executor import bridging
from d3engine.executor.bridging import BridgeStore
from d3engine.kernels.blocks import BlockLanesWeight, BlockWeight, quantize_blocks
from d3engine.kernels.quantized import Int8Weight
from d3engine.model.config import ModelConfig
from d3engine.model.expected_tensors import fingerprint
from d3engine.model.students import NEURONS, STUDENT_FILE, Student, read_student, write_student
from d3engine.model.weights import load_weights, quantize_weights


@pytest.fixture(scope="module")
def made(tiny_llama: MakeLlama, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    tiny = tiny_llama(num_hidden_layers=LAYERS, hidden_size=SIZE, intermediate_size=48)
    return Trained(tiny, tmp_path_factory.mktemp("students") / "model")


@pytest.fixture(scope="module")
def make_engine(made: Trained) -> MakeEngine:
    return maker(made.directory, max_model_len=64)


def asked(policy: DepthPolicy, max_tokens: int = TOKENS, **changes: Any) -> SamplingParams:
    return greedy(max_tokens, depth=policy, **changes)


POLICY = Distilled(SKIPPED)
PROMPTS = [[37 * (nth + place) % 300 for place in range(2 + 3 * nth)] for nth in range(5)]


def test_a_batch_equals_the_oracle(made: Trained, make_engine: MakeEngine) -> None:
    wanted = [made.answer(prompt) for prompt in PROMPTS]
    plain = [made.on_ladder(one, lambda step: None) for one in PROMPTS]
    assert all(one.token_ids != other.token_ids for one, other in zip(wanted, plain, strict=True))
    for enforce_eager in (True, False):
        with make_engine(enforce_eager=enforce_eager) as engine:
            outputs = engine.generate(PROMPTS, asked(POLICY), use_tqdm=False)
            if not enforce_eager and engine.stats().backend == "native":
                assert engine.stats().eager_steps == 0
        assert_answers(outputs, wanted, tie=1e-3)


ALPHA, STEPS = 0.95, (3, 6, 9)


def by_formula(step: int) -> int | None:
    """The widest student within alpha ** step, or the narrowest; the model itself is wider than any step's width."""
    return next((nth for nth, width in enumerate(WIDTHS) if width <= ALPHA**step), len(WIDTHS) - 1)


def by_table(step: int) -> int | None:
    return {3: 0, 4: 0, 5: 0, 6: 1, 7: 1, 8: 1}.get(step, None if step < 3 else 2)


def test_rows_of_different_levels_each_equal_the_oracle(made: Trained, make_engine: MakeEngine) -> None:
    """Rows of two ladders, of a student and of full depth share steps, and each goes on as the oracle does."""
    assert [by_formula(step) for step in range(1, 8)] == [0, 1, 1, 1, 1, 2, 2]
    ladder, table = Width(made.ladder, ALPHA, WIDTHS), Width(made.ladder, steps=STEPS)
    wanted = [made.on_ladder(PROMPTS[nth], rule) for nth, rule in ((0, by_formula), (1, by_table), (4, by_formula))]
    plain = [made.on_ladder(one, lambda step: None) for one in PROMPTS]
    assert wanted[1].token_ids[:3] == plain[1].token_ids[:3], "steps before the first student are full depth's"
    assert all(one.token_ids != other.token_ids for one, other in zip(wanted, plain[:2] + plain[4:], strict=True))
    every = [wanted[0], wanted[1], plain[2], made.answer(PROMPTS[3]), wanted[2]]
    params = [asked(policy) for policy in (ladder, table, FullDepth(), POLICY, ladder)]
    for enforce_eager in (True, False):
        with make_engine(enforce_eager=enforce_eager, depth=ladder) as engine:
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            if not enforce_eager and engine.stats().backend == "native":
                assert engine.stats().eager_steps == 0
        assert_answers(outputs, every, tie=1e-3)


@pytest.mark.usefixtures("native_library")
def test_a_run_of_steps_ends_where_a_row_changes_its_student(
    made: Trained, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of several steps keep their weights, before the first student too, and answers are the oracle's."""
    table, runs = Width(made.ladder, steps=STEPS), list[tuple[int, int]]()
    with make_engine(depth=table) as engine:
        executor: Any = engine.executor
        run = executor.run

        def watched(plan: Any) -> Any:
            runs.append((int(plan.steps[0]), plan.num_steps))
            return run(plan)

        monkeypatch.setattr(executor, "run", watched)
        (output,) = engine.generate(PROMPTS[1], asked(table), use_tqdm=False)
        attention = sum(one.numel() for one in made.teacher.model.layers[0].self_attn.parameters())  # of the one block
        assert engine.stats().student_bytes == 4 * (3 * SIZE * round(288 * sum(WIDTHS)) + attention)
    assert_answers([output], [made.on_ladder(PROMPTS[1], by_table)], tie=1e-3)
    assert runs == [(-1, 3), (3, 3), (6, 3), (9, 5)]  # the first opens with the prompt, behind which steps 1 and 2 run


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("is_ladder", [False, True], ids=["without layers", "narrower and narrower"])
def test_students_draft_what_full_depth_answers(made: Trained, make_engine: MakeEngine, is_ladder: bool) -> None:
    """Tokens and log-probabilities are full depth's to the bit; drafts by its own weights would all be accepted."""
    drafting = SelfSpeculative(Width(made.ladder, steps=STEPS) if is_ladder else POLICY, 3)
    with make_engine(depth=drafting) as engine:
        drafted, plain = (
            engine.generate(PROMPTS, asked(policy, logprobs=2), use_tqdm=False) for policy in (drafting, FullDepth())
        )
        stats = engine.stats()
    found, wanted = ([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in part] for part in (drafted, plain))
    assert found == wanted
    assert (0 < (stats.acceptance_rate or 0) < 1, stats.eager_steps) == (True, 0)


def test_adapters_are_refused_beside_students_that_draft(
    made: Trained, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """A student's layers may have fewer neurons than an adapter has rows for, also where it drafts alone."""
    save_adapter(made.directory, tmp_path / "some", 0, **ADAPTERS["all"])
    with make_engine(lora_modules={"some": str(tmp_path / "some")}) as engine:
        for policy in (POLICY, SelfSpeculative(POLICY)):
            with pytest.raises(InvalidValueError, match="lora_request must be None beside a student"):
                engine.generate([[1, 2]], asked(policy), lora_request="some", use_tqdm=False)


def test_a_ladder_saves_what_its_steps_save(made: Trained, make_engine: MakeEngine) -> None:
    """Layers' worth saved are those of each step's student, and a width that is not the file's is refused."""
    ladder = Width(made.ladder, steps=STEPS)
    with make_engine(depth=ladder) as engine:
        layer = engine.config.layer_parameters
        saved = [3 * SIZE * (288 - round(288 * width)) / layer for width in WIDTHS]
        found = engine.bridges.students_save(ladder, 11)
        assert found == pytest.approx(3 * saved[0] + 3 * saved[1] + 2 * saved[2])
        assert engine.bridges.students_save(ladder, 3) == engine.bridges.students_save(FullDepth(), 9) == 0
        other = Width(made.ladder, ALPHA, (0.9, 0.7, 0.4))
        with pytest.raises(InvalidValueError, match=r"widths must be the width of .*level-0.*, 0.917; got 0.9"):
            engine.generate([1, 2], asked(other), use_tqdm=False)
        with pytest.raises(InvalidValueError, match="skip_layers"):
            engine.generate([1, 2], asked(Width(made.ladder, steps=STEPS, skip_layers=[2])), use_tqdm=False)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "native if it is there"])
def test_a_streamed_answer_is_that_of_generate(make_engine: MakeEngine, enforce_eager: bool) -> None:
    with make_engine(enforce_eager=enforce_eager) as engine:
        (whole,) = engine.generate(PROMPTS[1], asked(POLICY), use_tqdm=False)
        streamed = [out.outputs[0].token_ids for out in engine.stream(PROMPTS[1], asked(POLICY))]
        (plain,) = engine.generate(PROMPTS[1], asked(FullDepth()), use_tqdm=False)
    assert streamed[-1] == whole.outputs[0].token_ids != plain.outputs[0].token_ids


@pytest.mark.usefixtures("native_library")
def test_a_students_run_ends_before_other_weights_run(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would write on into the blocks of an aborted request, which another may have by then."""
    followed: list[Any] = []
    with make_engine() as engine:
        executor: Any = engine.executor
        for name in ("one", "other"):
            engine.add_request(name, PROMPTS[1], asked(POLICY))
        while not (made := executor._students.made()) or made[0][1]._followed is None:
            engine.step()
        ((_, student),) = made
        for name in ("_run", "run_share"):  # of rows that all run the model's own weights, and of some that do
            run = getattr(executor, name)
            watched = partial(lambda run, plan: followed.append(student._followed) or run(plan), run)
            monkeypatch.setattr(executor, name, watched)
        engine.abort_request("one")
        engine.add_request("plain", PROMPTS[2], asked(FullDepth()))
        while not followed and engine.has_unfinished_requests():
            engine.step()
    assert followed[0] is None


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("executor", ["eager", "graphs", "native"])
def test_no_request_waits_for_the_engines_own_student(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """The engine's own student is there when it opens, and counts in the largest step; others are made when asked."""
    monkeypatch.setattr(resolve, "executor_for", lambda *given: executor)
    bytes_of = []
    for policy in (POLICY, FullDepth()):
        with make_engine(depth=policy) as engine:
            at_first = engine.stats().student_bytes
            if executor != "native":  # whose memory is no device's
                trial = build_executor(engine.settings, engine.executor.model.weights, 8, bridges=engine.bridges)
                trial.take_largest()
                assert trial.stats.student_bytes == at_first
            engine.generate(PROMPTS, asked(POLICY), use_tqdm=False)
            bytes_of.append((at_first, engine.stats().student_bytes))
    whole = bytes_of[0][0]
    assert whole > 0
    assert bytes_of == [(whole, whole), (0, whole)]


def test_a_gpus_weights_are_not_loaded_again_for_a_student(made: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_directory(made.directory)
    kind = {"dtype": torch.float32, "weight_dtype": torch.float32}
    own = quantize_weights(load_weights(made.directory, config, dtype=torch.float32, device="cpu"), "int8")
    store = BridgeStore(made.directory, config, **kind, device=torch.device("cuda"), allowed=frozenset({"auto"}))
    store.check(POLICY.schedule(LAYERS))
    monkeypatch.setattr(bridging, "load_weights", None)
    found = store.student_weights("auto", own).layers[0].gate_up
    assert isinstance(found, Int8Weight)
    assert found.shape[0] == 2 * NARROW[0]


def test_skipped_layers_give_back_their_memory(make_engine: MakeEngine) -> None:
    with make_engine() as engine:
        engine.generate(PROMPTS[1], asked(POLICY), use_tqdm=False)
        assert engine.stats().kv_bytes_saved_at_end > 0


def test_the_file_comes_back_as_it_was_and_others_are_refused(made: Trained, tmp_path: Path) -> None:
    config = ModelConfig.from_directory(made.directory)
    found = read_student(made.directory / STUDENT_FILE, config)
    assert (found.fingerprint, found.skip_layers, found.about) == (
        made.student.fingerprint,
        SKIPPED,
        {"made": "by hand"},
    )
    for number, tensors in made.student.layers.items():
        assert all(torch.equal(found.layers[number][name], tensor) for name, tensor in tensors.items())
    path = tmp_path / "other.safetensors"
    bad: list[tuple[str, dict[int, dict[str, torch.Tensor]]]] = [
        ("has shape", {0: {"down": torch.zeros(SIZE, 47)}}),
        ("not finite", {0: {"down": torch.full((SIZE, 48), torch.nan)}}),
        ("ascending neurons", {0: {NEURONS: torch.tensor([3, 2]), "down": torch.zeros(SIZE, 2)}}),
        ("no layer that runs", {3: {"down": torch.zeros(SIZE, 48)}}),
        ("is none of", {0: {"gate": torch.zeros(SIZE, 48)}}),
    ]
    for words, layers in bad:
        write_student(replace(made.student, layers=layers), path)
        with pytest.raises(ModelFormatError, match=words):
            read_student(path, config)


def test_what_a_policy_names_must_be_its_own(made: Trained, make_engine: MakeEngine, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    write_student(replace(made.student, fingerprint="of another model"), other)
    with make_engine() as engine:
        with pytest.raises(InvalidValueError, match=r"skip_layers.*trained without, \[3, 4\]"):
            engine.generate([1, 2], asked(Distilled([3])), use_tqdm=False)
        with pytest.raises(InvalidValueError, match="what the engine's own policy names"):
            engine.generate([1, 2], asked(Distilled(SKIPPED, str(other))), use_tqdm=False)
        with pytest.raises(InvalidValueError, match="what the engine's own policy names"):
            engine.generate([1, 2], asked(SelfSpeculative(Distilled(SKIPPED, str(other)))), use_tqdm=False)
    for file, words in ((other, "trained for these weights"), (tmp_path / "none", "student must be .* is missing")):
        with pytest.raises(InvalidValueError, match=words):
            make_engine(depth=Distilled(SKIPPED, str(file)))


def test_auto_takes_the_certified_student_beside_the_weights(made: Trained, make_engine: MakeEngine) -> None:
    from hashlib import sha256

    content = (made.directory / STUDENT_FILE).read_bytes()
    described = POLICY.describe()
    assert policy_from_dict(described) == POLICY
    path = made.directory / "d3.json"
    fields = {"depth": described, "fingerprint": fingerprint(made.directory), "task": "some"}
    try:
        path.write_text(json.dumps({**fields, "student": {"sha256": sha256(content).hexdigest()}}))
        with make_engine(depth="auto") as engine:
            assert engine.depth == POLICY
            (output,) = engine.generate(PROMPTS[2], asked(None), use_tqdm=False)  # type: ignore[arg-type]
        assert_answers([output], [made.answer(PROMPTS[2])], tie=1e-3)
        path.write_text(json.dumps({**fields, "student": {"sha256": "0" * 64}}))
        with pytest.raises(ModelFormatError, match="another student"):
            make_engine(depth="auto")
        path.write_text(json.dumps({**fields, "depth": {**described, "student": "/etc/passwd"}}))
        with pytest.raises(ModelFormatError, match='must be "auto"'):
            make_engine(depth="auto")
    finally:
        path.unlink()


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0"])
def test_quantized_rows_of_a_student_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    """Rows of a quantized file stay, and answers are those of all its neurons."""
    # A student of which every neuron stays, with the file's own down matrix, answers as the model does.
    sizes = {**SMALL, "types": (kind,), "intermediate": 64, "layers": 2, "vocab_size": 420}
    path = write_gguf(tmp_path / "model.gguf", tokenizer=bpe_keys(), **sizes)
    config = ModelConfig.from_directory(path)
    weights = load_weights(path, config, dtype=torch.float32, device="cpu")
    down = weights.layers[1].down
    assert isinstance(down, torch.Tensor)
    given = {"device": "cpu", "max_model_len": 64, "activations": "float32"}
    prompts = [{"prompt_token_ids": [3, 4, 5 + nth]} for nth in range(3)]
    for neurons, same in ((torch.arange(64), True), (torch.arange(32), False)):
        own = {NEURONS: neurons, "down": down[:, neurons].contiguous()}
        write_student(Student(fingerprint(path), 2, 32, (), {1: own}), tmp_path / STUDENT_FILE)
        with Engine(str(path), **given) as engine:  # type: ignore[arg-type]
            full, found = (
                [one.outputs[0].token_ids for one in engine.generate(prompts, asked(policy), use_tqdm=False)]
                for policy in (FullDepth(), Distilled())
            )
            ((_, student),) = engine.executor._students.made()  # type: ignore[attr-defined]
            held = student.model.weights.layers[1]
            assert engine.stats().eager_steps == 0
        assert isinstance(held.gate_up, BlockWeight | BlockLanesWeight)
        assert held.gate_up.type_name == kind
        assert tuple(held.gate_up.shape) == (2 * neurons.numel(), 32)
        rows = torch.cat((neurons, neurons + 64))
        assert torch.equal(held.gate_up.dequantize(torch.float32), weights.layers[1].gate_up[rows])  # type: ignore[index]
        if same and kind == "Q5_0":  # of another type the down matrix becomes 5 bits too
            assert found == full


@pytest.mark.parametrize(("type_name", "half"), [("Q4_0", 8), ("Q5_0", 16)])
def test_bits_of_a_matrix_are_ggmls_and_near(type_name: str, half: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(48, 96)
    matrix[0] = 0.0
    held = quantize_blocks(matrix, type_name)
    assert held.shape == matrix.shape
    error = (held.unpacked() - matrix).abs()  # by the gguf package
    largest = matrix.view(48, -1, 32).abs().amax(dim=2).repeat_interleave(32, dim=1)
    assert bool((error <= largest / half * 1.01).all())  # a whole step where the scale clips, as a rule half of one
    assert float(error.square().mean().sqrt()) < float(largest.mean()) / half * 0.35
    assert torch.equal(quantize_blocks(held.unpacked(), type_name).unpacked(), held.unpacked())
