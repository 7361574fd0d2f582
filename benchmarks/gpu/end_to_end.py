"""Decoding from end to end on random weights: time per step over depth, and what D3 makes of its layer bound.

A decode step is a `generate` call for N tokens less one for a single token, over N - 1. Over the layers that ran steps
are fitted to a line; the limit is the time in which weights and KV entries are read at the measured copy rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.common import Round, host_seconds
from benchmarks.gpu.models import (
    Model,
    dequantized,
    graph_figures,
    in_blocks,
    new_engine,
    params_for,
    quantized,
    random_model,
    with_8_bit_cache,
)
from benchmarks.gpu.plain_llama import PlainLlama
from benchmarks.systems import prompts_for
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.engine.engine import Engine

BBH, SLOW, GSM8K = D3(0.9, 0.6), D3(0.99, 0.5), D3(0.9999, 0.8)
REPEATS = 3
TARGETS = {
    ("llama2-7b", "bf16", 1, 16): 0.82,
    ("llama2-7b", "bf16", 8, 512): 0.78,
    ("llama2-7b", "bf16", 64, 512): 0.70,
    ("llama2-7b", "int8", 1, 16): 0.66,
    ("llama2-7b", "int4", 1, 16): 0.45,
}
"""The share of the bandwidth limit that full depth is to reach first, by model, scheme, batch and context."""
GATE = 1.05
"""A depth may take this multiple of what the line says, and a batch of two depths this multiple of what is promised."""
LEAST_REALISATION = 0.95
TIE = 0.15
"""A token may be so far below the largest logit of plain PyTorch at half precision; logits deviate by 1.3 here."""
CHECKED_PROMPTS, CHECKED_TOKENS = 2, 24
LEAST_S = 5.0


@dataclass(frozen=True)
class Setting:
    """One batch size and prompt length, and what is run at it."""

    batch: int
    context: int
    depths: tuple[int, ...] = ()
    schedules: tuple[D3, ...] = ()
    tokens: int = 129
    mixed: bool = False  # whether a batch of the first and the last depth is measured too


ALL_DEPTHS = (32, 28, 24, 20, 16)
FIRST_LIGHT = (Setting(1, 16, (32,), tokens=17),)
DECODE = (
    Setting(1, 16, ALL_DEPTHS, (BBH, SLOW)),
    Setting(8, 512, ALL_DEPTHS, (BBH,), mixed=True),
    Setting(1, 2048, (32, 24, 16), (BBH,)),
    Setting(8, 2048, (32, 24, 16), (BBH,)),
    Setting(1, 16, (32,), (GSM8K,), tokens=1025),
)
BATCHES = (Setting(64, 512, ALL_DEPTHS, (BBH,), mixed=True), Setting(64, 16, (32, 24, 16)))
FEWER = (
    Setting(1, 16, ALL_DEPTHS, (BBH,)),
    Setting(8, 512, (32, 24, 16), (BBH,)),
    Setting(64, 512, (32, 24, 16), (BBH,)),
    Setting(1, 2048, (32, 16)),
)
CACHE = (Setting(64, 512, (32, 16)),)
FULL_ONLY = (Setting(1, 16, (32,)), Setting(8, 512, (32,)))
SMOKE = (Setting(1, 16, (8, 6, 4), (D3(0.8, 0.5),), tokens=9), Setting(3, 40, (8, 4), (), tokens=5, mixed=True))


def first_light(report: dict[str, Any], current: Round) -> None:
    """Llama-2-7B in bfloat16, one prompt and 17 tokens at full depth: whether the engine runs and is right."""
    _llama2(report, FIRST_LIGHT if current.on_gpu else (replace(SMOKE[0], depths=(8,), schedules=()),), current)


def decode(report: dict[str, Any], current: Round) -> None:
    """Llama-2-7B in bfloat16 at batch 1 and 8: every context and depth."""
    _llama2(report, DECODE if current.on_gpu else SMOKE, current)


def batches(report: dict[str, Any], current: Round) -> None:
    """Llama-2-7B in bfloat16 at batch 64."""
    _llama2(report, BATCHES if current.on_gpu else SMOKE[1:], current)


def _llama2(report: dict[str, Any], settings: Sequence[Setting], current: Round) -> None:
    report["models"] = []
    with random_model("llama2-7b", current) as model:
        measure_model(report, model, settings, current)
    judge(report)


def quantization(report: dict[str, Any], current: Round) -> None:
    """Llama-2-7B in int8 and in int4 over depth, then full depth in 8-bit floats and in blocks of four bits."""
    report["models"] = []
    with random_model("llama2-7b", current) as model:
        for scheme in current.schemes:
            settings = FULL_ONLY if scheme == "fp8" else FEWER
            measure_model(report, quantized(model, scheme), settings if current.on_gpu else SMOKE[:1], current)
        of_blocks = in_blocks(model, current.blocks[0], current)
        measure_model(report, of_blocks, FULL_ONLY if current.on_gpu else SMOKE[:1], current)
    judge(report)


def cache(report: dict[str, Any], current: Round) -> None:
    """Llama-2-7B in bfloat16 over entries in bfloat16 and in 8 bits; `ratios` has the one's step over the other's."""
    report["models"] = []
    with random_model("llama2-7b", current) as model:
        for form in (model, with_8_bit_cache(model)):
            measure_model(report, form, CACHE if current.on_gpu else SMOKE[1:], current)
    report["ratios"] = [
        {"batch": row["batch"], "context": row["context"], "depth": narrow["depth"]}
        | {"over_wide_entries": narrow["step_s"] / wide["step_s"]}
        for of_wide, row in zip(*(card["settings"] for card in report["models"]), strict=False)
        for wide, narrow in zip(of_wide["depths"], row["depths"], strict=False)
        if wide["step_s"] > 0
    ]
    judge(report)


def llama3(report: dict[str, Any], current: Round) -> None:
    """Llama-3-8B: bfloat16 over depth, then full depth in every scheme."""
    report["models"] = []
    with random_model("llama3-8b", current) as model:
        measure_model(report, model, FEWER if current.on_gpu else SMOKE[:1], current)
        for scheme in current.schemes:
            measure_model(report, quantized(model, scheme), FULL_ONLY if current.on_gpu else SMOKE[:1], current)
    judge(report)


def judge(report: dict[str, Any]) -> None:
    """Raise if the tokens of any model are not those of plain PyTorch: its times are worth nothing then."""
    wrong = [card for card in report["models"] if "check" in card and card["check"]["largest_gap"] > TIE]
    if wrong:
        names = ", ".join(f"{card['name']} {card['scheme']}" for card in wrong)
        raise RuntimeError(f"tokens of {names} are not those of plain PyTorch; see `check`")


def measure_model(report: dict[str, Any], model: Model, settings: Sequence[Setting], current: Round) -> None:
    """Add one model's card to `report["models"]`, its settings in turn until the time is up."""
    found = model.card() | {"mode": current.mode, "settings": []}
    report["models"].append(found)
    is_checked = model.kv_cache_dtype == "auto"
    sizes = [*settings, _checked(current)] if is_checked else settings
    engine = new_engine(
        model,
        current,
        max_num_seqs=max(setting.batch for setting in sizes),
        max_model_len=max(setting.context + setting.tokens for setting in sizes) + 16,
        kv_tokens=max(setting.batch * (setting.context + setting.tokens + 16) for setting in sizes),
        # All prompts in one step, so that the rows of a batch stay in step with each other.
        max_num_batched_tokens=max(setting.batch * setting.context for setting in sizes) + 16,
    )
    try:
        current.keep(report)  # compiling has taken its time
        if is_checked:
            found["check"] = check(engine, model, current)
            current.keep(report)
        for setting in settings:
            row: dict[str, Any] = {"batch": setting.batch, "context": setting.context, "tokens": setting.tokens}
            found["settings"].append(row)
            prompts = prompts_for(model.config, setting.batch, setting.context)
            batch = Batch(engine, model, setting, prompts, current)
            if not measure_setting(row, batch, lambda: current.keep(report)):
                report["stopped"] = f"time: within {model.name} {model.scheme}, batch {setting.batch}"
                return
        found["graphs"] = graph_figures(engine)
    finally:
        engine.close()
        if current.on_gpu:
            torch.cuda.empty_cache()


def _checked(current: Round) -> Setting:
    """The prompts and tokens of `check`."""
    return Setting(CHECKED_PROMPTS, 400 if current.on_gpu else 12, tokens=CHECKED_TOKENS)


def check(engine: Engine, model: Model, current: Round) -> dict[str, Any]:
    """Run what the engine answered through plain PyTorch at once: how far each token is below the largest logit.

    Of quantized weights it gets what they stand for.
    """
    length = _checked(current).context
    outputs = engine.generate(
        prompts_for(model.config, CHECKED_PROMPTS, length), params_for(FullDepth(), CHECKED_TOKENS), use_tqdm=False
    )
    rows = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids for output in outputs])
    rows = rows.to(current.device)
    plain = PlainLlama(model.config, dequantized(model.weights), batch=CHECKED_PROMPTS, length=rows.shape[1])
    with torch.no_grad():
        logits = plain.logits(rows[:, :-1], torch.arange(rows.shape[1] - 1, device=current.device))
    logits = logits[:, length - 1 :].float()
    gaps = logits.amax(dim=2) - logits.gather(2, rows[:, length:, None])[..., 0]
    return {"tokens": gaps.numel(), "tokens_that_differ": int((gaps > 0).sum()), "largest_gap": float(gaps.max())}


def measure_setting(row: dict[str, Any], batch: Batch, keep: Callable[[], None]) -> bool:
    """Fill in prompt pass, depths, line, schedules and mixture; False if the time was up before the end."""
    model, setting, current = batch.model, batch.setting, batch.current
    row["depths"], row["schedules"] = [], []
    row["prompt_s"] = batch.prompt_s
    policies: list[tuple[str, DepthPolicy]] = [
        *(("depths", fixed_depth(depth, model.config.num_layers)) for depth in setting.depths),
        *(("schedules", schedule) for schedule in setting.schedules),
    ]
    for kind, policy in policies:
        if current.left() < LEAST_S:
            return False
        row[kind].append(batch.by_policy(policy))
        keep()
    if setting.mixed:
        if current.left() < LEAST_S:
            return False
        row["mixed"] = batch.of_two_depths(row)
        keep()
    if not row["depths"]:
        return True
    full = row["depths"][0]
    if len(row["depths"]) > 2:
        row["fit"] = fit(row["depths"])
    if current.left() >= LEAST_S:  # once more, last: how far two measurements lie apart
        again = batch.by_policy(FullDepth())
        row["noise"] = abs(again["step_s"] / full["step_s"] - 1)
    for schedule in row["schedules"]:
        schedule |= realisation(full, schedule)
    target = TARGETS.get((model.name, model.scheme, setting.batch, setting.context))
    if target is not None and setting.tokens == Setting.tokens:
        row["target"] = target
    keep()
    return True


def fixed_depth(depth: int, num_layers: int) -> DepthPolicy:
    """Full depth, or a D3 that is down to its first `depth` layers from the second token on."""
    return FullDepth() if depth == num_layers else D3(alpha=1e-6, start=depth / num_layers)


@dataclass(frozen=True)
class Batch:
    """The prompts of one setting, and the engine that answers them."""

    engine: Engine
    model: Model
    setting: Setting
    prompts: list[list[int]]
    current: Round

    @cached_property
    def prompt_s(self) -> float:
        """Median seconds of a call for one token of each prompt."""
        params = [params_for(FullDepth(), 1)] * len(self.prompts)
        return statistics.median(self._seconds(lambda: self.engine.generate(self.prompts, params, use_tqdm=False)))

    def calls(self, policies: Sequence[DepthPolicy]) -> list[float]:
        """Seconds of each of some whole calls, a policy a prompt; raises if a row ran other layers than it says."""
        tokens, num_layers = self.setting.tokens, self.model.config.num_layers
        params = [params_for(policy, tokens) for policy in policies]
        expected = [policy.schedule(num_layers).depths(tokens).tolist() for policy in policies]
        depths: list[list[int]] = []

        def call() -> None:
            outputs = self.engine.generate(self.prompts, params, use_tqdm=False)
            depths[:] = [output.outputs[0].depths for output in outputs]

        seconds = self._seconds(call)
        if depths != expected:
            raise RuntimeError(f"{policies} were to run {expected} layers per token and ran {depths}")
        return seconds

    def _seconds(self, call: Callable[[], object]) -> list[float]:
        """Of each of some calls after one that compiles and captures."""
        call()
        return [host_seconds(call, self.current.device) for _ in range(REPEATS)]

    def by_policy(self, policy: DepthPolicy) -> dict[str, Any]:
        """Median seconds of a decode step under one policy, and the bytes that it must move on average."""
        model, setting = self.model, self.setting
        prompt_s = self.prompt_s  # the prompt's pass comes first
        seconds = self.calls([policy] * setting.batch)
        expected = policy.schedule(model.config.num_layers).depths(setting.tokens).tolist()
        places = range(1, setting.tokens)
        step_s = (statistics.median(seconds) - prompt_s) / len(places)
        moved = sum(step_bytes(model, setting.batch, setting.context + i, expected[i]) for i in places) / len(places)
        return {
            "policy": policy.describe(),
            "depth": expected[1] if len(set(expected[1:])) == 1 else None,
            "mean_layers": statistics.fmean(expected[1:]),
            "calls_s": seconds,
            "step_s": step_s,
            "tokens_per_s": setting.batch / step_s if step_s > 0 else None,
            "bytes_a_step": moved,
            "share_of_copy": self.current.share(moved, step_s) if step_s > 0 else None,
        }

    def of_two_depths(self, row: dict[str, Any]) -> dict[str, Any]:
        """The first half at the setting's first depth and the other at the last, held to its promise.

        `row` has the uniform batches of all rows. Those of the first half alone are measured here.
        """
        setting, half = self.setting, (self.setting.batch + 1) // 2
        depths = [setting.depths[0], setting.depths[-1]]
        policies = [fixed_depth(depth, self.model.config.num_layers) for depth in depths]
        seconds = self.calls([policies[0]] * half + [policies[1]] * (setting.batch - half))
        alone = replace(self, setting=replace(setting, batch=half), prompts=self.prompts[:half])
        steps = {
            "step_s": (statistics.median(seconds) - self.prompt_s) / (setting.tokens - 1),
            "uniform_s": [row["depths"][0]["step_s"], row["depths"][-1]["step_s"]],
            "half_s": [alone.by_policy(policy)["step_s"] for policy in policies],
        }
        found = {"rows": [half, setting.batch - half], "depths": depths, "calls_s": seconds}
        return found | steps | mixture(**steps)


def mixture(step_s: float, uniform_s: Sequence[float], half_s: Sequence[float]) -> dict[str, Any]:
    """What uniform batches of the same active rows promise a batch of two depths, and how far it lies above.

    All are seconds per step: of the mixed batch; of all its rows at the deep and at the shallow depth; of its deep rows
    alone at both. Layers that all rows run cost what they cost all rows, and the head with them: a step at the shallow
    depth. Those above cost what they add to a batch of the deep rows.
    """
    promised = uniform_s[1] + half_s[0] - half_s[1]
    return {
        "promised_s": promised,
        "over_the_promise": step_s / promised if promised > 0 else None,
        "over_the_deepest": step_s / uniform_s[0],
        "within_the_gate": step_s <= GATE * promised,
    }


def step_bytes(model: Model, batch: int, entries: int, depth: int) -> float:
    """What one step at one depth must read: weights once for the batch, and each row's KV entries."""
    return depth * (model.layer_bytes + batch * model.entry_bytes * entries) + model.head_bytes


def fit(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The line through (depth, step), and by how much the slowest point lies above it, as a part of it."""
    depths = np.array([row["depth"] for row in rows], dtype=float)
    seconds = np.array([row["step_s"] for row in rows])
    slope, fixed = np.polyfit(depths, seconds, 1)
    over = seconds / (slope * depths + fixed)
    return {
        "layer_s": float(slope),
        "fixed_s": float(fixed),
        "over_the_line": [float(value) for value in over],
        "within_the_gate": bool(over.max() <= GATE),
    }


def realisation(full: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Speed-up of the decode steps over full depth, what the bytes allow, and the one over the other.

    The prompt pass, which is the same for both, is left out of them; `call_speedup` is that of the whole call.
    """
    speedup, bound = full["step_s"] / run["step_s"], full["bytes_a_step"] / run["bytes_a_step"]
    call = statistics.median(full["calls_s"]) / statistics.median(run["calls_s"])
    return {"speedup": speedup, "layer_bound": bound, "realisation": speedup / bound, "call_speedup": call}
