from __future__ import annotations

from pathlib import Path

import pytest

from drk.assistant.errors import ConfigError
from drk.training.config import TrainConfig, config_to_toml, load_config, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_load_and_survive_being_printed(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    path = tmp_path / "printed.toml"
    path.write_text(config_to_toml(config))
    assert load_config(str(path)) == config


def test_the_paper_recipe_has_the_papers_settings() -> None:
    config = load_config("paper-14b")
    assert config.model.path.endswith("14B-Base")
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt, config.rollout.turns) == (16, 16, 3)
    assert (config.optimizer.learning_rate, config.optimizer.clip_low, config.optimizer.clip_high) == (1e-6, 0.2, 0.28)
    assert (config.run.steps, config.advantage.estimator, config.rejection.prs) == (300, "trloo", "draw")


@pytest.mark.parametrize(
    ("override", "message", "help_text"),
    [
        ("run.stepz=3", "unknown setting run.stepz", "did you mean 'steps'?"),
        ("rnu.steps=3", "unknown section rnu", "did you mean 'run'?"),
        ("run.learning_rate=3", "unknown setting run.learning_rate", "did you mean optimizer.learning_rate?"),
        ("run.steps=many", "run.steps must be a whole number, not 'many'", ""),
        ("run.steps=0", "run.steps must be above 0", ""),
        ("advantage.estimator=trlo", "advantage.estimator must be one of", "did you mean 'trloo'?"),
        ("steps=3", "--set takes section.key=value", "--set run.steps=20"),
        ("tasks.families=3", "tasks.families must be a list of texts", ""),
        ("rollout.samples_per_prompt=1", "at least 2", ""),
        ("rejection.low=1.5", "no row would ever be kept", ""),
        ("rejection.prs=soft", "rejected_in_baseline must be true", ""),
        ("run.tensorboard=1", "run.tensorboard must be true or false, not 1", ""),
    ],
)
def test_mistakes_are_named(override: str, message: str, help_text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("nano-cpu", [override])
    assert message in caught.value.message
    assert help_text in caught.value.help


def test_overrides_win_in_order_and_whole_numbers_serve_as_numbers() -> None:
    config = load_config("nano-cpu", ["run.steps=9", "run.steps=7", "advantage.gamma=1", "tasks.path=some file.jsonl"])
    assert (config.run.steps, config.advantage.gamma, config.tasks.path) == (7, 1.0, "some file.jsonl")
    assert isinstance(config.advantage.gamma, float)


def test_a_file_extends_a_recipe_and_never_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "nano-cpu"\n[run]\nsteps = 11\n')
    config = load_config(str(path))
    assert (config.run.steps, config.model.init) == (11, "tiny")
    path.write_text(f'extends = "{path}"\n')
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(str(path))


@pytest.mark.parametrize(("text", "message"), [("[run", "not valid TOML"), ("run = 3", "run must be a table")])
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(str(path))
    assert caught.value.file == str(path)


def test_unknown_recipe_suggests() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("nano-cp")
    assert "nano-cpu" in caught.value.help


def test_text_with_quotes_and_newlines_is_printed_so_that_it_reads_back(tmp_path: Path) -> None:
    from dataclasses import replace

    config = TrainConfig()
    config = replace(config, tasks=replace(config.tasks, path='a "b"\\c\n\td', families=("x", 'y"')))
    path = tmp_path / "c.toml"
    path.write_text(config_to_toml(config))
    assert load_config(str(path)) == config
