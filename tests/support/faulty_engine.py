"""`rollout-python faulty_engine.py REQUEST FOLDER`: `beamline.rollout.sample`, with the temperature in the wrong place.

Beam's engine divides the logits before the softcap, as if the temperature were folded into the head's weights:
cap tanh(z / (T cap)) in the place of cap tanh(z / cap) / T.
"""

import os
import sys
from pathlib import Path

import torch

from beamline.protocol.doctor import SampleRequest
from beamline.rollout import environment, plugin
from beamline.rollout.sample import keep_samples
from beamline.runtime.request_program import serve


def keep_wrong_samples(request: SampleRequest, folder: Path) -> None:
    """Sample as asked, with a model that is registered in the place of Beam's; the engine's process inherits it."""
    environment.prepare(len(os.sched_getaffinity(0)))
    plugin.register()
    from vllm import ModelRegistry

    from beamline.rollout.beam_model import BeamForCausalLM

    temperature = request.groups[0].sampling.temperature

    class FoldedBeam(BeamForCausalLM):
        def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
            logits = super().compute_logits(hidden_states / temperature)
            return None if logits is None else logits * temperature  # the sampler divides by it once more

    ModelRegistry.register_model(plugin.BEAM_ARCHITECTURE, FoldedBeam)
    keep_samples(request, folder)


if __name__ == "__main__":
    sys.exit(serve(SampleRequest, keep_wrong_samples))
