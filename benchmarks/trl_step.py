"""The same step in TRL: one process, generation by transformers, two updates. Runs in the reference environment.

bin/python reference -m benchmarks.trl_step --model DIR --prompts PARQUET --out FILE
"""

import argparse
import json
import time
from pathlib import Path

import torch
from benchmarks.rewards import distinct_characters
from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

NUM_UPDATES = 2


class StepClock(TrainerCallback):
    """Reads the clock and the token counter at the end of every step, that is, of every `NUM_UPDATES`-th update."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.global_step % NUM_UPDATES == 0:
            self.ends.append(time.perf_counter())


def reward(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """One reward a completion, each of which is a chat of one message."""
    return [distinct_characters(messages[0]["content"]) for messages in completions]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    clock = StepClock()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=reward,
        args=trainer_config(options),
        train_dataset=Dataset.from_parquet(options.prompts).select_columns(["prompt"]),
        callbacks=[clock],
    )
    trainer.train()
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    steps = [
        {"seconds": spent, "prompt_tokens": prompt, "response_tokens": response}
        for spent, (prompt, response) in zip(seconds, tokens_of_steps(trainer, options), strict=True)
    ]
    Path(options.out).write_text(json.dumps({"steps": steps[options.warm_up :]}, indent=2) + "\n", encoding="utf-8")


def trainer_config(options: argparse.Namespace) -> GRPOConfig:
    """Beamline's bench recipe in TRL's words; all else is as TRL comes."""
    return GRPOConfig(
        output_dir=str(Path(options.out).parent / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=options.prompts_per_step * options.samples // NUM_UPDATES,
        gradient_accumulation_steps=1,
        steps_per_generation=NUM_UPDATES,
        max_steps=NUM_UPDATES * (options.warm_up + options.steps),
        num_generations=options.samples,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        chat_template_kwargs={"reasoning_effort": "minimal"},
        shuffle_dataset=False,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        seed=0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def tokens_of_steps(trainer: GRPOTrainer, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Prompt and sampled tokens of each step.

    TRL counts both together as they are generated, which is before the first of a step's updates, and tells the mean
    length of the completions beside it.
    """
    rows = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    totals = [0, *(row["num_tokens"] for row in rows)]
    num_samples = options.prompts_per_step * options.samples
    tokens = []
    for row, before in zip(rows, totals, strict=False):
        response = round(row["completions/mean_length"] * num_samples)
        tokens.append((round(row["num_tokens"] - before) - response, response))
    return tokens


def parse_arguments() -> argparse.Namespace:
    """The shape of the step, as `make bench` gives it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--prompts", required=True, help="parquet file with a column of chat prompts")
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="a completion")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the first that counts")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
