import sys

from d3engine.model import checkpoint_formats as _new

sys.modules[__name__] = _new
