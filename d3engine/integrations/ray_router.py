import sys

from d3engine.integrations import ray_serve as _new

sys.modules[__name__] = _new
