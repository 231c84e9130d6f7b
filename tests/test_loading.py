"""Loading what a command line names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from interlock import Task
from interlock.errors import LoadError
from interlock.loading import loaded, task_from
from interlock.specs import TRAINING, Spec

SOURCE = """
import helper
from interlock import Task

made = Task(model=lambda: None, optimizer=lambda m: None)

def build() -> Task:
    return made

def needs(argument):
    return made

def wrong():
    return 42

def raises():
    return {}["missing"]

class config:
    small = made

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train_it.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text("value = 1\n")
    return tmp_path


def fails(reference: str) -> str:
    with pytest.raises(LoadError) as caught, task_from(reference):
        pass
    return str(caught.value)


@pytest.mark.parametrize("name", ["made", "build", "config.small"])
def test_a_task_is_loaded_from_a_file(folder: Path, name: str):
    with task_from(f"{folder}/train_it.py:{name}") as task:
        assert isinstance(task, Task)
        # Tasks import more while they run.
        import helper  # type: ignore[import-not-found]

        assert helper.value == 1


def test_afterwards_path_and_modules_are_as_before(folder: Path):
    path, modules = list(sys.path), set(sys.modules)
    with task_from(f"{folder}/train_it.py:made"):
        assert "helper" in sys.modules
    assert sys.path == path
    assert set(sys.modules) == modules


def test_also_after_an_error(folder: Path):
    path, modules = list(sys.path), set(sys.modules)
    fails(f"{folder}/train_it.py:raises")
    (folder / "broken.py").write_text("import helper\n1 / 0\n")
    fails(f"{folder}/broken.py:task")
    assert sys.path == path
    assert set(sys.modules) == modules


def test_a_module_is_loaded_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch):
    package = folder / "experiments"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    with task_from("experiments.small:config.small") as task:
        assert isinstance(task, Task)
    assert "experiments.small" not in sys.modules


def test_a_file_named_like_a_loaded_module_does_not_replace_it(tmp_path: Path):
    (tmp_path / "json.py").write_text("from interlock import Task\nt = Task(model=list, optimizer=list)\n")
    import json

    with task_from(f"{tmp_path}/json.py:t"):
        assert sys.modules["json"] is json


def test_what_a_file_defines_can_be_pickled_meanwhile(tmp_path: Path):
    import pickle

    (tmp_path / "own.py").write_text(
        "from interlock import Task\nclass Thing: pass\nt = Task(model=Thing, optimizer=list)\n"
    )
    with task_from(f"{tmp_path}/own.py:t") as task:
        assert type(pickle.loads(pickle.dumps(task.model()))) is task.model


def test_specs_are_loaded_the_same_way(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from interlock.specs import TRAINING as mine\n")
    with loaded(f"{tmp_path}/mine.py:mine", Spec) as spec:
        assert spec is TRAINING


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("train_it.py", "does not say what to load"),
        (":task", "does not say what to load"),
        ("train_it.py:", "does not say what to load"),
        ("nothere.py:task", "does not exist"),
        ("folder.py:task", "is a folder"),
        ("./data.txt:task", "no Python file"),
        ("train_it.py:task", "has no 'task': its Tasks are made, build (a function)"),
        ("train_it.py:config.large", "has no 'config.large'"),
        ("helper.py:task", "it has no Task at all"),
        ("train_it.py:number", "is int, and must be a Task"),
        ("train_it.py:config", "is the class config"),
        ("train_it.py:wrong", "returned int"),
        ("train_it.py:raises", "raised KeyError"),
        ("train_it.py:needs", "raised TypeError"),
        ("no_such_module:task", "there is no module 'no_such_module'"),
        ("json.no_such:task", "there is no module 'json.no_such'"),
    ],
)
def test_what_cannot_be_loaded_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reference: str, says: str
):
    (folder / "folder.py").mkdir()
    (folder / "data.txt").touch()
    monkeypatch.chdir(folder)
    assert says in fails(reference)


def test_an_error_while_importing_is_the_cause(folder: Path):
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(LoadError) as caught, task_from(f"{folder}/broken.py:task"):
        pass
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_import_inside_of_the_file_is_its_error_and_not_ours(folder: Path):
    (folder / "broken.py").write_text("import no_such_package\n")
    with (
        pytest.raises(LoadError, match="raised ModuleNotFoundError") as caught,
        task_from(f"{folder}/broken.py:t"),
    ):
        pass
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_script_without_a_guard_is_told_what_it_lacks(folder: Path):
    (folder / "script.py").write_text("import sys\nsys.exit(2)\n")
    assert "__main__" in fails(f"{folder}/script.py:task")


def test_interrupts_are_not_taken_for_errors_of_the_file(folder: Path):
    (folder / "slow.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt), task_from(f"{folder}/slow.py:task"):
        pass
