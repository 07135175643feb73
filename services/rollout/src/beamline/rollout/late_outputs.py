"""vLLM's scheduler, which hands out a request once, with its last token, instead of a token at every step.

vLLM sends every request's token and log-probability from the engine's process to ours at every step, to be read as they
come. Nobody reads them before the request has ended, and with a small model the second process takes the cores away
from the engine.

What the workers note of a step rides along: which policy sampled its tokens, and which experts they were routed to.
Both are kept with each token as it was sampled, whatever happens to its request afterwards: a request that is put back
and computed again keeps the rows that it had, and one that is aborted is handed out with all that it has sampled.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from beamline.rollout import checkpoint
from beamline.rollout.stop_texts import EXTRA_ARG, StopTexts

SPANS = "beamline_version_spans"
"""Key of the spans in the one free field that vLLM carries from the engine to a request's output."""

NUM_SAMPLED_ARG = "beamline_num_sampled"
"""Key of how many tokens at the prompt's end a sample's earlier requests have sampled, among the extra arguments."""

FIRST_ARG = "beamline_first"
"""Key by which a request says that it goes before all others, among the extra arguments."""


@dataclass(frozen=True)
class StepNotes:
    """What the workers say of one step, beside vLLM's own output. L layers, K experts a token."""

    policy_versions: list[int]
    """That sampled the token of each request of the batch, in its order."""
    last_rows: np.ndarray | None = None
    """Expert ids of the last token of every request of the batch, in its order, [requests, L, K]; None without R3."""
    prompt_rows: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Expert ids of all prompt tokens, [prompt, L, K], of the requests that sampled their first token."""


class _Held(msgspec.Struct):
    """What a request has sampled so far."""

    tokens: list[int] = []
    logprobs: list[LogprobsLists] = []
    rows: list[np.ndarray] = []
    """Expert ids [tokens, L, K] of the prompt, then of each sampled token but the last."""
    spans: list[list[int]] = []
    """[policy version, start, end], contiguous."""
    prompt_logprobs: Any = None

    def add(self, output: EngineCoreOutput, notes: StepNotes, index: int) -> None:
        if notes.last_rows is not None:
            self.rows.append(notes.last_rows[index, None] if self.tokens else notes.prompt_rows[output.request_id])
        start, version = len(self.tokens), notes.policy_versions[index]
        self.tokens += output.new_token_ids
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append([version, start, start])
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
        output.routed_experts = np.concatenate(self.rows) if self.rows else None
        output.kv_transfer_params = {SPANS: self.spans}


class LateOutputsScheduler(Scheduler):
    """Only for requests of which the final output alone is read.

    vLLM's own scheduler forgets a request that is aborted. Here it has a last output like any other, handed out by the
    next step. There is one even if no request is left and while sampling is paused: the workers have yet to hear of
    those that ended. Where the reader has dropped the request, it drops that output too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, _Held] = {}
        self._aborted: list[tuple[int, EngineCoreOutput]] = []
        """By the client whose request it was."""
        self._stop_texts = StopTexts(checkpoint.tokenizer_file(Path(self.vllm_config.model_config.model)))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        notes, index = model_runner_output.aux_output_connector_output, model_runner_output.req_id_to_index
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            of_client.outputs = [output for output in of_client.outputs if self._ends(output, notes, index)]
        aborted, self._aborted = self._aborted, []
        for client, output in aborted:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        return {
            client: of_client
            for client, of_client in outputs.items()
            if of_client.outputs or of_client.finished_requests or of_client.scheduler_stats
        }

    def add_request(self, request: Request) -> None:
        """A canary does not wait for samples, of which there may be far more than fit: the last one makes room."""
        super().add_request(request)
        if not _extra_args(request).get(FIRST_ARG):
            return
        self.waiting.remove_request(request)
        if len(self.running) >= self.max_num_running_reqs:
            self._preempt_request(self.running.pop(), time.monotonic())
        self.waiting.prepend_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            held = self._held.pop(request.request_id, None) or _Held()
            if finished_status is RequestStatus.FINISHED_ABORTED:
                output = EngineCoreOutput(request.request_id, [], finish_reason=request.get_finished_reason())
                held.fill(output)
                self._aborted.append((request.client_index, output))
        return finished

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        sampled, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        extra = _extra_args(request)
        texts, num_sampled = extra.get(EXTRA_ARG, ()), extra.get(NUM_SAMPLED_ARG, 0)
        response = request.output_token_ids
        if texts and num_sampled:
            response = request.all_token_ids[request.num_prompt_tokens - num_sampled :]
        if sampled and not stopped and self._stop_texts.end(response, texts):
            request.status = RequestStatus.FINISHED_STOPPED
            stopped = True
        return sampled, stopped

    def _ends(self, output: EngineCoreOutput, notes: StepNotes, index: dict[str, int]) -> bool:
        held = self._held.setdefault(output.request_id, _Held())
        if output.new_token_ids:
            held.add(output, notes, index[output.request_id])
        if output.finish_reason is None:
            return False
        del self._held[output.request_id]
        held.fill(output)
        return True


def _extra_args(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


def _join(rows: list[LogprobsLists]) -> LogprobsLists:
    """The positions of one request, in order."""
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in rows]),
        np.concatenate([part.logprobs for part in rows]),
        np.concatenate([part.sampled_token_ranks for part in rows]),
    )
