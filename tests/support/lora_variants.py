"""The kinds of adapters with which trainer, engine and merged model are compared."""

from beamline.protocol.lora_config import LoraSection

RANK = 8
_SPLIT = ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"]

VARIANTS = {
    f"{'norm' if norm else 'full'}-alpha{times}": LoraSection(rank=RANK, alpha=times * RANK, normalize_moe_lora=norm)
    for norm in (False, True)
    for times in (1, 2)
}
"""Rank of experts normalised or not, alpha equal to the rank or twice that."""
SPLIT = {"split-norm-alpha2": LoraSection(rank=RANK, alpha=2 * RANK, targets=_SPLIT, normalize_moe_lora=True)}
"""Every module with an A of its own; without the output gate, which no variant of Bridge's splits."""
ALL = VARIANTS | SPLIT
