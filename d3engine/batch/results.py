import sys

from d3engine.batch import batch_file as _new

sys.modules[__name__] = _new
