import sys

from d3engine.model import source as _new

sys.modules[__name__] = _new
