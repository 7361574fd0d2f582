import sys

from d3engine.model import weights as _new

setattr(_new, "in_form", _new.in_layout)  # noqa: B010
sys.modules[__name__] = _new
