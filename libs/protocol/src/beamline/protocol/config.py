"""The run configuration: one small frozen struct tree a service. Defaults are written here and nowhere else.

A recipe (YAML) fills it in; `beamline.runtime.recipe` converts and checks it, so everything past that door is trusted.
Keys are given as in Hydra overrides: `trainer.eval_interval=10`.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from beamline.protocol.algorithm_config import AlgorithmSection
from beamline.protocol.environment_config import EnvironmentSection
from beamline.protocol.lora_config import LoraSection
from beamline.protocol.reward_config import GRADERS, RewardSection
from beamline.protocol.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    check_choice,
    check_name,
)
from beamline.protocol.telemetry_config import TelemetrySection
from beamline.protocol.weights_config import WeightsSection


class Placement(StrEnum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


class RunSection(Section, kw_only=True):
    name: str = "run"
    """One NATS subject token; also the run's folder under `dir`."""
    dir: str = "runs"
    """Summary, report, metrics, logs, evaluation dumps and checkpoints lie in `<dir>/<name>`."""
    project: str = ""
    """PROJECT_NAME: of Weights & Biases. Empty is WANDB_PROJECT's, or beamline."""
    log_path: str = ""
    """LOG_PATH: the folder of the services' logs. Empty is `<run folder>/logs`, else that is a link to it."""
    seed: int = 0
    placement: Placement = Placement.COLOCATED
    """colocated: services take turns on the devices, a phase is a lease. disaggregated: phases overlap."""
    loggers: list[str] = msgspec.field(default_factory=lambda: ["console", "jsonl"])


class ModelSection(Section, kw_only=True):
    path: str = ""
    """Hugging Face directory, or `asset:NAME` for one that ships with beamline.models."""
    dtype: str = "float32"
    lora: LoraSection = LoraSection()


class EvalSet(Section, kw_only=True):
    path: str
    """Parquet file."""
    name: str = ""
    """Metric name, `eval/<name>/*`; empty takes the rows' data_source."""
    num_samples: Positive = 8
    temperature: NonNegativeFloat = 1.0
    """0 is greedy; num_samples must then be 1."""
    max_problems: NonNegative = 0
    """0 takes all."""
    grader: str = ""
    """Empty takes `reward.grader`."""
    max_response_tokens: NonNegative = 0
    """0 takes `rollout.sampling.max_response_tokens`."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """None takes `rollout.sampling.top_p`."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.num_samples != 1:
            raise ValueError(f"num_samples={self.num_samples} with temperature=0: greedy samples are all alike, use 1")
        if self.grader:
            check_name("grader", self.grader, GRADERS)


class DataSection(Section, kw_only=True):
    dir: str = "data"
    """DATA_DIR. Where `beamline data prepare` puts its files; a recipe names them as `${data.dir}/FILE`."""
    train: str = ""
    """Parquet file of training prompts, or `task:chained-sums` to generate it into the run's folder."""
    evals: list[EvalSet] = msgspec.field(default_factory=list[EvalSet])
    max_prompt_tokens: Positive = 2048
    """Longer prompts are dropped and counted."""
    shuffle: bool = True
    chat_template_kwargs: dict[str, str | int | float | bool] = msgspec.field(
        default_factory=lambda: {"reasoning_effort": "minimal"}
    )


class SamplingSection(Section, kw_only=True):
    groups_per_step: Positive = 64
    samples_per_group: Positive = 8
    max_response_tokens: Positive = 8192
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stop: list[str] = msgspec.field(default_factory=list[str])
    """Texts that end a completion; they stay in it. An environment adds its own."""


class EngineSection(Section, kw_only=True):
    kv_cache_mib: Positive = 256
    """Of a rank's key-value cache and, with LoRA, of its adapter slots."""
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 4096
    block_size: Positive = 32
    threads: NonNegative = 0
    """CPU threads; 0 takes all of the machine's cores when colocated, else half."""
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    prefix_caching: bool = True
    shared_parameters: bool = False
    """Parameters are views of the trainer's shared memory, so that nothing is copied. On a CPU that leaves them
    unpacked, and decoding is slower: docs/weights.md has the number."""
    adapter_slots: Annotated[int, Meta(ge=2)] = 2
    """With LoRA: versions of the adapters that are held at once, one of which is being loaded at times. Their memory is
    taken from `kv_cache_mib`."""
    max_expert_lora_rank: NonNegative = 0
    """With LoRA: the rank for which an expert's slots have room; 0 takes the run's. Needs no more than that."""

    def __post_init__(self) -> None:
        if self.block_size % 32:
            raise ValueError(f"block_size={self.block_size}: must be a multiple of 32 on a CPU")


class RolloutSection(Section, kw_only=True):
    replicas: Positive = 1
    """Engines that serve one work queue."""
    groups_in_flight: Positive = 64
    """Groups that one replica holds at a time."""
    group_deadline_s: PositiveFloat = 600.0
    sampling: SamplingSection = SamplingSection()
    environment: EnvironmentSection = EnvironmentSection()
    engine: EngineSection = EngineSection()
    canary_tolerance: PositiveFloat | None = None
    """A worker whose log-probabilities differ by more from the trainer's after a sync refuses the new version. Left out
    it is that of the model's precision: 1e-3 in float32, 0.1 in bfloat16, where the
    median over the canary counts."""


class OptimizerSection(Section, kw_only=True):
    state: str = "device"
    """Where float32 main weights and both Adam moments are. device: beside the model. host: in the host's memory, where
    they are updated too. disk: on a local disk, streamed through memory in buckets."""
    state_dir: str = ""
    """Of disk: OPTIMIZER_STATE_DISK_DIR, a folder on a disk of each node."""
    bucket_mib: Positive = 256
    """Of disk: size of a bucket, three of which are in memory."""
    lr: PositiveFloat = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    warmup_steps: NonNegative = 0
    """Optimizer steps' train steps of linear warm-up."""
    decay: str = "constant"
    """constant, linear or cosine: from the end of the warm-up to the last step."""
    min_lr_ratio: Share = 0.0
    """Share of lr at the end of the decay."""

    def __post_init__(self) -> None:
        check_choice("decay", self.decay, ("constant", "linear", "cosine"))
        check_choice("state", self.state, ("device", "host", "disk"))
        if (self.state == "disk") != bool(self.state_dir):
            raise ValueError(
                f"state={self.state} with state_dir={self.state_dir!r}: disk needs a folder on a local disk, and "
                "the others have none (OPTIMIZER_STATE_DISK_DIR sets both)"
            )


class ParallelSection(Section, kw_only=True):
    """How the trainer's ranks share the model and the batch; a rank is a process."""

    tensor: Positive = 1
    expert: Positive = 1
    """Of the tensor x data ranks of a pipeline stage, so many share out the experts."""
    pipeline: Positive = 1
    data: Positive = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data


class TrainerSection(Section, kw_only=True):
    """Steps, evaluations, checkpoints and exports; and where a run goes on."""

    num_steps: NonNegative = 50
    """MAX_TRAINING_STEPS. 0 evaluates only."""
    eval_interval: NonNegative = 5
    """Steps between evaluations; 0 is off, the first and the last included."""
    max_tokens_per_micro_batch: Positive = 16384
    recompute: bool = False
    """Recompute every layer's activations in the backward pass: less memory, a third more work."""
    threads: NonNegative = 0
    """CPU threads; 0 takes all of the machine's cores when colocated, else half."""
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint_interval: NonNegative = 10
    """CKPT_INTERVAL: steps between checkpoints, of which the last step has one too; 0 is off."""
    checkpoint_path: str = ""
    """Empty is `<run folder>/checkpoints`."""
    keep_checkpoints: NonNegative = 3
    """The newest that are kept; 0 keeps all."""
    keep_every: NonNegative = 0
    """Of the older checkpoints those are kept too whose step is a multiple of it; 0 keeps none of them."""
    export_interval: NonNegative = 0
    """Steps between exports; the last step has one always."""
    export_path: str = ""
    """Empty is `<run folder>/exports`."""
    resume_mode: str = "none"
    """none: start from model.path. latest: go on from the run's newest whole checkpoint, if it has any. from_path: go
    on from the checkpoint at resume_path."""
    resume_path: str = ""
    """A checkpoint's folder. The launcher writes down here what `latest` has found."""

    def __post_init__(self) -> None:
        check_choice("resume_mode", self.resume_mode, ("none", "latest", "from_path"))
        if self.resume_mode == "from_path" and not self.resume_path:
            raise ValueError("resume_mode='from_path' needs resume_path, the folder of a checkpoint")
        if self.resume_mode == "none" and self.resume_path:
            raise ValueError(f"resume_path={self.resume_path!r} has no effect: set resume_mode=from_path")

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.checkpoint_interval > 0


class CoordinatorSection(Section, kw_only=True):
    max_staleness: NonNegative = 0
    """0 is synchronous training."""
    max_attempts: Positive = 3
    """Tries of a group before it ends as failed."""
    start_deadline_s: PositiveFloat = 300.0
    """Until every service must have started, and the trainer published its first policy."""
    step_deadline_s: PositiveFloat = 1800.0
    """Until a step's wait (groups, update) must have ended."""
    lease_deadline_s: PositiveFloat = 120.0
    """Until every worker that shares devices must have released their memory."""


class BusSection(Section, kw_only=True):
    prefix: str = "beamline"
    url: str = ""
    """Empty starts a server of the run's own on loopback."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Of the run's own server; 0 takes any free one."""
    blob_store: str = "shm"
    """shm (one host) or jetstream (across hosts)."""
    ack_wait_s: PositiveFloat = 15.0
    """Redelivery after this long without an in-progress ack."""

    def __post_init__(self) -> None:
        check_choice("blob_store", self.blob_store, ("shm", "jetstream"))


class RunConfig(Section, kw_only=True):
    """A whole run. Sections are named after the service that owns the setting."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    trainer: TrainerSection = TrainerSection()
    weights: WeightsSection = WeightsSection()
    bus: BusSection = BusSection()
    telemetry: TelemetrySection = TelemetrySection()

    def __post_init__(self) -> None:
        sampling, overlong = self.rollout.sampling, self.reward.overlong
        if self.algorithm.num_mini_batches > sampling.groups_per_step:
            raise ValueError(
                f"algorithm.num_mini_batches={self.algorithm.num_mini_batches} exceeds "
                f"rollout.sampling.groups_per_step={sampling.groups_per_step}: a mini-batch needs a group"
            )
        if overlong.buffer_tokens >= sampling.max_response_tokens:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} must be under "
                f"rollout.sampling.max_response_tokens={sampling.max_response_tokens}"
            )
        self.reward.check_graders(self.graders)
        self._check_weights()

    def _check_weights(self) -> None:
        transport = self.weights.transport
        if self.bus.blob_store == "jetstream" and transport in ("shm", "cuda_ipc"):
            raise ValueError(
                f"weights.transport={transport} works on one host, bus.blob_store=jetstream is for several: "
                "use weights.transport=nixl or checkpoint"
            )
        if self.rollout.engine.shared_parameters and transport not in ("auto", "shm"):
            raise ValueError(
                f"rollout.engine.shared_parameters needs the trainer's shared memory, weights.transport={transport} "
                "has none: use weights.transport=shm"
            )
        if self.rollout.engine.shared_parameters and self.model.lora.is_on:
            raise ValueError("rollout.engine.shared_parameters has no use with model.lora.rank: adapters are small")
        if self.weights.pause == "overlap" and not self.model.lora.is_on:
            raise ValueError(
                "weights.pause=overlap needs adapters, of which an engine holds several versions, and model.lora.rank "
                "is 0: use keep, drain or abort"
            )

    @property
    def graders(self) -> list[str]:
        """Names of all graders of the run, that of training first."""
        evaluated = [chosen.grader for chosen in self.data.evals if chosen.grader]
        return list(dict.fromkeys([self.reward.grader, *evaluated]))

    @property
    def canary_tolerance(self) -> float:
        """As set, or that of the model's precision."""
        if self.rollout.canary_tolerance is not None:
            return self.rollout.canary_tolerance
        return 1e-3 if self.model.dtype == "float32" else 0.1

    @property
    def max_train_tokens(self) -> int:
        """Longest sequence that is trained on: prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.sampling.max_response_tokens

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence of all, those of evaluations included: prompt and response."""
        evaluated = [evaluation.max_response_tokens for evaluation in self.data.evals]
        return self.data.max_prompt_tokens + max([self.rollout.sampling.max_response_tokens, *evaluated])
