import sys

from d3engine.text import tokenizer_files as _new

sys.modules[__name__] = _new
