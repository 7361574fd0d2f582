"""The command line of the demo model's training: its flags, their defaults, and what each may be."""

import argparse
import json
import math
from pathlib import Path

from d3engine.research.evaluation.procedural import NAMES, WORD_PROBLEMS
from d3engine.weights_tools.demo_data import PROMPT_LOSS_WEIGHT
from d3engine.weights_tools.demo_trainer import DemoConfig, hf_config

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
    if json.loads((directory / "config.json").read_text()) != hf_config(DemoConfig()):
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
