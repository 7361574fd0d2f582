import sys

from d3engine.weights_tools import convert as _new

sys.modules[__name__] = _new
