"""The command line: what it answers, what it says of mistakes, and its exit statuses."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.runs import TASK, environment

import interlock
from interlock import messages
from interlock.cli import main, parser
from interlock.errors import TaskError
from interlock.specs import TRAINING, compose

OWN = f"{Path(interlock.__file__).parent}/"

SPECS = """
from dataclasses import replace
from interlock.specs import TRAINING, Property, Pattern, on

same = replace(TRAINING, name="same")
kept = tuple(t for t in TRAINING.transitions if str(t) != "offloading --drop--> dropping")
table = {**TRAINING.table, "offloading": TRAINING.table["offloading"][1:]}
broken = replace(TRAINING, name="broken", transitions=kept, table=table)
idle = replace(TRAINING, name="idle", properties=(Property("never", Pattern.ABSENCE, on("no_such_event"),
    after=on("nor_this"), doc="vacuous"),))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TASK)
    (tmp_path / "mine.py").write_text(SPECS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != "__pycache__"}


class Said:
    """Exit status and output of the command line, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: Any) -> None:
        try:
            self.status = main([str(word) for word in words])
        except SystemExit as end:
            self.status = end.code if isinstance(end.code, int) else 1
        self.out, self.err = capsys.readouterr()

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def test_every_error_can_be_caught_from_one_place():
    """All but those of the command line itself, which reach nobody."""
    for info in pkgutil.walk_packages(interlock.__path__, "interlock."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
    kinds = {interlock.InterlockError}
    while found := {one for kind in kinds for one in kind.__subclasses__()} - kinds:
        kinds |= found
    ours = {kind.__name__ for kind in kinds if kind.__module__.startswith("interlock.")}
    assert ours - {"UsageError", "OutputLost"} <= set(interlock.errors.__all__)


# help, version, usage


def test_without_arguments_it_shows_help_and_fails(capsys):
    said = Said(capsys)
    assert said.status == 2
    assert "usage: interlock" in said.err
    assert not said.out


@pytest.mark.parametrize("name", ["", "fit", "check", "graph", "explain", "doctor"])
def test_help_explains_every_option(capsys, name: str):
    said = Said(capsys, *[name] * bool(name), "--help")
    assert said.status == 0
    assert "interlock " in said.out
    actions = {a.dest: a for a in parser()._actions}
    this = actions["command"].choices[name] if name else parser()
    assert all(action.help for action in this._actions if action.dest != "command")


def test_version(capsys):
    assert Said(capsys, "--version").out.startswith("interlock 0.")


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("fit",),
        ("fit", "train.py:task", "--epochs", "0"),
        ("fit", "train.py:task", "--epochs", "many"),
        ("fit", "train.py:task", "--deadline", "-1"),
        ("fit", "train.py:task", "--deadline", "nan"),
        ("fit", "train.py:task", "--exit", "vanish"),
        ("fit", "train.py:task", "--epo", "3"),
        ("graph", "--format", "png"),
        ("graph", "-o", "drawing.png"),
        ("graph", "--check", "a.md", "--renew", "a.md"),
        ("graph", "--check", "a.md", "--backend", "cpu"),
        ("graph", "--check", "missing.md"),
        ("graph", "--check", "train.py"),
        ("graph", "--trace", "missing.jsonl"),
        ("graph", "--spec", "no_such"),
        ("graph", "--backend", "no_such"),
        ("graph", "-o", "missing/a.svg"),
        ("fit", "train.py:task", "--resume"),
        ("fit", "train.py:task", "--seed", "-1"),
        ("fit", "train.py:task", "--max-steps", "0"),
        ("fit", "train.py:task", "--overfit", "none"),
        ("check", "--backend", "cpu", "--all"),
        ("check", "--backend", "no_such"),
        ("check", "--spec", "no_such"),
        ("check", "--spec", "mine.py:no_such"),
        ("check", "--spec", "train.txt:task"),
        ("check", "--journal", "missing.jsonl"),
        ("check", "--journal", "train.py"),
        ("check", "--journal", "train.py", "--json"),
        ("check", "--journal", ".", "--all"),
        ("explain", "missing.py:task"),
        ("explain", "train.py:task", "--backend", "no_such"),
    ],
)
def test_a_wrong_command_line_is_told_in_words_and_begins_nothing(capsys, folder: Path, words):
    before = files(folder)
    said = Said(capsys, *words)
    assert said.status == 2, said.err
    assert said.err.strip()
    assert "Traceback" not in said.err
    assert not said.out
    assert files(folder) == before


@pytest.mark.parametrize(
    ("words", "usage", "says"),
    [
        (("fit", "train.py:task", "--epoch", "3"), "interlock fit", "did you mean --epochs?"),
        (("check", "--jurnal=a"), "interlock check", "did you mean --journal?"),
        (("graph", "--colour", "red"), "interlock graph", "unrecognized arguments: --colour red\n"),
    ],
)
def test_a_misspelt_option_is_told_by_its_command(capsys, words, usage: str, says: str):
    said = Said(capsys, *words)
    assert said.status == 2
    assert said.err.startswith(f"usage: {usage} ")
    assert says in said.err


def test_names_that_come_close_are_told_first_and_few(capsys, folder: Path):
    more = "".join(f"task_{n} = task\n" for n in range(20))
    (folder / "train.py").write_text(f"{TASK}\n{more}training = task\n")
    err = Said(capsys, "explain", "train.py:trainin").err
    assert "its Tasks are training, task, task_0" in err
    assert re.search(r"task_\d and 12 more$", err.rstrip())
    assert "task_19" not in err


def test_help_and_refusal_of_a_drawing_agree(capsys, folder: Path):
    told = re.search(r"which ends in\s+(.*?mermaid)", Said(capsys, "fit", "--help").out, re.DOTALL)
    assert told is not None
    endings = " ".join(told[1].split())
    assert f"a file ending in {endings}\n" in Said(capsys, "fit", "train.py:task", "--drawing", "a.png").err


@pytest.mark.parametrize("place", ["lib/python3/site-packages/interlock/", "src/interlock/"])
def test_frames_of_interlock_are_none_of_the_users(monkeypatch: pytest.MonkeyPatch, place: str):
    """Wherever it is installed: in an environment, it lies in site-packages below the standard library."""
    monkeypatch.setattr(messages, "_STANDARD", "/lib/python3")
    monkeypatch.setattr(messages, "_OWN", (f"/{place}",))

    def in_file(file: str, body: str, **names: Any) -> Callable[[], None]:
        exec(compile(f"def call():\n    {body}\n", file, "exec"), names)
        return names["call"]

    def told(call: Callable[[], None]) -> str:
        with pytest.raises(Exception, match="no such thing") as caught:
            call()
        mine = caught.value.__traceback__
        assert mine is not None
        return messages.describe(caught.value.with_traceback(mine.tb_next))  # without the frame of this test

    ours = in_file(f"/{place}choices.py", "raise error", error=TaskError("no such thing"))
    assert told(ours) == "error: TaskError: no such thing"
    theirs = in_file("/home/train.py", "raise error", error=ValueError("no such thing"))
    shown = told(in_file(f"/{place}loop.py", "theirs()", theirs=theirs))
    assert '"/home/train.py"' in shown
    assert place not in shown


# check


def test_check_proves_every_lifecycle(capsys):
    said = Said(capsys, "check", "--all")
    assert said.status == 0
    assert "training on fsdp2" in said.out
    assert "10 of 10 lifecycles proved" in said.out
    assert Said(capsys, "check").out.count("proved ") == said.out.count("proved ")


def test_check_tells_each_property_of_one_lifecycle(capsys):
    said = Said(capsys, "check", "--backend", "xla", "--spec", "inference")
    assert said.status == 0
    assert said.out.count("  proved  ") > 20
    assert "proved       inference on xla" in said.out


def test_check_refutes_with_a_trace(capsys, folder: Path):
    said = Said(capsys, "check", "--spec", "mine.py:broken")
    assert said.status == 1
    assert "refuted" in said.out
    assert "created --acquire--> acquiring" in said.out


def test_what_is_vacuous_is_undetermined_and_no_pass(capsys, folder: Path):
    assert Said(capsys, "check", "--spec", "mine.py:idle").status == 3


def test_a_spec_of_ones_own_is_composed_where_a_backend_is_given(capsys, folder: Path):
    assert "same, " not in Said(capsys, "check", "--spec", "mine.py:same", "--backend", "cuda").out
    assert "same on cuda" in Said(capsys, "check", "--spec", "mine.py:same", "--backend", "cuda").out
    assert "same  " in Said(capsys, "check", "--spec", "mine.py:same").out


def test_check_as_json(capsys, folder: Path):
    (broken,) = Said(capsys, "check", "--spec", "mine.py:broken", "--json").data
    assert broken["result"] == "refuted"
    refuted = [row for row in broken["properties"] if row["result"] == "refuted"]
    assert any(row.get("trace", [""])[0] == "acquire" for row in refuted)
    assert len(Said(capsys, "check", "--all", "--json").data) == 10


# graph


@pytest.mark.parametrize(("suffix", "begins"), [("mmd", "%% "), ("dot", "// "), ("json", "{"), ("pml", "/*")])
def test_the_format_follows_the_files_name(capsys, folder: Path, suffix: str, begins: str):
    assert Said(capsys, "graph", "-o", f"drawing.{suffix}").status == 0
    assert (folder / f"drawing.{suffix}").read_text().startswith(begins)
    assert files(folder) == {"train.py", "mine.py", f"drawing.{suffix}"}


def test_a_drawing_is_checked_and_renewed(capsys, folder: Path):
    for name in ("a.mmd", "b.dot", "c.json", "d.svg"):
        Said(capsys, "graph", "--backend", "cuda", "--spec", "inference", "-o", name)
        assert Said(capsys, "graph", "--check", name).status == 0
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("serving", "severing"))
        stale = Said(capsys, "graph", "--check", name)
        assert stale.status == 1
        assert name in stale.out
        assert Said(capsys, "graph", "--renew", name).status == 0
        assert (folder / name).read_text() == text


def test_drawings_in_a_page_are_checked(capsys, folder: Path):
    drawing = Said(capsys, "graph", "--backend", "ddp").out
    page = folder / "page.md"
    page.write_text(f"# A page\n\n```mermaid\n{drawing}```\n")
    assert Said(capsys, "graph", "--check", "page.md").status == 0
    page.write_text(page.read_text().replace("--backend ddp", "--backend cpu"))
    assert Said(capsys, "graph", "--check", "page.md").status == 1
    page.write_text(page.read_text().replace("--backend cpu", "--colour red"))
    assert "options are not those of" in Said(capsys, "graph", "--check", "page.md").out


def test_an_output_that_cannot_be_replaced_is_left_alone(capsys, folder: Path):
    (folder / "a.mmd").mkdir()
    assert Said(capsys, "graph", "-o", "a.mmd").status == 2
    assert files(folder) == {"train.py", "mine.py", "a.mmd"}


# explain and doctor


def test_explain_shows_plan_verdict_and_source(capsys, folder: Path):
    said = Said(capsys, "explain", "train.py:task", "--backend", "double")
    assert said.status == 0
    for part in (
        "backend   double (on the lifecycle of cuda)",
        "training on cuda",
        "--sync--> syncing",
        "verdict   proved",
        "def step(batch):",
        "loss loss",
    ):
        assert part in said.out


def test_check_says_whose_lifecycle_a_backend_is_on(capsys):
    assert "double (on the lifecycle of cuda)" in Said(capsys, "check", "--backend", "double").out
    assert "lifecycle of" not in Said(capsys, "check", "--backend", "cuda").out


def test_doctor(capsys):
    said = Said(capsys, "doctor")
    assert said.status == 0
    assert "double (on the lifecycle of cuda)" in said.out
    assert "never run on their hardware: cuda, ddp, fsdp2, xla" in said.out
    data = Said(capsys, "doctor", "--json").data
    rows = {row["name"]: row for row in data["backends"]}
    assert rows["cpu"]["available"]
    assert not rows["xla"]["available"]
    assert all(row["proved"] for row in rows.values())
    assert "torch" in data["versions"]


@pytest.mark.torchless
def test_check_graph_and_doctor_work_without_torch(tmp_path: Path):
    program = f"""
import sys
sys.modules["torch"] = None
from interlock.cli import main
assert main(["check", "--all"]) == 0
assert main(["graph", "--backend", "xla", "-o", {str(tmp_path / "a.svg")!r}]) == 0
assert main(["graph", "--format", "promela"]) == 0
assert main(["doctor"]) == 0
assert main(["fit", "train.py:task"]) == 1
assert not [name for name in sys.modules if name.startswith("torch") and sys.modules[name]]
assert "rich" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "torch          cannot be imported" in done.stdout
    assert "needs torch, which cannot be imported" in done.stdout
    assert "error: ModuleNotFoundError: import of torch halted" in done.stderr


def test_a_reader_that_has_enough_is_no_error():
    words = f"{sys.executable} -m interlock graph --format json | head -c 10"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False, env=environment())
    assert done.stdout == '{\n "made_b'
    assert not done.stderr


FIT = f"{sys.executable} -m interlock fit train.py:task --epochs 1 --no-progress"


@pytest.mark.parametrize("more", ["", " --json"])
def test_nor_is_one_of_a_summary(folder: Path, more: str):
    # The reader is gone before anything is written.
    words = f"({FIT}{more}; echo $? >&2) | sleep 0"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False, env=environment())
    assert done.stderr == "1\n"


@pytest.mark.parametrize("words", [FIT, f"{FIT} --json", f"{sys.executable} -m interlock check --all"])
def test_an_output_that_is_full_is_told_in_a_sentence(folder: Path, words: str):
    done = subprocess.run(
        ["sh", "-c", f"{words} > /dev/full"], capture_output=True, text=True, check=False, env=environment()
    )
    says = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, says)


# fit, in this process


def fit(capsys, *words: Any) -> Said:
    return Said(capsys, "fit", *words, "--no-progress")


def test_fit_reports_replays_and_draws(capsys, folder: Path):
    said = fit(capsys, "train.py:task", "--journal", "run.jsonl", "--drawing", "run.svg", "--report-every", 2)
    assert said.status == 0, said.err
    for part in (
        "finished, clean: 12 steps",
        "updates  12; the history has `update` once for all between two other events",
        " others ",
        "val_loss",
        "training",
        "residue  0 bytes",
        "journal  run.jsonl",
    ):
        assert part in said.out
    assert "transitions, proved" in said.out
    assert (folder / "run.svg").read_text().count("taken") > 10
    assert files(folder) == {"train.py", "mine.py", "run.jsonl", "run.svg"}
    checked = Said(capsys, "check", "--journal", "run.jsonl")
    assert checked.status == 0
    assert "closed, clean; outcome: finished, residue 0 bytes" in checked.out
    traced = Said(capsys, "graph", "--trace", "run.jsonl", "--format", "dot")
    assert "taken" in traced.out
    assert Said(capsys, "graph", "--trace", "run.jsonl", "--format", "json").status == 2


def test_fit_as_json(capsys, folder: Path):
    data = fit(capsys, "train.py:task", "--epochs", 1, "--journal", "run.jsonl", "--json").data
    assert (data["status"], data["steps"], data["residue"]["bytes"]) == ("finished", 6, 0)
    assert data["replay"]["result"] == "proved"
    assert data["path"][0] == ["created", "acquire", "acquiring"]


def test_what_does_not_fit_the_spec_fails_the_command(capsys, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("interlock.fitting.read_journal", lambda path: path.no_such)
    said = fit(capsys, "train.py:task", "--epochs", 1, "--journal", "run.jsonl")
    assert said.status == 1
    assert "the journal cannot be replayed" in said.err


def test_limits_and_seed_are_taken_from_the_command_line(capsys, folder: Path):
    def ran(*words: Any) -> tuple[int, float]:
        said = fit(capsys, "train.py:task", "--epochs", 2, "--json", "--report-every", 1, *words)
        assert said.status == 0, said.err
        data = json.loads(said.out)
        return data["steps"], data["metrics"]["loss"]

    assert ran("--seed", 3) == ran("--seed", 3)
    assert ran("--seed", 3)[1] != ran("--seed", 4)[1]
    assert ran("--max-steps", 2)[0] == ran("--limit-batches", 1)[0] == ran("--overfit", 1)[0] == 2


BAD = """
def variant(**changes):
    return il.Task(**{**parts, **changes})

no_data = variant(data=None)
empty = variant(data=lambda: [])
late = variant(data=lambda: 1 / 0)
odd = variant(data=lambda: [*batches[:3], (torch.randn(8, 5), batches[0][1])])
vector = variant(loss=lambda m, b: m(b[0]))
number = variant(loss=lambda m, b: 0.5)
no_graph = variant(loss=lambda m, b: loss(m, b).detach())
nan = variant(loss=lambda m, b: loss(m, b) * float("nan"))
early = variant(optimizer=lambda m: torch.optim.SGD(nn.Linear(4, 2).parameters(), 0.1))
no_model = variant(model=lambda: 3)
exits = variant(loss=lambda m, b: sys.exit(0))
"""


@pytest.mark.parametrize(
    ("name", "says", "traced"),
    [
        ("no_data", "error: TaskError: ", False),
        ("empty", "error: DataError: ", False),
        ("late", "error: ZeroDivisionError: ", True),
        ("odd", "error: RuntimeError: ", True),
        ("vector", "error: LossError: ", False),
        ("number", "error: LossError: ", False),
        ("no_graph", "error: LossError: ", False),
        ("nan", "error: NonFiniteLoss: ", False),
        ("early", "error: ForeignParameter: ", False),
        ("no_model", "error: TaskError: ", False),
        ("exits", "error: SystemExit: 0", True),
    ],
)
def test_a_bad_task_fails_with_one_clear_message(capsys, folder: Path, name: str, says: str, traced: bool):
    (folder / "train.py").write_text(TASK + BAD)
    said = fit(capsys, f"train.py:{name}", "--journal", "run.jsonl")
    assert said.status == 1
    assert says in said.err
    assert said.err.count("error: ") == 1
    # The user's own lines are shown, and never the engine's.
    assert ("train.py" in said.err) is traced
    assert ("Traceback" in said.err) is traced
    assert OWN not in said.err
    began = name not in ("no_data", "late")
    assert ("run.jsonl" in files(folder)) is began
    if began:
        assert "residue  0 bytes" in said.out
        assert "transitions, proved" in said.out
        assert Said(capsys, "check", "--journal", "run.jsonl").status == 0


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("missing.py:task",), 2, "does not exist"),
        (("train.py:missing",), 2, "its Tasks are task"),
        (("broken.py:task",), 1, "ZeroDivisionError: division by zero"),
        (("syntax.py:task",), 1, "SyntaxError"),
        (("train.py:task", "--backend", "no_such"), 2, "unknown backend 'no_such'"),
        (("train.py:task", "--backend", "fsdp2"), 2, "no adapter yet"),
        (("train.py:task", "--journal", "missing/run.jsonl"), 2, "no folder 'missing'"),
        (("train.py:task", "--journal", "."), 2, "it is a folder"),
        (("train.py:task", "--journal", "/proc/run.jsonl"), 2, "/proc/run.jsonl"),
        (("train.py:task", "--journal", "train.py"), 2, "it is not overwritten"),
        (("train.py:task", "--drawing", "run.png"), 2, "a file ending in .svg, .dot, .gv, .mmd or .mermaid"),
        (("train.py:task", "--drawing", "run.json"), 2, "a file ending in .svg, .dot"),
        (("train.py:task", "--drawing", "missing/run.svg"), 2, "its folder is missing"),
    ],
)
def test_bad_input_begins_nothing(capsys, folder: Path, words, status: int, says: str):
    (folder / "broken.py").write_text("def inner():\n    return 1 / 0\n\ninner()\n")
    (folder / "syntax.py").write_text("task = = 3\n")
    before = files(folder)
    said = fit(capsys, *words)
    assert (said.status, says in said.err) == (status, True), said.err
    assert OWN not in said.err
    assert "Traceback, without" not in said.err or status == 1
    assert "<frozen" not in said.err
    assert not said.out
    assert files(folder) == before


def test_the_users_frames_are_shown_when_the_import_raises(capsys, folder: Path):
    (folder / "broken.py").write_text("def inner():\n    return 1 / 0\n\ninner()\n")
    err = fit(capsys, "broken.py:task").err
    assert err.startswith("error: LoadError: importing 'broken.py' raised ZeroDivisionError\n")
    assert err.count("broken.py") == 3
    assert "in inner" in err


# journals


def test_the_hash_in_a_journal_is_that_of_the_composed_spec(capsys, folder: Path):
    from interlock.backends.monitors import CUDA

    fit(capsys, "train.py:task", "--epochs", 1, "--backend", "double", "--journal", "run.jsonl")
    header = json.loads((folder / "run.jsonl").read_text().splitlines()[0])
    assert header["spec_hash"] == compose(TRAINING, CUDA).hash
    assert header["backend"] == "double"
    assert Said(capsys, "check", "--journal", "run.jsonl").status == 0
    assert Said(capsys, "check", "--journal", "run.jsonl", "--backend", "cpu").status == 3


def tampered(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ('"event":"optimize"', '"event":"train"', 1),
        ('"phase":"placed","held":["device","model"]', '"phase":"placed","held":["device"]', 1),
        ('"backend":"cpu"', '"backend":"no_such"', 3),
        ('"kind":"header"', '"kind":"hat"', 1),
        ('{"kind":"note"', '{"kind:"note"', 1),
        ('"status":"finished"', '"status":"stopped"', 1),
        ('"verdict":"clean"', '"verdict":"abandoned"', 1),
        ('"kind":"outcome"', '"kind":"note"', 3),
    ],
)
def test_a_tampered_journal_is_refuted(capsys, folder: Path, old: str, new: str, status: int):
    fit(capsys, "train.py:task", "--epochs", 1, "--journal", "run.jsonl")
    tampered(folder / "run.jsonl", old, new)
    for more in ((), ("--json",)):
        said = Said(capsys, "check", "--journal", "run.jsonl", *more)
        assert said.status == status, said.out + said.err
        assert ("refuted" in said.out) is (status == 1)
