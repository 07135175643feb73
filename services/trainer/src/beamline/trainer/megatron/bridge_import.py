"""megatron.bridge made importable: quickly, and without Transformer Engine.

`import megatron.bridge` runs some forty model families' modules, and one of its files imports Transformer
Engine unguarded. `prepare()` enters its packages without their `__init__`, and gives that file a stand-in where
Transformer Engine is not installed. It has to run before any import of megatron.bridge, which is why the package's
`__init__` calls it.
"""

import importlib.util
import logging
import sys
import types
import warnings

from beamline.trainer.megatron import cpu

_PACKAGES = ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.peft", "megatron.bridge.models.qwen")


def prepare() -> None:
    """Idempotent. Raises ModuleNotFoundError where Megatron-Bridge is not installed."""
    with cpu.quietly():
        for package in _PACKAGES:
            _enter_without_init(package)
        _import_lora_layers()
    # Megatron warns of what our settings choose on purpose, such as fusions that are off, and of its own deprecations.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")


def _enter_without_init(name: str) -> None:
    """Put package `name` into sys.modules without running its `__init__`."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{sys.executable} has no package {name}: sync the trainer's environment")
    package = types.ModuleType(name)
    package.__spec__, package.__package__ = spec, name
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[name] = package
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, package)


def _import_lora_layers() -> None:
    """Import the bridge's LoRA layers, which name `te.ops.Sequential` in an annotation.

    The stand-in lives for this one import alone: Megatron probes for Transformer Engine elsewhere and must
    not find it.
    """
    import megatron.bridge.peft.utils

    megatron.bridge.peft.utils.HAVE_TE = (
        False  # it finds Megatron's wrappers and takes Transformer Engine for installed
    )
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.pytorch, pytorch.ops = pytorch, types.SimpleNamespace(Sequential=object)  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": package, "transformer_engine.pytorch": pytorch}
    try:
        import megatron.bridge.peft.lora_layers
    finally:
        del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
