"""A process that runs environments and may be killed at any moment: `python -m beamline.environments.host_process`."""

import argparse
import sys
from collections.abc import Callable

from beamline.environments.environment import Environment, Start, Step
from beamline.environments.frames import (
    MAX_REASON_CHARS,
    MAX_REPLY_BYTES,
    Answer,
    Answered,
    Forget,
    Raised,
    Ready,
    Refused,
    Reset,
    calls,
    encode,
)
from beamline.protocol.errors import ConfigError
from beamline.runtime.foreign_code import add_arguments, confine, frame, limit_cpu, read_frame
from beamline.runtime.plugins import load_plugin

KEY = "rollout.environment.name"


def main() -> int:
    """Serve calls until standard input ends; 1 when the environment cannot be loaded."""
    arguments = _parse_arguments()
    incoming, outgoing = confine(arguments.parent, arguments.memory_bytes)
    try:
        episodes = Episodes(load_plugin(KEY, arguments.environment))
    except ConfigError as error:
        outgoing.write(frame(encode(Refused(str(error)))))
        return 1
    outgoing.write(frame(encode(Ready())))
    while (payload := read_frame(incoming)) is not None:
        call = calls.decode(payload)
        if isinstance(call, Forget):
            episodes.forget(call.episode)
        else:
            limit_cpu(arguments.timeout_s)
            outgoing.write(frame(_encoded(episodes, call)))
    return 0


class Episodes:
    """The environments that are under way.

    Args:
        make: makes the one of a new trajectory.
    """

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._running: dict[int, Environment] = {}

    def answer(self, call: Answered) -> Answer | Raised:
        """What the environment says, or why it does not; then its episode is forgotten."""
        try:
            answer = self._answer(call)
        except Exception as error:  # foreign code: whatever it raises ends its own episode alone
            self.forget(call.episode)
            return Raised(f"raised {type(error).__name__}: {error}"[:MAX_REASON_CHARS])
        wanted, method = (Start, "reset") if isinstance(call, Reset) else (Step, "step")
        if not isinstance(answer, wanted):
            return Raised(f"{method} returned {type(answer).__name__}, expected {wanted.__module__}.{wanted.__name__}")
        return answer

    def forget(self, episode: int) -> None:
        self._running.pop(episode, None)

    def _answer(self, call: Answered) -> object:
        if isinstance(call, Reset):
            self._running[call.episode] = self._make()
            return self._running[call.episode].reset(call.task)
        return self._running[call.episode].step(call.text)


def _encoded(episodes: Episodes, call: Answered) -> bytes:
    """The answer's bytes; one that cannot be sent is the environment's fault too."""
    answer = episodes.answer(call)
    try:
        payload = encode(answer)
    except (TypeError, ValueError) as error:
        return encode(Raised(f"returned what cannot be sent: {error}"[:MAX_REASON_CHARS]))
    if len(payload) > MAX_REPLY_BYTES:
        return encode(Raised(f"returned {len(payload)} bytes, at most {MAX_REPLY_BYTES}"))
    return payload


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", required=True, help="package.module:Class")
    parser.add_argument("--timeout-s", type=float, required=True, help="of one call")
    add_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
