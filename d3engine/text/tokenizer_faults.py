import sys

from d3engine.text import tokenizer as _new

sys.modules[__name__] = _new
