"""What the pages for users quote is what the engine says: programs, source, messages; nothing is left out.

That their blocks run, and that their links resolve, is in `test_docs.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import interlock as il
from interlock import errors
from interlock.backends.monitors import CPU
from interlock.program import explain, step_program
from interlock.specs import Automaton
from interlock.steps.option import Option
from interlock.weaving import Block, Line, after

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def quotes(text: str) -> list[str]:
    """The blocks of a page that show text."""
    return re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def is_quoted(said: str, text: str) -> bool:
    """Whether a page quotes something that was said, however it breaks the lines."""
    return any(said.split() == quote.split() for quote in quotes(text))


# Step options


def rows(text: str) -> dict[str, str]:
    """Option -> program, as the table of options says."""
    found = re.findall(r"^\| `il\.(.+?)` \| (?:`(.+?)`|as the plain step) \|", text, re.MULTILINE)
    plain = re.search(r"The plain step is `(.+?)`", text)
    assert plain
    return {option: (program or plain[1]).replace("\\|", "|") for option, program in found}


OPTIONS: Mapping[str, Option] = {
    "Accumulate(n)": il.Accumulate(3),
    "ClipNorm(bound)": il.ClipNorm(math.inf),
    'Precision("bf16")': il.Precision("bf16"),
    'Precision("fp16")': il.Precision("fp16"),
}


def test_the_table_of_options_has_their_programs() -> None:
    said = {name: str(step_program(CPU, options=[option]).expression) for name, option in OPTIONS.items()}
    assert rows(page("options")) == said


def test_the_table_of_options_has_each_option() -> None:
    public = {name for name in il.__all__ if _is_option(getattr(il, name))}
    assert {name.partition("(")[0] for name in rows(page("options"))} == public


def _is_option(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Option) and value is not Option


def test_what_explain_shows_is_quoted() -> None:
    shown = explain(step_program(CPU, options=[il.Accumulate(2), il.ClipNorm(1.0)])).splitlines()
    (quote,) = (quote for quote in quotes(page("options")) if "def step" in quote)
    lines = quote.splitlines()
    cut = lines.index("...")
    assert lines[:cut] == shown[:cut]
    assert lines[cut + 1 :] == shown[shown.index("def step(batch):") :]


# Messages


def task(**fields: Any) -> il.Task:
    given = {
        "model": lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)),
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), 0.1),
        "loss": lambda m, b: m(b).square().mean(),
    }
    return il.Task(**{**given, **fields})


BATCHES = [torch.ones(4, 8)]


def misses_parameters() -> None:
    il.Engine("cpu").fit(task(optimizer=lambda m: torch.optim.AdamW(m[0].parameters())), BATCHES)


def wants_another_seed() -> None:
    told: list[BaseException] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # Asked within the run that has the seed: so it has it for sure.
        other = il.Engine("cpu", seed=2, when_taken="refuse").start(task(name="other"), BATCHES)
        told.append(other.wait(timeout=60).error or SystemExit("it was not refused"))
        return model(batch).square().mean()

    il.Engine("cpu", seed=1).fit(task(name="seeded", loss=loss), BATCHES)
    raise told[0]


class Late(Option):
    """As the page has it: noise that comes after the update."""

    name = "noise"
    events = ("perturb",)
    bindings: Mapping[str, str] = {"perturb": "perturb(): add noise to the gradients"}
    automata = (
        Automaton(
            "noise",
            "due",
            {("due", "perturb"): "done", ("done", "update"): "due"},
            "noise once before each update",
        ),
    )

    def weave(self, program: Block) -> Block:
        return after(program, "updated", Line("perturb()", ("perturb",)))


def comes_too_late() -> None:
    step_program(CPU, options=[Late()])


MESSAGES: Mapping[str, tuple[Callable[[], None], type[Exception]]] = {
    "guide": (misses_parameters, errors.MissingParameter),
    "embedding": (wants_another_seed, errors.LeaseRefused),
    "options": (comes_too_late, errors.ProgramError),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_a_page_shows_is_the_one(name: str) -> None:
    cause, kind = MESSAGES[name]
    with pytest.raises(kind) as caught:
        cause()
    assert is_quoted(str(caught.value), page(name))
    # The comparison sees a word that is wrong, and a message that is not there.
    assert not is_quoted(str(caught.value), page(name).replace("a", "o"))
    assert not is_quoted(str(caught.value), page("index"))


def test_the_errors_that_the_guide_lists_are_there() -> None:
    cells = re.findall(r"^\| (`[A-Z]\w+`(?:, `[A-Z]\w+`)*) \|", page("guide"), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"\w+", cell)]
    assert len(names) >= 15
    assert [name for name in names if not hasattr(il.errors, name)] == []


# What there is


def missing(index: str, root: Path) -> list[str]:
    """Pages and examples that the list of documents does not name."""
    linked = set(re.findall(r"\]\(([^)#]+)\)", index))
    pages = {path.name for path in (root / "docs").glob("*.md")} - {"index.md"}
    examples = {f"../examples/{path.name}" for path in (root / "examples").glob("*.py")}
    return sorted((pages | examples) - linked)


def test_the_list_of_documents_is_complete() -> None:
    assert missing(page("index"), ROOT) == []
    assert missing(page("index").replace("(cuda.md)", "()"), ROOT) == ["cuda.md"]
