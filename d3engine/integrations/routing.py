import sys

from d3engine.integrations import proxy as _new

sys.modules[__name__] = _new
