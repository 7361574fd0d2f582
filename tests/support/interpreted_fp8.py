"""Triton's interpreter with a GPU's 8-bit floats: its own e4m3 has no NaN, and loses what rounding carries over."""

from typing import Any


def convert_as_a_gpu_does() -> None:
    """From now on, for the whole process: e4m3 is rounded to the nearest even, and NaN stays NaN."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_convert_float"):
        return  # another version of Triton
    others, wide = interpreter._convert_float, {tl.float32: torch.float32, tl.float16: torch.float16}

    def convert(given: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if target == tl.float8e4nv and source in wide:
            values = torch.from_numpy(np.ascontiguousarray(given)).view(wide[source])
            return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in wide:
            values = torch.from_numpy(np.ascontiguousarray(given).view(np.uint8)).view(torch.float8_e4m3fn)
            return values.to(wide[target]).numpy().view(f"uint{target.primitive_bitwidth}")
        return others(given, source, target, rounding_mode)

    interpreter._convert_float = convert
