"""Low-rank adapters (LoRA, 2106.09685) on a frozen model: y = W x + alpha / rank B A x."""

import msgspec

from beamline.protocol.section import NonNegative, Section, Share, check_choice

ALL_LINEAR = "all-linear"
TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "linear_proj": ("self_attn.o_proj",),
    "linear_gate": ("self_attn.gate_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
    "linear_q": ("self_attn.q_proj",),
    "linear_k": ("self_attn.k_proj",),
    "linear_v": ("self_attn.v_proj",),
    "linear_fc1_gate": ("mlp.gate_proj",),
    "linear_fc1_up": ("mlp.up_proj",),
}
"""Megatron-Bridge's names, and which Hugging Face modules of a layer each stands for, experts included."""
FUSED = ("linear_qkv", "linear_fc1")
"""Their modules share one A. All of `all-linear` are of this kind."""
SPLIT = ("linear_q", "linear_k", "linear_v", "linear_fc1_gate", "linear_fc1_up")
"""Modules of the same matrices, each with an A of its own."""


class LoraSection(Section, kw_only=True):
    """Which layers have adapters, and of which size. The output head and routers have none."""

    rank: NonNegative = 0
    """0 trains all weights; else adapters of this rank alone."""
    alpha: NonNegative = 0
    """An adapter's output is multiplied by alpha / its rank; 0 takes `rank`."""
    dropout: Share = 0.0
    """Of an adapter's input, in training."""
    targets: list[str] = msgspec.field(default_factory=lambda: [ALL_LINEAR])
    """all-linear: linear_qkv, linear_proj, linear_gate (the attention's output gate, where the model has one),
    linear_fc1 and linear_fc2. linear_q, linear_k and linear_v in the place of linear_qkv, or linear_fc1_gate and
    linear_fc1_up in that of linear_fc1, have an A of their own each. Experts have an adapter each, always."""
    normalize_moe_lora: bool = False
    """An expert's adapter has rank / (experts a token) as its rank; alpha stays as it is."""
    sequence_parallel_input_regather: bool = False
    """Keep only the rank's rows of an adapter's input for the backward pass, and gather the others again there."""

    def __post_init__(self) -> None:
        for target in self.targets:
            check_choice("targets", target, (ALL_LINEAR, *TARGETS))
        if self.rank and not self.targets:
            raise ValueError(f"targets=[] with rank={self.rank}: name the layers to adapt, or {ALL_LINEAR}")
        split = [target for target in self.targets if target in SPLIT]
        fused = [target for target in self.targets if target in (*FUSED, ALL_LINEAR)]
        if split and fused:
            raise ValueError(
                f"targets has {fused[0]}, whose modules share one A, beside {split[0]}, which has its own: use one kind"
            )
        if split and self.sequence_parallel_input_regather:
            raise ValueError(
                f"sequence_parallel_input_regather does not go with target {split[0]}: Megatron-Bridge regathers for "
                f"{', '.join(FUSED)}"
            )
        if self.dropout == 1:
            raise ValueError("dropout=1.0 leaves nothing of an adapter's input: use less than 1")

    @property
    def is_on(self) -> bool:
        """Whether the run trains adapters."""
        return self.rank > 0

    @property
    def is_split(self) -> bool:
        """Whether every module has an A of its own."""
        return any(target in SPLIT for target in self.targets)

    @property
    def scale_numerator(self) -> int:
        """Alpha: what is divided by an adapter's rank to get its scale."""
        return self.alpha or self.rank
