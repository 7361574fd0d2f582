import sys

from d3engine.model import config as _new

sys.modules[__name__] = _new
