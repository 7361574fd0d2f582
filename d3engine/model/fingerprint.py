import sys

from d3engine.model import expected_tensors as _new

sys.modules[__name__] = _new
