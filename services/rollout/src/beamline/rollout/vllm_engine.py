"""vLLM behind the Engine protocol: AsyncLLM in this process, its engine core in one other, more ranks in further ones.

Sampling asks for `processed_logprobs`: log softmax(logits / temperature), renormalised over what top_p keeps. Prefixes
are cached between the samples of a prompt; the cache is dropped with every new policy. Requests under way survive an
update: they are put back and recomputed under the new weights, or cut off and taken up by further requests. Either way
their version spans say which token came from which policy.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from beamline.protocol.blobs import VersionSpan
from beamline.protocol.config import EngineSection
from beamline.protocol.errors import Rejected, WeightError
from beamline.protocol.lora_config import LoraSection
from beamline.protocol.messages import FinishReason, PromptGroup
from beamline.rollout import checkpoint, environment
from beamline.rollout.continuation import Part, Sample
from beamline.rollout.engine import Completion, EngineError, MemoryReport, Pause, Scored
from beamline.rollout.late_outputs import FIRST_ARG, NUM_SAMPLED_ARG, SPANS
from beamline.rollout.lora.adapter_policies import AdapterPolicies
from beamline.rollout.lora.budget import plan_slots
from beamline.rollout.policies import Policies, WholeWeights
from beamline.rollout.ranks import Ranks
from beamline.rollout.scratch import Scratch
from beamline.rollout.stop_texts import EXTRA_ARG
from beamline.rollout.vllm_settings import end_deadline_s, engine_args
from beamline.rollout.vllm_stats import measure
from beamline.weights.manifest import WeightManifest


class VllmEngine:
    """One model, one policy at a time.

    Args:
        llm: started by `start`.
        model_path: its Hugging Face directory.
        policies: how it holds them.
        scratch: where its processes meet.
    """

    def __init__(self, llm: AsyncLLM, model_path: Path, policies: Policies, scratch: Scratch) -> None:
        self._llm, self.meter, self._scratch = llm, measure(llm), scratch
        self._policies, self._call = policies, Ranks(llm).call
        self._tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file(model_path)))
        self._end_tokens = checkpoint.end_tokens(model_path)
        self._max_tokens = llm.model_config.max_model_len
        self._request_ids = count()
        self._under_way: set[Sample] = set()
        self._takes_requests = True
        self._changed = asyncio.Condition()
        """Of the three above and below, and of what a sample is told."""
        self._released = False
        self._control = asyncio.Lock()
        """Held by whoever pauses and resumes sampling."""
        self._staging = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model_path: Path,
        *,
        dtype: str,
        max_model_tokens: int,
        config: EngineSection,
        routed_experts: bool = True,
        policy_version: int = 0,
        lora: LoraSection | None = None,
    ) -> "VllmEngine":
        """Load the model and start the engine's processes.

        Completions carry routed experts if asked to and if the model has any. With `lora` there are slots for adapters
        like that. Raises ConfigError as `checkpoint.check_servable` and `plan_slots` do.
        """
        checkpoint.check_servable(model_path, max_model_tokens)
        has_experts = checkpoint.routing_shape(model_path) is not None
        settings = {
            "policy_version": policy_version,
            "routed_experts": routed_experts and has_experts,
            "shared_parameters": config.shared_parameters and current_platform.is_cpu(),
        }
        slots = plan_slots(model_path, dtype, lora, config) if lora and lora.is_on else None
        args = engine_args(model_path, dtype, max_model_tokens, config, settings, slots)
        vllm_config = args.create_engine_config()
        if current_platform.is_cpu():
            environment.start_engine_by_fork()
        scratch = Scratch()
        try:
            with scratch.in_use():
                llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=False)
        except BaseException:
            scratch.remove()
            raise
        if slots is None:
            return cls(llm, model_path, WholeWeights(Ranks(llm), checkpoint.tensor_shapes(model_path)), scratch)
        policies = AdapterPolicies(Ranks(llm), model_path, dtype, slots, policy_version)
        await policies.begin()
        return cls(llm, model_path, policies, scratch)

    async def generate(self, group: PromptGroup, stop: asyncio.Event | None = None) -> list[Completion]:
        num_tokens = len(group.prompt_tokens) + group.sampling.max_tokens
        if num_tokens > self._max_tokens:
            raise Rejected(
                "prompt_too_long",
                f"prompt {group.task.prompt_id} has {len(group.prompt_tokens)} tokens and up to "
                f"{group.sampling.max_tokens} are sampled: {num_tokens} do not fit {self._max_tokens}",
            )
        samples = [Sample(group, seed) for seed in group.seeds]
        stopping = asyncio.create_task(self._stop(samples, stop)) if stop else None
        try:
            return list(await asyncio.gather(*map(self._sample, samples)))
        finally:
            if stopping:
                stopping.cancel()

    async def stage_weights(self, manifest: WeightManifest, slot_wait_s: float = 0.0) -> int:
        async with self._staging:
            try:
                return await self._policies.stage(manifest, slot_wait_s)
            except BaseException:
                await asyncio.shield(self._policies.drop())
                raise

    async def activate_weights(self, pause: Pause = "keep") -> None:
        async with self._staging:
            if not self._policies.is_staged:
                raise WeightError("no policy is staged: stage_weights comes before activate_weights")
            async with self._drained() if pause == "drain" else nullcontext():
                swap = asyncio.create_task(self._swap(pause))
                try:
                    await asyncio.shield(swap)
                finally:
                    await asyncio.wait({swap})  # half a swap is none: who is cancelled here waits for its end

    async def drop_staged(self) -> None:
        async with self._staging:
            await self._policies.drop()

    async def score(self, tokens: Sequence[int], policy: Scored = "served") -> list[float]:
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            skip_reading_prefix_cache=True,
            extra_args={FIRST_ARG: True},
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async with self._control:
            if self._released:
                await self._llm.resume_generation()
            output = await self._request(tokens, params, str(next(self._request_ids)), policy)
            if self._released:
                await self._pause()
                await self._call("beamline_drop_cache")
        assert output.prompt_logprobs is not None
        rows = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return [row[token].logprob for token, row in rows if row is not None]

    async def forget_prefixes(self) -> None:
        async with self._paused():
            pass

    async def release_memory(self) -> MemoryReport:
        async with self._control:
            if self._released:
                return _report([(resident, resident, kept) for resident, kept in await self._call("beamline_memory")])
            await self._pause()
            self._released = True
            await self._notify()
            return _report(await self._call("beamline_release_memory"))

    async def restore_memory(self) -> MemoryReport:
        async with self._control:
            memory = await self._call("beamline_memory")
            if self._released:
                await self._llm.resume_generation()
                self._released = False
        return _report([(resident, resident, 0) for resident, _ in memory])

    async def until_broken(self) -> None:
        reader = self._llm.output_handler
        assert reader is not None
        await asyncio.wait({reader})
        parallel = self._llm.vllm_config.parallel_config
        raise EngineError(
            f"vLLM ended by itself: its engine core or one of its {parallel.world_size} ranks died (tensor_parallel="
            f"{parallel.tensor_parallel_size}, pipeline_parallel={parallel.pipeline_parallel_size}); its last words "
            "are above"
        )

    async def close(self) -> None:
        self._llm.shutdown(end_deadline_s(self._llm.vllm_config))
        self._scratch.remove()
        del self._llm, self._call, self._policies

    async def _sample(self, sample: Sample) -> Completion:
        self._under_way.add(sample)
        try:
            while await self._is_admitted(sample):
                await self._request_part(sample)
        finally:
            self._under_way.discard(sample)
            await self._notify()
        return Completion(
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            finish_reason=sample.finish_reason or FinishReason.ABORT,
            text=self._tokenizer.decode(sample.tokens, skip_special_tokens=True),
            version_spans=sample.version_spans,
            routed_experts=sample.routed_experts,
        )

    async def _is_admitted(self, sample: Sample) -> bool:
        """Whether there is more to sample; waits while no requests are taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._takes_requests or sample.has_ended)
        return not sample.has_ended

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _request_part(self, sample: Sample) -> None:
        sampling = sample.group.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sample.max_tokens,
            seed=sample.seed,
            logprobs=0,
            flat_logprobs=True,
            stop_token_ids=self._end_tokens,
            extra_args={EXTRA_ARG: sampling.stop, NUM_SAMPLED_ARG: len(sample.tokens)},
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        sample.request_id = str(next(self._request_ids))
        sample.add(_part(await self._request(sample.prompt, params, sample.request_id)))

    async def _stop(self, samples: Sequence[Sample], stop: asyncio.Event) -> None:
        """Once told to, have these samples end as they are."""
        await stop.wait()
        for sample in samples:
            sample.stop()
        await self._notify()
        await self._abort(samples)

    async def _abort(self, samples: Iterable[Sample]) -> None:
        """Have the engine core hand out what the samples' requests have sampled.

        vLLM's own way to abort ends them on this side at once, where none of it has arrived.
        """
        running = self._llm.output_processor.external_req_ids
        names = [one for sample in samples for one in running.get(sample.request_id, ())]
        await self._llm.engine_core.abort_requests_async(names)

    async def _request(
        self, tokens: Sequence[int], params: SamplingParams, name: str, policy: Scored = "served"
    ) -> RequestOutput:
        """The final output of one request. Cancelling it drops the request. Raises EngineError."""
        self.meter.num_prompt_tokens += len(tokens)
        final, prompt = None, tokens_input(list(tokens))
        try:
            with self._policies.read(policy) as adapters:
                async for output in self._llm.generate(prompt, params, name, lora_request=adapters):
                    final = output
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM failed while generating: {error.__cause__ or error}") from error
        assert final is not None
        return final

    async def _swap(self, pause: Pause) -> None:
        """Serve what is staged, while no token is sampled, after cutting samples off where they are to be.

        Beside what is served it is done at once.
        """
        async with self._paused() if self._policies.needs_pause(pause) else nullcontext():
            if pause in ("abort", "continue"):
                cut = [sample for sample in self._under_way if sample.request_id]
                for sample in cut:
                    sample.continues = pause == "continue" and not sample.is_stopped
                await self._abort(cut)
            await self._policies.activate(pause)

    @asynccontextmanager
    async def _drained(self) -> AsyncIterator[None]:
        """Every sample under way has ended, but where memory is released; further ones wait until this is left."""
        self._takes_requests = False
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._released or not any(sample.request_id for sample in self._under_way)
                )
            yield
        finally:
            self._takes_requests = True
            await self._notify()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """No token is sampled inside; afterwards every cached prefix is gone."""
        async with self._control:
            if not self._released:
                await self._pause()
            yield
            if not self._released:
                await self._llm.resume_generation()

    async def _pause(self) -> None:
        """Have no token sampled from now on, and forget every prefix."""
        # vLLM's own pause_generation sleeps for 20 ms after this, for callers that want earlier outputs first.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


def _part(whole: RequestOutput) -> Part:
    output = whole.outputs[0]
    assert output.logprobs is not None and output.finish_reason is not None
    tokens = list(output.token_ids)
    return Part(
        tokens=tokens,
        logprobs=[row[token].logprob for token, row in zip(tokens, output.logprobs, strict=True) if row is not None],
        finish_reason=FinishReason(output.finish_reason),
        version_spans=[VersionSpan(*span) for span in (whole.kv_transfer_params or {})[SPANS]],
        routed_experts=output.routed_experts,
    )


def _report(ranks: Sequence[Sequence[int]]) -> MemoryReport:
    """Of what every rank says: resident bytes before and after, and what it has kept."""
    before, after, kept = (sum(column) for column in zip(*ranks, strict=True))
    return MemoryReport(before_bytes=before, after_bytes=after, kept_bytes=kept)
