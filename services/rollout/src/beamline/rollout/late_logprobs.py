"""vLLM's scheduler, which hands out a request's log-probabilities once, with its last token, instead of at every step.

vLLM sends three arrays a request and step from the engine's process to ours. With a small model that takes a fifth of
the time of generation, and nobody reads them before the request has ended. Tokens are still sent at every step: by them
it is known which policy a token came from.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists


class LateLogprobsScheduler(Scheduler):
    """Only for requests of which the final output alone is read; an aborted request ends without log-probabilities."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[LogprobsLists]] = {}

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        for of_client in outputs.values():
            for output in of_client.outputs:
                self._hold(output)
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)
        self._held = {name: rows for name, rows in self._held.items() if name in self.requests}
        return finished

    def _hold(self, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            self._held.setdefault(output.request_id, []).append(output.new_logprobs)
            output.new_logprobs = None
        if output.finish_reason is not None and (held := self._held.pop(output.request_id, None)):
            output.new_logprobs = _join(held)


def _join(rows: list[LogprobsLists]) -> LogprobsLists:
    """The positions of one request, in order."""
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in rows]),
        np.concatenate([part.logprobs for part in rows]),
        np.concatenate([part.sampled_token_ranks for part in rows]),
    )
