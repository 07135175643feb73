"""Make the shipped tiny models: train random ones on flawed solutions of chained sums.

    .venv/bin/python warm_start.py tiny-beam tiny-qwen3-moe

The models learn the format, the arithmetic and a bad habit that reinforcement learning can remove.
Deterministic on one kind of CPU: one thread, fixed seeds. Needs a few minutes for each model.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import sampling
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from beamline.models import assets, chained_sums, tiny, tokenizer
from beamline.models.chat import ChatTokenizer

FLAWS = chained_sums.Flaws(leave_out_last=0.62, wrong_total=0.04)
SEED = 0
NUM_STEPS = 600
BATCH_SIZE = 32
PEAK_LR = 4e-3
NUM_WARMUP_STEPS = 40
FLAT_SHARE = 0.7
FINAL_LR_SHARE = 0.05
REPORT_EVERY = 50
IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=assets.WARM_STARTED)
    parser.add_argument(
        "--into", type=Path, default=assets.DIRECTORY, help="where <model>/model.safetensors is written"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        warm_start(name, arguments.into / name)


def warm_start(name: str, into: Path) -> None:
    """Train one model and write its bfloat16 weights."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        tiny.build(tiny.SPECS[name], directory, seed=SEED)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        train(model, ChatTokenizer.load(directory))
        model.save_pretrained(directory)
        into.mkdir(parents=True, exist_ok=True)
        write_bfloat16(directory / "model.safetensors", into / "model.safetensors")


def write_bfloat16(source: Path, target: Path) -> None:
    """Round a float32 checkpoint to bfloat16, routers excepted."""
    tensors = load_file(source)
    rounded = {name: t if tiny.keeps_float32(name) else t.to(torch.bfloat16) for name, t in tensors.items()}
    save_file(rounded, target, metadata={"format": "pt"})


def train(model, chat: ChatTokenizer) -> None:
    """AdamW on the completions' tokens, warm-up, flat, then a linear fall of the learning rate."""
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_share)
    started, losses = time.monotonic(), []
    for step, (input_ids, labels) in enumerate(batches(chat), start=1):
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % REPORT_EVERY == 0:
            mean_loss = sum(losses[-REPORT_EVERY:]) / REPORT_EVERY
            print(f"step {step:4d}/{NUM_STEPS}  loss {mean_loss:.3f}  {time.monotonic() - started:.0f} s", flush=True)


def lr_share(step: int) -> float:
    """Share of the peak learning rate at a step counted from zero."""
    fall = (step / NUM_STEPS - FLAT_SHARE) / (1 - FLAT_SHARE)
    return min((step + 1) / NUM_WARMUP_STEPS, 1 - (1 - FINAL_LR_SHARE) * max(fall, 0.0))


def batches(chat: ChatTokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded token ids and labels, both [BATCH_SIZE, longest]; prompts and padding are not learnt."""
    generator = random.Random(SEED)
    problems = chained_sums.warm_start_problems()
    for step in range(NUM_STEPS):
        first = step * BATCH_SIZE % len(problems)
        rows = []
        for problem in problems[first : first + BATCH_SIZE]:
            completion = chat.encode(chained_sums.solve(problem, FLAWS, generator) + tokenizer.END_OF_TURN)
            rows.append((sampling.prompt_ids(chat, problem), completion))
        longest = max(len(prompt) + len(completion) for prompt, completion in rows)
        input_ids = torch.full((BATCH_SIZE, longest), tokenizer.PAD_ID)
        labels = torch.full((BATCH_SIZE, longest), IGNORED)
        for row, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion)
            input_ids[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion)
        yield input_ids, labels


if __name__ == "__main__":
    main()
