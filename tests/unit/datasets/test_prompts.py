"""From a row to token ids: what the recipe and the environment say about the chat template reaches the prompt."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from beamline.coordinator import cli
from beamline.coordinator.cursor import Prompt
from beamline.coordinator.prompts import eval_prompts, tokenizer_of, train_cursor
from beamline.models import assets
from beamline.models.chat import ChatTokenizer
from beamline.models.tokenizer import REASONING_EFFORTS
from beamline.protocol.config import DataSection, EvalSet, ModelSection, RunConfig
from beamline.protocol.errors import ConfigError
from beamline.runtime.recipe import load_recipe
from prompt_files import parquet, row


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets.materialise("bench", tmp_path_factory.mktemp("model"))


def data_config(model: Path, file: Path, **settings: object) -> RunConfig:
    data = replace(DataSection(train=str(file), shuffle=False), **settings)
    return RunConfig(model=ModelSection(path=str(model)), data=data)


def first_prompt(config: RunConfig) -> Prompt:
    """What the coordinator would issue first."""
    return train_cursor(config, tokenizer_of(config)).draw(0)[0]


def test_every_reasoning_effort_is_another_prompt(model: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", row(0))
    chat = ChatTokenizer.load(model)
    prompts: dict[str, list[int]] = {}
    for effort in REASONING_EFFORTS:
        prompt = first_prompt(data_config(model, file, chat_template_kwargs={"reasoning_effort": effort}))
        prompts[effort] = prompt.tokens
        assert chat.decode(prompt.tokens, skip_special_tokens=False).startswith(f"<|effort_{effort}|>")
        assert "0+1" in chat.decode(prompt.tokens)
    assert len({tuple(tokens) for tokens in prompts.values()}) == len(REASONING_EFFORTS)
    assert first_prompt(data_config(model, file)).tokens == prompts["minimal"], "the default"


@pytest.mark.parametrize("effort", ["high", "max"])
def test_the_environment_sets_the_effort_and_an_override_wins(model: Path, tmp_path: Path, effort: str) -> None:
    settings = [f"model.path={model}", f"data.train={parquet(tmp_path / 'rows.parquet', row(0))}"]
    by_environment = load_recipe("tiny-beam", settings, environment={"REASONING_EFFORT": effort})
    override = "data.chat_template_kwargs.reasoning_effort=low"
    overridden = load_recipe("tiny-beam", [*settings, override], environment={"REASONING_EFFORT": effort})
    chat = ChatTokenizer.load(model)
    texts = [chat.decode(first_prompt(c).tokens, skip_special_tokens=False) for c in (by_environment, overridden)]
    assert [text.partition("|>")[0] for text in texts] == [f"<|effort_{effort}", "<|effort_low"]


def test_any_argument_of_a_template_reaches_it(tmp_path: Path) -> None:
    model = assets.materialise("bench", tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}think {{ budget * 2 }}{% endif %}"
    (model / "chat_template.jinja").write_text(template)
    config = data_config(model, parquet(tmp_path / "rows.parquet", row(0)))
    config = replace(config, data=replace(config.data, chat_template_kwargs={"think": True, "budget": 21}))
    assert ChatTokenizer.load(model).decode(first_prompt(config).tokens) == "0+1think 42"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reasoning_effort": "heroic"}, ["reasoning_effort", "heroic", "minimal"]),
        ({"messages": "mine"}, ["messages", "the prompt itself"]),
        ({"messages_": "mine", "reasoning_effort": 3}, ["reasoning_effort is 3"]),
    ],
)
@pytest.mark.parametrize("path", ["asset:tiny-beam", "directory"])
def test_a_refused_argument_ends_the_run_before_its_start(
    path: str,
    arguments: dict[str, object],
    words: list[str],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [f"data.chat_template_kwargs.{name}={value}" for name, value in arguments.items()]
    overrides += [f"run.dir={tmp_path / 'runs'}", f"model.path={model if path == 'directory' else path}"]
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "tiny-beam", *overrides])
    told = capsys.readouterr().err
    assert end.value.code == 2 and len(told.splitlines()) == 1
    for word in ("data.chat_template_kwargs", *words):
        assert word in told
    assert not (tmp_path / "runs" / "tiny-beam").exists()


def test_an_effort_that_is_not_one_is_refused_by_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"REASONING_EFFORT='huge'.*data\.chat_template_kwargs\.reasoning_effort"):
        load_recipe("tiny-beam", environment={"REASONING_EFFORT": "huge"})


def test_evaluated_prompts_are_named_by_set_or_source_and_too_long_ones_counted(model: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "9" * 500}]
    rows = [row(0, data_source="a"), row(1, data_source="b"), row(2, data_source="a", prompt=long)]
    file = str(parquet(tmp_path / "rows.parquet", *rows))
    config = data_config(model, Path(file), max_prompt_tokens=100)
    tokenize = tokenizer_of(config)
    by_source = eval_prompts(EvalSet(path=file), config.data, tokenize)
    assert {n: (len(p.prompts), p.num_dropped) for n, p in by_source.items()} == {"a": (1, 1), "b": (1, 0)}
    (together,) = eval_prompts(EvalSet(path=file, name="all"), config.data, tokenize).values()
    assert [prompt.text for prompt in together.prompts] == ["0+1", "1+1"] and together.num_dropped == 1
    with pytest.raises(ConfigError, match=r"no prompt of a in .* fits data\.max_prompt_tokens=3"):
        eval_prompts(EvalSet(path=file), replace(config.data, max_prompt_tokens=3), tokenize)


def test_a_bad_row_is_named_by_file_row_and_field(model: Path, tmp_path: Path) -> None:
    file = parquet(tmp_path / "rows.parquet", row(0), row(1, ability=None))
    with pytest.raises(ConfigError, match=r"rows\.parquet row 2: field 'ability' is missing"):
        first_prompt(data_config(model, file))


def test_a_recipe_finds_its_files_where_data_dir_says() -> None:
    config = load_recipe("tiny-beam-gsm8k", environment={"DATA_DIR": "/sets"})
    assert config.data.train == "/sets/gsm8k-train-cleaned.parquet"
    assert config.data.evals[0].path == "/sets/aime-2025-cleaned.parquet"
    assert load_recipe("tiny-beam-gsm8k", environment={}).data.train == "data/gsm8k-train-cleaned.parquet"
