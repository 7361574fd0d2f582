"""Break the product on purpose, one place after the other, and say whether the named tests fail.

    python tools/breaks.py [NAME ...]     # all breaks, or those whose name has one of these words

The breaks are made in a copy of the tree, in which the named tests must first pass. Exit status 1 where a break is
unseen. A test of the gate holds the table to the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = "kernels/native"
BUILT = (f"{NATIVE}/libd3native.so", "d3engine/server/page/vendor")
"""What the tests read and git does not keep."""
FAILED = 1
"""pytest's exit status where a test has failed; others are errors of the run, such as a module without a test."""


@dataclass(frozen=True)
class Break:
    """A text of `file`, which occurs there once, what stands in its place, and tests that must see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        """Whether the native library is to be built again."""
        return self.file.endswith((".cpp", ".h", ".inc"))


BREAKS: list[Break] = []


def of(file: str, *tests: str) -> Callable[..., None]:
    """What adds breaks of one file: by name, old text and new text, and tests in the place of `tests`."""

    def add(name: str, old: str, new: str, *others: str) -> None:
        BREAKS.append(Break(name, file, old, new, others or tests))

    return add


ORACLE = "tests/engine/test_equals_depth_oracle.py"
MACHINE = "tests/scheduling/test_scheduler_machine.py"
PREEMPTION = "tests/scheduling/test_preemption.py"

# -- schedules and policies --------------------------------------------------------------------------------------------

schedule = of("d3engine/depth/schedule.py", "tests/depth/test_schedule.py")
schedule("cutoff", "running: BoolArray = step < self.cutoffs", "running: BoolArray = step <= self.cutoffs")
schedule(
    "depth-at-cutoff",
    "return len(self._cutoffs_listed) - bisect_right(self._cutoffs_listed, step)",
    "return len(self._cutoffs_listed) - bisect_right(self._cutoffs_listed, step - 1)",
)
schedule("nested-table", "if bool((rows[1:] <= rows[:-1]).all()):", "if bool((rows[1:] >= rows[:-1]).all()):")
schedule("window-limit", "num_layers - (layer - start))", "num_layers - (layer - start) - 1)", "tests/depth/test_d3.py")
schedule("first-step", "if falling(middle) < limit:", "if falling(middle) <= limit:", "tests/depth/test_d3.py")

skips = of("d3engine/depth/skips.py", "tests/depth/test_d3.py")
skips("start-floor", 'math.floor(exact_fraction("start", self.start) * num_layers)', "round(self.start * num_layers)")
skips(
    "round-half-up",
    "return (2 * numerator + last_step) // (2 * last_step)",
    "return (2 * numerator) // (2 * last_step)",
    "tests/depth/test_policies.py",
)

exits = of("d3engine/executor/early_exit.py", "tests/engine/test_early_exit.py")
exits(
    "exit-at-threshold",
    ">= group.thresholds[here]",
    "> group.thresholds[here]",
    "tests/engine/test_early_exit.py::test_exit_confidence_equal_to_threshold_leaves",
)
exits(
    "exit-last-layer",
    "return group.rule.checks_after(layer) and not is_last and",
    "return group.rule.checks_after(layer) and",
)
exits("exit-entries", "entries[depth - 1, row].expand_as(left_out)", "entries[depth - 2, row].expand_as(left_out)")
rules = of("d3engine/depth/policy.py", "tests/engine/test_early_exit.py")
rules("exit-first-check", "return layer >= self.min_layer and", "return layer > self.min_layer and")

# -- scheduler ---------------------------------------------------------------------------------------------------------

scheduler = of("d3engine/scheduling/scheduler.py", MACHINE)
scheduler(
    "admission-promises",
    "self.prefix_cache.reserve(promised + needed)",
    "self.prefix_cache.reserve(needed)",
    PREEMPTION,
)
scheduler("preempted-first", "victim = in_turn(self._running)[-1]", "victim = in_turn(self._running)[0]", PREEMPTION)
scheduler(
    "admission-interval",
    "not self.config.admission.admits(self.counters.steps)",
    "False",
    "tests/engine/scripted/test_step_api.py",
)
chunks = of("d3engine/scheduling/select_chunks.py", MACHINE)
chunks("row-budget", "budget = max_rows - (slots.size - longer.size)", "budget = max_rows")
chunks("flow-share", "max(1, max_rows // PARTS)", "max_rows", "tests/scheduling/test_fair_turns.py")
chunks(
    "chunk-across-cutoff",
    "return min(sequence.num_tokens - computed, sequence.same_layers_until(step) - step)",
    "return sequence.num_tokens - computed",
)
waiting = of("d3engine/scheduling/waiting.py", "tests/scheduling/test_fair_turns.py")
waiting(
    "priority", "ranked.append((sequence.priority, counted[name], place))", "ranked.append((0, counted[name], place))"
)
waiting("queue-by-flow", "return priority, self._running[flow], arrival", "return priority, 0, arrival")
of("d3engine/scheduling/multi_step.py", "tests/scheduling/test_ends_of_runs.py")(
    "rows-out-of-order", "if (active[1:] & ~active[:-1]).any():", "if False:"
)
running = of("d3engine/scheduling/running.py", "tests/engine/test_early_exit.py")
running(
    "replayed-depth", "depth = self.sequence(int(slots[chunk])).depths[int(steps[chunk])]", "depth = active.shape[1]"
)

# -- allocator, KV cache, prefix cache ---------------------------------------------------------------------------------

allocator = of("d3engine/scheduling/allocator.py", "tests/cache/test_kv_freed.py")
allocator("freed-late", "(cutoffs <= step).nonzero()[0]", "(cutoffs < step).nonzero()[0]")
allocator("freed-early", "(cutoffs <= step).nonzero()", "(cutoffs <= step + 1).nonzero()")
allocator("peak-step", "for c in schedule.cutoffs if c - 1 <= last_step", "for c in schedule.cutoffs if c <= 1")
kv = of("d3engine/cache/kv_cache.py", MACHINE)
kv("shared-references", "self.pool.retain(blocks.ravel())", "blocks.ravel()", "tests/cache/test_prefix_cache.py")
kv("released-mentions", "self.ref_counts[blocks] -= mentions.astype(np.int32)", "self.ref_counts[blocks] -= 1")
kv(
    "copy-on-write",
    "before.add(cache, int(shared), int(own), 0, filled)",
    "before.add(cache, int(shared), int(own), 0, filled - 1)",
)
kv(
    "nearest-below",
    "np.where(active, np.arange(active.size), -1)",
    "np.where(active, np.arange(active.size), 0)",
    ORACLE,
)
prefix = of("d3engine/cache/prefix_cache.py", "tests/cache/test_prefix_cache.py")
prefix("last-block", "_full_blocks(prompt[: len(prompt) - 1], size)", "_full_blocks(prompt, size)")
prefix("compared-tokens", " or entry.tokens != tokens:", ":")
prefix("salted-parent", "entry is None or entry.parent != parent or", "entry is None or")
prefix("in-use-everywhere", "if (pool.ref_counts[entry.blocks] == 1).any():", "if True:")
prefix("least-recent", "for key in reversed(keys):", "for key in ():")
prefix(
    "adapter-key",
    "return hashlib.sha256(hashlib.sha256(named).digest() + _root(own)).digest()",
    "return _root(own)",
    "tests/engine/test_lora.py::test_prompt_blocks_are_shared_within_an_adapter_alone",
)
of("d3engine/loading/prefix_file.py", "tests/engine/test_prefix_file.py")(
    "prefixes-of-other-weights", '"weights": fingerprint(settings.directory),', '"weights": "",'
)
of("d3engine/loading/prefix_file.py", "tests/engine/test_prefix_file.py")(
    "prefix-digest", " or _digest(prefix, row) != digests[place].tobytes():", ":"
)

# -- sampling ----------------------------------------------------------------------------------------------------------

SAMPLING = "tests/sampling/test_sampling.py"
cuts = of("kernels/sampling.py", SAMPLING)
cuts("top-p-met-exactly", "beyond = (before >= top_p) &", "beyond = (before > top_p) &")
cuts("top-k-edge", "(ranks >= top_k) & (top_k > 0)", "(ranks > top_k) & (top_k > 0)")
cuts("min-p-edge", "masked_fill_(scores < floor, -torch.inf)", "masked_fill_(scores <= floor, -torch.inf)")
sampler = of("d3engine/sampling/sampler.py", SAMPLING)
sampler(
    "repetition-sign",
    "torch.where(scores > 0, scores / params.repetition_penalty,",
    "torch.where(scores < 0, scores / params.repetition_penalty,",
)
sampler("presence-once", "params.presence_penalty * (counts > 0)", "params.presence_penalty * counts")
sampler(
    "index-in-noise",
    "[(s.seed, s.index, s.step) for",
    "[(s.seed, 0, s.step) for",
    "tests/sampling/test_logprobs_and_seeds.py",
)
sampler(
    "rank-of-ties",
    "ranks = ((logprobs > own)",
    "ranks = ((logprobs >= own)",
    "tests/sampling/test_logprobs_and_seeds.py",
)
sampler(
    "raw-logprobs",
    "_sampled_logprobs(raw, sequences",
    "_sampled_logprobs(scores_of(raw, sequences), sequences",
    "tests/sampling/test_logprobs_and_seeds.py",
)
sampler(
    "min-tokens",
    "if sequence.step < params.min_tokens:",
    "if sequence.step <= params.min_tokens:",
    "tests/engine/scripted/test_ends_of_answers.py",
)
sampler("row-of-infinity", "[math.isfinite(score) for score in best]", "[True for score in best]")
verification = of("d3engine/sampling/verification.py", "tests/sampling/test_verification.py")
verification("noise-of-draft", "Ahead(sequences[place], drafted[:nth])", "Ahead(sequences[place], drafted)")
verification("fault-behind-draft", "rows[: accepted + 1]]", "rows[:accepted]]")
verification(
    "accepted-draft",
    "_first_false(token == own for token",
    "_first_false(token >= own for token",
    "tests/engine/test_lossless.py",
)
draft = of("d3engine/request/sequence.py", "tests/engine/test_lossless.py")
draft("adapted-length", "change = 1 if num_accepted == count else -1", "change = 1 if num_accepted else -1")

# -- text --------------------------------------------------------------------------------------------------------------

detokenizer = of("d3engine/text/detokenizer.py", "tests/text/test_detokenizer.py")
detokenizer("character-of-prompt", "if len(end) >= 3:", "if len(end) >= 1:")
detokenizer("held-stop", "safe = len(text) - max(stop.held() for stop in self._stops)", "safe = len(text)")
detokenizer(
    "stop-in-min-tokens", "if self.num_tokens <= self._min_tokens or", "if self.num_tokens < self._min_tokens or"
)
detokenizer("spoiled-run", "self._valid, self._characters = False, []", "self._valid = False")
detokenizer("first-stop", "end, text = min(found, key=", "end, text = max(found, key=")
ends = of("d3engine/request/sequence.py", "tests/engine/scripted/test_ends_of_answers.py")
ends("length", "if len(self.token_ids) - first >= room:", "if len(self.token_ids) - first > room:")
output = of("d3engine/text/output.py", "tests/engine/scripted/test_ends_of_answers.py")
output("shown-stop-token", "hides_last = stops and not", "hides_last = False and not")
output(
    "logprobs-twice",
    "found[max(0, len(known) - 1 - rows.position) :]",
    "found",
    "tests/sampling/test_logprobs_and_seeds.py",
)
template = of("d3engine/text/chat_template.py", "tests/text/test_chat_template.py")
template("continued-message", 'return before if after.startswith(" ") else before.rstrip()', "return before")
template(
    "second-bos",
    "tokenizer.encode(text, add_special_tokens=False)",
    "tokenizer.encode(text)",
    "tests/server/test_chat.py",
)

# -- models ------------------------------------------------------------------------------------------------------------

gguf = of("d3engine/model/checkpoint_formats.py", "tests/engine/test_gguf.py")
gguf("gguf-row-order", "return values if num_heads is None else to_half_split(values, num_heads)", "return values")
gguf("gguf-block-order", "return blocks if num_heads is None else to_half_split(blocks, num_heads)", "return blocks")
gguf(
    "gguf-one-row",
    "place = row if num_heads is None else",
    "place = row if True else",
    "tests/engine/test_gguf.py",
    "tests/model/test_gguf_file.py",
    "tests/model/test_part.py",
)
of("d3engine/model/gguf_file.py", "tests/model/test_gguf_file.py")(
    "gguf-overlap", "if tensor.offset < end:", "if tensor.offset < 0:"
)
checkpoint = of("d3engine/model/checkpoint.py", "tests/model/test_damaged_weights.py")
checkpoint("shard-path", '("/", "\\\\", ":", "\\0")', '("\\\\", ":", "\\0")')
checkpoint("tensor-in-two-shards", "if entry.name in entries:", "if False:")
checkpoint("index-of-other-shard", "if entries[tensor].file.name != shard:", "if False:")
of("d3engine/model/adapters.py", "tests/model/test_adapters.py", "tests/engine/test_lora.py")(
    "lora-scale", "return alpha / (math.sqrt(rank) if self._is_root else rank)", "return alpha / rank"
)
steering = of("d3engine/request/hidden_states.py", "tests/engine/test_hidden_states.py")
steering("last-position", '"last": slice(-1, prompt_length)', '"last": slice(-2, prompt_length)')
steering("stepped-positions", "((positions - self.start) % self.step == 0)", "(positions % self.step == 0)")
steering(
    "steered-elsewhere",
    "return self._digest + repr(tuple(positions)).encode()",
    "return self._digest",
    "tests/engine/test_hidden_states.py::test_prompt_blocks_are_shared_by_equal_steering_alone",
)
rope = of("d3engine/model/llama.py", "tests/model/test_rope.py")
rope("rope-llama3", "is_long = wavelength > trained / low", "is_long = wavelength > trained / high")
rope(
    "rope-bfloat16",
    "angles = positions.float()[:, None] * frequencies",
    "angles = positions.bfloat16()[:, None] * frequencies",
)

# -- Triton ------------------------------------------------------------------------------------------------------------

of("kernels/triton/rms_norm.py", "tests/kernels/test_triton_linear.py::test_rms_norm_rounds_before_weight")(
    "triton-norm-rounding", "rounded = scaled.to(out_ptr.dtype.element_ty).to(tl.float32)", "rounded = scaled"
)
attention = of("kernels/triton/attention_kernels.py", "tests/kernels/test_triton_attention.py")
attention("triton-mask", "limits = cached + first_row + rows + 1", "limits = cached + first_row + rows + 2")
attention("triton-window", "firsts = limits - window", "firsts = limits - window + 1")
attention("triton-single-window", "seen_first = kv_length - window", "seen_first = kv_length - window + 1")
attention("triton-joined-splits", "total = total * decay + tl.sum(shares, 0)", "total = total + tl.sum(shares, 0)")
threshold = of("kernels/triton/threshold.py", "tests/kernels/test_triton_sample.py")
threshold("triton-top-p", "tl.ceil(total.to(tl.float64)", "tl.floor(total.to(tl.float64)")
threshold("triton-top-k", "BINS, LISTED, BY_COUNT=True", "BINS, LISTED, BY_COUNT=False")

# -- C++ ---------------------------------------------------------------------------------------------------------------

of(f"{NATIVE}/attention/attention.inc", "tests/kernels/native/test_prompts.py")(
    "cpp-mask",
    "const int seen = a.length + q / a.group - start,",
    "const int seen = a.length + q / a.group + 1 - start,",
)
of(f"{NATIVE}/attention/attention.inc", "tests/kernels/native/test_decoding.py")(
    "cpp-window", "const int first = a.length + row - a.window;", "const int first = a.length + row - a.window + 1;"
)
of(f"{NATIVE}/isa/simd.inc", "tests/kernels/native/test_decoding.py")(
    "cpp-rope", "out[i + 1] = real * sine + imaginary * cosine;", "out[i + 1] = real * sine - imaginary * cosine;"
)
native_sampling = of(f"{NATIVE}/sampling/sampling.cpp", "tests/kernels/native/test_sampling.py")
native_sampling("cpp-top-p-met-exactly", "if (sum >= target) return kept + 1;", "if (sum > target) return kept + 1;")
native_sampling("cpp-tie", "(other == score && of < token)", "(other == score && of > token)")
native_sampling(
    "cpp-repetition", "logit > 0 ? logit / asked.repetition : logit * asked.repetition", "logit / asked.repetition"
)
native_drafts = of(f"{NATIVE}/speculation/speculative_loop.cpp", "tests/kernels/native/test_speculative_loop.py")
native_drafts("cpp-acceptance", " && batch_.chosen[first + accepted] == tokens[accepted])", ")")
native_drafts("cpp-last-draft", "while (accepted < count && is_sound", "while (accepted + 1 < count && is_sound")
of(f"{NATIVE}/formats/blocks.inc", "tests/kernels/native/test_blocks.py")(
    "cpp-q4-minimum", "to[2] = to[3] = float_of_half(block + 2);", "to[2] = to[3] = float_of_half(block);"
)

# -- server ------------------------------------------------------------------------------------------------------------

access = of("d3engine/server/middleware/access.py", "tests/server/guards/test_keys_and_hosts.py")
access("no-host", "if len(given) != 1 or name_of(", "if given and name_of(")
access("open-paths", 'if scope["path"] in self._open_paths:', 'if scope["path"].startswith(tuple(self._open_paths)):')
access("scheme", 'if scheme.lower() == b"bearer":', "if key:")
limits = of("d3engine/server/middleware/limits.py", "tests/server/guards/test_traffic_and_deadlines.py")
limits("last-place", "if traffic.taken + count > traffic.places:", "if traffic.taken + count >= traffic.places:")
limits("place-kept", "self._traffic.taken -= self._taken", "self._traffic.taken -= 0")
bodies = of("d3engine/server/middleware/bodies.py", "tests/server/guards/test_bodies.py")
bodies("nesting", "if depths.max() > MAX_DEPTH:", "if depths.max() > MAX_DEPTH + 1:")
bodies("body-length", "or int(length) > self._max_bytes:", "or int(length) > self._max_bytes + 1:")
of(
    "d3engine/server/responses/running.py",
    "tests/server/test_faults.py::test_stream_with_a_fault_of_one_answer_ends_with_an_error",
)(
    "fault-of-one-answer",
    'for answer in output.outputs:\n        if answer.finish_reason == "abort":',
    'for answer in output.outputs[:1]:\n        if answer.finish_reason == "abort":',
)
of("d3engine/server/responses/streams.py", "tests/server/test_faults.py", "tests/server/test_event_stream.py")(
    "stream-error", "last = self._form.failed(error)", "last = self._form.end"
)
usage = of("d3engine/server/responses/extras.py", "tests/server/test_streams.py", "tests/server/test_completions.py")
usage("usage-tokens", "self._completion_tokens += len(answer.token_ids)", "self._completion_tokens += 1")
usage("usage-cached", '{"cached_tokens": sum(self._cached)}', '{"cached_tokens": 0}')

# -- guided decoding, bounds -------------------------------------------------------------------------------------------

grammar = of("d3engine/structured/grammar.py", "tests/structured/test_forms.py")
grammar("grammar-end", "if may_end:", "if True:")
grammar("grammar-over", "return self.fault is None and self._matcher.is_stopped()", "return False")
grammar(
    "grammar-rollback", "self._check(self._matcher.rollback(taken))", "self._check(self._matcher.rollback(taken - 1))"
)
params = of("d3engine/request/params.py", "tests/engine/scripted/test_refused_parameters.py")
params(
    "top-p-of-zero",
    "top_p: float = argument(1.0, Numbers(0.0, 1.0, open_low=True)",
    "top_p: float = argument(1.0, Numbers(0.0, 1.0)",
)
params("min-above-max-tokens", "require(self.min_tokens <= longest,", "require(self.min_tokens <= longest + 1,")
of("d3engine/scheduling/scheduler.py", "tests/engine/scripted/test_refused_arguments.py")(
    "rows-for-every-sequence", "self.max_num_batched_tokens >= self.max_num_seqs,", "self.max_num_batched_tokens > 0,"
)


# -- running -----------------------------------------------------------------------------------------------------------


def copy_tree(to: Path) -> None:
    """Copy what git keeps, what it would not ignore, and what is built."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, dirs_exist_ok=True)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, to / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit status of pytest over these tests of a tree, and what it has said."""
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "900"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "NO_SHRINKING": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def build(tree: Path) -> None:
    """Compile the native library without optimization, which takes a fifth of the time and changes no bit."""
    program = "import runpy; b = runpy.run_path({!r}); b['compile_library'](b['FOLDER'] / b['LIBRARY'], flags=('-O0',))"
    subprocess.run([sys.executable, "-c", program.format(f"{NATIVE}/build.py")], cwd=tree, check=True)


@contextmanager
def broken(tree: Path, one: Break) -> Iterator[None]:
    """A tree with a break in it; the library before it is kept."""
    file, library = tree / one.file, tree / BUILT[0]
    whole = file.read_text(encoding="utf-8")
    assert whole.count(one.old) == 1, f"{one.name}: its old text does not stand once in {one.file}"
    kept = library.read_bytes() if one.is_compiled else b""
    try:
        file.write_text(whole.replace(one.old, one.new), encoding="utf-8")
        if one.is_compiled:
            build(tree)
        yield
    finally:
        file.write_text(whole, encoding="utf-8")
        if kept:
            library.with_suffix(".kept").write_bytes(kept)
            library.with_suffix(".kept").replace(library)


def is_seen(tree: Path, one: Break) -> bool:
    """Whether the tests of a break fail with it, or end the process."""
    with broken(tree, one):
        status, said = run_tests(tree, one.tests)
    if status > FAILED:
        sys.exit(f"{one.name}: pytest ends with {status}\n{said}")
    return status != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="words; breaks whose name has one of them are made [default: all]")
    names = parser.parse_args().names
    chosen = [one for one in BREAKS if not names or any(name in one.name for name in names)]
    if not chosen:
        parser.error(f"no break has a name with {' or '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        build(tree)
        status, said = run_tests(tree, sorted({test for one in chosen for test in one.tests}))
        if status:
            print(said)
            sys.exit("the tests must pass before anything is broken")
        unseen = []
        for one in chosen:
            begun = time.monotonic()
            seen = is_seen(tree, one)
            unseen += [] if seen else [one.name]
            print(f"{'seen' if seen else 'UNSEEN':6} {one.name} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} breaks are seen" + "".join(f"\n  {name}" for name in unseen))
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
