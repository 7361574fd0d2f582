import sys

from d3engine.kernels.native import runs as _new

sys.modules[__name__] = _new
