"""vLLM's scheduler, which hands out a request once, with its last token, instead of a token at every step.

vLLM sends every request's token and log-probability from the engine's process to ours at every step, to be read as they
come. Nobody reads them before the request has ended, and with a small model the second process takes the cores away
from the engine.

Which policy a token came from is noted here, where it was sampled; vLLM's own notes are taken on arrival.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

SPANS = "beamline_version_spans"
"""Key of the spans in the one free field that vLLM carries from the engine to a request's output."""


class ServedPolicy:
    """The policy whose weights this process has: written by its worker, read by its scheduler."""

    version = 0


SERVED = ServedPolicy()


class _Held(msgspec.Struct):
    """What a request has sampled so far."""

    tokens: list[int] = []
    logprobs: list[LogprobsLists] = []
    spans: list[list[int]] = []
    """[policy version, start, end], contiguous."""
    prompt_logprobs: Any = None

    def add(self, output: EngineCoreOutput) -> None:
        start = len(self.tokens)
        self.tokens += output.new_token_ids
        if not self.spans or self.spans[-1][0] != SERVED.version:
            self.spans.append([SERVED.version, start, start])
        self.spans[-1][2] = len(self.tokens)
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors

    def fill(self, output: EngineCoreOutput) -> None:
        """Make a request's last output its only one."""
        output.new_token_ids = self.tokens
        output.new_logprobs = _join(self.logprobs) if self.logprobs else None
        output.new_prompt_logprobs_tensors = self.prompt_logprobs
        output.kv_transfer_params = {SPANS: self.spans}


class LateOutputsScheduler(Scheduler):
    """Only for requests of which the final output alone is read; an aborted request ends without tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if self._ends(output)]
        return {
            client: of_client
            for client, of_client in outputs.items()
            if of_client.outputs or of_client.finished_requests or of_client.scheduler_stats
        }

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(request_ids, *args, **kwargs)
        self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return finished

    def _ends(self, output: EngineCoreOutput) -> bool:
        held = self._held.setdefault(output.request_id, _Held())
        held.add(output)
        if output.finish_reason is None:
            return False
        del self._held[output.request_id]
        held.fill(output)
        return True


def _join(rows: list[LogprobsLists]) -> LogprobsLists:
    """The positions of one request, in order."""
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in rows]),
        np.concatenate([part.logprobs for part in rows]),
        np.concatenate([part.sampled_token_ranks for part in rows]),
    )
