"""Greedy decode: our engine at full depth, the same under D3, and transformers' `generate`, interleaved in one run.

The one idea: every figure is a ratio of two neighbours in time. A round runs the three systems one after the other,
each from the same short prompt to the same fixed number of new tokens; ratios are taken within a round, and the median
over the rounds is reported. What is timed is the whole call for all systems, so the prompt pass is in it for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.report import environment, summary, write_json
from d3engine.depth import D3, DepthPolicy, FullDepth
from d3engine.depth.statistics import layer_bound
from d3engine.engine import Engine
from d3engine.loading import model_directory
from d3engine.model.config import CONFIG_FILE, ModelConfig
from d3engine.model.weights import LlamaWeights, load_weights, random_weights, to_half_split
from d3engine.request import SamplingParams

TARGET_SPEEDUP_IN_LAYERS = 1.5
"""D3 is set so that the mean depth over the generated tokens is as near as can be to L divided by this."""

PROMPT_TOKENS = 16
FULL, DECAY, PEER = "full_depth", "d3", "transformers"
SYSTEMS = (FULL, DECAY, PEER)

RANDOM_MODELS: dict[str, dict[str, int]] = {
    "large": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    },
    "tiny": {
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
MODELS = ("demo", *RANDOM_MODELS)


@dataclass(frozen=True)
class Settings:
    """What is run; `tokens` are generated for each of `batch` equally long prompts, `repeats` times by each system."""

    model: str = "demo"
    tokens: int = 128
    batch: int = 1
    repeats: int = 5
    threads: int = 2


@dataclass(frozen=True)
class Answers:
    """What one call generated, by row of the batch; `depths` are empty for a system that does not count layers."""

    token_ids: list[list[int]]
    depths: list[list[int]]


Generate = Callable[[], Answers]


# -- the models ------------------------------------------------------------------------------------------------


@contextmanager
def model_at(name: str, num_positions: int) -> Iterator[Path]:
    """The directory of a named model; for a random one a temporary directory with nothing but its config.json."""
    if name not in RANDOM_MODELS:
        yield model_directory(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = RANDOM_MODELS[name] | {"model_type": "llama", "max_position_embeddings": max(2048, num_positions)}
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def weights_of(directory: Path, config: ModelConfig) -> LlamaWeights:
    """Float32 weights: those of the directory, or random ones where it has none."""
    if any(directory.glob("*.safetensors")):
        return load_weights(directory, config, dtype=torch.float32, device="cpu", show_progress=False)
    return random_weights(config, dtype=torch.float32, device="cpu", seed=0)


def prompts_for(config: ModelConfig, batch: int) -> list[list[int]]:
    """Random prompts of ordinary tokens, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(3, config.vocab_size, (batch, PROMPT_TOKENS), generator=generator)
    return [[int(token) for token in row] for row in drawn]


def decay_for(num_layers: int, num_tokens: int) -> D3:
    """The D3 setting whose mean depth over `num_tokens` is nearest to L / 1.5.

    Starts from 0.2 to 0.8 by 0.05, alphas from 0.8 to 0.9999; of equal ones the first, which decays fastest.
    """
    alphas = (0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
    settings = [D3(alpha, round(start / 20, 2)) for alpha in alphas for start in range(4, 17)]
    wanted = num_layers / TARGET_SPEEDUP_IN_LAYERS
    return min(settings, key=lambda d3: abs(float(d3.schedule(num_layers).depths(num_tokens).mean()) - wanted))


# -- the systems -----------------------------------------------------------------------------------------------


def new_engine(directory: Path, weights: LlamaWeights, settings: Settings) -> Engine:
    """Our engine with a cache for exactly these requests; they share nothing, so the prefix cache is off."""
    return Engine(
        directory,
        weights=weights,
        device="cpu",
        dtype="float32",
        max_model_len=PROMPT_TOKENS + settings.tokens,
        max_num_seqs=settings.batch,
        max_num_batched_tokens=max(2048, PROMPT_TOKENS * settings.batch),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def ours(engine: Engine, prompts: list[list[int]], depth: DepthPolicy, num_tokens: int) -> Generate:
    """Our engine's whole call, from token ids to token ids."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, depth=depth)

    def generate() -> Answers:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return Answers([o.outputs[0].token_ids for o in outputs], [o.outputs[0].depths for o in outputs])

    return generate


def transformers_model(directory: Path, config: ModelConfig, weights: LlamaWeights) -> Any:
    """transformers' Llama with the same weights; it shares memory with the matrices that both lay out alike."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    peer_config = LlamaConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(peer_config)
    model.model.rotary_emb = LlamaRotaryEmbedding(peer_config)
    model.load_state_dict(_transformers_state(config, weights), strict=True, assign=True)
    model.generation_config.eos_token_id = None  # so that exactly max_new_tokens are generated
    return model.eval()


def _transformers_state(config: ModelConfig, weights: LlamaWeights) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head,
    }
    for index, layer in enumerate(weights.layers):
        assert layer.qkv_bias is None, "the models measured here have no biases"
        query, key, value = layer.qkv.split([config.q_size, config.kv_size, config.kv_size])
        gate, up = layer.gate_up.chunk(2)
        matrices = {
            "self_attn.q_proj": to_half_split(query, config.num_heads),
            "self_attn.k_proj": to_half_split(key, config.num_kv_heads),
            "self_attn.v_proj": value.clone(),  # a view would keep the whole of our qkv alive
            "self_attn.o_proj": layer.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }
        state |= {f"model.layers.{index}.{name}.weight": matrix for name, matrix in matrices.items()}
    return state


def theirs(model: Any, prompts: list[list[int]], num_tokens: int) -> Generate:
    """transformers' whole call: greedy `generate` with its default attention and its dynamic cache."""
    from transformers import DynamicCache

    given = torch.tensor(prompts)

    def generate() -> Answers:
        generated = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=DynamicCache(config=model.config),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return Answers(generated[:, given.shape[1] :].tolist(), [])

    return generate


# -- time ------------------------------------------------------------------------------------------------------


def measure(settings: Settings, *, with_memory: bool = True, show_progress: bool | None = None) -> dict[str, Any]:
    """Run all rounds and return the report, without its environment. Sets torch's number of threads."""
    torch.set_num_threads(settings.threads)
    with model_at(settings.model, PROMPT_TOKENS + settings.tokens) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        prompts = prompts_for(config, settings.batch)
        decay = decay_for(config.num_layers, settings.tokens)
        engine = new_engine(directory, weights, settings)
        peer = transformers_model(directory, config, weights)
        systems = {
            FULL: ours(engine, prompts, FullDepth(), settings.tokens),
            DECAY: ours(engine, prompts, decay, settings.tokens),
            PEER: theirs(peer, prompts, settings.tokens),
        }
        answers, seconds = run_rounds(systems, settings.repeats, show_progress)
    engine.close()
    report = {
        "benchmark": "decode",
        "settings": asdict(settings) | {"prompt_tokens": PROMPT_TOKENS, "dtype": "float32", "depth": decay.describe()},
        "model": describe(config, weights),
        "attention_of_transformers": peer.config._attn_implementation,
        **evaluate(settings, config, weights, answers, seconds),
    }
    del systems, engine, peer, weights
    gc.collect()
    if with_memory:
        for system in tqdm(SYSTEMS, "memory", disable=_hide(show_progress)):
            report["systems"][system]["memory"] = memory_in_subprocess(system, settings)
    return report


def run_rounds(
    systems: dict[str, Generate], repeats: int, show_progress: bool | None
) -> tuple[dict[str, Answers], dict[str, list[float]]]:
    """One warm-up of each system, whose answers are kept, then the rounds: seconds by system, one a round."""
    answers: dict[str, Answers] = {}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    with tqdm(total=(repeats + 1) * len(systems), unit="run", disable=_hide(show_progress)) as bar:
        for turn in range(repeats + 1):
            for system, generate in systems.items():
                bar.set_description(system)
                start = time.perf_counter()
                given = generate()
                elapsed = time.perf_counter() - start
                if turn == 0:
                    answers[system] = given
                else:
                    seconds[system].append(elapsed)
                    assert given == answers[system], f"{system} has given another answer to the same prompts"
                bar.update()
    return answers, seconds


def _hide(show_progress: bool | None) -> bool | None:
    """tqdm's `disable`: None hides the bar where there is no terminal."""
    return None if show_progress is None else not show_progress


def evaluate(
    settings: Settings,
    config: ModelConfig,
    weights: LlamaWeights,
    answers: dict[str, Answers],
    seconds: dict[str, list[float]],
) -> dict[str, Any]:
    """Rates, ratios within rounds, and the realisation ratio: the speed-up of D3 over what its bytes allow."""
    for system in SYSTEMS:
        lengths = {len(row) for row in answers[system].token_ids}
        assert lengths == {settings.tokens}, f"{system} was to generate {settings.tokens} tokens, not {lengths}"
    num_tokens = settings.tokens * settings.batch
    layer_bytes, head_bytes = _layer_bytes(weights), _head_bytes(weights)
    systems: dict[str, Any] = {}
    for system in SYSTEMS:
        depths = _depths_of_steps(answers[system]) or [config.num_layers] * settings.tokens
        moved = sum(depths) * layer_bytes + len(depths) * head_bytes
        systems[system] = {
            "seconds": summary(seconds[system]),
            "tokens_per_second": summary([num_tokens / s for s in seconds[system]]),
            "mean_layers": sum(depths) / len(depths),
            "weight_bytes_moved": moved,
            "gigabytes_per_second": summary([moved / s / 1e9 for s in seconds[system]]),
        }
    speedup = _ratio(seconds[FULL], seconds[DECAY])
    bound = layer_bound(
        _depths_of_steps(answers[DECAY]),
        num_layers=config.num_layers,
        layer_size=layer_bytes,
        head_size=head_bytes,
    )
    ours_tokens, peer_tokens = answers[FULL].token_ids, answers[PEER].token_ids
    return {
        "systems": systems,
        "full_depth_over_transformers": _ratio(seconds[PEER], seconds[FULL]),
        "d3_over_transformers": _ratio(seconds[PEER], seconds[DECAY]),
        "d3_over_full_depth": speedup,
        "layer_bound": bound,
        "realisation_ratio": speedup["median"] / bound,
        "tokens_equal": ours_tokens == peer_tokens,
        "first_difference": [_first_difference(*rows) for rows in zip(ours_tokens, peer_tokens, strict=True)],
    }


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, Any]:
    """How many times faster, round by round."""
    return summary([a / b for a, b in zip(slower, faster, strict=True)])


def _depths_of_steps(answers: Answers) -> list[int]:
    """Layers that each engine step ran: all rows start together, so they are of one depth."""
    if not answers.depths:
        return []
    assert all(row == answers.depths[0] for row in answers.depths), "the rows of the batch did not stay in step"
    return answers.depths[0]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def _layer_bytes(weights: LlamaWeights) -> int:
    return sum(tensor.nbytes for tensor in weights.layers[0].tensors())


def _head_bytes(weights: LlamaWeights) -> int:
    return weights.final_norm.nbytes + weights.lm_head.nbytes


def describe(config: ModelConfig, weights: LlamaWeights) -> dict[str, Any]:
    """The sizes that the figures depend on; the embedding is not read but for a row a token, so it is not moved."""
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "parameters": weights.nbytes // torch.float32.itemsize,
        "weight_bytes": weights.nbytes,
        "layer_bytes": _layer_bytes(weights),
        "head_bytes": _head_bytes(weights),
        "kv_bytes_per_token": 2 * config.num_layers * config.kv_size * torch.float32.itemsize,
    }


# -- memory ----------------------------------------------------------------------------------------------------


def memory_in_subprocess(system: str, settings: Settings) -> dict[str, Any]:
    """What `memory` returns, for one system alone in a fresh process."""
    options = [f"--{name}={getattr(settings, name)}" for name in ("model", "tokens", "batch", "threads")]
    command = [sys.executable, "-m", "benchmarks.decode", *options, f"--memory-of={system}"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {system} has failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def memory(system: str, settings: Settings) -> dict[str, Any]:
    """Resident bytes of this process with the model loaded, and at most while it answers twice.

    Where the kernel cannot forget an earlier peak (only Linux can), the peak is that of the whole process.
    """
    torch.set_num_threads(settings.threads)
    with model_at(settings.model, PROMPT_TOKENS + settings.tokens) as directory:
        config = ModelConfig.from_directory(directory)
        weights = weights_of(directory, config)
        prompts = prompts_for(config, settings.batch)
        if system == PEER:
            generate = theirs(transformers_model(directory, config, weights), prompts, settings.tokens)
        else:
            depth = FullDepth() if system == FULL else decay_for(config.num_layers, settings.tokens)
            generate = ours(new_engine(directory, weights, settings), prompts, depth, settings.tokens)
        del weights
        gc.collect()
        forgotten = _forget_peak()
        loaded = _resident_bytes("VmRSS") if forgotten else None
        for _ in range(2):
            generate()
    return {"loaded_bytes": loaded, "peak_bytes": _peak_bytes(), "peak_includes_loading": not forgotten}


def _forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    if sys.platform == "linux":
        return _resident_bytes("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")


# -- the page --------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    """Print the model's card, one row a system, and the ratios."""
    settings, model = report["settings"], report["model"]
    console.print(
        f"{settings['model']}: {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers of"
        f" {model['layer_bytes'] / 1e6:.2f} MB, head {model['head_bytes'] / 1e6:.2f} MB,"
        f" KV {model['kv_bytes_per_token'] / 1024:.1f} KiB a token; float32, {settings['threads']} threads, batch"
        f" {settings['batch']}, {settings['prompt_tokens']} prompt + {settings['tokens']} new tokens,"
        f" {settings['repeats']} rounds"
    )
    depth = settings["depth"]
    names = {FULL: "full depth", DECAY: f"D3({depth['alpha']}, {depth['start']})", PEER: PEER}
    table = Table()
    for title in ("system", "tok/s", "min - max", "layers", "GB/s", "peak MiB"):
        table.add_column(title, justify="left" if title == "system" else "right", no_wrap=True)
    for system, row in report["systems"].items():
        rate = row["tokens_per_second"]
        peak = row["memory"]["peak_bytes"] / 2**20 if "memory" in row else None
        table.add_row(
            names[system],
            f"{rate['median']:.2f}",
            f"{rate['min']:.2f} - {rate['max']:.2f}",
            f"{row['mean_layers']:.2f}",
            f"{row['gigabytes_per_second']['median']:.2f}",
            "-" if peak is None else f"{peak:,.0f}",
        )
    console.print(table)
    ratios = Table("ratio", "median", "min - max")
    for name in ("full_depth_over_transformers", "d3_over_transformers", "d3_over_full_depth"):
        ratio = report[name]
        ratios.add_row(name.replace("_", " "), f"{ratio['median']:.3f}", f"{ratio['min']:.3f} - {ratio['max']:.3f}")
    ratios.add_row("layer bound of D3, head counted", f"{report['layer_bound']:.3f}", "")
    ratios.add_row("realisation ratio", f"{report['realisation_ratio']:.3f}", "")
    console.print(ratios)
    console.print("Timed: the whole call, prompt pass included, for every system alike. GB/s: weights read.")
    if report["tokens_equal"]:
        console.print("Full-depth tokens equal those of transformers.")
    else:
        console.print(f"[bold red]Full-depth tokens differ from transformers', first at {report['first_difference']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when the tokens differ from transformers'."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="demo", help="demo: the bundled one; others are random")
    parser.add_argument("--tokens", type=_positive, default=128, help="new tokens a prompt")
    parser.add_argument("--batch", type=_positive, default=1, help="prompts at once")
    parser.add_argument("--repeats", type=_positive, default=5, help="rounds")
    parser.add_argument("--threads", type=_positive, default=2, help="torch's threads")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to this file")
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory (three more processes)")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    settings = Settings(options.model, options.tokens, options.batch, options.repeats, options.threads)
    if options.memory_of:
        print(json.dumps(memory(options.memory_of, settings)))
        return 0
    report = measure(settings, with_memory=not options.no_memory)
    report["environment"] = environment("benchmarks.decode", arguments)
    show(report, Console())
    if options.json:
        write_json(report, options.json)
    return 0 if report["tokens_equal"] else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
