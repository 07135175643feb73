"""Where a response says its answer: after a label, or in a box."""

import re

_LABEL = re.compile(r"answer\s*:[\s*]*(?=\S)", re.IGNORECASE)
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")


def last_labelled(text: str) -> str:
    """What follows the last `Answer:` (in any case) on its line; empty when there is none."""
    ends = [label.end() for label in _LABEL.finditer(text)]
    return text[ends[-1] :].partition("\n")[0] if ends else ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`; an unclosed one reaches to the end. None when there is none."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth, start = 1, boxes[-1].end()
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]


def labelled_or_whole(text: str) -> str:
    """What follows the last `Answer:` on its line; without one, the whole response. Without space around it."""
    return last_labelled(text).strip() or text.strip()
