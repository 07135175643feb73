"""Settings of `algorithm` that do not go together are refused by name; those that decide for each other do."""

import pytest

from beamline.algorithms.advantages import ADVANTAGES
from beamline.algorithms.reductions import REDUCTIONS
from beamline.protocol import algorithm_config
from beamline.protocol.algorithm_config import AlgorithmSection


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "groups"}, "advantage='groups' does not exist: did you mean 'grpo'"),
        ({"loss": "gpso"}, "loss='gpso' does not exist: did you mean 'gspo'"),
        ({"reduction": "mean"}, "reduction='mean' does not exist: did you mean 'token_mean'"),
        ({"dual_clip": 0.5}, "dual_clip=0.5: must be above 1"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip=3.0 has no effect with loss=cispo"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        AlgorithmSection(**settings)


def test_the_names_of_the_recipe_are_those_of_the_functions():
    assert set(algorithm_config.ADVANTAGES) == set(ADVANTAGES)
    assert set(algorithm_config.REDUCTIONS) == set(REDUCTIONS)


@pytest.mark.parametrize(
    ("settings", "filters"),
    [({}, True), ({"drop_zero_variance": False}, False), ({"advantage": "reinforce_pp"}, False)],
)
def test_equal_rewards_end_a_group_where_they_have_no_gradient(settings: dict, filters: bool):
    assert AlgorithmSection(**settings).filters_zero_variance is filters
