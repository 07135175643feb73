"""The Megatron side of the trainer. Importing any of it first makes Megatron usable without CUDA and its extensions."""

from beamline.trainer.megatron import bridge_import, cpu

cpu.adapt()
bridge_import.prepare()
