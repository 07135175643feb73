"""From parquet rows to token ids: the one place where the coordinator reads data sets and the tokenizer."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from beamline.coordinator.cursor import DataCursor, Problems, Prompt
from beamline.models.chat import ChatTokenizer
from beamline.models.datasets import PromptRow, read_rows
from beamline.protocol.config import DataSection, EvalSet, RunConfig
from beamline.protocol.errors import ConfigError


def load_tokenizer(config: RunConfig) -> ChatTokenizer:
    """The tokenizer of the run's model. Raises ConfigError where there is none."""
    try:
        return ChatTokenizer.load(config.model.path)
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error


def tokenizer_of(config: RunConfig, chat: ChatTokenizer | None = None) -> Callable[[PromptRow], Prompt]:
    """Renders a row's chat by the model's template, with `chat` or the tokenizer of the run's model.

    Raises ConfigError: no tokenizer; when a row is rendered, an argument that the template refuses.
    """
    chat = chat or load_tokenizer(config)

    def tokenize(row: PromptRow) -> Prompt:
        try:
            tokens = chat.encode_chat(row.messages, **config.data.chat_template_kwargs)
        except ValueError as error:
            raise ConfigError(f"data.chat_template_kwargs={config.data.chat_template_kwargs}: {error}") from error
        prompt_id = f"{row.data_source}/{row.split}/{row.index}"
        return Prompt(prompt_id, row.data_source, row.ground_truth, tokens, row.messages[-1]["content"])

    return tokenize


def train_cursor(config: RunConfig, tokenize: Callable[[PromptRow], Prompt]) -> DataCursor:
    """The cursor over `data.train`. Raises ConfigError naming file, row and field."""
    return DataCursor(
        _rows(config.data.train),
        tokenize,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.run.seed if config.data.shuffle else None,
        source=config.data.train,
    )


def eval_prompts(eval_set: EvalSet, data: DataSection, tokenize: Callable[[PromptRow], Prompt]) -> dict[str, Problems]:
    """Problems by metric name: the set's own, or each row's data source. Too long ones are left out and counted.

    Raises:
        ConfigError: a bad file, or a name without a prompt that is short enough.
    """
    named: dict[str, list[Prompt]] = defaultdict(list)
    rows = _rows(eval_set.path)
    for row in rows[: eval_set.max_problems or len(rows)]:
        prompt = tokenize(row)
        named[eval_set.name or prompt.data_source].append(prompt)
    problems: dict[str, Problems] = {}
    for name, prompts in named.items():
        fitting = [prompt for prompt in prompts if len(prompt.tokens) <= data.max_prompt_tokens]
        if not fitting:
            raise ConfigError(
                f"data.evals: no prompt of {name} in {eval_set.path} fits "
                f"data.max_prompt_tokens={data.max_prompt_tokens}: raise it"
            )
        problems[name] = Problems(fitting, num_dropped=len(prompts) - len(fitting))
    return problems


def _rows(path: str) -> list[PromptRow]:
    try:
        return list(read_rows(Path(path)))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
