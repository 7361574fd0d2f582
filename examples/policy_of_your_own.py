"""A depth policy in ten lines: full depth for a while, then every second layer of the upper half is gone for good.

python examples/policy_of_your_own.py
"""

from dataclasses import dataclass
from typing import ClassVar

from d3engine import Engine, SamplingParams
from d3engine.depth import NEVER, DepthPolicy, Schedule

PROMPT = "Question: Tom has 5 pens. Tom finds 3. Tom gives 2 to Ana. How many pens does Tom have now?\nAnswer:"


@dataclass(frozen=True)
class Thinned(DepthPolicy):
    """From step `after` on, every second layer of the upper half is skipped."""

    after: int = 8

    name: ClassVar[str] = "thinned"

    def schedule(self, num_layers: int) -> Schedule:
        skipped = range(num_layers // 2, num_layers, 2)
        return Schedule.nested([self.after if layer in skipped else NEVER for layer in range(num_layers)])


def main() -> None:
    """Print the layers that each token ran, and the answer; one right answer says nothing of the next question."""
    with Engine("demo", depth=Thinned()) as engine:
        answer = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0]
    print(answer.depths)
    print(answer.text)


if __name__ == "__main__":
    main()
