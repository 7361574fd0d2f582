import sys

from d3engine.model import shard as _new

sys.modules[__name__] = _new
