"""The two sides at work, each a program in its service's own environment: an engine samples, the trainer reads."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from beamline.coordinator.cursor import Prompt
from beamline.coordinator.doctor.case import Case, Options
from beamline.coordinator.launch.local import environment, interpreter
from beamline.coordinator.prompts import eval_prompts, tokenizer_of
from beamline.coordinator.seeds import sample_seed
from beamline.models import chained_sums
from beamline.protocol.config import EvalSet
from beamline.protocol.doctor import READINGS, ReadRequest, Recomputed, SampleRequest
from beamline.protocol.errors import BeamlineError, ConfigError, DeadlineExceeded
from beamline.protocol.messages import PromptGroup, Purpose, Sampling, Task
from beamline.runtime.request_program import REFUSED, write_request
from beamline.runtime.sample_files import read_recomputed

DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Sides:
    """Starts the programs.

    Args:
        base_environment: the user's.
        threads: CPU threads of each.
    """

    base_environment: Mapping[str, str]
    threads: int

    def sample(self, case: Case, options: Options) -> None:
        """Have an engine sample into the case's folder.

        Raises:
            ConfigError: what the user has to mend, in the engine's words.
            BeamlineError: it broke; its log says how.
        """
        case.folder.mkdir(parents=True, exist_ok=True)
        request = SampleRequest(
            model=str(case.engine_model),
            dtype=case.config.model.dtype,
            policy_version=case.policy_version,
            groups=list(_groups(case, options)),
            lora=case.config.model.lora,
            adapters=str(case.adapters or ""),
        )
        self._run("rollout", "beamline.rollout.sample", request, case.folder)

    def recompute(self, case: Case) -> Recomputed:
        """Have the trainer read the samples of the case's folder. Raises as `sample` does."""
        request = ReadRequest(
            model=str(case.trainer_model),
            dtype=case.config.model.dtype,
            replay=case.config.algorithm.routing_replay,
            max_tokens=case.config.trainer.max_tokens_per_micro_batch,
            lora=case.config.model.lora,
            base=str(case.engine_model) if case.adapters else "",
        )
        self._run("trainer", "beamline.trainer.doctor", request, case.folder)
        return read_recomputed(case.folder / READINGS)

    def _run(self, service: str, module: str, request: SampleRequest | ReadRequest, folder: Path) -> None:
        asked, log = folder / f"{service}-request.json", folder / f"{service}.log"
        write_request(asked, request)
        command = [str(interpreter(service)), "-m", module, str(asked), str(folder)]
        try:
            with log.open("wb") as file:
                code = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=environment(self.base_environment, self.threads),
                    timeout=DEADLINE_S,
                    check=False,
                ).returncode
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"the {service} side to end; its log is {log}", DEADLINE_S) from None
        if code == 0:
            return
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        words = last[0].removeprefix("error: ") if last else "it said nothing"
        if code == REFUSED:
            raise ConfigError(words)
        raise BeamlineError(f"the {service} side ended with exit code {code}: {words}; its log is {log}")


def _groups(case: Case, options: Options) -> Iterator[PromptGroup]:
    """Prompts of the case, `options.problems` of them."""
    sampling = case.config.rollout.sampling
    for number, prompt in enumerate(_prompts(case, options.problems)):
        yield PromptGroup(
            group_id=f"doctor-{number:04d}",
            attempt=0,
            purpose=Purpose.EVAL,
            task=Task(prompt_id=prompt.prompt_id, data_source=prompt.data_source, grader="", ground_truth=""),
            prompt_tokens=prompt.tokens,
            sampling=Sampling(temperature=sampling.temperature, top_p=1.0, max_tokens=sampling.max_response_tokens),
            seeds=[sample_seed(0, f"doctor/{prompt.prompt_id}", sample) for sample in range(options.samples)],
            min_policy_version=case.policy_version,
            deadline=time.time() + DEADLINE_S,
        )


def _prompts(case: Case, number: int) -> list[Prompt]:
    config = case.config
    tokenize = tokenizer_of(config)
    if config.data.evals or config.data.train:
        chosen = config.data.evals[0] if config.data.evals else EvalSet(path=config.data.train)
        named = eval_prompts(chosen, config.data, tokenize).values()
        found = [prompt for problems in named for prompt in problems.prompts]
        return found[:number]
    return [tokenize(row) for row in chained_sums.rows(chained_sums.eval_problems(number), "doctor")]
