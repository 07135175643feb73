"""The Megatron side of the trainer. Importing anything of it first makes Megatron usable where there is no CUDA."""

from beamline.trainer.megatron import cpu

cpu.adapt()
