"""How Ray Serve chooses a replica where it is told to: by a rule of `d3engine.integrations.routing` (extra `ray`).

Each door has a router of its own, which knows what Ray tells it of how busy the replicas are.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from d3engine.integrations.routing import ROUTINGS, beginning, least_loaded


class RuleRouter(RequestRouter):  # type: ignore[misc]  # untyped
    """Asks for the replica that the rule names, and for any other where that one is full."""

    def initialize_state(self, *, routing: str, cohort_seconds: float) -> None:
        """Called by Ray with what the deployment was given."""
        self._rule = ROUTINGS[routing](cohort_seconds)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: Ray takes the first one that has room, and of a rank the one with fewest requests."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between two rounds, where all are full
        busy = {name_of(one): self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas}
        chosen = self._chosen(pending_request, busy)
        first = [one for one in candidate_replicas if name_of(one) == chosen]
        return [first, [one for one in candidate_replicas if one not in first]]

    def _chosen(self, request: PendingRequest, busy: dict[str, int]) -> str:
        _scope, body = request.args
        if not body:  # it asks for no answer of the model's, so it is of no cohort
            return least_loaded(busy)
        return self._rule.choose(time.monotonic(), beginning(body), busy)


def name_of(replica: Any) -> str:
    """A replica's name in the metrics, too."""
    return str(replica.replica_id.unique_id)
