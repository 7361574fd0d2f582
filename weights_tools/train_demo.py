"""Trains the bundled demo model from nothing: tokenizer, data, schedule, evaluation, export.

About 80 minutes on two idle CPU cores. Depth is trained in from the first step (see demo_trainer); ``--plain``
trains the twin without it, ``--tasks`` one that knows more than word problems, ``--start-from`` goes on from a model
that there is. The run is fixed by ``--seed`` and ``--steps``. A file named FINISH in the output directory starts the
decay of the learning rate early; its text may say over how many steps.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor

from d3engine.research.evaluation.procedural import MAX_TOKENS, NAMES, WORD_PROBLEMS, SolvedQuestion
from d3engine.utils.files import read_json
from d3engine.weights_tools.demo_trainer import (
    ALPHA_WEIGHTS,
    ALPHAS,
    EOS,
    PROMPT_LOSS_WEIGHT,
    START_WEIGHTS,
    STARTS,
    TOKENS_PER_BATCH,
    Batch,
    DemoConfig,
    DemoModel,
    Muon,
    batch_loss,
    batches,
    config_json,
    cutoffs,
    draw_cutoff,
    draw_tail,
    encode,
    exits_loss,
    export,
    load,
    mixed_problems,
    train_tokenizer,
)

# After the main run full depth is solved and skipping not quite: a second, lower hump of the rate tries to help
# it. It changed no score by more than the noise of 500 problems, but the bundled model went through it.
REFINE_FULL_DEPTH_SHARE, REFINE_RATE = 0.1, 0.25
MUON_RATE, ADAM_RATE = 0.02, 4e-3
WARMUP_STEPS = 60
CHECKPOINT_SECONDS = 600
TARGET_POLICY = (0.9, 0.6)  # alpha, start: what the demo is meant to run


class Schedule:
    """Warm-up, hold, linear decay to zero; then a lower, shorter hump. ``finish`` starts the last decay now."""

    def __init__(self, main_steps: int, decay_steps: int, refine_steps: int) -> None:
        self.main_steps, self.steps = main_steps, main_steps + refine_steps
        self.decay_from = max(0, main_steps - decay_steps)
        self.cut_at: int | None = None  # the step at which the end was moved, for the record

    def refining(self, step: int) -> bool:
        return step >= self.main_steps

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rates at a step counted from 0."""
        if self.refining(step):
            began, peak, decay_from = self.main_steps, REFINE_RATE, self.main_steps
            end = self.steps
        else:
            began, peak, decay_from, end = 0, 1.0, self.decay_from, self.main_steps
        decay = (end - step) / max(1, end - decay_from)
        return peak * max(0.0, min(1.0, (step - began + 1) / WARMUP_STEPS, decay))

    def finish(self, step: int, over: int) -> None:
        """Ends the phase that ``step`` is in after ``over`` more steps, decaying from here."""
        self.cut_at = step
        if self.refining(step):
            self.steps = step + over
        else:
            refine_steps = self.steps - self.main_steps
            self.decay_from, self.main_steps = min(self.decay_from, step), step + over
            self.steps = self.main_steps + refine_steps


def exact_match(
    model: DemoModel,
    tokenizer: sentencepiece.SentencePieceProcessor,
    examples: list[SolvedQuestion],
    cutoff: list[int] | None,
) -> float:
    """Returns the share of examples whose greedy completion ends in the right answer."""
    right = 0
    for start in range(0, len(examples), 100):
        part = examples[start : start + 100]
        prompts = [encode(tokenizer, example)[0] for example in part]
        completions = model.generate(prompts, max_tokens=MAX_TOKENS, eos=EOS, cutoff=cutoff)
        right += sum(example.is_right(tokenizer.decode(ids)) for ids, example in zip(completions, part, strict=True))
    return right / len(examples)


@dataclass
class Progress:
    """What a run has done so far; the training record is made of it."""

    step: int = 0
    tokens: int = 0
    problems: int = 0
    began: float = field(default_factory=time.perf_counter)
    curve: list[dict[str, float]] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count(self, batch: Batch) -> None:
        self.step += 1
        self.tokens += int((batch.weights > 0).sum()) + len(batch.tokens)
        self.problems += len(batch.tokens)

    def log(self, schedule: Schedule) -> None:
        """Prints the progress line, adds a point to the curve and starts a new mean."""
        means = {kind: round(sum(losses) / len(losses), 5) for kind, losses in sorted(self.losses.items())}
        self.losses.clear()
        self.curve.append({"step": self.step, "tokens": self.tokens} | means)
        elapsed = time.perf_counter() - self.began
        left = elapsed / self.step * (schedule.steps - self.step)
        print(
            f"step {self.step}/{schedule.steps} {elapsed / 60:.1f} min ({left / 60:.0f} left),"
            f" {self.tokens / 1e6:.2f} M tokens, {self.tokens / elapsed:.0f} tok/s,"
            f" loss {' '.join(f'{kind} {mean:.4f}' for kind, mean in means.items())},"
            f" rate x{schedule.factor(self.step - 1):.2f}",
            flush=True,
        )


class DemoRun:
    """One training run: model, optimizers, schedule and record, with checkpoints in the output directory."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        torch.set_num_threads(args.threads)
        args.out.mkdir(parents=True, exist_ok=True)
        self.args, self.out = args, args.out
        self.config = DemoConfig()
        self.model = DemoModel(self.config)
        self.started_from: dict[str, Tensor] = {}
        if args.start_from:
            self.tokenizer_model = load(self.model, args.start_from)
            self.model.move_to_the_end(args.move_to_the_end)
            self.started_from = {name: weights.clone() for name, weights in self.model.state_dict().items()}
        else:
            self.tokenizer_model = train_tokenizer(args.tasks, self.config.vocab_size)
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_proto=self.tokenizer_model)
        self.muon = Muon(self.model)
        self.vectors = [self.model.embedding, self.model.lm_head, self.model.norms, self.model.final_norm]
        self.adam = torch.optim.AdamW(self.vectors, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.schedule = Schedule(args.steps, args.decay_steps, args.refine_steps)
        self.progress = Progress()
        self.target = cutoffs(self.config.layers, *TARGET_POLICY)

    def train(self) -> None:
        args, progress, schedule = self.args, self.progress, self.schedule
        policies, last_saved = random.Random(f"policy-{args.seed}"), time.perf_counter()
        validation = list(itertools.islice(mixed_problems(args.tasks, "validation", 0), 100))
        resumed = self.load_checkpoint() if args.resume else 0
        stream = batches(
            self.tokenizer, args.tasks, args.seed, args.prompt_loss_weight, args.single_step_share, args.giver_share
        )
        for batch in stream:
            if progress.step >= schedule.steps:
                break
            share = REFINE_FULL_DEPTH_SHARE if schedule.refining(progress.step) else args.full_depth_share
            cutoff = None if args.plain else draw_cutoff(policies, self.config, share)
            tail = draw_tail(policies, batch.prompt, args.tail_share) if cutoff and args.tail_share else 0
            progress.count(batch)
            if progress.step <= resumed:  # data and policies are replayed: a resumed run stays the same run
                continue
            for kind, loss in self.update(batch, cutoff, tail).items():
                progress.losses[kind].append(loss)
            if progress.step % args.log_every == 0 or progress.step == schedule.steps:
                progress.log(schedule)
            if progress.step % args.evaluate_every == 0 or progress.step == schedule.steps:
                self.evaluate(validation)
            if (self.out / "FINISH").exists():
                self.finish_early()
            if time.perf_counter() - last_saved > CHECKPOINT_SECONDS:
                last_saved = time.perf_counter()
                self.save()
        self.save()
        self.keep_a_share_of_the_start()
        self.measure_and_export()

    def update(self, batch: Batch, cutoff: list[int] | None, tail: int) -> dict[str, float]:
        """Takes one optimizer step; returns the mean losses over answer tokens, by kind."""
        if cutoff is None:
            loss, by_kind = exits_loss(self.model, batch, self.args.exits)
        else:
            loss, answer_loss = batch_loss(self.model, batch, cutoff, tail)
            by_kind = {"depth": answer_loss}
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.vectors, 1.0)
        factor = self.args.rate * self.schedule.factor(self.progress.step - 1)
        self.muon.step(MUON_RATE * factor)
        self.adam.param_groups[0]["lr"] = ADAM_RATE * factor
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return {kind: float(value) for kind, value in by_kind.items()}

    def evaluate(self, validation: list[SolvedQuestion]) -> None:
        full, depth = (exact_match(self.model, self.tokenizer, validation, c) for c in (None, self.target))
        print(f"  validation exact match: full depth {full:.2f}, D3(0.9, 0.6) {depth:.2f}", flush=True)
        self.progress.curve[-1] |= {"exact_match_full": full, "exact_match_d3": depth}

    def finish_early(self) -> None:
        text = (self.out / "FINISH").read_text().strip()
        (self.out / "FINISH").unlink()
        self.schedule.finish(self.progress.step, int(text or self.args.decay_steps))
        print(f"FINISH: {self.schedule.steps - self.progress.step} steps left", flush=True)

    def record(self) -> dict[str, object]:
        """Returns training.json: the recipe, what was done, and on which versions."""
        recipe: dict[str, object] = {
            "model": self.config.as_dict(),
            "seed": self.args.seed,
            "steps": self.schedule.main_steps,
            "decay_from_step": self.schedule.decay_from,
            "refine_steps": self.schedule.steps - self.schedule.main_steps,
            "refine_rate_factor": REFINE_RATE,
            "steps_planned": self.args.steps,  # until an early end the rate follows from these
            "finished_early_at_step": self.schedule.cut_at,
            "warmup_steps": WARMUP_STEPS,
            "tokens_per_batch": TOKENS_PER_BATCH,
            "prompt_loss_weight": self.args.prompt_loss_weight,
            "optimizer": "Muon (hidden matrices), AdamW (embedding, lm_head, norms)",
            "muon_rate": MUON_RATE * self.args.rate,
            "adam_rate": ADAM_RATE * self.args.rate,
            "depth_trained_in": not self.args.plain,
            "full_depth_share": 1.0 if self.args.plain else self.args.full_depth_share,
            "refine_full_depth_share": 1.0 if self.args.plain else REFINE_FULL_DEPTH_SHARE,
        }
        if not self.args.plain:
            recipe["start_weights"] = dict(zip(map(str, STARTS), START_WEIGHTS, strict=True))
            recipe["alpha_weights"] = dict(zip(map(str, ALPHAS), ALPHA_WEIGHTS, strict=True))
            recipe["prompt_tail_share"] = self.args.tail_share
        recipe["exits"] = self.args.exits
        recipe["single_step_share"] = self.args.single_step_share
        recipe["giver_share"] = self.args.giver_share
        recipe["layers_moved_to_the_end"] = self.args.move_to_the_end
        recipe["share_kept_of_start"] = self.args.keep_of_start
        progress = self.progress
        return {
            "tasks": self.args.tasks,
            "started_from": self.args.start_from.name if self.args.start_from else None,
            "recipe": recipe,
            "steps_done": progress.step,
            "tokens_seen": progress.tokens,
            "problems_seen": progress.problems,
            "seconds": round(time.perf_counter() - progress.began, 1),
            "threads": self.args.threads,
            "versions": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "sentencepiece": sentencepiece.__version__,
            },
            "curve": progress.curve,
            **earlier_training(self.args.start_from),
        }

    def save(self) -> None:
        """Writes checkpoint.pt (all that resuming needs) and an export of the model as it is."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "step": self.progress.step,
            "schedule": vars(self.schedule),  # an early end outlives an interruption
            "curve": self.progress.curve,
            "seconds": time.perf_counter() - self.progress.began,
        }
        torch.save(state, self.out / "checkpoint.part")
        (self.out / "checkpoint.part").rename(self.out / "checkpoint.pt")
        export(self.model, self.tokenizer_model, self.record(), self.out / "model")

    def load_checkpoint(self) -> int:
        """Returns the number of steps done by the run whose state it loads."""
        state = torch.load(self.out / "checkpoint.pt")
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self.muon.buffers = state["muon"]
        vars(self.schedule).update(state["schedule"])
        self.progress.curve = state["curve"]
        self.progress.began = time.perf_counter() - state["seconds"]
        return int(state["step"])

    def keep_a_share_of_the_start(self) -> None:
        """Moves the weights back towards those of the start: what a short run has taught stays, what it cost less so.

        The mean of a model and its own fine-tune, as in Wortsman and others, "Robust fine-tuning of zero-shot models"
        (CVPR 2022).
        """
        with torch.no_grad():
            weights = self.model.state_dict()
            for name, before in self.started_from.items():
                weights[name].lerp_(before, self.args.keep_of_start)

    def measure_and_export(self) -> None:
        """Measures 500 test problems with the weights rounded to bfloat16, as they are exported."""
        training = self.record()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        test = list(itertools.islice(mixed_problems(self.args.tasks, "test", 0), 500))
        training["exact_match_test_500"] = {
            "full depth": exact_match(self.model, self.tokenizer, test, None),
            "D3(alpha 0.9, start 0.6)": exact_match(self.model, self.tokenizer, test, self.target),
        }
        print(training["exact_match_test_500"], flush=True)
        export(self.model, self.tokenizer_model, training, self.out / "model")


def earlier_training(directory: Path | None) -> dict[str, object]:
    """Returns the record of the model that a run started from, under "earlier"; nothing if there is none.

    So a record is the whole recipe, however often training went on.
    """
    if directory is None or not (directory / "training.json").is_file():
        return {}
    return {"earlier": read_json(directory / "training.json")}


DEFAULT_STEPS, DEFAULT_DECAY_STEPS, DEFAULT_REFINE_STEPS = 4404, 2000, 450  # the bundled model's first stage
FULL_DEPTH_SHARE = 0.4


def parse(words: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line, or of a list of words; ``description`` is for ``--help``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument(
        "--decay-steps", type=int, default=DEFAULT_DECAY_STEPS, help="the last steps, in which the rate falls to 0"
    )
    parser.add_argument("--refine-steps", type=int, default=DEFAULT_REFINE_STEPS, help="steps after the main run")
    parser.add_argument(
        "--tasks",
        type=task_names,
        default=[WORD_PROBLEMS],
        help=f"what to learn: all, or a comma-separated list of {', '.join(NAMES)}",
    )
    parser.add_argument(
        "--start-from", type=earlier_model, help="a model that this script has made: its weights and tokenizer"
    )
    parser.add_argument(
        "--exits", type=exit_depths, default=[], help="depths at which full-depth batches answer too, such as 9,11"
    )
    parser.add_argument(
        "--tail-share", type=share, default=0.0, help="of the batches under D3, those that count a prompt's last tokens"
    )
    parser.add_argument("--full-depth-share", type=share, default=FULL_DEPTH_SHARE, help="of all batches")
    parser.add_argument(
        "--prompt-loss-weight", type=share, default=PROMPT_LOSS_WEIGHT, help="of a prompt's token; an answer's is 1"
    )
    parser.add_argument(
        "--single-step-share", type=share, default=0.0, help="of the problems, word problems of one step"
    )
    parser.add_argument(
        "--giver-share", type=share, default=0.0, help="of gains and losses, those that only who gives tells apart"
    )
    parser.add_argument(
        "--move-to-the-end",
        type=layers_to_move,
        default=[],
        metavar="LAYERS",
        help="of the starting weights, layers to put above all others, such as 5,8",
    )
    parser.add_argument("--rate", type=share, default=1.0, help="factor of the learning rates, at most 1")
    parser.add_argument(
        "--keep-of-start", type=share, default=0.0, help="share of the starting weights in the mean that is the result"
    )
    parser.add_argument("--plain", action="store_true", help="train the twin without depth trained in")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the output directory's checkpoint")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--evaluate-every", type=int, default=500)
    args = parser.parse_args(words)
    if args.keep_of_start and not args.start_from:
        parser.error("--keep-of-start is of use with --start-from alone")
    if args.move_to_the_end and not args.start_from:
        parser.error("--move-to-the-end is of use with --start-from alone")
    return args


def task_names(text: str) -> list[str]:
    """Returns the tasks of a comma-separated list, or all of them for "all"."""
    names = list(NAMES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be all, or some of {', '.join(NAMES)}; got {unknown[0]!r}")
    return names


def earlier_model(text: str) -> Path:
    """Returns the directory of a model that this script has exported."""
    directory = Path(text)
    missing = [
        name for name in ("config.json", "model.safetensors", "tokenizer.model") if not (directory / name).is_file()
    ]
    if missing:
        raise argparse.ArgumentTypeError(
            f"must be a model that this script has made; got {text!r}, without {missing[0]}"
        )
    if json.loads((directory / "config.json").read_text()) != config_json(DemoConfig()):
        raise argparse.ArgumentTypeError(f"must be a model of the shape that this script trains; got {text!r}")
    return directory


def exit_depths(text: str) -> list[int]:
    """Returns the depths of a comma-separated list, each below the model's own."""
    layers = DemoConfig().layers
    depths = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= depth < layers for depth in depths):
        raise argparse.ArgumentTypeError(f"must be depths from 1 to {layers - 1}, such as 9,11; got {text!r}")
    return sorted(set(depths))


def layers_to_move(text: str) -> list[int]:
    """Returns the layers of a comma-separated list, counted from 0."""
    layers = DemoConfig().layers
    chosen = [int(part) if part.isdecimal() else layers for part in text.split(",")]
    if not all(layer < layers for layer in chosen):
        raise argparse.ArgumentTypeError(f"must be layers from 0 to {layers - 1}, such as 5,8; got {text!r}")
    return sorted(set(chosen))


def share(text: str) -> float:
    """Returns a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1; got {text!r}")
    return number


def main() -> None:
    DemoRun(parse(description=__doc__)).train()


if __name__ == "__main__":
    main()
