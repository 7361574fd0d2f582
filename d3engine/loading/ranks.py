"""A model on several devices: its ranks begin, load their parts, and run together what rank 0 plans.

The one idea: every rank does the same things in the same order, and rank 0 says when. Whatever fails on the way ends
all of them with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from d3engine.depth import FullDepth
from d3engine.executor.interface import Executor
from d3engine.executor.memory import workspace_bytes
from d3engine.executor.tensor_parallel.executor import TensorParallelExecutor
from d3engine.executor.tensor_parallel.follower import Leader
from d3engine.executor.tensor_parallel.group import GroupCollectives, Store, join_group
from d3engine.executor.tensor_parallel.team import Team
from d3engine.loading.cache_size import num_blocks
from d3engine.loading.executors import build_executor
from d3engine.loading.pytorch_threads import pytorch_threads_for
from d3engine.loading.settings import EngineSettings, plain_settings, settings_of_plain
from d3engine.model.config import ModelConfig
from d3engine.model.parallel import Ranks
from d3engine.model.part import Part, part_of
from d3engine.model.weights import LlamaWeights, load_weights
from d3engine.scheduling.waiting import Immediate


@dataclass(frozen=True)
class Place:
    """Where one rank stands: `index` among the ranks of its machine, and where all of them meet."""

    rank: int
    size: int
    index: int
    store: Store
    is_local: bool

    def join(self, device: torch.device) -> GroupCollectives:
        return join_group(self.store, self.rank, self.size, device, is_local=self.is_local)


def rank_device(device: torch.device, index: int) -> torch.device:
    """The device of the rank that is number `index` on its machine."""
    return torch.device("cuda", index) if device.type == "cuda" else device


def lead(settings: EngineSettings, team: Team, place: Place, draft: ModelConfig | None) -> tuple[Executor, int]:
    """Rank 0: what runs plans on all ranks, and how many blocks each has; `draft` lies on this rank beside it.

    Raises `EngineDeadError` for a rank that ends over it, `ModelFormatError` for files that one cannot load.
    """
    try:
        # Other ranks never ask for a policy, and might not know it.
        told = plain_settings(replace(settings, depth=FullDepth()))
        team.tell({"settings": told, "threads": pytorch_threads_for(settings.config, torch.get_num_threads())})
        own, part, weights = _load(settings, place, show_progress=True)
        team.hearing.hear()
        team.tell("all have loaded")
        collectives = team.hearing.call(partial(place.join, own.device))
        team.hearing.free_by(collectives.abort)
        build = partial(_build, own, weights, Ranks(part, collectives))
        blocks: int = min(_room(own, build, draft), *team.hearing.hear())
        team.tell(blocks)
        executor = TensorParallelExecutor(build(blocks), team, settings.block_size)
    except BaseException as fault:
        cause = team.hearing.explain(fault)
        team.close(str(cause) or repr(cause))
        if cause is fault:
            raise
        raise cause from fault
    return executor, blocks


def follow(leader: Leader, place: Place) -> None:
    """Another rank: load, and run what rank 0 plans until that is done; what fails here is told to it, and raised."""
    leader.rely_on()
    try:
        start = leader.hear()
        torch.set_num_threads(start["threads"])
        own, part, weights = _load(settings_of_plain(start["settings"], Immediate()), place, show_progress=False)
        leader.say("loaded")
        leader.hear()
        build = partial(_build, own, weights, Ranks(part, place.join(own.device)))
        leader.say(_room(own, build, None))
        leader.follow(build(leader.hear()))
    except BaseException as error:
        leader.fail(error)
        raise
    finally:
        leader.leave()


def _load(settings: EngineSettings, place: Place, *, show_progress: bool) -> tuple[EngineSettings, Part, LlamaWeights]:
    part = part_of(settings.config, place.rank, place.size)
    own = settings.of_part(part, rank_device(settings.device, place.index))
    if own.device.type == "cuda":
        torch.cuda.set_device(own.device)
    weights = load_weights(
        settings.directory,
        settings.config,
        dtype=own.dtype,
        weight_dtype=own.weight_dtype,
        device=own.device,
        show_progress=show_progress,
        part=part,
    )
    return own, part, weights


def _build(own: EngineSettings, weights: LlamaWeights, ranks: Ranks, blocks: int) -> Executor:
    return build_executor(own, weights, blocks, ranks)


def _room(own: EngineSettings, build: Callable[[int], Executor], draft: ModelConfig | None) -> int:
    """Blocks that there is room for beside this rank's weights and steps; on GPUs all ranks measure it together."""

    def workspace() -> int:
        return workspace_bytes(
            build,
            own.scheduler_config,
            num_layers=own.config.num_layers,
            block_size=own.block_size,
            free_bytes=lambda: torch.cuda.mem_get_info(own.device)[0],
        )

    return num_blocks(own, workspace, draft)
