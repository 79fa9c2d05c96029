from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.loggers import TensorBoardLogger
from paceline.messages import PacelineWarning

Read = Callable[[str], Any]


def _hparams_tab(folder: Path) -> tuple[Any, list[Any]]:
    """What the HParams tab of ``tensorboard --logdir folder`` shows: the settings it knows, and the sessions."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2 as messages
    from tensorboard.plugins.hparams.backend_context import Context
    from tensorboard.plugins.hparams.list_session_groups import Handler

    events = EventMultiplexer().AddRunsFromDirectory(str(folder))
    events.Reload()
    backend = Context(TBContext(data_provider=MultiplexerDataProvider(events, str(folder))))
    context = RequestContext()
    found = backend.experiment_from_metadata(
        context, "", True, backend.hparams_metadata(context, ""), backend.hparams_from_data_provider(context, "", 100)
    )
    api: Any = messages
    request = api.ListSessionGroupsRequest(
        start_index=0,
        slice_size=100,
        allowed_statuses=[api.STATUS_SUCCESS, api.STATUS_FAILURE, api.STATUS_RUNNING],
        col_params=[api.ColParams(metric=metric.name) for metric in found.metric_infos],
    )
    groups = Handler(context, backend, "", request).run().session_groups
    return found, list(groups)


def test_values_of_a_step_are_one_event_with_step_and_wall_time(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path)
    before = time.time()
    for step in (49, 99):
        logger.log_metrics({"train/loss": 1 / step, "acc": torch.tensor([step]), "epoch": 0}, step=step)
    logger.finalize("success")
    events = read_events(logger.log_dir)
    assert set(events.Tags()["scalars"]) == {"train/loss", "acc", "epoch"}
    assert [(e.step, e.value) for e in events.Scalars("acc")] == [(49, 49.0), (99, 99.0)]
    assert events.Scalars("train/loss")[1].value == pytest.approx(1 / 99)
    times = [events.Scalars(tag)[0].wall_time for tag in events.Tags()["scalars"]]
    assert len(set(times)) == 1
    assert before <= times[0] <= time.time()


def test_a_dict_of_values_becomes_curves_in_one_plot(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": {"train": 1.0, "val": 2.0}, "acc": 0.5}, step=3)
    logger.finalize("success")
    for run, tag, value in (("loss_train", "loss", 1.0), ("loss_val", "loss", 2.0), ("", "acc", 0.5)):
        (event,) = read_events(os.path.join(logger.log_dir, run)).Scalars(tag)
        assert (event.step, event.value) == (3, value)


def test_prefix_steps_and_sub_dir(tmp_path: Path, read_events: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PART", "fold1")
    logger = TensorBoardLogger(tmp_path, prefix="exp", sub_dir="$PART")
    for _ in range(2):
        logger.log_metrics({"loss": 1.0})
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "paceline_logs" / "version_0" / "fold1")
    assert [e.step for e in read_events(logger.log_dir).Scalars("exp-loss")] == [0, 1]


def test_save_brings_everything_to_the_file_and_the_run_goes_on(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in range(500):
        logger.log_metrics({"loss": step}, step=step)
    logger.save()
    assert len(read_events(logger.log_dir).Scalars("loss")) == 500
    logger.log_metrics({"loss": 500}, step=500)
    logger.finalize("success")
    logger.log_metrics({"test_loss": 1.0}, step=500)
    logger.finalize("success")
    events = read_events(logger.log_dir)
    assert len(events.Scalars("loss")) == 501
    assert len(events.Scalars("test_loss")) == 1


def test_the_hparams_tab_shows_settings_metrics_and_how_the_runs_ended(tmp_path: Path) -> None:
    for rate, status in ((0.1, "success"), (0.2, "failed")):
        logger = TensorBoardLogger(tmp_path, name="")
        logger.log_hyperparams({"opt": {"lr": rate, "betas": (0.9, 0.99)}, "fast": rate > 0.1, "init": None})
        logger.log_hyperparams({"widths": [8, 4]}, {"hp/acc": rate * 2})
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.finalize(status)
    experiment, groups = _hparams_tab(tmp_path)
    known = {info.name: info for info in experiment.hparam_infos}
    assert set(known) == {"opt/lr", "opt/betas", "fast", "init", "widths"}
    assert known["opt/lr"].differs
    assert not known["opt/betas"].differs
    assert {metric.name.tag for metric in experiment.metric_infos} >= {"hp/acc", "loss", "hp_metric"}
    assert {group.name for group in groups} == {"version_0", "version_1"}
    first = next(group for group in groups if group.name == "version_0")
    assert first.hparams["opt/lr"].number_value == 0.1
    assert first.hparams["opt/betas"].string_value == "[0.9, 0.99]"
    assert first.hparams["fast"].bool_value is False
    assert first.hparams["init"].string_value == "None"
    shown = {value.name.tag: value.value for value in first.metric_values}
    assert shown["hp/acc"] == pytest.approx(0.2)
    assert shown["hp_metric"] == -1
    ends = {group.name: [session.status for session in group.sessions] for group in groups}
    assert ends == {"version_0": [1], "version_1": [2]}


def test_the_placeholder_metric_never_covers_a_value_of_the_users(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path, version=0)
    for _ in range(2):
        logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"hp_metric": 0.5}, step=10)
    logger.finalize("success")
    for again in (logger, TensorBoardLogger(tmp_path, version=0)):
        again.log_hyperparams({"lr": 0.1})
        again.finalize("success")
    assert [e.value for e in read_events(logger.log_dir).Scalars("hp_metric")] == [-1.0, 0.5]


def test_settings_alone_are_on_disk_after_a_failure_before_the_first_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("failed")
    experiment, groups = _hparams_tab(tmp_path)
    assert [info.name for info in experiment.hparam_infos] == ["lr"]
    assert [session.status for session in groups[0].sessions] == [2]
    assert list(experiment.metric_infos) == []


def test_text_is_read_back(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_text("sample", "a *generated* text", step=5)
    logger.finalize("success")
    events = read_events(logger.log_dir)
    (event,) = events.Tensors("sample/text_summary")
    assert event.step == 5
    assert event.tensor_proto.string_val[0] == b"a *generated* text"
    assert events.summary_metadata["sample/text_summary"].plugin_data.plugin_name == "text"


class Net(torch.nn.Module):
    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(), torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(3, 2)
        self.example_input_array = example

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.head(self.encoder(x + 0 * torch.rand_like(x)))
        return y if scale is None else y * scale


@pytest.mark.parametrize("example", [torch.zeros(2, 4), (torch.zeros(2, 4), torch.ones(2))])
def test_the_graph_names_the_layers_of_the_model(tmp_path: Path, read_events: Read, example: Any) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(Net(example))
    logger.finalize("success")
    graph = read_events(logger.log_dir).Graph()
    names = " ".join(node.name for node in graph.node)
    assert "Linear[head]" in names
    assert "Sequential[encoder]" in names


def test_recording_the_graph_leaves_modes_buffers_and_random_states_alone(tmp_path: Path) -> None:
    model = Net(torch.randn(2, 4))
    model.encoder[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    TensorBoardLogger(tmp_path, log_graph=True).log_graph(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_no_graph_unless_asked_for(tmp_path: Path) -> None:
    TensorBoardLogger(tmp_path).log_graph(Net(torch.zeros(2, 4)))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_without_example_input_is_asked_for_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(PacelineWarning, match=r"no input with which to trace Net.*Set self.example_input_array"):
        logger.log_graph(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_graph(Net())


def test_a_model_that_cannot_be_traced_costs_a_warning_only(tmp_path: Path, read_events: Read) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    model = Net(torch.zeros(2, 5))
    with pytest.warns(PacelineWarning, match=r"graph of Net was not logged.*RuntimeError.*log_graph=False"):
        logger.log_graph(model)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert model.training
    assert len(read_events(logger.log_dir).Scalars("loss")) == 1


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(TypeError, match=r"metric 'loss/train'.*'high' .of type str.* is not a single number"):
        logger.log_metrics({"loss": {"train": "high"}}, step=0)


def test_an_unknown_writer_option_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'flush_sec'. Did you mean 'flush_secs'"):
        TensorBoardLogger(tmp_path, flush_sec=3)


def test_writer_options_arrive(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, filename_suffix=".mine", max_queue=3)
    logger.log_metrics({"a": 1}, step=0)
    assert logger.experiment.max_queue == 3
    logger.finalize("success")
    assert [name for name in os.listdir(logger.log_dir) if name.endswith(".mine")]


def test_purge_step_hides_what_the_crashed_run_recorded_later(
    tmp_path: Path, read_events: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at once, and although the tenth file of a process would stand before its ninth in one second."""
    names = "tensorboard.summary.writer.event_file_writer._global_uid"
    monkeypatch.setattr(names, SimpleNamespace(get=itertools.count(9).__next__))
    logger = TensorBoardLogger(tmp_path, version=0)
    for step in range(6):
        logger.log_metrics({"loss": 1.0}, step=step)
    logger.finalize("failed")
    logger = TensorBoardLogger(tmp_path, version=0, purge_step=3, filename_suffix=".z")
    logger.log_metrics({"loss": 2.0}, step=3)
    logger.finalize("success")
    logger.log_metrics({"test": 1.0}, step=4)
    logger.finalize("success")
    loss = read_events(logger.log_dir).Scalars("loss")
    assert [(e.step, e.value) for e in loss] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"TensorBoardLogger needs .*'tensorboard'.*pip install tensorboard"):
        TensorBoardLogger(tmp_path)


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('no finalize')"])
def test_a_program_that_ends_without_finalize_leaves_its_values(tmp_path: Path, read_events: Read, ending: str) -> None:
    code = (
        "from paceline.loggers import TensorBoardLogger\n"
        f"logger = TensorBoardLogger({str(tmp_path)!r}, version='run')\n"
        "for step in range(50): logger.log_metrics({'loss': 1.0}, step=step)\n" + ending
    )
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=not ending)
    assert len(read_events(str(tmp_path / "paceline_logs" / "run")).Scalars("loss")) == 50


def test_metrics_of_hyperparameters_are_logged_at_the_step_given(tmp_path: Path, read_events: Any) -> None:
    logger = TensorBoardLogger(tmp_path, name="")
    logger.log_hyperparams({"lr": 0.1}, {"hp/acc": 0.5}, 3)
    logger.log_hyperparams({"lr": 0.1}, {"hp/loss": 0.5})
    logger.finalize("success")
    events = read_events(logger.log_dir)
    assert [(tag, events.Scalars(tag)[0].step) for tag in ("hp/acc", "hp/loss")] == [("hp/acc", 3), ("hp/loss", 0)]
