"""The settings of `reward`: how completions are graded."""

from collections.abc import Iterable

from beamline.protocol.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, check_name

GRADERS = ("math_dapo", "math_verify", "gsm8k", "exact", "regex", "code", "http")
"""The graders that Beamline has; docs/rewards.md describes them."""


class OverlongSection(Section, kw_only=True):
    buffer_tokens: NonNegative = 0
    """0 is off. The last buffer_tokens before max_response_tokens are penalised linearly (DAPO)."""
    factor: NonNegativeFloat = 1.0


class CodeSection(Section, kw_only=True):
    """Limits of the programs that the grader `code` runs. One that exceeds them has failed its tests."""

    cpu_s: Positive = 4
    """Processor time of one program."""
    wall_s: PositiveFloat = 8.0
    """All programs of one grading together."""
    memory_mib: Positive = 512
    """Address space of one program."""
    output_kib: Positive = 1024
    """What one program may print."""


class HttpSection(Section, kw_only=True):
    """The endpoint of the grader `http`."""

    url: str = ""
    timeout_s: PositiveFloat = 5.0
    """Of one try."""
    retries: NonNegative = 2
    """After no answer, status 429 or a status from 500 on."""
    backoff_s: PositiveFloat = 0.25
    """Before the first retry; twice as long before each further one."""
    deadline_s: PositiveFloat = 8.0
    """Of all tries together."""


class RewardSection(Section, kw_only=True):
    """How completions are graded and their rewards shaped."""

    grader: str = "math_dapo"
    """math_dapo, math_verify, gsm8k, exact, regex, code, http, or package.module:function of your own."""
    workers: Positive = 1
    """Gradings at a time, each in a process that can be killed; all graders of a run share them."""
    grade_timeout_s: PositiveFloat = 10.0
    """A grading that takes longer abstains."""
    overlong: OverlongSection = OverlongSection()
    code: CodeSection = CodeSection()
    http: HttpSection = HttpSection()

    def __post_init__(self) -> None:
        check_name("grader", self.grader, GRADERS)

    def check_graders(self, graders: Iterable[str]) -> None:
        """Raises ValueError where one of these graders cannot work with the settings."""
        if "http" in (graders := list(graders)) and not self.http.url.startswith(("http://", "https://")):
            raise ValueError(
                f"reward.http.url={self.http.url!r}: the grader http needs a URL, http://... or https://..."
            )
        for name, key, limit_s in (("code", "wall_s", self.code.wall_s), ("http", "deadline_s", self.http.deadline_s)):
            if name in graders and limit_s >= self.grade_timeout_s:
                raise ValueError(
                    f"reward.{name}.{key}={limit_s:g} must be under reward.grade_timeout_s={self.grade_timeout_s:g}: "
                    "a grading that is killed abstains without a reason of its own"
                )
