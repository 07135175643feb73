"""The shipped models: right on about three problems in ten, with the habit that reinforcement learning removes."""

import pytest
import sampling
import torch
import warm_start
from transformers import AutoModelForCausalLM

from beamline.models import assets, chained_sums
from beamline.models.chat import ChatTokenizer

NUM_PROBLEMS, NUM_SAMPLES = 64, 8


@pytest.fixture(scope="module", params=assets.WARM_STARTED)
def directory(request, tmp_path_factory):
    return assets.materialise(request.param, tmp_path_factory.mktemp(request.param))


def test_shipped_models_are_right_on_about_three_problems_in_ten(directory):
    chat = ChatTokenizer.load(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(0)
    accuracy = sampling.measure(model, chat, chained_sums.eval_problems(NUM_PROBLEMS), NUM_SAMPLES)
    assert 0.20 <= accuracy.average <= 0.40
    assert accuracy.greedy < accuracy.average
    assert accuracy.mean_length < 30


def test_a_few_steps_of_the_warm_start_reduce_the_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warm_start, "NUM_STEPS", 20)
    monkeypatch.setattr(warm_start, "REPORT_EVERY", 5)
    warm_start.warm_start("tiny-beam", tmp_path)
    losses = [
        float(line.split("loss")[1].split()[0]) for line in capsys.readouterr().out.splitlines() if "loss" in line
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert (tmp_path / "model.safetensors").stat().st_size == assets.weights("tiny-beam").stat().st_size


def test_the_learning_rate_rises_stays_and_falls():
    shares = [warm_start.lr_share(step) for step in range(warm_start.NUM_STEPS)]
    assert shares[0] == 1 / warm_start.NUM_WARMUP_STEPS
    assert max(shares) == shares[warm_start.NUM_WARMUP_STEPS] == shares[warm_start.NUM_STEPS // 2] == 1
    assert warm_start.FINAL_LR_SHARE <= shares[-1] < 0.06


def test_completions_are_graded_by_their_last_line(directory):
    chat, problem = ChatTokenizer.load(directory), chained_sums.Problem(7, (-2, 6, 9))
    end = [chat.eos_token_ids[0]]
    assert sampling.is_right(chat, problem, chat.encode("7-2=5\nAnswer: 20") + end)
    assert not sampling.is_right(chat, problem, chat.encode("7-2=5\nAnswer: 20"))
    assert not sampling.is_right(chat, problem, chat.encode("Answer: 20\nAnswer: 2") + end)
