"""What an environment says, as the tokens that stand between two turns of the policy."""

from collections.abc import Mapping

from beamline.models.chat import ChatTokenizer

_MARK = "\u241e"
"""Stands for the policy's turn in a rendered chat; no template writes it."""


class Observations:
    """Tokenises observations as the environment wants them placed.

    Args:
        chat: the model's tokenizer and template.
        role: of the message that an observation becomes; empty puts its text behind the policy's as it is.
        template_kwargs: with which the run renders its prompts.
    """

    def __init__(self, chat: ChatTokenizer, role: str, template_kwargs: Mapping[str, str | int | float | bool]) -> None:
        self._chat = chat
        self._role = role
        self._template_kwargs = template_kwargs

    def after(self, turn: list[int], observation: str) -> tuple[list[int], str]:
        """Tokens and text of an observation that follows a turn.

        As a message they are what the chat template writes between the turn's text and the next turn: the end of the
        policy's message, unless the policy sampled it, the observation's message, and the next one's beginning.
        """
        tokens = self._chat.encode(self._rendered(observation) if self._role else observation)
        if self._role and turn[-1] in self._chat.eos_token_ids and tokens[:1] == turn[-1:]:
            tokens = tokens[1:]
        return tokens, self._chat.decode(tokens)

    def _rendered(self, observation: str) -> str:
        messages = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _MARK},
            {"role": self._role, "content": observation},
        ]
        _, _, after = self._chat.render(messages, **self._template_kwargs).partition(_MARK)
        return after
