import sys

from d3engine.model import shard as _new

setattr(_new, "part_of", _new.shard_of)  # noqa: B010
sys.modules[__name__] = _new
