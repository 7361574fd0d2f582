"""The step API, for a server or a scheduler of your own: requests arrive while others run, and one is called off.

python examples/step_loop.py [MODEL]
"""

import sys

from d3engine import Engine, FullDepth, SamplingParams

PROMPT = "Question: Tom has {} pens. Tom finds 3. Tom gives 2 to Ana. How many pens does Tom have now?\nAnswer:"


def main(model: str = "demo") -> None:
    """Admit a request every third step, abort one of them, and print each as it ends."""
    params = SamplingParams(temperature=0, max_tokens=48)
    deep = SamplingParams(temperature=0, max_tokens=48, depth=FullDepth())
    waiting = [(f"request {number}", PROMPT.format(5 + number), deep if number % 2 else params) for number in range(4)]
    with Engine(model) as engine:
        steps = 0
        while waiting or engine.has_unfinished_requests():
            if waiting and steps % 3 == 0:
                engine.add_request(*waiting.pop(0))
            if steps == 7:
                engine.abort_request("request 1")
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    print(f"step {steps}: {output.request_id} ended ({answer.finish_reason}): {answer.text.strip()}")
            steps += 1
        stats = engine.stats()
    print(f"{stats.generated_tokens} tokens, {stats.realised_mean_layers:.2f} layers per token")


if __name__ == "__main__":
    main(*sys.argv[1:2])
