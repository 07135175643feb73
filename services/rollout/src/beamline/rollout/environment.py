"""Environment variables that vLLM reads once, at import. The only file of this service that touches os.environ.

Called by the entry point, before anything imports vllm.
"""

import os

VLLM_ENVIRONMENT = {
    "VLLM_PLUGINS": "beamline",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # A run never downloads: model, tokenizer and data lie on disk before it starts.
    "HF_HUB_OFFLINE": "1",
    # Policies change every step and batches all the time; compiling stalls the first of each for seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # One engine a process, its threads placed by the operating system; tensor-parallel ranks need this on one socket.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # How long a thread spins for its next piece of work, some tens of microseconds. By default it is milliseconds, and
    # holds the core on which the other half of the work waits: with a busy neighbour that was ten times slower.
    # Without any spinning every small operation waits for a thread to wake: a sixth slower on a quiet machine.
    "GOMP_SPINCOUNT": "2000",
}


def prepare(num_threads: int) -> None:
    """Set vLLM's environment and its number of CPU threads. Values that the user has set stay.

    Args:
        num_threads: OpenMP threads of the engine's process.
    """
    for name, value in {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)}.items():
        os.environ.setdefault(name, value)


def start_engine_by_fork() -> None:
    """Let the engine's process inherit the modules that this one has imported: 5 s instead of 25 s.

    Only for CPU engines, and only before this process has started threads or opened connections. vLLM writes "spawn"
    when it builds its configuration, so this is called between that and the start.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
