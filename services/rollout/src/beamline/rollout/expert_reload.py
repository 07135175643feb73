"""A mend for vLLM 0.32 and 0.33: expert weights that are reloaded in place on a CPU are left unpacked.

At start vLLM packs the experts into its grouped-GEMM layout. On a later update it copies the plain weights over the
packed ones, without an error, and every routed token is then multiplied by shuffled numbers. Packing once more after
each update is all that is missing. Nothing is changed on devices whose experts are not packed after loading.
"""

from functools import wraps
from typing import Any


def install() -> None:
    """Wrap the unquantised expert method's set-up step; calling it again does nothing."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup_kernel = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(setup_kernel, "__wrapped__"):
        return

    @wraps(setup_kernel)
    def setup_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update and isinstance(self.moe_kernel.fused_experts, CPUUnquantizedExperts):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack
