from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from paceline.data import DataModule


class Digits(DataModule):
    def __init__(self, size: int = 8, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(torch.arange(self.hparams.size))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return {"a": [1, 2], "b": (i for i in range(3))}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_module_that_defines_nothing_has_hooks_that_do_nothing():
    module = DataModule()
    module.prepare_data()
    module.setup("fit")
    module.teardown("fit")
    module.on_exception(KeyboardInterrupt())
    module.load_state_dict({})
    assert module.state_dict() == {}
    assert module.trainer is None
    assert module.prepare_data_per_node is True
    assert module.allow_zero_length_dataloader_with_multiple_devices is False


@pytest.mark.parametrize(
    ("hook", "entry"),
    [
        ("train_dataloader", "fit"),
        ("val_dataloader", "validate"),
        ("test_dataloader", "test"),
        ("predict_dataloader", "predict"),
    ],
)
def test_a_loader_that_is_not_defined_is_an_error_that_names_the_users_class(hook, entry):
    class Mine(DataModule):
        pass

    with pytest.raises(NotImplementedError, match=rf"Mine does not define {hook}\(\), but {entry} needs"):
        getattr(Mine(), hook)()


def test_hyperparameters_are_kept():
    module = Digits(size=4)
    assert module.hparams == {"size": 4, "batch_size": 2}
    assert module._log_hyperparams


def test_a_batch_moves_to_the_device_by_default():
    module = DataModule()
    batch = {"x": torch.zeros(2)}
    assert module.on_before_batch_transfer(batch, 0) is batch
    assert module.transfer_batch_to_device(batch, torch.device("meta"), 0)["x"].device.type == "meta"
    assert module.on_after_batch_transfer(batch, 0) is batch


def test_its_text_lists_its_loaders():
    module = Digits()
    assert "train: not ready (AttributeError" in str(module)
    module.setup("fit")
    module.predict_dataloader = lambda: [DataLoader(range(3)), DataLoader(Stream())]
    module.test_dataloader = None
    assert str(module).splitlines() == [
        "Digits:",
        "  train: DataLoader, 4 batches of 8 samples",
        "  val: a: list, 2 batches; b: generator, unknown number of batches",
        "  test: none",
        "  predict: DataLoader, 3 batches of 3 samples; DataLoader, unknown number of batches",
    ]


def test_data_sets_become_loaders_of_which_only_training_shuffles():
    module = DataModule.from_datasets(range(6), range(4), range(4), range(2), batch_size=2, num_workers=1)
    train, val = module.train_dataloader(), module.val_dataloader()
    assert isinstance(train.sampler, RandomSampler)
    assert [len(train), train.batch_size, train.num_workers] == [3, 2, 1]
    for loader in (val, module.test_dataloader(), module.predict_dataloader()):
        assert isinstance(loader.sampler, SequentialSampler)
    assert [batch.tolist() for batch in DataModule.from_datasets(Stream()).train_dataloader()] == [[0], [1], [2]]


def test_a_data_set_that_is_not_given_leaves_its_loader_undefined():
    module = DataModule.from_datasets(val_dataset=range(2))
    with pytest.raises(NotImplementedError):
        module.train_dataloader()
    assert len(module.val_dataloader()) == 2


def test_several_data_sets_become_several_loaders_and_a_list_of_samples_is_one():
    data = TensorDataset(torch.arange(4))
    module = DataModule.from_datasets({"a": data, "b": data}, [data, data], [(1, 2), (3, 4)], batch_size=2)
    assert list(module.train_dataloader()) == ["a", "b"]
    assert [len(loader) for loader in module.val_dataloader()] == [2, 2]
    assert len(module.test_dataloader()) == 1


def test_sizes_go_to_a_constructor_that_takes_them():
    module = Digits.from_datasets(range(4), batch_size=3, size=5)
    assert module.hparams == {"size": 5, "batch_size": 3}
    assert len(module.train_dataloader()) == 2
