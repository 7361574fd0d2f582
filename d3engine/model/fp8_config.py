import sys

from d3engine.model import quantization_config as _new

sys.modules[__name__] = _new
