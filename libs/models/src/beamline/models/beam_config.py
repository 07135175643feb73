"""Beam's configuration for versions of transformers that do not ship Beam (it arrived in 5.22).

Fields and defaults are those of transformers' own `BeamConfig`, so one `config.json` serves every
service. Call `register()` once before `AutoConfig.from_pretrained`; where transformers knows Beam
already it does nothing. This is the only file of `beamline.models` that imports transformers.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE = "beam"
FULL_ATTENTION_EVERY = 6
NUM_LEADING_DENSE_LAYERS = 3


@strict
class BeamConfig(PreTrainedConfig):
    """Architecture of a Beam model.

    layer_types: "sliding_attention" (RoPE, window `sliding_window`) or "full_attention" (no positional
        encoding, scaled queries) per layer; by default every sixth layer and the last are full.
    mlp_layer_types: "dense" or "sparse" per layer; by default the first three are dense.
    rope_parameters: by layer type; None marks a layer type without positional encoding.
    n_group, topk_group: experts are chosen inside the `topk_group` best of `n_group` equal groups.
    routed_scaling_factor: multiplies the sum of the experts' weighted outputs.
    final_logit_softcapping: logits are cap * tanh(logits / cap); None leaves them as they are.
    """

    model_type = MODEL_TYPE

    vocab_size: int = 151936
    hidden_size: int = 5120
    intermediate_size: int = 20480
    num_hidden_layers: int = 52
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    sliding_window: int | None = 512
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None

    mlp_layer_types: list[str] | None = None
    moe_intermediate_size: int = 2560
    num_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: int | float = 2.5
    output_router_logits: bool = False

    final_logit_softcapping: int | float | None = 30.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        num_layers = self.num_hidden_layers
        if self.layer_types is None:
            self.layer_types = [
                "full_attention"
                if (layer + 1) % FULL_ATTENTION_EVERY == 0 or layer == num_layers - 1
                else "sliding_attention"
                for layer in range(num_layers)
            ]
        if self.mlp_layer_types is None:
            self.mlp_layer_types = [
                "dense" if layer < NUM_LEADING_DENSE_LAYERS else "sparse" for layer in range(num_layers)
            ]
        if self.rope_parameters is None:
            self.rope_parameters = {
                "sliding_attention": {"rope_type": "default", "rope_theta": self.default_theta},
                "full_attention": None,
            }
        super().__post_init__(**kwargs)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Leave `rope_parameters` as given: the inherited conversion would add flat keys beside the layer types."""
        return kwargs

    def validate_rope(self) -> None:
        """Check each layer type's entry, passing over None (the inherited check fails on it before 5.19)."""
        for layer_type, parameters in (self.rope_parameters or {}).items():
            if parameters is None:
                continue
            rope_type = parameters.get("rope_type", "default")
            check = getattr(self, f"_validate_{rope_type}_rope_parameters", None)
            if check is None:
                raise ValueError(
                    f"rope_parameters[{layer_type!r}] has rope_type {rope_type!r}, which transformers does not know"
                )
            check(parameters, ignore_keys=self.ignore_keys_at_rope_validation)

    def validate_architecture(self) -> None:
        """Query heads are shared out evenly over key-value heads."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )


def register() -> None:
    """Let AutoConfig read Beam's `config.json`; does nothing where transformers ships Beam."""
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, BeamConfig)
