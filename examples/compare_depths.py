"""One question under four depth policies, answered in one batch: what each says, and how many layers it ran.

python examples/compare_depths.py [MODEL]
"""

import sys

from d3engine import D3, Engine, FullDepth, Lossless, SamplingParams, TailSkip

QUESTION = "Question: Ben has 41 shells. Ben finds 12. Ben gives 7 to Mia. How many shells does Ben have now?\nAnswer:"
POLICIES = {
    "full depth": FullDepth(),
    "D3": D3(alpha=0.8, start=0.6),
    "tail skipping": TailSkip(mean_layers=11.2, max_tokens=64),
    "lossless D3": Lossless(D3(alpha=0.8, start=0.5)),
}


def main(model: str = "demo") -> None:
    """Print each policy's answer with its mean layers per token."""
    params = [SamplingParams(temperature=0, max_tokens=64, depth=policy) for policy in POLICIES.values()]
    with Engine(model) as engine:
        outputs = engine.generate([QUESTION] * len(params), params, use_tqdm=False)
    for name, output in zip(POLICIES, outputs, strict=True):
        answer = output.outputs[0]
        print(f"{name}: {sum(answer.depths) / len(answer.depths):.2f} layers per token\n {answer.text.strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
