import sys

from d3engine.model import bridges as _new

sys.modules[__name__] = _new
