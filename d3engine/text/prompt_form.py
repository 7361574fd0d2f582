import sys

from d3engine.text import prompts as _new

sys.modules[__name__] = _new
