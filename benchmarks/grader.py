"""The benchmark's reward in the form in which the reward service takes a grader of the user's own."""

from benchmarks.rewards import distinct_characters

from beamline.reward.grader import Verdict


def grade(text: str, ground_truth: str) -> Verdict:
    """Rewards any text; no answer is right."""
    return Verdict(reward=distinct_characters(text), acc=0.0)
