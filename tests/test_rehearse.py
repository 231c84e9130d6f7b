"""`interlock rehearse`: the simulated device is registered in processes of their own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tools.runs import environment
from torch import nn

import interlock as il
from interlock.cli import parser
from interlock.rehearsal_report import Finding, Rehearsal
from interlock.rehearsal_watch import Watch
from interlock.rehearsing import _again, _show, _told
from interlock.sweep_points import Settings
from interlock.sweep_report import SweepReport, Verdict

TASK = """
import torch
from torch import nn
import torch.nn.functional as F
import interlock as il

kept = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def loss(model, batch):
    value = F.cross_entropy(model(batch[0]), batch[1])
    EXTRA
    return value


def data():
    torch.manual_seed(1)
    batches = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)]
    return il.Data(batches, batches[:1])


def optimizer(model):
    return torch.optim.AdamW(PARAMETERS)


task = il.Task(name="small", model=Net, optimizer=optimizer, loss=loss, data=data)
"""


def rehearse(
    folder: Path, *options: str, extra: str = "pass", parameters: str = "model.parameters()"
) -> tuple[int, Any, str]:
    """(exit status, report, error stream) of a rehearsal."""
    file = folder / "train.py"
    file.write_text(TASK.replace("EXTRA", extra).replace("PARAMETERS", parameters))
    words = [sys.executable, "-m", "interlock", "rehearse", f"{file}:task", "--json", *options]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=110, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def texts(report: Any, kind: str) -> list[str]:
    return [finding["text"] for finding in report["findings"] if finding["kind"] == kind]


def test_a_good_task_passes_and_every_fault_ends_clean(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, "--report", str(tmp_path / "report.xml"))
    assert status == 0, told
    assert report["ok"]
    assert report["findings"] == []
    (faults,) = report["faults"]
    assert faults["counts"]["clean"] > 100
    assert sum(faults["counts"].values()) == faults["counts"]["clean"]
    owners = report["peak_bytes_by_owner"]
    size = 4 * (4 * 8 + 8 + 8 * 3 + 3)
    assert (owners["parameters"], owners["gradients"]) == (size, size)
    assert sum(owners.values()) == report["peak_bytes"]
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()
    cases = [case.get("classname") for case in suite.iter("testcase")]
    assert [case.get("name") for case in suite.iter("testcase")][:6] == report["parts"]
    assert report["parts"] == [
        *("a watched run", "exit offload", "exit keep", "exit discard"),
        *("an evaluation", "a checkpoint and its restoring"),
    ]
    assert len(cases) - 6 == faults["counts"]["clean"]
    (note,) = report["notes"]
    assert "--full" in note


def test_an_item_in_the_loop_is_found_with_its_line(tmp_path: Path) -> None:
    status, report, told = rehearse(
        tmp_path, "--strict", "--report", str(tmp_path / "r.xml"), extra="value.item()"
    )
    assert status == 1, told
    # Whatever is told of it tells the same.
    assert (report["ok"], report["strict"]) == (False, True)
    root = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert [failure.get("type") for failure in root.iter("failure")] == ["copy"]
    line = TASK.splitlines().index("    EXTRA") + 1
    (text,) = texts(report, "copy")
    assert text.startswith(f"{tmp_path / 'train.py'}:{line} in loss copies to the host once a step")


def test_a_loss_that_is_kept_is_a_leak_with_its_owner_and_its_line(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, extra="kept.append(value)")
    assert status == 1, told
    leaks = texts(report, "leak")
    assert any("held by global train.kept[0]" in text and "train.py:" in text for text in leaks), leaks
    assert texts(report, "faults")
    assert report["faults"] == []


def test_a_parameter_that_no_optimizer_holds_is_an_error_of_order(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, parameters="model.a.parameters()")
    assert status == 1, told
    (text,) = texts(report, "order")
    assert "no optimizer holds 'b.weight', 'b.bias'" in text


def test_code_that_names_cuda_is_carried_out_and_told(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, extra="batch[0].cuda()")
    assert status == 0, told
    line = TASK.splitlines().index("    EXTRA") + 1
    assert any(f"train.py:{line}: Tensor.cuda" in text for text in texts(report, "foreign"))


def test_one_cell_can_be_tried_alone(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, "--only", "hook.loss[1] before: error")
    assert status == 0, told
    (faults,) = report["faults"]
    assert faults["counts"]["clean"] == 1
    assert report["notes"] == []


def test_a_cell_that_is_not_there_is_a_wrong_command_line(tmp_path: Path) -> None:
    status, report, told = rehearse(tmp_path, "--only", "hook.los[1] before: error")
    assert (status, report) == (2, None)
    assert "no cell 'hook.los[1] before: error'" in told
    assert "such as 'hook.loss[1] before: error'" in told


def test_a_rehearsal_that_is_interrupted_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = parser().parse_args(["rehearse", "train.py:task", "--state", str(tmp_path)])
    last = [("offload", 118, 151)]
    with pytest.raises(KeyboardInterrupt), _told(options, last):
        raise KeyboardInterrupt
    told = capsys.readouterr().err
    assert f"118 of 151 verdicts of exit offload are in '{tmp_path}'; the same command goes on" in told


# Verdicts


def clean() -> SweepReport:
    settings = Settings("sim", "offload", 1, 1, False, False, True, ("hook",), 0, 0.5, 60.0)
    return SweepReport("t", settings, "", 1, (Verdict("undisturbed", "run", "nothing", "clean"),))


LOOK, PROBLEM = Finding("copy", False, "a look"), Finding("leak", True, "a leak")


@pytest.mark.parametrize(
    ("findings", "strict", "ok", "failures", "words"),
    [
        ((), False, True, 0, "pass: t: 2 steps watched; 1 fault, all clean; 1.5 s"),
        ((), True, True, 0, "pass (strict): t: "),
        ((LOOK,), False, True, 0, "pass: t: 2 steps watched; 1 worth a look; "),
        ((LOOK,), True, False, 1, "fail (strict): t: 2 steps watched; 1 problem; "),
        ((PROBLEM, LOOK), False, False, 1, "fail: t: 2 steps watched; 1 problem; 1 worth a look; "),
    ],
)
def test_status_text_json_and_junit_have_one_verdict(
    findings: tuple[Finding, ...], strict: bool, ok: bool, failures: int, words: str
) -> None:
    found = Rehearsal(
        "t", 2, findings, sweeps=(clean(),), seconds=1.5, parts=("a watched run", "exit keep"), strict=strict
    )
    assert found.ok is ok
    assert found.as_data()["ok"] is ok
    assert found.verdict.startswith(words)
    suite = ElementTree.fromstring(found.as_junit())[0]
    assert suite.get("failures") == str(failures) == str(len(list(suite.iter("failure"))))
    assert suite.get("tests") == str(len(list(suite.iter("testcase"))))
    assert "exit keep" in [case.get("name") for case in suite.iter("testcase")]


def test_the_report_for_people_ends_with_the_verdict_and_has_no_table_where_all_is_clean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _show(Rehearsal("t", 2, (LOOK,), sweeps=(clean(),), seconds=1.5, notes=("not tried: x",)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "pass: t: 2 steps watched; 1 worth a look; 1 fault, all clean; 1.5 s"
    assert "faults, exit offload: 1 point, 1 fault: 1 clean (0.0 s)" in lines
    assert "not tried: x" in lines
    assert not any("kind of point" in line for line in lines)


# The example


@pytest.mark.timeout(300)
def test_the_digits_example_passes() -> None:
    file = Path(__file__).parents[1] / "examples" / "digits.py"
    words = [sys.executable, "-m", "interlock", "rehearse", f"{file}:task", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["findings"] == []
    assert len(report["parts"]) == 6


def test_gradients_that_a_closure_makes_inside_of_the_step_count() -> None:
    watch = Watch()
    model = nn.Linear(2, 1)
    what = watch.task(
        il.Task(model=model, optimizer=lambda m: torch.optim.LBFGS(m.parameters()), loss=_square)
    )
    optimizer: Any = what.optimizer(model)

    def closure() -> torch.Tensor:
        loss = _square(model, torch.ones(1, 2))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert watch.unused == set()


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(batch).square().sum()
    return value


def test_a_report_has_the_problems_where_nothing_could_be_injected(tmp_path: Path) -> None:
    status, report, told = rehearse(
        tmp_path, "--report", str(tmp_path / "r.xml"), parameters="model.a.parameters()"
    )
    assert status == 1, told
    root = ElementTree.parse(tmp_path / "r.xml").getroot()
    kinds = [failure.get("type") for failure in root.iter("failure")]
    assert kinds == [finding["kind"] for finding in report["findings"] if finding["problem"]]
    assert kinds == ["order", "faults"]


def test_a_cell_is_tried_again_with_its_own_exit_policy(tmp_path: Path) -> None:
    options = parser().parse_args(["rehearse", "train.py:task", "--full", "--steps", "2", "--no-checkpoints"])
    command = _again(options, "hook.loss[1] before: error", "keep")
    parsed = parser().parse_args(shlex.split(command)[1:])
    assert (parsed.only, parsed.exit, parsed.steps) == ("hook.loss[1] before: error", "keep", 2)
    assert parsed.full
    assert parsed.no_checkpoints
    status, report, told = rehearse(tmp_path, "--only", parsed.only, "--exit", "keep")
    assert status == 0, told
    assert [faults["exit"] for faults in report["faults"]] == ["keep"]


def test_where_another_device_has_the_slot_a_process_without_it_rehearses(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TASK.replace("EXTRA", "pass").replace("PARAMETERS", "model.parameters()"))
    words = ["rehearse", f"{file}:task", "--json", "--only", "hook.loss[1] before: error"]
    text = (
        "import sys, torch\ntorch.utils.rename_privateuse1_backend('other')\n"
        f"from interlock.cli import main\nsys.exit(main({words!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'other' has PyTorch's one slot for devices" in done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    "words",
    [
        ["--quick", "--full"],
        ["--report", "x.txt"],
        ["--report", "no/x.xml"],
        ["--steps", "0"],
        ["--state", __file__],
    ],
    ids=str,
)
def test_a_wrong_command_line_begins_nothing(tmp_path: Path, words: list[str]) -> None:
    status, report, told = rehearse(tmp_path, *words)
    assert status == 2
    assert report is None
    assert told.count("error: ") == 1
