"""Every error that crosses a service boundary.

    BeamlineError
    ├── ConfigError          a recipe or setting that cannot work; raised before anything starts
    ├── ProtocolError        bytes that are not a message or blob of this version
    ├── BlobError            a blob that is missing, cut short or damaged
    ├── WeightError          weights that are missing, damaged, or not those of this model
    ├── DeadlineExceeded     a wait that ran out; says what it waited for
    ├── BusUnavailable       no broker at the address, or it turned the connection away
    ├── PermissionDenied     the broker does not let this service use a subject
    ├── Rejected             this input will never work: publish a failure, acknowledge the input
    └── Retryable            this input may work later: ask for redelivery

In a handler, `Rejected` and `Retryable` are answers; any other exception ends the process.
"""


class BeamlineError(Exception):
    """Base of all. Its text names the thing, the value and the mend."""


class ConfigError(BeamlineError, ValueError):
    """A recipe, setting or file that the user has to change."""


class ProtocolError(BeamlineError, ValueError):
    """A message or blob that does not follow the schema."""


class BlobError(BeamlineError):
    """A blob that is missing, truncated or whose checksum differs."""


class WeightError(BeamlineError):
    """A weight manifest or tensor that cannot be used."""


class DeadlineExceeded(BeamlineError, TimeoutError):
    """A wait that ran out.

    Args:
        waiting_for: what was awaited, in words, such as "PolicyUpdate for step 3 from the trainer".
        deadline_s: how long the wait was allowed to take, in seconds.
    """

    def __init__(self, waiting_for: str, deadline_s: float) -> None:
        super().__init__(f"waited {deadline_s:g} s for {waiting_for}")
        self.waiting_for = waiting_for
        self.deadline_s = deadline_s


class BusUnavailable(BeamlineError):
    """The broker cannot be reached or used. Its text gives the address and the mend."""


class PermissionDenied(BeamlineError):
    """The broker refused a subject to this service's user."""


class Rejected(BeamlineError):
    """The input is unusable for good. `kind` is a short machine-readable word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Retryable(BeamlineError):
    """The input may succeed on another try, after `delay_s` seconds."""

    def __init__(self, text: str, delay_s: float = 1.0) -> None:
        super().__init__(text)
        self.delay_s = delay_s
