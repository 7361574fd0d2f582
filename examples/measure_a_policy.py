"""Is a depth setting safe for a task? Both depths answer the same questions, and the difference has an interval.

python examples/measure_a_policy.py [MODEL] [QUESTIONS]
"""

import sys

from d3engine import D3, Engine, FullDepth, SamplingParams
from d3engine.research.evaluation.accuracy import compare, measure
from d3engine.research.evaluation.procedural import procedural


def main(model: str = "demo", questions: str = "50") -> None:
    """Print exact match at full depth and under D3, with 95 % intervals, and the paired difference."""
    task = procedural("word-problems", split="validation", seed=1, limit=int(questions))
    with Engine(model) as engine:
        params = SamplingParams(temperature=0, max_tokens=task.max_tokens)
        full = measure(engine, task.questions, FullDepth(), params)
        d3 = measure(engine, task.questions, D3(alpha=0.8, start=0.6), params)
    for name, score in (("full depth", full), ("D3", d3)):
        interval = f"{score.interval.low:.1%} to {score.interval.high:.1%}"
        print(f"{name}: {score.accuracy:.1%} ({interval}) at {score.realised_mean_layers:.2f} layers per token")
    found = compare(full, d3)
    interval = f"{100 * found.interval.low:+.1f} to {100 * found.interval.high:+.1f}"
    print(f"difference: {100 * found.difference:+.1f} points ({interval})")


if __name__ == "__main__":
    main(*sys.argv[1:3])
