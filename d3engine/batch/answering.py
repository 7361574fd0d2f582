import sys

from d3engine.batch import runner as _new

sys.modules[__name__] = _new
