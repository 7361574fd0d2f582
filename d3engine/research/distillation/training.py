"""Self-distillation: a student's matrices trained towards full depth on the model's own answers; all else is frozen.

Two losses, one after the other. The first is of the hidden state behind the window that the student changes, relative
to what the window changes: it needs no layer above, so it is several times cheaper. The second is the KL divergence
from full depth's next-token distribution, at some of the generated positions of each text.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d3engine.depth import Schedule
from d3engine.errors import require
from d3engine.model.students import MATRICES, NEURONS, Student, narrowed
from d3engine.model.weights import LayerWeights
from d3engine.research.bridges.fitting import read_state, read_training, text_hash, write_state, write_training
from d3engine.research.bridges.judging import skipping
from d3engine.research.distillation.corpus import OwnAnswer, in_turns
from d3engine.research.distillation.judging import Judgeable, judge
from d3engine.research.distillation.passes import AnswerPass, FullAnswer, replaced, tensors_of_layer
from d3engine.research.distillation.widths import Refitting, kept_neurons, narrow, neuron_scores
from d3engine.utils.files import as_json

SAVE_EVERY = 20
"""Steps from one saved state to the next."""

SLOWER = 10
"""Adam's rate by the state over that by the distribution."""

SCORED_TEXTS = 256
"""Answers by which neurons are ordered, at most; refitting takes all that it is given."""

HEAD_ROWS = 32
"""Positions whose logits exist at once: their gradient goes back to the state before the next ones are computed."""

CACHE_BYTES = 4 * 2**30
"""Texts at full depth that are kept, at most; others are computed again when they come."""


@dataclass(frozen=True)
class Shape:
    """What a student is, before it is trained: layers left out, and the matrices of those that are its own.

    `start` has each own layer's tensors (float32, or `NEURONS`), of which the floats are trained.
    """

    skip_layers: tuple[int, ...]
    start: Mapping[int, Mapping[str, Tensor]]

    @property
    def first(self) -> int:
        return min([*self.skip_layers, *self.start])

    @property
    def behind(self) -> int:
        """The layer behind the last that is not the model's own."""
        return max([*self.skip_layers, *self.start]) + 1


@dataclass(frozen=True)
class TrainingOptions:
    """`hidden_steps` with the loss of the state, then `steps` with that of the distribution, `texts` a step.

    `rate` is Adam's for the first, a tenth of it for the second; each rises over a twentieth of its steps, or ten, and
    falls as a cosine to a tenth. `rows` positions of a text get logits. With a `rank` maps of that rank are trained,
    and added to the matrices as they begin.
    """

    hidden_steps: int = 0
    steps: int = 0
    texts: int = 4
    rows: int = 64
    rate: float = 3e-4
    seed: int = 0
    judge_every: int = 100
    most_tokens: int = 256
    rank: int | None = None

    @property
    def all_steps(self) -> int:
        return self.hidden_steps + self.steps


@dataclass
class Curve:
    """What has been seen on the way: losses by step, and the held-out agreement now and then."""

    losses: list[float] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        return len(self.losses)


class Distillation:
    """Trains one student; what is trained is float32 until the end."""

    def __init__(self, run: AnswerPass, shape: Shape, options: TrainingOptions) -> None:
        self.run_pass, self.shape, self.options = run, shape, options
        self._schedule: Schedule = skipping(shape.skip_layers, run.config.num_layers)
        generator = torch.Generator().manual_seed(options.seed)
        self._trained = {layer: _parameters(own, options.rank, generator) for layer, own in shape.start.items()}
        # The rows of gate and up that stay are the model's own where only the down matrix is trained.
        self._fixed: dict[int, dict[str, Tensor]] = {}
        for layer, own in shape.start.items():
            if NEURONS in own:
                gate_up = narrowed(run.weights.layers[layer], own[NEURONS])
                assert isinstance(gate_up, Tensor)
                self._fixed[layer] = {"gate_up": gate_up}
        named = [tensor for _, tensor in self._named()]
        require(len(named) > 0 or options.all_steps == 0, "--steps", options.all_steps, "0 where nothing is trained")
        self._adam = torch.optim.Adam(named, lr=options.rate, betas=(0.9, 0.98)) if named else None
        self.curve = Curve()
        self._kept: dict[str, FullAnswer] = {}
        self._room = CACHE_BYTES

    def tensors(self) -> dict[int, dict[str, Tensor]]:
        """What the student's file holds, as it is now."""
        found: dict[int, dict[str, Tensor]] = {}
        for layer, own in self.shape.start.items():
            whole = self._whole(layer)
            found[layer] = {name: whole[name].detach().clone() if name in whole else t for name, t in own.items()}
        return found

    def layers(self) -> dict[int, LayerWeights]:
        """The student's layers, through which gradients go back into what is trained."""
        dtype = self.run_pass.weights.dtype
        return {
            layer: replaced(self.run_pass.weights.layers[layer], self._fixed.get(layer, {}) | self._whole(layer), dtype)
            for layer in self._trained
        }

    @property
    def num_trained(self) -> int:
        return sum(tensor.numel() for _, tensor in self._named())

    def _whole(self, layer: int) -> dict[str, Tensor]:
        """A layer's own floats as they are now."""
        trained = self._trained[layer]
        return {
            name: trained[name] if name in trained else start + trained[f"{name}.up"] @ trained[f"{name}.down"]
            for name, start in self.shape.start[layer].items()
            if name != NEURONS
        }

    def judgeable(self, name: str) -> Judgeable:
        with torch.no_grad():
            return Judgeable(name, self._schedule, self.layers())

    def judged(
        self, held_out: Sequence[OwnAnswer], fingerprint: str, progress: Callable[[], None]
    ) -> tuple[Student, dict[str, Any]]:
        """The student to write, and its report: beside it stands its window left out."""
        shape, config, most = self.shape, self.run_pass.config, self.options.most_tokens
        wanted = [self.judgeable("student")]
        if shape.skip_layers:
            wanted.append(Judgeable("the same layers left out", self._schedule))
        found = judge(self.run_pass, held_out, wanted, most, progress)
        told = {
            "skip_layers": list(shape.skip_layers),
            "own_layers": sorted(shape.start),
            "layers_saved": wanted[0].saved(config, most),
            "curve": self.curve.points,
            "losses": [round(loss, 5) for loss in self.curve.losses],
            "held_out": found[0].as_dict(),
            "controls": {one.name: agreement.as_dict() for one, agreement in zip(wanted[1:], found[1:], strict=True)},
        }
        # What is still the model's own is left out: it would be rounded, and lie in memory twice.
        held: dict[int, dict[str, Tensor]] = {}
        for layer, named in self.tensors().items():
            own = tensors_of_layer(self.run_pass.weights.layers[layer])
            changed = {name: t for name, t in named.items() if name not in own or not _same(t, own[name])}
            held[layer] = {name: t.to(torch.bfloat16) if name in MATRICES else t for name, t in changed.items()}
        about = {name: told[name] for name in ("held_out", "layers_saved")} | {"steps": self.curve.num_steps}
        return Student(fingerprint, config.num_layers, config.hidden_size, shape.skip_layers, held, about), told

    def train(
        self,
        texts: Sequence[OwnAnswer],
        held_out: Sequence[OwnAnswer],
        state: Path | None,
        key: str,
        progress: Callable[[int, str], None] = lambda steps, words: None,
        until: float = math.inf,
    ) -> None:
        """All steps that are left, or those that begin before the monotonic time `until`.

        Those that a `state` of the same `key` holds are not taken again; it is the caller's to delete. `progress` hears
        of the steps taken, and how it stands. Steps draw from the seed and their own number alone.
        """
        if state is not None:
            self._load(state, key)
        progress(self.curve.num_steps, "")
        begun, before = time.monotonic(), self.curve.seconds
        if not self.curve.points:
            self._judge(held_out)
        while self.curve.num_steps < self.options.all_steps and time.monotonic() < until:
            self._step(texts)
            self.curve.seconds = before + time.monotonic() - begun
            number = self.curve.num_steps
            if number % self.options.judge_every == 0 or number == self.options.all_steps:
                self._judge(held_out)
            if state is not None and number % SAVE_EVERY == 0:
                self._save(state, key)
            progress(1, self._in_words())
        if state is not None:
            self._save(state, key)
        if self.curve.points[-1]["step"] != self.curve.num_steps:
            self._judge(held_out)

    def _in_words(self) -> str:
        recent = self.curve.losses[-20:]
        point = self.curve.points[-1]
        return f"loss {sum(recent) / len(recent):.4f}, held out {point['agreement']:.1%}, KL {point['kl']:.3f}"

    def _judge(self, held_out: Sequence[OwnAnswer]) -> None:
        (found,) = judge(self.run_pass, held_out, [self.judgeable("student")], self.options.most_tokens)
        curve = self.curve
        told = {"step": curve.num_steps, "tokens": curve.tokens, "seconds": round(curve.seconds, 1)}
        curve.points.append({**told, **found.as_dict()["all"]})

    def _step(self, texts: Sequence[OwnAnswer]) -> None:
        assert self._adam is not None
        number, options = self.curve.num_steps, self.options
        rng = random.Random(f"distill-{options.seed}-{number}")
        by_state = number < options.hidden_steps
        if number == options.hidden_steps:  # the other loss has gradients of another size
            self._adam.state.clear()
        for group in self._adam.param_groups:
            group["lr"] = self._rate(number)
        self._adam.zero_grad()
        total = 0.0
        chosen = self._chosen(number, len(texts))
        layers = self.layers()
        for nth, place in enumerate(chosen, 1):
            full = self._full(texts[place])
            loss = self._state_loss(full, layers) if by_state else self._kl(full, layers, rng)
            # Each text's graph goes at once; that of the weights in the pass's dtype is walked for each of them.
            (loss / len(chosen)).backward(retain_graph=nth < len(chosen))  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            self.curve.tokens += full.rows
        torch.nn.utils.clip_grad_norm_([tensor for _, tensor in self._named()], 1.0)
        self._adam.step()
        self.curve.losses.append(total / len(chosen))

    def _chosen(self, number: int, count: int) -> list[int]:
        """The places of a step's texts: all are seen before one is seen again, each time round in another order."""
        each = min(self.options.texts, count)
        found = []
        for nth in range(number * each, (number + 1) * each):
            time_round, place = divmod(nth, count)
            order = random.Random(f"distill-{self.options.seed}-round-{time_round}").sample(range(count), count)
            found.append(order[place])
        return found

    def _rate(self, number: int) -> float:
        options = self.options
        by_state = number < options.hidden_steps
        steps, at = (options.hidden_steps, number) if by_state else (options.steps, number - options.hidden_steps)
        most = options.rate if by_state else options.rate / SLOWER
        rising = min(1.0, (at + 1) / max(1, min(steps // 4, max(10, steps // 20))))
        return most * rising * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * at / steps)))

    def _full(self, text: OwnAnswer) -> FullAnswer:
        if text.key in self._kept:
            return self._kept[text.key]
        shape = self.shape
        tokens = text.token_ids[: self.options.most_tokens + 1]
        full = self.run_pass.at_full_depth(text.prompt_ids, tokens, {shape.first, shape.behind})
        if full.num_bytes <= self._room:
            self._room -= full.num_bytes
            self._kept[text.key] = full
        return full

    def _state_loss(self, full: FullAnswer, layers: Mapping[int, LayerWeights]) -> Tensor:
        """What the student leaves unexplained of the window's change, 1 for a window left out."""
        shape = self.shape
        own = self.run_pass.run(full, self._schedule, first=shape.first, stop=shape.behind, layers=layers)
        before, behind = full.states[shape.first].float(), full.states[shape.behind].float()
        change = (behind - before).square().sum()
        return (own.float() - behind).square().sum() / change

    def _kl(self, full: FullAnswer, layers: Mapping[int, LayerWeights], rng: random.Random) -> Tensor:
        rows = torch.tensor(sorted(rng.sample(range(full.rows), min(self.options.rows, full.rows))))
        state = self.run_pass.run(full, self._schedule, first=self.shape.first, layers=layers)
        above, last = state.detach().requires_grad_(), self.run_pass.config.num_layers
        total = 0.0
        for some in torch.split(rows, HEAD_ROWS):
            logits = self.run_pass.logits(above[some])
            with torch.no_grad():
                known = self.run_pass.logits(full.states[last][some]).log_softmax(-1)
                own, full_depth = logits.log_softmax(-1), known.exp()
                total += float((full_depth * known.sub_(own)).sum()) / len(rows)
                logits.backward(own.exp_().sub_(full_depth).div_(len(rows)))  # type: ignore[no-untyped-call]
        assert above.grad is not None
        passed_on = (state * above.grad).sum()
        return passed_on - passed_on.detach() + total

    def _named(self) -> list[tuple[str, Tensor]]:
        return [
            (f"{layer}.{name}", tensor)
            for layer, trained in sorted(self._trained.items())
            for name, tensor in sorted(trained.items())
        ]

    def _save(self, path: Path, key: str) -> None:
        write_training(path, key, self._adam, self._named(), {"curve": json.dumps(asdict(self.curve))})

    def _load(self, path: Path, key: str) -> None:
        def read(words: Mapping[str, str]) -> tuple[Curve, int]:
            curve = Curve(**as_json(words["curve"], path))
            number, first = curve.num_steps, self.options.hidden_steps
            return curve, number - first if number > first else number

        self.curve = read_training(path, key, self._adam, self._named(), read) or self.curve


def _parameters(own: Mapping[str, Tensor], rank: int | None, generator: torch.Generator) -> dict[str, Tensor]:
    """What is trained of a layer's own tensors, by name: whole ones, or maps `up` [rows, rank], `down` [rank, columns]
    that begin as 0."""
    found: dict[str, Tensor] = {}
    for name, start in own.items():
        if rank is not None and name in MATRICES:
            rows, columns = start.shape
            found[f"{name}.up"] = torch.zeros(rows, rank)
            found[f"{name}.down"] = torch.randn(rank, columns, generator=generator) / math.sqrt(columns)
        elif name != NEURONS:
            found[name] = start.detach().float().clone()
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def window_shape(run: AnswerPass, first: int, stop: int, kept: Sequence[int]) -> Shape:
    """A window of which `kept` layers stay, all their tensors the student's own, and the others are left out."""
    skip = tuple(layer for layer in range(first, stop) if layer not in kept)
    return Shape(skip, {layer: _floats(tensors_of_layer(run.weights.layers[layer])) for layer in kept})


def narrowed_shape(
    run: AnswerPass,
    shape: Shape,
    among: Sequence[int],
    width: float,
    texts: Sequence[OwnAnswer],
    progress: Callable[[int], None],
    state: tuple[Path, str] | None = None,
) -> Shape:
    """A shape with narrower MLPs in those layers `among` that it leaves as they are.

    `width` is what stays of all their neurons. Beside the down matrices all but the rows of gate and up is the
    student's own. `progress` is called for each part of the work, with how many parts there are. `state` is a file, and
    the key of this run, which goes on where an earlier one of that key has ended.
    """
    layers = [one for one in among if one not in shape.skip_layers and one not in shape.start]
    scored = in_turns(texts)[:SCORED_TEXTS]
    begun = None if state is None else Refitting.read(*state)
    advance = partial(progress, run.config.num_layers + (-begun.done if begun else len(scored)))

    def save(refitting: Refitting) -> None:
        if state is not None:
            refitting.write(*state)

    if begun is None:
        begun = Refitting(kept_neurons(neuron_scores(run, scored, layers, progress=advance), width))
        save(begun)
    own = {layer: replaced(run.weights.layers[layer], t, run.weights.dtype) for layer, t in shape.start.items()}
    down = narrow(run, texts, begun, shape.skip_layers, own, advance, save)
    start = dict(shape.start)
    for layer in layers:
        others = tensors_of_layer(run.weights.layers[layer])
        del others["gate_up"]
        start[layer] = {**_floats(others), NEURONS: begun.kept[layer], "down": down[layer]}
    return Shape(shape.skip_layers, start)


def kept_shape(path: Path, key: str, make: Callable[[], Shape]) -> Shape:
    """The shape that an earlier run of this `key` has kept there; otherwise what `make` makes in minutes, kept too."""

    def read(tensor: Callable[[str], Tensor], words: Mapping[str, str]) -> Shape:
        skip, names = as_json(words["shape"], path)
        start: dict[int, dict[str, Tensor]] = {}
        for layer, name in names:
            start.setdefault(layer, {})[name] = tensor(f"{layer}.{name}")
        return Shape(tuple(skip), start)

    if (found := read_state(path, key, read)) is not None:
        return found
    made = make()
    tensors = {(layer, name): tensor for layer, named in made.start.items() for name, tensor in named.items()}
    words = {"shape": json.dumps([made.skip_layers, list(tensors)])}
    write_state(path, key, {f"{layer}.{name}": t.contiguous() for (layer, name), t in tensors.items()}, words)
    return made


def shape_of(student: Student) -> Shape:
    """A student of a file, to be trained further."""
    return Shape(student.skip_layers, {layer: _floats(named) for layer, named in student.layers.items()})


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor if name == NEURONS else tensor.float() for name, tensor in tensors.items()}


def run_key(fingerprint: str, begun: str, shape: Shape, options: TrainingOptions, own: Sequence[OwnAnswer]) -> str:
    """By which a saved state is known to be of this very run; `begun` names the student that it began with."""
    sizes = {layer: {name: list(t.shape) for name, t in named.items()} for layer, named in shape.start.items()}
    texts = text_hash([one.token_ids for one in own])
    return json.dumps([fingerprint, begun, list(shape.skip_layers), sizes, vars(options), texts], sort_keys=True)


@torch.no_grad()
def best_kept(run: AnswerPass, first: int, stop: int, texts: Sequence[OwnAnswer], most_tokens: int) -> int:
    """The layer of a window which, alone in its place, leaves least of the window's change unexplained."""
    fulls = [run.at_full_depth(t.prompt_ids, t.token_ids[: most_tokens + 1], {first, stop}) for t in texts]
    errors = {}
    for kept in range(first, stop):
        schedule = skipping([one for one in range(first, stop) if one != kept], run.config.num_layers)
        errors[kept] = sum(
            float((run.run(full, schedule, first=first, stop=stop) - full.states[stop]).float().square().sum())
            for full in fulls
        )
    return min(errors, key=lambda layer: errors[layer])


def best_window(
    run: AnswerPass, size: int, texts: Sequence[OwnAnswer], most_tokens: int, progress: Callable[[], None]
) -> tuple[int, int]:
    """The window of `size` layers that generated tokens can be without at the least KL divergence from full depth."""
    layers = run.config.num_layers
    windows = [(first, first + size) for first in range(layers - size + 1)]
    found = judge(run, texts, [Judgeable("", skipping(range(*one), layers)) for one in windows], most_tokens, progress)
    return min(zip(windows, found, strict=True), key=lambda one: one[1].mean(0).value)[0]


@dataclass(frozen=True)
class Estimate:
    """What a training takes; `gigaflops` is what a product gives on this machine, just now."""

    seconds: float
    gigabytes: float
    gigaflops: float


def estimate(training: Distillation, own: Sequence[OwnAnswer], held_out: Sequence[OwnAnswer]) -> Estimate:
    """Time and memory of all steps, by the products alone; a loaded machine is slower."""
    run, options, shape = training.run_pass, training.options, training.shape
    config = run.config
    layer, head = config.layer_parameters, config.vocab_size * config.hidden_size
    most = options.most_tokens
    prompt = sum(len(one.prompt_ids) for one in own) / len(own)
    answer = sum(min(one.positions, most) for one in own) / len(own)
    inside = shape.behind - shape.first - len(shape.skip_layers)
    above = config.num_layers - shape.behind + inside
    read = 2 * (prompt + answer) * config.num_layers * layer
    texts_seen = options.texts * options.all_steps
    flops = read * min(len(own), texts_seen)
    flops += options.hidden_steps * options.texts * 6 * answer * inside * layer
    rows = min(options.rows, answer)
    flops += options.steps * options.texts * (6 * answer * above * layer + 8 * rows * head)
    judgements = 1 + options.all_steps // options.judge_every
    flops += judgements * len(held_out) * (read + 2 * answer * (above * layer + 2 * head))
    speed = _flops_a_second(run.weights.dtype, config.hidden_size, config.intermediate_size)
    size = run.weights.dtype.itemsize
    kept = answer * 3 * config.hidden_size + prompt * 2 * config.num_layers * config.kv_size
    held = min(CACHE_BYTES, min(len(own), texts_seen) * kept * size)
    weights = (config.num_layers * layer + 2 * head) * size
    logits = 5 * 4 * config.vocab_size * max(rows, answer)
    graph = answer * above * (4 * config.intermediate_size + 8 * config.hidden_size) * size
    total = weights + held + training.num_trained * (16 + size) + logits + graph
    return Estimate(flops / speed, total / 2**30, speed / 1e9)


def estimate_widths(run: AnswerPass, texts: Sequence[OwnAnswer], num_layers: int, width: float) -> Estimate:
    """The same of `narrowed_shape` for `num_layers` layers."""
    config, count, size = run.config, len(texts), run.weights.dtype.itemsize
    layer, head, hidden = config.layer_parameters, config.vocab_size * config.hidden_size, config.hidden_size
    kept = width * config.intermediate_size
    answer = sum(one.positions for one in texts) / count
    whole = answer + sum(len(one.prompt_ids) for one in texts) / count
    flops = 6 * min(count, SCORED_TEXTS) * (whole * config.num_layers * layer + answer * head)
    flops += 2 * count * (whole + answer) * config.num_layers * layer
    flops += num_layers * kept * kept * 2 * count * answer
    # The rest of a layer's equations is float32 whatever the passes are, a fifth as fast where AMX multiplies bfloat16.
    refitted = num_layers * kept * (4 * count * answer * hidden + kept * kept)
    graph = whole * config.num_layers * (4 * config.intermediate_size + 8 * hidden) * size
    scoring = graph + 3 * 4 * config.vocab_size * answer
    # Of texts and of down matrices there are copies while a state is saved.
    refitting = count * (3 * (whole + answer) * hidden + answer * kept) * size + 4 * count * answer * hidden
    refitting += 4 * kept * (3 * kept + 2 * num_layers * hidden)
    total = (config.num_layers * layer + 2 * head) * size + max(scoring, refitting)
    speed = _flops_a_second(run.weights.dtype, hidden, config.intermediate_size)
    seconds = flops / speed + refitted / _flops_a_second(torch.float32, hidden, config.intermediate_size)
    return Estimate(seconds, total / 2**30, (flops + refitted) / seconds / 1e9)


def _flops_a_second(dtype: torch.dtype, columns: int, rows: int) -> float:
    x, weight = torch.randn(128, columns, dtype=dtype), torch.randn(rows, columns, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 0.2:
        torch.nn.functional.linear(x, weight)
        count += 1
    return count * 2 * 128 * columns * rows / (time.perf_counter() - begun)
