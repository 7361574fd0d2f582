import sys

from d3engine.integrations import asgi as _new

sys.modules[__name__] = _new
