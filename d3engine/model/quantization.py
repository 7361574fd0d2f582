import sys

from d3engine.model import weights as _new

sys.modules[__name__] = _new
