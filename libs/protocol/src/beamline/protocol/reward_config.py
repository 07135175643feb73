"""The settings of `reward`: how completions are graded."""

from beamline.protocol.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class OverlongSection(Section, kw_only=True):
    buffer_tokens: NonNegative = 0
    """0 is off. The last buffer_tokens before max_response_tokens are penalised linearly (DAPO)."""
    factor: NonNegativeFloat = 1.0


class RewardSection(Section, kw_only=True):
    grader: str = "math_dapo"
    """math_dapo or math_verify."""
    workers: Positive = 1
    """Processes in which graders run, each of which can be killed."""
    grade_timeout_s: PositiveFloat = 10.0
    overlong: OverlongSection = OverlongSection()
