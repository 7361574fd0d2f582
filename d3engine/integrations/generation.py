import sys

from d3engine.integrations import transformers as _new

sys.modules[__name__] = _new
