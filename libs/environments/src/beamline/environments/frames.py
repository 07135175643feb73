"""What passes between an `EnvironmentHost` and its process, each struct in a frame of its own.

Calls name the episode they are of. Every call is answered once, in order; `Forget` is not answered. Before the first
call the process says `Ready` or `Refused`.
"""

import msgspec

from beamline.environments.environment import EpisodeTask, Start, Step

MAX_REPLY_BYTES = 1 << 20
MAX_REASON_CHARS = 500
"""What people read."""


class Reset(msgspec.Struct, frozen=True, tag="Reset"):
    """Make an environment and begin."""

    episode: int
    task: EpisodeTask


class Act(msgspec.Struct, frozen=True, tag="Act"):
    """Answer a turn."""

    episode: int
    text: str


class Forget(msgspec.Struct, frozen=True, tag="Forget"):
    """The episode is over."""

    episode: int


class Ready(msgspec.Struct, frozen=True, tag="Ready"):
    """The environment's class is loaded."""


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    """It cannot be loaded."""

    why: str


class Raised(msgspec.Struct, frozen=True, tag="Raised"):
    """The environment did not answer the call; its episode is over."""

    why: str


type Answered = Reset | Act
type Call = Reset | Act | Forget
type Answer = Start | Step
type Reply = Ready | Refused | Raised | Answer

calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Reset | Act | Forget)
replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Ready | Refused | Raised | Start | Step)
encode = msgspec.msgpack.Encoder().encode
