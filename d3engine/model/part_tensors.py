import sys

from d3engine.model import shard as _new

setattr(_new, "part_shapes", _new.shard_shapes)  # noqa: B010
sys.modules[__name__] = _new
