import sys

from d3engine.model import llama as _new

sys.modules[__name__] = _new
