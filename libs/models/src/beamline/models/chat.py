"""Chat prompts to token ids without torch or transformers: tokenizers and jinja2 alone.

Reads any Hugging Face directory with a tokenizer.json and a chat template, and gives the ids that
transformers' `apply_chat_template` gives.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template; `eos_token_ids` end a completion."""

    tokenizer: Tokenizer
    template: jinja2.Template
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, directory: Path | str) -> "ChatTokenizer":
        """Read a model's directory. Raises ValueError naming the file that is missing or unreadable."""
        directory = Path(directory)
        path = _require(directory, TOKENIZER_FILE, "save the model's tokenizer there (a fast one, as tokenizer.json)")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}; save the model's tokenizer again") from error
        settings = _read_json(directory / SETTINGS_FILE)
        special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and token is not None
        }
        return cls(
            tokenizer=tokenizer,
            template=_compile(_template_source(directory, settings), directory),
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(directory, tokenizer, special_tokens),
        )

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def render(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> str:
        """The prompt's text; `add_generation_prompt` is true unless given.

        Raises ValueError with the template's own words when it refuses an argument or a message, or breaks on one.
        """
        if "messages" in template_kwargs:
            raise ValueError("messages is the name of the prompt itself: no argument can be called so")
        arguments = {"add_generation_prompt": True, **self.special_tokens, **template_kwargs, "messages": messages}
        try:
            return self.template.render(arguments)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"it breaks on them: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_kwargs: Any) -> list[int]:
        """Token ids of a chat as the template renders it, such as `reasoning_effort="high"` asks for."""
        return self.encode(self.render(messages, **template_kwargs))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` with nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str:
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(template := settings.get("chat_template"), str):
        return template
    raise ValueError(
        f"{directory} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {SETTINGS_FILE}; "
        "add the model's template"
    )


def _compile(source: str, directory: Path) -> jinja2.Template:
    # Whitespace rules, filters and globals are those with which chat templates are published.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{directory} has a chat template that does not parse: {error}; mend the template") from error


def _refuse(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _eos_token_ids(directory: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(directory / name).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    eos_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if eos_id is None:
        raise ValueError(f"{directory} names no end-of-sequence token: set eos_token_id in generation_config.json")
    return (eos_id,)


def _require(directory: Path, name: str, mend: str) -> Path:
    if not directory.is_dir():
        raise ValueError(f"model directory {directory} does not exist: give the path of a Hugging Face directory")
    path = directory / name
    if not path.is_file():
        raise ValueError(f"model directory {directory} has no {name}: {mend}")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}; mend or replace the file") from error
