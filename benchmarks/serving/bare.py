"""The engine without a server, in a process of its own: answers a round for each line that it reads."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Take what `processes.Bare` gives."""
    given = json.loads(sys.argv[1])
    import torch

    from benchmarks.serving.asking import DEPTHS, prompt
    from d3engine import Engine, SamplingParams
    from d3engine.depth.policy import policy_from_dict

    torch.set_num_threads(given["threads"])
    sizes = {"max_num_seqs": given["rows"], "weight_dtype": given["weight_dtype"], "num_threads": given["threads"]}
    nth = 0
    with Engine(given["model"], device="cpu", **sizes) as engine:
        for line in sys.stdin:
            streams, seconds, depth = json.loads(line)
            policy = policy_from_dict(DEPTHS[depth])
            params = SamplingParams(temperature=0, max_tokens=given["tokens"], ignore_eos=True, depth=policy)
            tokens, start, begun = 0, time.perf_counter(), time.process_time()
            while not tokens or time.perf_counter() < start + seconds:
                outputs = engine.generate([prompt(nth + i) for i in range(streams)], params, use_tqdm=False)
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
                nth += streams
            found = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - begun}
            print(json.dumps({"tokens": tokens, **found}), flush=True)


if __name__ == "__main__":
    main()
