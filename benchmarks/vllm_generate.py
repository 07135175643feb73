"""Bare vLLM: the ring's prompts, seeds and engine settings, and nothing of the ring. Runs in rollout's environment.

One engine has the threads and the cache of all of the ring's replicas.

bin/python rollout -m benchmarks.vllm_generate --run DIR --groups FILE --out FILE
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from beamline.protocol.config import RunConfig
from beamline.rollout import checkpoint, cpu_norm, environment
from beamline.runtime.run_files import read_config


def main() -> None:
    options = parse_arguments()
    config = read_config(Path(options.run))
    environment.prepare(config.rollout.engine.threads * config.rollout.replicas)
    llm = start(config)
    rounds = json.loads(Path(options.groups).read_text(encoding="utf-8"))
    steps = [generate(llm, groups, config) for groups in rounds]
    Path(options.out).write_text(json.dumps({"steps": steps[options.warm_up :]}, indent=2) + "\n", encoding="utf-8")


def start(config: RunConfig) -> Any:
    """vLLM's own offline engine, its worker in the process of its core as in the ring: its fastest form on a CPU."""
    from vllm import LLM
    from vllm.config.kernel import IrOpPriorityConfig
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    class InProcess(UniProcExecutor):
        """vLLM turns the string "uni" into another process on a CPU."""

    engine = config.rollout.engine
    return LLM(
        model=config.model.path,
        skip_tokenizer_init=True,
        dtype=config.model.dtype,
        max_model_len=config.max_model_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_memory_bytes=config.rollout.replicas * engine.kv_cache_mib << 20,
        block_size=engine.block_size,
        enable_prefix_caching=engine.prefix_caching,
        distributed_executor_backend=InProcess,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        ir_op_priority=IrOpPriorityConfig(rms_norm=[cpu_norm.PROVIDER]),
        disable_hybrid_kv_cache_manager=True,
        disable_log_stats=True,
    )


def generate(llm: Any, groups: list[dict[str, Any]], config: RunConfig) -> dict[str, float]:
    """One step's groups, all at once. A group has prompt tokens and a seed for each sample."""
    from vllm import SamplingParams

    sampling, end_tokens = config.rollout.sampling, checkpoint.end_tokens(Path(config.model.path))
    prompts, params = [], []
    for group in groups:
        for seed in group["seeds"]:
            prompts.append({"prompt_token_ids": group["prompt_tokens"]})
            params.append(
                SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=sampling.max_response_tokens,
                    seed=seed,
                    logprobs=0,
                    flat_logprobs=True,
                    stop_token_ids=end_tokens,
                    detokenize=False,
                )
            )
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "prompt_tokens": sum(len(prompt["prompt_token_ids"]) for prompt in prompts),
        "response_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="folder of the ring's run")
    parser.add_argument("--groups", required=True, help="JSON file: steps of groups of prompt_tokens and seeds")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the first that counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
