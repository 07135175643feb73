"""The group of samples by which an engine's decoding is timed: one prompt, of tokens that mean nothing."""

from beamline.protocol import messages as m

FAR_AWAY = 4e9


def sampled_group(num_samples: int, num_prompt_tokens: int, num_tokens: int) -> m.PromptGroup:
    """Samples of up to `num_tokens` each, at temperature 1."""
    return m.PromptGroup(
        group_id="g-000001",
        attempt=0,
        purpose=m.Purpose.TRAIN,
        task=m.Task(prompt_id="p", data_source="none", grader="math_dapo", ground_truth=""),
        prompt_tokens=list(range(5, 5 + num_prompt_tokens)),
        sampling=m.Sampling(temperature=1.0, top_p=1.0, max_tokens=num_tokens),
        seeds=list(range(num_samples)),
        min_policy_version=0,
        deadline=FAR_AWAY,
    )
