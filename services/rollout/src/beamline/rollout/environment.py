"""Environment variables that vLLM reads once, at import. The only file of this service that touches os.environ.

Called by the entry point, before anything imports vllm.
"""

import logging
import os

VLLM_ENVIRONMENT = {
    "VLLM_PLUGINS": "beamline",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Its loggers have no handlers of their own: what they say goes where this service's own lines go.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # A run never downloads: model, tokenizer and data lie on disk before it starts.
    "HF_HUB_OFFLINE": "1",
    # Policies change every step and batches all the time; compiling stalls the first of each for seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # Routed experts are read off the batch of vLLM's first model runner, the only one that runs on every device.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # One engine a process, its threads placed by the operating system; tensor-parallel ranks need this on one socket.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # How long a thread spins for its next piece of work, some tens of microseconds. By default it is milliseconds, and
    # holds the core on which the other half of the work waits: with a busy neighbour that was ten times slower.
    # Without any spinning every small operation waits for a thread to wake: a sixth slower on a quiet machine.
    "GOMP_SPINCOUNT": "2000",
    # oneDNN keeps a compiled product for every number of rows that it has met, 1,024 by default: an engine with
    # adapters grew by a megabyte a policy. With so many it stays as it is, and is as quick.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}


def prepare(num_threads: int, num_ranks: int = 1) -> None:
    """Set vLLM's environment and its number of CPU threads. Values that the user has set stay.

    Args:
        num_threads: OpenMP threads of the whole engine, where OMP_NUM_THREADS does not say otherwise.
        num_ranks: processes that share them.
    """
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    total = int(os.environ.get("OMP_NUM_THREADS", num_threads))
    os.environ["OMP_NUM_THREADS"] = str(max(1, total // num_ranks))


def start_engine_by_fork() -> None:
    """Let the engine's process inherit the modules that this one has imported: 5 s instead of 25 s.

    Its ranks are forked from it in turn. Only for CPU engines, and only before this process has started threads or
    opened connections. vLLM writes "spawn" when it builds its configuration, so this is called between that and the
    start.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
