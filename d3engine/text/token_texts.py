import sys

from d3engine.text import detokenizer as _new

sys.modules[__name__] = _new
