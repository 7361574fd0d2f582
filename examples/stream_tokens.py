"""Text as it comes, with the depth of each new token beside it.

python examples/stream_tokens.py [MODEL] [PROMPT]
"""

import sys

from d3engine import Engine, SamplingParams

PROMPT = "Question: Mia has 30 stamps. Mia buys 15. Mia loses 4. How many stamps does Mia have now?\nAnswer:"


def main(model: str = "demo", prompt: str = PROMPT) -> None:
    """Print each piece of text with the layers that its tokens ran, then the reason why the answer ended."""
    params = SamplingParams(temperature=0, max_tokens=64)
    shown, seen = 0, 0
    with Engine(model) as engine:
        for output in engine.stream(prompt, params):
            answer = output.outputs[0]
            print(f"{answer.text[shown:]!r:>12}  layers {answer.depths[seen:]}")
            shown, seen = len(answer.text), len(answer.depths)
    print(f"finished: {answer.finish_reason}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
