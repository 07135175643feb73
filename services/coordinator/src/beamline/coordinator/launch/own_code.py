"""Code of the user's own loads in the environment of the service that calls it; looked at before anything starts."""

import os
import subprocess
from collections.abc import Iterator

from beamline.coordinator.launch.local import environment, interpreter
from beamline.protocol.config import RunConfig
from beamline.protocol.errors import ConfigError

DEADLINE_S = 120.0
"""To import one module, with whatever it imports itself."""


def own_code(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Service, setting and value of what a recipe gives as `package.module:name`."""
    algorithm, environment = config.algorithm, config.rollout.environment.name
    named = [
        ("coordinator", "algorithm.advantage", algorithm.advantage),
        ("trainer", "algorithm.loss", algorithm.loss),
        *(("reward", "reward.grader", grader) for grader in config.graders),
        ("rollout", "rollout.environment.name", environment),
    ]
    if algorithm.kl.coefficient and algorithm.kl.place == "reward":
        named.append(("trainer", "algorithm.advantage", algorithm.advantage))
    yield from (choice for choice in named if ":" in choice[2])


def check_own_code(config: RunConfig) -> None:
    """Raises ConfigError where something cannot be loaded; says what and why."""
    for service, key, path in own_code(config):
        command = [str(interpreter(service)), "-m", "beamline.runtime.plugins", key, path]
        try:
            done = subprocess.run(
                command,
                env=environment(os.environ, threads=1),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{key}={path}: its module was not imported within {DEADLINE_S:g} s") from None
        if done.returncode:
            last = done.stderr.strip().splitlines() or [f"its process ended with exit code {done.returncode}"]
            raise ConfigError(last[-1] if last[-1].startswith(key) else f"{key}={path}: {last[-1]}")
