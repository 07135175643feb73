"""Entry point of vLLM's `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

import faulthandler
import signal

BEAM_ARCHITECTURE = "BeamForCausalLM"


def register() -> None:
    """Teach vLLM Beam's configuration and model and our loader, mend its CPU engine, quicken its norms. Idempotent."""
    faulthandler.register(signal.SIGUSR1)  # a silent worker is asked for the stacks of its engine too
    from vllm import ModelRegistry

    from beamline.models.beam_config import register as register_config
    from beamline.rollout import cpu_norm, expert_reload, seeded_prefill

    if BEAM_ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    # The class, not its name: vLLM would start a process of its own to look at a model that it has to import.
    from beamline.rollout.beam_model import BeamForCausalLM
    from beamline.rollout.weight_loader import register as register_loader

    register_config()
    register_loader()
    ModelRegistry.register_model(BEAM_ARCHITECTURE, BeamForCausalLM)
    expert_reload.install()
    seeded_prefill.install()
    cpu_norm.install()
