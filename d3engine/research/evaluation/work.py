"""The work of a run's answers, counted as the engine runs it: rows through layers, through
the LM head, and keys and values of skipped layers."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from d3engine.depth import DepthPolicy
from d3engine.depth.policy import ExitRule
from d3engine.depth.schedule import windows_of
from d3engine.depth.statistics import ModelShape, flops_ratio
from d3engine.request.outputs import RequestOutput


@dataclass(frozen=True)
class Work:
    """Generated tokens, and what was run for them; the prompts are not in it, nor what a preemption repeats.

    `layers` are layers run, summed over all rows; `heads` rows through the LM head; `projections` skipped layers for
    which an entry alone was computed (`on_skip="project"`), summed over rows; `crossings` windows of skipped layers
    that answered rows crossed by a bridge, which counts as a full map. Those of drafts are not counted. `narrower` are
    the layers' worth of matrices that a student's narrower layers did not run, of the `layers`.
    """

    tokens: int = 0
    layers: int = 0
    heads: int = 0
    projections: int = 0
    crossings: int = 0
    narrower: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def flops_ratio(self, shape: ModelShape) -> float:
        """FLOPs of full depth for as many tokens over those of this work, matrices alone; may be below 1."""
        full = self.tokens * (shape.num_layers * shape.layer_parameters + shape.head_parameters)
        # one matrix holds queries, keys and values: the engine computes all three where it needs only the entry
        projection = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
        run = (self.layers - self.narrower) * shape.layer_parameters + self.heads * shape.head_parameters
        return full / (run + self.projections * projection + self.crossings * shape.hidden_size**2)


def work_of(output: RequestOutput, policy: DepthPolicy, num_layers: int) -> Work:
    """What the finished answer of a request (n=1) under this policy has cost in a model of `num_layers` layers.

    A verification of d drafted tokens puts d + 1 rows through the LM head, after one for each token that layers of the
    model have drafted; lookups take none. Of a second model that drafts nothing is counted.
    """
    depths, metrics = output.outputs[0].depths, output.metrics
    tokens, layers = len(depths), sum(depths)
    if policy.drafts:
        heads = tokens + metrics.num_drafted_tokens - metrics.num_accepted_tokens + metrics.num_discarded_tokens
        drafting = policy.draft_rule(num_layers)
        heads += 0 if drafting is None or drafting.is_by_text else metrics.num_drafted_tokens
        return Work(tokens, layers + metrics.num_discarded_layers, heads)
    rule = policy.exit_rule(num_layers)
    heads = tokens if rule is None else sum(_heads(rule, depth, num_layers) for depth in depths[1:]) + len(depths[:1])
    schedule = policy.schedule(num_layers)
    projections = tokens * num_layers - layers if schedule.on_skip == "project" else 0
    runs = () if schedule.bridges is None else schedule.runs(tokens)
    crossings = sum((end - step) * len(windows_of(schedule.active(step))) for step, end in runs)
    return Work(tokens, layers, heads, projections, crossings)


def _heads(rule: ExitRule, depth: int, num_layers: int) -> int:
    """Rows through the LM head for a token of this depth: it leaves with the logits of its last look, if it leaves."""
    if rule.confidence == "cosine":
        return 1
    looks = sum(rule.checks_after(layer) for layer in range(min(depth, num_layers - 1)))
    return looks + (depth == num_layers)


def has_second_model(policy: DepthPolicy, num_layers: int) -> bool:
    """Whether another model drafts, whose layers and LM head are of other sizes."""
    rule = policy.draft_rule(num_layers)
    return rule is not None and rule.model is not None


def is_known_beforehand(policy: DepthPolicy, num_layers: int) -> bool:
    """Whether the schedule alone says how deep each token goes: no early exit, and no draft that may be rejected."""
    return policy.exit_rule(num_layers) is None and policy.draft_rule(num_layers) is None


@dataclass(frozen=True)
class Cost:
    """What answers under a policy have cost.

    `nominal_mean_layers` is what the schedule promises over the longest answers allowed; None where the policy leaves
    it open (`is_known_beforehand`). `unfinished` answers were cut off at that length. `seconds` is the wall clock of
    the whole batch, prompts included. `shape` holds the model's sizes.
    """

    policy: DepthPolicy
    shape: ModelShape
    work: Work
    unfinished: int
    nominal_mean_layers: float | None
    seconds: float

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def tokens(self) -> int:
        return self.work.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def realised_mean_layers(self) -> float:
        """Layers run for a token truly generated. Drafted and verified rows count whether accepted or not, so it may
        be above the model's number of layers; a second model's layers do not count. A narrower layer counts as the part
        of a layer that it is."""
        return (self.work.layers - self.work.narrower) / self.work.tokens

    @property
    def realised_layers_with_bridges(self) -> float:
        """The same with the bridges that were crossed, each as the share of a layer that a full map is."""
        crossings = self.work.crossings * self.shape.hidden_size**2 / self.shape.layer_parameters
        return self.realised_mean_layers + crossings / self.work.tokens

    @property
    def nominal_flops_ratio(self) -> float | None:
        """Full depth over the schedule, LM head included: the FLOPs column of the D3 paper's Table 6."""
        if self.nominal_mean_layers is None:
            return None
        shape = self.shape
        return flops_ratio(self.nominal_mean_layers, shape.num_layers, shape.layer_parameters, shape.head_parameters)

    @property
    def realised_flops_ratio(self) -> float | None:
        """Full depth over what was run for the tokens really generated, all of `Work`; None with a second model."""
        return None if has_second_model(self.policy, self.num_layers) else self.work.flops_ratio(self.shape)
