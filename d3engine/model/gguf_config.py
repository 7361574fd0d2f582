import sys

from d3engine.model import gguf_metadata as _new

sys.modules[__name__] = _new
