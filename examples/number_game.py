"""An environment of one's own: the policy guesses a number and is told whether it is higher or lower.

rollout:
  environment:
    name: examples.number_game:NumberGame
"""

import re

from beamline.environments.environment import EpisodeTask, Start, Step

_NUMBER = re.compile(r"-?\d+")


class NumberGame:
    """Each turn is a message with a guess; the answer comes as the user's next message.

    The hidden number is the prompt's ground truth. Finding it is rewarded with 1, less 0.1 for each guess before.
    """

    def __init__(self) -> None:
        self._hidden = 0
        self._num_misses = 0

    def reset(self, task: EpisodeTask) -> Start:
        self._hidden = int(task.ground_truth)
        return Start(role="user")

    def step(self, text: str) -> Step:
        guesses = _NUMBER.findall(text)
        if not guesses:
            return Step(observation="Write a number.")
        guess = int(guesses[-1])
        if guess == self._hidden:
            return Step(reward=max(0.0, 1 - 0.1 * self._num_misses), done=True)
        self._num_misses += 1
        return Step(observation="It is higher." if guess < self._hidden else "It is lower.")
