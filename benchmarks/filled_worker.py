"""A rank of `benchmarks.lora_slots`: it makes adapters where they are served."""

import torch

from beamline.rollout.engine_worker import EngineWorker

STD = 0.02


class FilledWorker(EngineWorker):
    """Fills the slot that is served from the start."""

    def fill(self, seed: int) -> tuple[int, int, int]:
        """Write random adapters; returns bytes of the experts' slots, of the others, and blocks of the cache."""
        slots, generator = self.lora_slots, torch.Generator().manual_seed(seed)
        assert slots is not None
        shapes = {name: [stop for _, stop in boxes[0]] for name, boxes in slots.needs.items()}
        slots.write(0, ((name, STD * torch.randn(shape, generator=generator)) for name, shape in shapes.items()))
        return slots.num_expert_bytes, slots.num_dense_bytes, self.model_runner.kv_cache_config.num_blocks
