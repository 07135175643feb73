"""A stop text is found with the token that completes it, whatever tokens it is made of."""

import pytest

from beamline.models.chat import ChatTokenizer
from beamline.models.tokenizer import ASSETS
from beamline.rollout.stop_texts import StopTexts


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("7-2=5\n5+6=11", ["="], "7-2="),
        ("7-2=5\n5+6=11", ["5+", "6="], "7-2=5\n5+"),
        ("Answer: 12\nmore", ["12\n"], "Answer: 12\n"),
        ("ends in </tool> and goes on", ["</tool>"], "ends in </tool>"),
        ("größer ist ➝ mehr", ["➝"], "größer ist ➝"),
        ("no call", ["="], None),
        ("=", [], None),
    ],
)
def test_the_first_token_that_completes_a_text_is_the_last(text: str, stop: list[str], kept: str | None) -> None:
    chat, stop_texts = ChatTokenizer.load(ASSETS), StopTexts(ASSETS / "tokenizer.json")
    tokens = chat.encode(text)
    ends = [end for end in range(1, len(tokens) + 1) if stop_texts.end(tokens[:end], stop)]
    assert (chat.decode(tokens[: ends[0]]) if ends else None) == kept


def test_a_token_that_writes_more_than_the_end_of_a_text_ends_it_too() -> None:
    chat, stop_texts = ChatTokenizer.load(ASSETS), StopTexts(ASSETS / "tokenizer.json")
    (answer,) = chat.encode("Answer")
    assert stop_texts.end([answer], ["Ans"]) and not stop_texts.end([answer], ["answer"])
