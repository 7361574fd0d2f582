import sys

from d3engine.text import chat_template as _new

sys.modules[__name__] = _new
